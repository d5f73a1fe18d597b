"""The selective scan, Mamba's recurrence, and one step of it to decode."""

from jaxkern.ops.selective_scan.op import selective_scan as selective_scan
from jaxkern.ops.selective_scan.op import selective_scan_step as selective_scan_step
from jaxkern.ops.selective_scan.reference import (
    selective_scan_reference as selective_scan_reference,
)
