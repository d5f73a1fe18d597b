"""The causal convolution along time, and one step of it to decode."""

from jaxkern.ops.causal_conv1d.op import causal_conv1d as causal_conv1d
from jaxkern.ops.causal_conv1d.op import causal_conv1d_step as causal_conv1d_step
from jaxkern.ops.causal_conv1d.reference import (
    causal_conv1d_reference as causal_conv1d_reference,
)
