"""RMS norm and layer norm, one pair of kernels."""

from jaxkern.ops.norm.op import layer_norm as layer_norm
from jaxkern.ops.norm.op import rms_norm as rms_norm
