"""The selective scan: `api` is the op, `kernels` its Mosaic part, `reference` its plain JAX."""

from jaxkern.ops.selective_scan.api import selective_scan as selective_scan
from jaxkern.ops.selective_scan.api import selective_scan_step as selective_scan_step
from jaxkern.ops.selective_scan.reference import (
    selective_scan_reference as selective_scan_reference,
)
