"""The arrays of a pass as the kernels take them: heads in a row, decays summed inside chunks.

A pass has heads as (G, R) and the logarithms of decays token by token, so that it knows of no
chunk; kernels have H heads and their sums inside chunks of a length that is theirs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.ops.ssd.reference import join_heads, split_heads


class Rows(NamedTuple):
    """The arrays of a forward, for chunks of Q tokens: `dt` and `cum` are padded to whole ones."""

    x: Any  # (B, L, H, P)
    dt: Any  # (B, H, L'), 0 behind the end
    cum: Any  # (B, H, L'), sums inside each chunk, constant behind the end
    B: Any  # (B, L, G, N)
    C: Any  # (B, L, G, N)
    D: Any  # (H,) or (H, P)
    z: Any  # (B, L, H, P)
    initial_state: Any  # (B, H, P, N)

    @classmethod
    def of(cls, chunk: int, x, dt, a, B, C, D, z, initial_state) -> "Rows":
        dt, a = (_padded(join_heads(v, 2), chunk) for v in (dt, a))
        in_chunks = a.reshape(*a.shape[:2], -1, chunk)
        return cls(
            x=join_heads(x, 2),
            dt=dt,
            cum=jnp.cumsum(in_chunks, axis=3).reshape(a.shape),
            B=B,
            C=C,
            D=join_heads(D, 0),
            z=join_heads(z, 2),
            initial_state=join_heads(initial_state, 1),
        )


def _padded(v: jax.Array, chunk: int) -> jax.Array:
    """(B, L, H) as (B, H, L'), with zeros behind the end."""
    v = jnp.swapaxes(v, 1, 2)
    return jnp.pad(v, ((0, 0), (0, 0), (0, -v.shape[2] % chunk)))


def of_steps(ddt: jax.Array, length: int, groups: int) -> jax.Array:
    """The gradient of dt, (B, L, G, R), from (B, H, L')."""
    return split_heads(jnp.swapaxes(ddt[..., :length], 1, 2), 2, groups)


def of_sums(dcum: jax.Array, chunk: int, length: int, groups: int) -> jax.Array:
    """The gradient of a, (B, L, G, R), from that of its sums inside chunks, (B, H, L')."""
    in_chunks = dcum.reshape(*dcum.shape[:2], -1, chunk)
    da = lax.cumsum(in_chunks, axis=3, reverse=True)
    return of_steps(da.reshape(dcum.shape), length, groups)
