"""RMS norm and layer norm, one pair of kernels: `api` is the ops, `reference` their plain JAX."""

from jaxkern.ops.norm.api import layer_norm as layer_norm
from jaxkern.ops.norm.api import layer_norm_reference as layer_norm_reference
from jaxkern.ops.norm.api import rms_norm as rms_norm
from jaxkern.ops.norm.api import rms_norm_reference as rms_norm_reference
