"""RMS norm and layer norm, one pair of kernels: :mod:`~jaxkern.ops.norm.op` is the ops.

`forward` and `backward` are the kernels, written for windows of a tile in registers. What those are
is decided in `tiles` and done in `short_rows` or `long_row` (with `windows`, and `exchange` for
sums over several warps). `stream` brings a block its tiles and parameters; `param_sums` adds up
what blocks have of dw and db; `launch` is what the two launches share; `pointwise` is what happens
to an element outside of its row's sums, for kernels and plain JAX (`reference`) alike.
"""

from jaxkern.ops.norm.op import layer_norm as layer_norm
from jaxkern.ops.norm.op import rms_norm as rms_norm
