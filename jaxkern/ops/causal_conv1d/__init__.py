"""The causal convolution: `api` is the op, `kernels` its Mosaic part, `reference` its plain JAX."""

from jaxkern.ops.causal_conv1d.api import causal_conv1d as causal_conv1d
from jaxkern.ops.causal_conv1d.api import causal_conv1d_step as causal_conv1d_step
from jaxkern.ops.causal_conv1d.reference import (
    causal_conv1d_reference as causal_conv1d_reference,
)
