"""The linear scan, a diagonal linear recurrence."""

from jaxkern.ops.linear_scan.op import linear_scan as linear_scan
from jaxkern.ops.linear_scan.reference import linear_scan_reference as linear_scan_reference
