# ruff: noqa: F401
"""The public names of `jaxkern`, with JAX; `__init__` imports it when one of them is used."""

import jaxkern.precision as precision
from jaxkern.core.dispatch import default_implementation
from jaxkern.core.target import Gpu, lowering_for
from jaxkern.custom import custom_op, triton_call
from jaxkern.ops.activations import gelu, quick_gelu, relu, relu_squared, sigmoid, silu, tanh
from jaxkern.ops.causal_conv1d import causal_conv1d, causal_conv1d_step
from jaxkern.ops.cross_entropy import cross_entropy, linear_cross_entropy
from jaxkern.ops.delta_rule import gated_delta_rule, gated_delta_rule_step
from jaxkern.ops.dropout import dropout, dropout_add
from jaxkern.ops.gated import geglu, gelu_and_mul, glu, reglu, silu_and_mul, swiglu
from jaxkern.ops.linear import (
    accumulate_weight_grad,
    gated_linear_unit,
    layer_norm_linear,
    linear,
    rms_norm_linear,
)
from jaxkern.ops.linear_scan import linear_scan
from jaxkern.ops.norm import layer_norm, rms_norm
from jaxkern.ops.selective_scan import selective_scan, selective_scan_step
from jaxkern.ops.ssd import ssd, ssd_step
from jaxkern.optim.gradients import accumulate_gradients, scale_gradients
from jaxkern.optim.transforms import apply, fused_adam, fused_adamw, fused_sgd
