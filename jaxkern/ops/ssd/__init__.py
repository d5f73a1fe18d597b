"""The SSD scan, Mamba-2's recurrence, and one step of it to decode."""

from jaxkern.ops.ssd.op import ssd as ssd
from jaxkern.ops.ssd.op import ssd_step as ssd_step
