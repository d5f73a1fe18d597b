"""Linear layers: products with weights."""

from jaxkern.ops.linear.api import accumulate_weight_grad as accumulate_weight_grad
from jaxkern.ops.linear.api import linear as linear

__all__ = ["accumulate_weight_grad", "linear"]
