"""jaxkern: GPU training kernels for JAX.

Functions like those of ``jax.nn``. On an NVIDIA GPU a call runs a Pallas kernel forward and
backward; elsewhere the same call is plain JAX. The optimizers are Optax transformations, and
``apply`` does a step of one.

Dimensions, in every docstring: B batch, L length, D channels, N elements of a normalised row or
states of a scan, H outputs of a gated unit, W width of a convolution, M rows (all axes but the
last, together).
"""

from jaxkern import precision as precision
from jaxkern.core.target import Gpu as Gpu
from jaxkern.core.target import lowering_for as lowering_for
from jaxkern.ops.activations import gelu as gelu
from jaxkern.ops.activations import relu as relu
from jaxkern.ops.activations import relu_squared as relu_squared
from jaxkern.ops.activations import silu as silu
from jaxkern.ops.causal_conv1d import causal_conv1d as causal_conv1d
from jaxkern.ops.causal_conv1d import causal_conv1d_step as causal_conv1d_step
from jaxkern.ops.dropout import dropout as dropout
from jaxkern.ops.dropout import dropout_add as dropout_add
from jaxkern.ops.gated import geglu as geglu
from jaxkern.ops.gated import gelu_and_mul as gelu_and_mul
from jaxkern.ops.gated import reglu as reglu
from jaxkern.ops.gated import silu_and_mul as silu_and_mul
from jaxkern.ops.gated import swiglu as swiglu
from jaxkern.ops.linear import accumulate_weight_grad as accumulate_weight_grad
from jaxkern.ops.linear import gated_linear_unit as gated_linear_unit
from jaxkern.ops.linear import layer_norm_linear as layer_norm_linear
from jaxkern.ops.linear import linear as linear
from jaxkern.ops.linear import rms_norm_linear as rms_norm_linear
from jaxkern.ops.linear_scan import linear_scan as linear_scan
from jaxkern.ops.norm import layer_norm as layer_norm
from jaxkern.ops.norm import rms_norm as rms_norm
from jaxkern.ops.selective_scan import selective_scan as selective_scan
from jaxkern.ops.selective_scan import selective_scan_step as selective_scan_step
from jaxkern.optim.accumulation import accumulate_gradients as accumulate_gradients
from jaxkern.optim.gradients import scale_gradients as scale_gradients
from jaxkern.optim.transforms import apply as apply
from jaxkern.optim.transforms import fused_adam as fused_adam
from jaxkern.optim.transforms import fused_adamw as fused_adamw
from jaxkern.optim.transforms import fused_sgd as fused_sgd

__version__ = "0.1.0"
