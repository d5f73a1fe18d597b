"""The linear scan: `api` is the op, `kernels` its Mosaic part, `reference` its plain JAX."""

from jaxkern.ops.linear_scan.api import linear_scan as linear_scan
from jaxkern.ops.linear_scan.reference import linear_scan_reference as linear_scan_reference
