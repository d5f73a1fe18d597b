"""Arrays of a call of the gated delta rule, and their parts, as the kernels take them."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import LOG2E
from jaxkern.mosaic.launch import LANES, grid_axes, num_sms
from jaxkern.mosaic.mma import accumulator, finish, start
from jaxkern.mosaic.tiles import (
    launch_tiles,
    load_left,
    load_transposed,
)
from jaxkern.mosaic.wgmma import (
    COLUMNS,
    ROWS,
    causal,
    over_columns,
    over_rows,
    to_fp32,
)
from jaxkern.ops.chunks import cut_decays, padded
from jaxkern.ops.delta_rule.reference import (
    KERNEL_CHUNK,
    SAVED_EVERY,
    DeltaRuleOptions,
    clipped_decays,
    of_channels,
    unit_length,
)

CHUNK = KERNEL_CHUNK
"""Tokens of a chunk: the rows of an accumulator."""
SLICE = 64
"""Value channels of a block that scans."""
KEYS = 64
"""Key channels that are padded to, and whose gradients are found at once."""
MOST_VALUES = 2 * SLICE
"""The most value channels of a head in the last kernel: SLICE of each warpgroup."""
PAIR = 2
"""Chunks of a block that inverts: it has a lane for each column of both."""
SAVED = SAVED_EVERY // CHUNK
"""Chunks from one saved state to the next."""
SQUARE = 2 * CHUNK * CHUNK

BLOCK, WARPGROUP = grid_axes("block", "warpgroup")
BF16, F32 = jnp.bfloat16, jnp.float32


def launch(
    kernel: Any, name: str, ins: Any, outs: Any, scratch: Any, grid: int, *args: Any, **more: Any
) -> dict[str, Any]:
    """Launches blocks: :func:`jaxkern.mosaic.tiles.launch_tiles`."""
    name, axes = f"gated_delta_rule_{name}", (BLOCK, WARPGROUP)
    return launch_tiles(kernel, name, ins, outs, scratch, axes, grid, *args, **more)


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


SUM, BETA, START, TO_END = range(4)
"""Rows of a chunk's steps: c · log2(e), β, E and β ∘ left."""
MOST = SUM
"""Row of the most that g may be, where decays are of channels: such a chunk has it and β."""


