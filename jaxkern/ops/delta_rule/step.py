"""The kernel of one token of the gated delta rule, for decoding: it updates the state in place.

    S' = exp(g) ∘ S                                 (K, V)
    n  = β (v − S'ᵀ k)                              (V,)
    S  ← S' + k ⊗ n
    o  = scale · Sᵀ q                               (V,)

A token reads and writes 8 bytes of every state, and little else: 128 KiB a head at K = V = 128.

A block is a warpgroup, which has some value channels of one head, and each of its warps a quarter
of them with all keys: a sum over keys is one over a lane's own and over lanes of its warp. A lane
has four neighbouring channels of every so many keys. It loads all its states before it sums, and
keeps them in registers until n is known: each is read and written once, without shared memory.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.core.dispatch import Mode
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes, sum_lanes
from jaxkern.mosaic.launch import grid_axes, num_sms
from jaxkern.ops.delta_rule.reference import NORM_EPS
from jaxkern.ops.scan_step import unfit_token, update_in_place, update_slices

BLOCK = grid_axes("block")[0]

_VECTOR = 4
"""States of an access, 16 bytes."""

_MOST_STATES = 64
"""The most states of a lane, which with keys and queries are 128 registers: four blocks share a
multiprocessor. Twice as many are 226, and leave two."""

_MOST_KEYS, _KEYS, _VALUES = 256, 16, 32
"""The most keys, and what keys and value channels are multiples of: a block has 32 channels at
least, 32 bytes of a row for each warp, whose lanes then share 16 keys."""


@dataclasses.dataclass(frozen=True)
class DeltaRuleStepOptions:
    """The static arguments of a step."""

    mode: Mode
    scale: float
    qk_l2norm: bool


@dataclasses.dataclass(frozen=True)
class DeltaStepTile:
    """The value channels of a block, and the lanes that share them.

    Attributes:
      across: lanes of a warp beside each other, each with channels of its own.
      keys: K.
      values: V.
    """

    across: int
    keys: int
    values: int

    @classmethod
    def of(cls, keys: int, values: int, heads: int) -> "DeltaStepTile":
        """Chooses the most channels of a block whose blocks still fill the GPU four times.

        Long parts of rows are longer transfers of memory.
        """
        tiles = [cls(across, keys, values) for across in (2, 4, 8)]
        fits = [t for t in tiles if values % t.channels == 0 and t.states <= _MOST_STATES]
        enough = [t for t in fits if heads * t.parts >= 4 * num_sms()]
        return [*fits[:1], *enough][-1]

    @property
    def channels(self) -> int:
        """Value channels of a block."""
        return 4 * _VECTOR * self.across

    @property
    def parts(self) -> int:
        """Blocks of a head."""
        return self.values // self.channels

    @property
    def apart(self) -> int:
        """Lanes that share channels, with keys of their own."""
        return 32 // self.across

    @property
    def states(self) -> int:
        """States of a lane."""
        return self.keys * _VECTOR // self.apart

    @property
    def together(self) -> int:
        """Neighbouring keys of a lane, which it loads at a time."""
        return math.gcd(_VECTOR, self.keys // self.apart)

    @property
    def firsts(self) -> range:
        """The first key of each such access of all lanes."""
        return range(0, self.keys, self.together * self.apart)

    def of_keys(self, ref: Any) -> list[jax.Array]:
        """Loads the values of a lane's keys from (K,)."""
        digits = ((self.across, self.apart, self.together),)
        loads = (load_lanes(ref, LaneOffsets(digits, f), self.together) for f in self.firsts)
        return [x for loaded in loads for x in loaded]

    def of_states(self) -> list[LaneOffsets]:
        """Offsets of a lane's states of each of its keys, from the block's first channel on."""
        keys = (self.across, self.apart, self.together * self.values)
        rows = (first + i for first in self.firsts for i in range(self.together))
        return [self.of_channels(keys, start=row * self.values) for row in rows]

    def of_channels(self, *digits: tuple[int, int, int], start: int = 0) -> LaneOffsets:
        """Offsets of a lane's channels in a block's, and those of `digits`."""
        beside, warps = (1, self.across, _VECTOR), (32, 4, _VECTOR * self.across)
        return LaneOffsets((*digits, beside, warps), start)

    @property
    def distances(self) -> list[int]:
        """Distances of the lanes that share channels, from 16 down to 8 at least."""
        return [d for d in (16, 8, 4, 2) if d >= self.across]


