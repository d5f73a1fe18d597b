"""Linear layers: products with weights, and what goes with them."""

from jaxkern.ops.linear.gated import gated_linear_unit as gated_linear_unit
from jaxkern.ops.linear.op import accumulate_weight_grad as accumulate_weight_grad
from jaxkern.ops.linear.op import layer_norm_linear as layer_norm_linear
from jaxkern.ops.linear.op import linear as linear
from jaxkern.ops.linear.op import rms_norm_linear as rms_norm_linear