class Call:
    """A call's arrays as the kernels take them: in whole chunks and tiles.

    Attributes:
      q, k: (B, L, G, K); v: (B, L, H, V).
      g: (B, L, H / joined, joined · K), the logarithms of decays of channels, or ``None``.
      in_place: whether a kernel may write where one of its arguments lies; not under ``vmap``.
      joined: heads whose key channels a block of :mod:`jaxkern.ops.delta_rule.channels` takes at
        once, next to each other: 2 if they are narrow.
      steps: (B, chunks, H, 4 or 2, CHUNK), fp32, numbers of each token: `SUM` or `MOST`, `BETA`,
        `START` and `TO_END`.
      parts: of a sequence, which are scanned at once where blocks are few.
    """

    def __init__(
        self,
        options: DeltaRuleOptions,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        rank: Any,
        *,
        in_place: bool = True,
    ):
        self.batch, self.length, self.groups, self.rank, self.channels = v.shape
        self.key_channels = q.shape[-1]
        self.heads = self.groups * self.rank
        self.by_channel, self.packed = of_channels(g), rank is not None
        self.in_place = in_place
        narrow = max(self.key_channels, self.channels) <= KEYS and self.heads % 2 == 0
        self.joined = 2 if self.by_channel and narrow else 1
        self.keys = up(self.key_channels, LANES // self.joined if self.by_channel else KEYS)
        self.values = up(self.channels, SLICE)
        self.slices = self.values // SLICE
        self.columns = self.slices + self.keys // SLICE
        self.parts = _parts(self)
        self.tokens = up(self.length, CHUNK * (PAIR if self.parts == 1 else SAVED * self.parts))
        self.chunks = self.tokens // CHUNK
        if options.qk_l2norm:
            q, k = (unit_length(x.astype(F32)).astype(x.dtype) for x in (q, k))
        self.q, self.k = (padded(padded(x, 1, self.tokens), 3, self.keys) for x in (q, k))
        self.v, self.scale = self.of_values(v), options.scale
        self.g: Any = None
        of_tokens, in_chunks = v.shape[:-1], lambda x: self.in_chunks(x.astype(F32))
        beta = in_chunks(jnp.ones(of_tokens, F32) if beta is None else beta)
        if self.by_channel:
            g = g.reshape(*g.shape[:2], self.heads, self.key_channels)
            g = padded(padded(g, 1, self.tokens), 3, self.keys)
            self.g = g.reshape(self.joined_like(g.dtype).shape)
            most = jnp.full(of_tokens, jnp.inf, F32)
            most = in_chunks(most if rank is None else cut_decays(most, rank))
            self.steps = jnp.stack([most, beta], axis=3)
            return
        g = clipped_decays(jnp.zeros(of_tokens, F32) if g is None else g)
        c = jnp.cumsum(in_chunks(g if rank is None else cut_decays(g, rank)) * LOG2E, axis=-1)
        to_end = beta * jnp.exp2(c[..., -1:] - c)
        self.steps = jnp.stack([c, beta, jnp.exp2(c), to_end], axis=3)

    def in_chunks(self, v: Any) -> Any:
        """(B, chunks, H, CHUNK) of (B, L, G, R), with zeros at the end."""
        v = padded(v.reshape(*v.shape[:2], self.heads), 1, self.tokens)
        return v.reshape(self.batch, self.chunks, CHUNK, self.heads).swapaxes(2, 3)

    def split(self) -> "Call":
        """The call, with each part of a sequence as a sequence."""
        call = copy.copy(self)
        call.batch, call.parts = self.batch * self.parts, 1
        call.tokens, call.chunks = self.tokens // self.parts, self.chunks // self.parts
        call.v = self.split_arrays({"v": self.v})["v"]
        return call

    def split_arrays(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Arrays of all tokens or chunks, (B, n, …), as those of :meth:`split`."""
        parts = self.parts
        of_parts = lambda x: x.reshape(len(x) * parts, x.shape[1] // parts, *x.shape[2:])
        return {name: of_parts(x) for name, x in arrays.items()}

    def whole_arrays(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Undoes `split_arrays`."""
        whole = lambda x: x.reshape(self.batch, self.parts * x.shape[1], *x.shape[2:])
        return {name: whole(x) for name, x in arrays.items()}

    def of_values(self, v: Any) -> Any:
        """(B, L, H, V) of (B, L, G, R, V)."""
        v = v.reshape(*v.shape[:2], self.heads, self.channels)
        return padded(padded(v, 1, self.tokens), 3, self.values)

    def states(self, v: Any) -> Any:
        """(…, H, K, V), fp32, of (…, G, R, K, V)."""
        if v is None:
            return None
        v = v.astype(jnp.float32).reshape(*v.shape[:-4], self.heads, *v.shape[-2:])
        return padded(padded(v, v.ndim - 2, self.keys), v.ndim - 1, self.values)

    def cut_states(self, v: Any) -> Any:
        """Undoes `states`."""
        v = v[..., : self.key_channels, : self.channels]
        return v.reshape(*v.shape[:-3], self.groups, self.rank, *v.shape[-2:])

    def cut_values(self, v: Any) -> Any:
        """Undoes `of_values`."""
        v = v[:, : self.length, :, : self.channels]
        return v.reshape(*v.shape[:2], self.groups, self.rank, self.channels)

    def cut_steps(self, v: Any) -> Any:
        """(B, L, G, R) of (B, chunks, H, CHUNK)."""
        v = v.swapaxes(2, 3).reshape(self.batch, self.tokens, self.heads)
        return v[:, : self.length].reshape(self.batch, self.length, self.groups, self.rank)

    def cut_channels(self, v: Any) -> Any:
        """(B, L, G, R, K) of (B, L, H, K), the heads apart or joined."""
        v = self.apart(v)[:, : self.length, :, : self.key_channels]
        return v.reshape(*v.shape[:2], self.groups, self.rank, self.key_channels)

    def cut_keys(self, v: Any, dtype: Any) -> Any:
        """(B, L, G, K) of what each head has, (B, L, H, K), the heads apart or joined."""
        v = self.cut_channels(v)
        return v[:, :, :, 0] if self.rank == 1 else v.astype(dtype).sum(3)

    def apart(self, v: Any) -> Any:
        """(B, n, H, K) of (B, n, H / joined, joined · K)."""
        return v.reshape(*v.shape[:2], self.heads, self.keys)

    def joined_like(self, dtype: Any, count: int | None = None) -> Any:
        """The type of what is of key channels, of all tokens or of `count` others."""
        joined = self.heads // self.joined, self.joined * self.keys
        return jax.ShapeDtypeStruct((self.batch, count or self.tokens, *joined), dtype)

    def matrices_like(self) -> Any:
        """The type of T and of P with its weights."""
        shape = self.batch, self.chunks, self.heads, CHUNK, CHUNK
        return jax.ShapeDtypeStruct(shape, BF16)

    def states_like(self, count: int, columns: int = 0) -> Any:
        shape = self.batch, count, self.heads, self.keys, columns or self.values
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def key_gradients(self, after: tuple[Any, ...]) -> dict[str, Any]:
        """Arguments of :func:`launch` for dQ and dK of each head, and dS of the slices as `after`.

        A chunk's are as large as its dS. If `in_place`, that of the first slice lies where dQ is
        written later, and that of the second where dK is.
        """
        like, own = self.joined_like(BF16), self.after_names()
        given = {name: x.reshape(like.shape) for name, x in zip(own, after, strict=True)}
        outs = {name: like for name in ("dq", "dk") if name not in given}
        return {"updated" if self.in_place else "ins": given, "outs": outs}

    def after_names(self) -> tuple[str, ...]:
        """Names of dS of the slices after chunks."""
        names = ("dq", "dk") if self.in_place else ("after_0", "after_1")
        return names[: self.slices]

    def turned_like(self) -> Any:
        """The type of transposed states of all chunks, in 16 bits."""
        shape = self.batch, self.chunks, self.heads, self.values, self.keys
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


_PARTS = 1, 2, 4, 8, 16
"""Numbers of parts that a scan may have of a sequence."""
_LAUNCH, _PART = 15, 5
"""Estimates, in the time of a chunk: for the launches of a scan in parts, and for the product that
gives the state before a part."""


def _parts(call: Call) -> int:
    """Parts of a sequence for which a scan takes the least time.

    A part's chunks are gone through twice, and the first time for the columns of the identity, too.
    """
    chunks, blocks = up(-(-call.length // CHUNK), PAIR), call.batch * call.heads
    rounds = lambda count: -(-count // num_sms())

    def time(parts: int) -> int:
        if parts == 1:
            return chunks * rounds(blocks * call.slices)
        of_part = up(-(-chunks // parts), SAVED)
        both = rounds(parts * blocks * call.slices) + rounds(parts * blocks * call.columns)
        return of_part * both + _LAUNCH + _PART * parts

    return min(_PARTS, key=time)


class Place:
    """The coordinates of a block, of `counts` of something beside heads and batch rows.

    What comes first in `counts` has consecutive blocks. Of a block of several `joined` heads it has
    those of one `number`; `joint` is for all of them.
    """

    def __init__(self, call: Call, *counts: int, joined: int = 1, number: Any = 0):
        rest, self.own = lax.axis_index(BLOCK), []
        for count in counts:
            self.own.append(lax.rem(rest, count))
            rest = lax.div(rest, count)
        blocks = call.heads // joined
        self.joint, self.batch = lax.rem(rest, blocks), lax.div(rest, blocks)
        self.head = self.joint * joined + number
        self.group = lax.div(self.head, call.rank)

    def sources(self, refs: Any, names: Any, chunk: Any, part: Any) -> dict[str, Any]:
        """Parts of arrays in a chunk by their names, as :func:`tiles_of` has them."""
        of: dict[str, Any] = dict.fromkeys(("q", "k"), self.keys)
        of |= dict.fromkeys(("kd", "kt", "qd"), self.all_values)
        of |= dict.fromkeys(("T", "P", "steps", "ends"), self.of_chunk)
        values = lambda ref, chunk: self.values(ref, chunk, part)
        return {name: of.get(name, values)(getattr(refs, name), chunk) for name in names}

    def keys(self, ref: Any, chunk: Any) -> Any:
        """(CHUNK, K) of q or k."""
        return ref.at[self.batch, tokens_of(chunk), self.group]

    def values(self, ref: Any, chunk: Any, part: Any) -> Any:
        """(CHUNK, SLICE) of v and what has its shape."""
        return ref.at[self.batch, tokens_of(chunk), self.head, pl.ds(part * SLICE, SLICE)]

    def all_values(self, ref: Any, chunk: Any) -> Any:
        """(CHUNK, V), or (CHUNK, K) of what each head has."""
        return ref.at[self.batch, tokens_of(chunk), self.head]

    def of_chunk(self, ref: Any, chunk: Any) -> Any:
        """An array's part of a chunk and head: steps, T, P, or all of a transposed state."""
        return ref.at[self.batch, chunk, self.head]

    def turned(self, ref: Any, chunk: Any, part: Any) -> Any:
        """(SLICE, K) of transposed states."""
        return ref.at[self.batch, chunk, self.head, pl.ds(part * SLICE, SLICE)]

    def joint_keys(self, ref: Any, chunk: Any) -> Any:
        """(CHUNK, K) of all heads of a block, next to each other."""
        return ref.at[self.batch, tokens_of(chunk), self.joint]

    def state(self, ref: Any, index: Any, part: Any) -> Any:
        """(K, SLICE) of states."""
        return ref.at[self.batch, index, self.head, :, pl.ds(part * SLICE, SLICE)]


def tokens_of(chunk: Any) -> Any:
    return pl.ds(chunk * CHUNK, CHUNK)


def by_row(steps: Any, row: int, columns: int, times: float = 1) -> Any:
    """(CHUNK, columns): numbers of the tokens that are the rows."""
    number = plgpu.load(steps.at[row], layout=ROWS)
    return over_rows(number if times == 1 else number * times, columns)


def column_numbers(steps: Any, row: int) -> Any:
    """(CHUNK,): numbers of the tokens that are columns."""
    return plgpu.load(steps.at[row], layout=COLUMNS)


def by_column(steps: Any, row: int, times: float = 1) -> Any:
    """(64, CHUNK): numbers of the tokens that are the columns."""
    number = column_numbers(steps, row)
    return over_columns(number if times == 1 else number * times, CHUNK)


def decays_of(steps: Any, *, strict: bool = False) -> Any:
    """D, (CHUNK, CHUNK), or without its diagonal."""
    c = by_row(steps, SUM, CHUNK) - by_column(steps, SUM)
    return jnp.exp2(causal(c, first=1 if strict else 0))


def of_end(steps: Any) -> Any:
    """exp(c[last])."""
    return steps[START, CHUNK - 1]


def tiles_of(call: Call, names: str) -> dict[str, Any]:
    """Shapes and dtypes of the arrays' parts in a chunk, of these names and of steps or ends."""
    of: dict[str, Any] = dict.fromkeys(("q", "k", "kd", "kt", "qd"), ((CHUNK, call.keys), BF16))
    of |= {"steps": (call.steps.shape[-2:], F32), "ends": ((call.keys,), F32)}
    all_names = names.split()
    all_names.append("ends" if call.by_channel and "q" not in all_names else "steps")
    return {name: of.get(name, ((CHUNK, CHUNK), BF16)) for name in all_names}


def columns_of(ref: Any, part: Any) -> Any:
    """(64, K): SLICE columns of a matrix (K, n), transposed."""
    return load_transposed(ref.at[:, pl.ds(part * SLICE, SLICE)])


def first_state(ref: Any, at: Place, index: Any, part: Any, keys: int) -> Any:
    """A transposed state, (SLICE, K), or zeros."""
    return accumulator(keys) if ref is None else load_transposed(at.state(ref, index, part))


def by_role(*roles: Any) -> None:
    """Runs one of `roles` in each warpgroup."""
    for number, role in enumerate(roles):
        pl.when(lax.axis_index(WARPGROUP) == number)(role)


def new_values(stage: dict[str, Any], reading: Any, has_values: Any = None) -> Any:
    """Starts Nᵀ = (V − E ∘ (K S))ᵀ Tᵀ, (SLICE, CHUNK), from (K S)ᵀ, or from that times E.

    V is 0 if it is said not to have values.
    """
    v = to_fp32(load_left(stage["v"], transposed=True))
    v = v if has_values is None else jnp.where(has_values, v, 0.0)
    if "ends" in stage:
        read, v = finish(reading, ready=[v])
    else:
        read, v, E = finish(reading, ready=[v, column_numbers(stage["steps"], START)])
        read = read * over_columns(E, SLICE)
    return start([accumulator(CHUNK)], [v - read], stage["T"], transposed=True)


def next_state(stage: dict[str, Any], S: Any, making: Any) -> tuple[Any, Any]:
    """Starts the next Sᵀ, from that before and Nᵀ, which it returns, too."""
    if "ends" in stage:
        new, decayed = finish(making, ready=[decayed_state(stage, S)])
        return start([decayed], [new], stage["kt"]), new
    ready = [decayed_state(stage, S), column_numbers(stage["steps"], TO_END)]
    new, decayed, to_end = finish(making, ready=ready)
    return start([decayed], [new * over_columns(to_end, SLICE)], stage["k"]), new


def decayed_state(stage: dict[str, Any], S: Any) -> Any:
    """Sᵀ, (SLICE, K), times exp(c[last])."""
    if "ends" not in stage:
        return S * of_end(stage["steps"])
    return S * over_columns(plgpu.load(stage["ends"], layout=COLUMNS), SLICE)