def unsupported(state: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> str | None:
    """Why the kernel cannot take a step.

    The arrays are those of :func:`launch`, but `state` is of one layer, (B, G, R, K, V).
    """
    if reason := unfit_token(state, q=q, k=k, v=v, g=g, beta=beta):
        return reason
    keys, values = state.shape[-2:]
    takes = "channels a head, and the kernel takes multiples of"
    if keys % _KEYS or keys > _MOST_KEYS:
        return f"q has {keys} {takes} {_KEYS} up to {_MOST_KEYS}"
    return f"v has {values} {takes} {_VALUES}" if values % _VALUES else None


def launch(options: DeltaRuleStepOptions, state: Any, layer: Any, *arrays: Any) -> tuple[Any, ...]:
    """The output and the state, by a kernel that updates it where it lies.

    Args:
      options: the static arguments.
      state: (layers, B, G, R, K, V), fp32.
      layer: number of the layer, (1,), int32; ``None`` where there is one.
      *arrays: q and k (B, G, K), v (B, G, R, V), g (B, G, R) or (B, G, R, K) and beta (B, G, R),
        the last two or ``None``.
    """
    return _launch(update_in_place, options, state, layer, *arrays)


def launch_of_slices(
    options: DeltaRuleStepOptions, state: Any, layer: Any, *arrays: Any
) -> tuple[Any, ...]:
    """Does as :func:`launch` under ``vmap``."""
    return _launch(update_slices, options, state, layer, *arrays)


def _launch(update: Any, options: DeltaRuleStepOptions, state, layer, q, k, v, g, beta):
    if v.size == 0:
        return v, state
    heads, (keys, values) = math.prod(v.shape[:3]), state.shape[-2:]
    tile = DeltaStepTile.of(keys, values, heads)
    of_heads = {"v": v, "g": g, "beta": beta}
    flat = {name: x if x is None else x.reshape(heads, -1) for name, x in of_heads.items()}
    flat |= {"q": q.reshape(-1, keys), "k": k.reshape(-1, keys)}
    out, after = update(
        lambda refs: _token(options, tile, v.shape[2], refs),
        jax.ShapeDtypeStruct((heads, values), v.dtype),
        *(flat, state.reshape(state.shape[0], heads, keys * values), layer),
        grid=(heads * tile.parts,),
        grid_names=(BLOCK,),
        kernel_name="gated_delta_rule_step",
    )
    return out.reshape(v.shape), after.reshape(state.shape)


def _token(options: DeltaRuleStepOptions, tile: DeltaStepTile, shared: int, refs: Any) -> None:
    """A token of a block's channels; `shared` heads have the same q and k."""
    block = lax.axis_index(BLOCK)
    head, first = lax.div(block, tile.parts), lax.rem(block, tile.parts) * tile.channels
    group, own = lax.div(head, shared), pl.ds(first, tile.channels)
    # From the block's channels of the first key to those of the last, the others' between them.
    up_to_last = pl.ds(first, (tile.keys - 1) * tile.values + tile.channels)
    before, after = (ref.at[refs.layer, head, up_to_last] for ref in (refs.before, refs.after))
    where = tile.of_states()
    S = [load_lanes(before, at, _VECTOR) for at in where]
    k, q = (tile.of_keys(ref.at[group]) for ref in (refs.k, refs.q))
    v = load_lanes(refs.v.at[head, own], tile.of_channels(), _VECTOR)
    beta = None if refs.beta is None else load_lanes(refs.beta.at[head], LaneOffsets())[0]
    if options.qk_l2norm:
        k, q = _unit_length(tile, k), _unit_length(tile, q)
    if refs.g is not None:
        of_head = refs.g.shape[1] == 1
        g = load_lanes(refs.g.at[head], LaneOffsets()) if of_head else tile.of_keys(refs.g.at[head])
        decays = [jnp.exp(x) for x in g] * (len(S) if of_head else 1)
        S = [[d * x for x in row] for d, row in zip(decays, S, strict=True)]
    n = [x - _sum_over_keys(tile, of_channel, k) for x, *of_channel in zip(v, *S, strict=True)]
    n = n if beta is None else [beta * x for x in n]
    out: list[Any] = [0.0] * _VECTOR
    for at, row, x, y in zip(where, S, k, q, strict=True):
        row = [s + x * entering for s, entering in zip(row, n, strict=True)]
        store_lanes(after, at, row)
        out = [o + y * s for o, s in zip(out, row, strict=True)]
    (summed,) = sum_lanes(out, tile.distances)
    at = tile.of_channels((16, 2, 2), (8, 2, 1))  # a lane keeps a half of four, and again of two
    store_lanes(refs.out.at[head, own], at, [options.scale * summed])


def _unit_length(tile: DeltaStepTile, x: list[jax.Array]) -> list[jax.Array]:
    inverse = lax.rsqrt(_sum_over_keys(tile, x, x) + NORM_EPS)
    return [v * inverse for v in x]


def _sum_over_keys(tile: DeltaStepTile, x: list[jax.Array], y: list[jax.Array]) -> jax.Array:
    """Σ x · y over all keys, in each of the lanes that share channels."""
    own: Any = sum(a * b for a, b in zip(x, y, strict=True))
    return sum_lanes([own], tile.distances)[0]
