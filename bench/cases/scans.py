"""Cases of scans and of the convolution before one."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from bench.cases import peers
from bench.cases.case import Argument, Case, Cost, Errors, Shape, arguments, constant, normal, times

_SQUARE, _LARGE, _THIN = (8, 2048, 2048), (4, 4096, 5120), (1, 16384, 2048)
"""Batch, length and channels."""

_CARRIES: dict[str, Any] = {"sequence": {"all-gather": 2}}
"""The collectives of a scan whose sequence is split: its carries, forward and backward."""
_PACKED: dict[str, Any] = {"sequence": {"all-gather": 2, "collective-permute": 1}}
"""The collectives with packed sequences: a segment's id goes to the token after, too."""
_NUMBERED: dict[str, Any] = {"sequence": {"all-gather": 3, "collective-permute": 3}}
"""The collectives with packed sequences whose segments are numbered, over all parts."""


def _packed(of: dict[str, Any], *sizes: tuple[int, ...], word: str = "") -> Case:
    """The op of eight sequences in each row."""

    def run(*arrays: Any, **how: Any) -> Any:
        b, l = arrays[0].shape[:2]
        ids = jnp.broadcast_to(jnp.arange(l) // -(-l // 8), (b, l))
        case = next(case for case in CASES if case.op == of["op"] and case.shapes)
        return case.call(*arrays, segment_ids=ids, **how)

    return Case(**of, shapes=[*map(Shape, sizes)], variant=f"{word}packed", run=run)


def _continued(of: dict[str, Any], inputs: Any, state: str, **options: Any) -> Case:
    """The op of packed rows with states before and after them, of these axes."""
    ids = Argument("segment_ids", "b l", constant(0), "int32")
    options |= {"return_final_state": True}
    every = (*inputs, ids, Argument("initial_state", state, role="float32"))
    of = of | {"arguments": every, "options": options}
    return Case(**of, variant="packed and continued", strict=True)


def _step(of: dict[str, Any], inputs: Any, state: str, axes: str, **rest: Any) -> Case:
    """One token of a scan: its arguments are those of a sequence, without their length."""
    of_token = (dataclasses.replace(a, axes=a.axes.replace("b l", "b")) for a in inputs)
    every = (Argument("state", state, role="float32"), *of_token)
    how: Any = {"op": f"{of['op']}_step", "split": of["split"], "kernels": False, "strict": True}
    return Case(**how, axes=axes, arguments=every, **rest)


def _decoded(of: dict[str, Any], run: Any, forward: Cost, *shapes: Shape, word: str = "") -> Case:
    """A sequence by steps, whose arguments and options are those of the scan."""
    taken = {name: of[name] for name in ("axes", "arguments", "options")}
    how: Any = {"op": f"{of['op']}_step", "variant": f"{word}decoded", "passes": ("forward",)}
    return Case(**taken, **how, run=run, forward=forward, shapes=shapes)


def _token_by_token(step: Any, state: Any, tokens: tuple[Any, ...]) -> Any:
    """The outputs, (B, L, …), of ``step(state, *token) -> (out, state)`` for every token."""
    along = tuple(jnp.moveaxis(v, 1, 0) for v in tokens)
    token = lambda state, now: step(state, *now)[::-1]
    return jnp.moveaxis(jax.lax.scan(token, state, along)[1], 0, 1)


def _stepped(op: str) -> Any:
    """A scan by its step."""

    def run(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any, **how: Any) -> Any:
        def step(state: Any, x: Any, dt: Any, B: Any, C: Any) -> Any:
            return getattr(jaxkern, op)(state, x, dt, A, B, C, D, dt_bias=dt_bias, **how)

        before = jnp.zeros((x.shape[0], *x.shape[2:], B.shape[-1]))
        return _token_by_token(step, before, (x, dt, B, C))

    return run


# The convolution


def _convolved(x: Any, weight: Any, bias: Any) -> Any:
    width, length = weight.shape[1], x.shape[1]
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    y = sum(padded[:, i : i + length] * weight[:, i] for i in range(width)) + bias
    return jax.nn.silu(y)


_CONVOLUTION: dict[str, Any] = {"op": "causal_conv1d", "axes": "b l d w", "split": "b d"}
_CONVOLUTION |= {"sequence": {"collective-permute": 3}}  # inputs, both ways, and their gradient
_WEIGHT = Argument("weight", "d w", times(0.5), "parameter")
_CONVOLVED = Argument("x", "b l d"), _WEIGHT, Argument("bias", "d", times(0.1), "parameter")
_TIMED: dict[str, Any] = _CONVOLUTION | {"forward": Cost("2 b l d"), "backward": Cost("3 b l d")}
_TIMED |= {"arguments": _CONVOLVED}

CONVOLUTIONS = [
    Case(
        **_TIMED,
        options={"activation": "silu"},
        expression=_convolved,
        peers=peers.CAUSAL_CONV1D,
        shapes=[
            *(Shape((*s, 4)) for s in (_SQUARE, _LARGE, _THIN, (8, 2048, 4096))),
            *(Shape((*_SQUARE, w)) for w in (2, 8)),
            Shape((*_SQUARE, 4), "float32"),
        ],
        small=Shape((2, 256, 256, 4), "float32"),
        errors=Errors((4, 512, 1024, 4), (2, 32, 128, 4)),
    ),
    _packed(_TIMED | {"sequence": {"collective-permute": 4}}, (*_SQUARE, 4)),
    Case(
        **_CONVOLUTION,
        variant="continued",
        arguments=(*_CONVOLVED, Argument("initial_state", "b 3 d")),
        options={"activation": "silu"},
        strict=True,
    ),
    Case(
        op="causal_conv1d_step",
        kernels=False,
        axes="b d w",
        split="b d",
        arguments=(*arguments(state="b 3 d", x="b d"), _WEIGHT),
        strict=True,
    ),
]


# The linear scan


_decay = lambda key, shape: jax.nn.sigmoid(normal(key, shape) + 2)


def _recurrence(a: Any, b: Any) -> Any:
    step = lambda h, a, b: (h := a * h + b, h)
    return _token_by_token(step, jnp.zeros_like(b[:, 0]), (a, b))


_LINEAR: dict[str, Any] = _CARRIES | {"op": "linear_scan", "axes": "b l d", "split": "b d"}
_LINEAR |= {"forward": Cost("3 b l d"), "backward": Cost("5 b l d")}
_RECURRENT = arguments(a=("b l d", _decay), b="b l d")
_EVEN = itertools.product((_SQUARE, _LARGE, (1, 65536, 1024)), ("bfloat16", "float32"))
_ODD = ((1, 16384, 256), (64, 100, 128), (64, 2048, 64), (8, 2048, 1023))

LINEAR_SCANS = [
    Case(
        **_LINEAR,
        arguments=_RECURRENT,
        expression=_recurrence,
        peers=peers.LINEAR_SCAN,
        shapes=[*itertools.starmap(Shape, _EVEN), *map(Shape, _ODD)],
        small=Shape((2, 256, 256), "float32"),
        errors=Errors((4, 512, 1024), (2, 32, 128)),
    ),
    _packed(_LINEAR | _PACKED | {"arguments": _RECURRENT}, _SQUARE),
    Case(
        **_LINEAR,
        variant="continued",
        arguments=(*_RECURRENT, Argument("initial_state", "b d", role="float32")),
        strict=True,
    ),
]


# The selective scan


# A of a Mamba at the start of its training, and the biases of its steps.
_rates = lambda key, shape: -jnp.broadcast_to(jnp.arange(1.0, shape[1] + 1), shape)
_step_biases = lambda key, shape: jnp.linspace(-6.0, -2.0, shape[0])


def _selective(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any) -> Any:
    dt = jax.nn.softplus(dt + dt_bias.astype(dt.dtype))
    decay = jnp.exp(dt[..., None] * A.astype(dt.dtype))  # (b, l, d, n)
    h = _recurrence(decay, (dt * x)[..., None] * B[:, :, None])
    y = jnp.sum(h * C[:, :, None], -1) + D.astype(x.dtype) * x  # (b, l, d)
    return y * jax.nn.silu(z)


_OF_TOKENS = arguments(x="b l d", dt="b l d", A=("d n", _rates, "float32"), B="b l n", C="b l n")
_D, _STEP_BIASES = arguments(
    D=("d", constant(1.0), "float32"), dt_bias=("d", _step_biases, "float32")
)
_SOFTPLUS: dict[str, Any] = {"options": {"dt_softplus": True}}
_SELECTIVE: dict[str, Any] = _CARRIES | {
    "op": "selective_scan",
    "axes": "b l d n",
    "split": "b d",
    "arguments": (*_OF_TOKENS, _D, Argument("z", "b l d"), _STEP_BIASES),
    "forward": Cost("4 b l d + 2 b l n", exponentials="b l d n"),
    "backward": Cost("7 b l d + 4 b l n", exponentials="b l d n"),
}


def _every(sizes: tuple[int, ...], count: int | None) -> Shape:
    return Shape((*sizes, 16), word=f"/{count}", options={"checkpoint_every": count})


SELECTIVE_SCANS = [
    Case(
        **_SELECTIVE,
        options={"dt_softplus": True, "checkpoint_every": 8},
        peers=peers.SELECTIVE_SCAN,
        shapes=[
            *(Shape((*s, 16)) for s in (_SQUARE, _LARGE, _THIN, (2, 512, 512))),
            *(Shape((*_SQUARE, 16), dtype) for dtype in ("float32", "float16")),
            *(_every(_LARGE, count) for count in (64, 128)),
            *(Shape((*_SQUARE, n)) for n in (64, 128)),
            *(Shape((*s, 16)) for s in ((1, 65536, 2048), (8, 36864, 8192))),
            *(_every(_SQUARE, count) for count in (32, 64, None, 1)),
        ],
        small=Shape((2, 256, 256, 16), "float32"),
    ),
    _packed(_SELECTIVE | _PACKED, (*_SQUARE, 16)),
    Case(
        **_SELECTIVE | _SOFTPLUS,
        expression=_selective,
        errors=Errors((2, 512, 256, 16), (2, 16, 128, 16)),
        strict=True,
    ),
    _continued(_SELECTIVE | _PACKED, _OF_TOKENS, "b d n", dt_softplus=True),
    _step(_SELECTIVE, _OF_TOKENS, "b d n", "b d n", **_SOFTPLUS),
    _decoded(
        _SELECTIVE | _SOFTPLUS | {"arguments": (*_OF_TOKENS, _D, _STEP_BIASES)},
        _stepped("selective_scan_step"),
        Cost("3 b l d + 2 b l n", nbytes="8 b l d n", exponentials="b l d n"),
        Shape((1024, 16, 1536, 16)),
    ),
]

# SSD, Mamba-2's scan


# A of a Mamba-2 at the start of its training.
_rates_of_heads = lambda key, shape: -jnp.linspace(1.0, 16.0, shape[0])


def _ssd(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any) -> Any:
    dt = jax.nn.softplus(dt + dt_bias.astype(dt.dtype))
    decay = jnp.exp(dt * A.astype(dt.dtype))  # (b, l, heads)
    B, C = (jnp.repeat(v, x.shape[2] // v.shape[2], axis=2)[..., None, :] for v in (B, C))
    added = (dt[..., None] * x)[..., None] * B  # (b, l, heads, p, n)
    h = _recurrence(jnp.broadcast_to(decay[..., None, None], added.shape), added)
    return jnp.sum(h * C, -1) + D.astype(x.dtype)[:, None] * x


_OF_HEADS = (
    *arguments(x="b l heads p", dt=("b l heads", times(0.5))),
    *arguments(A=("heads", _rates_of_heads, "float32"), B="b l g n", C="b l g n"),
)
_D_OF_HEADS = Argument("D", "heads", constant(1.0), "float32")
_Z = Argument("z", "b l heads p")
_OF_SSD = *_OF_HEADS, _D_OF_HEADS, Argument("dt_bias", "heads", constant(-3.0), "float32")
_SSD: dict[str, Any] = _CARRIES | {"op": "ssd", "axes": "b l heads p n g", "split": "b heads"}


def _ssd_of(forward: int, backward: int, *more: Argument) -> dict[str, Any]:
    """SSD with so many arrays like x; operations in chunks of 64 tokens."""
    return _SSD | {
        "arguments": (*_OF_SSD, *more),
        "forward": Cost(
            f"{forward} b l heads p + b l heads + 2 b l g n",
            operations="128 b l heads p + 4 b l heads p n + 128 b l g n",
        ),
        "backward": Cost(
            f"{backward} b l heads p + 2 b l heads + 4 b l g n",
            operations="384 b l heads p + 10 b l heads p n + 384 b l g n",
        ),
    }


_MAMBA_2 = ((8, 4096, 64), (1, 32768, 64), (8, 4096, 24))
"""Batch, length and heads."""
_SSD_LARGE = (*_MAMBA_2[0], 64, 128, 1)
_SSD_SIZES = [
    *((*s, 64, 128, 1) for s in _MAMBA_2),
    *((8, 2048, 32, 64, 128, 8), (2, 4096, 128, 80, 128, 8), (4, 4096, 24, 128, 256, 1)),
]

SSDS = [
    Case(
        **_ssd_of(2, 3) | _SOFTPLUS,
        expression=_ssd,
        peers=peers.SSD,
        shapes=[*map(Shape, _SSD_SIZES)],
        small=Shape((2, 256, 4, 16, 32, 1), "float32"),
        errors=Errors((2, 1024, 8, 64, 128, 2), (2, 64, 4, 8, 16, 2)),
        strict=True,
    ),
    Case(**_ssd_of(3, 5, _Z) | _SOFTPLUS, variant="gated", shapes=[Shape(_SSD_LARGE)]),
    _packed(_ssd_of(2, 3) | _NUMBERED, _SSD_LARGE),
    _continued(_SSD | _NUMBERED, (*_OF_HEADS, _D_OF_HEADS, _Z), "b heads p n", dt_softplus=True),
    _step(_SSD, _OF_HEADS, "b heads p n", "b heads p n g", result="b heads p", **_SOFTPLUS),
    _decoded(
        _ssd_of(2, 3) | _SOFTPLUS,
        _stepped("ssd_step"),
        Cost("2 b l heads p + b l heads + 2 b l g n", nbytes="8 b l heads p n"),
        *(Shape((256, 16, heads, 64, 128, 1)) for heads in (24, 80)),
    ),
]

# The gated delta rule


def delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, new: Any, *, qk_l2norm: bool = False
) -> tuple[Any, Any]:
    """Computes output and final state, one token after the other.

    `g` is of heads or of key channels, and `new`, (B, L), says where a segment begins.
    """
    if qk_l2norm:
        q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    decay = jnp.exp(g if g.ndim == 4 else g[..., None]).astype(v.dtype)

    def token(state: Any, now: Any) -> tuple[Any, Any]:
        q, k, v, decay, beta, new = now
        state = jnp.where(new[:, None, None, None], 0, state) * decay[..., None]
        read = lambda x: jnp.sum(x[..., None] * state, axis=2)
        state = state + k[..., None] * (beta[..., None] * (v - read(k)))[:, :, None]
        return state, k.shape[-1] ** -0.5 * jnp.sum(q[..., None] * state, axis=2)

    along = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta, new))
    state, out = jax.lax.scan(token, state, along)
    return jnp.moveaxis(out, 0, 1), state


def _delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    b, l, heads, p = v.shape
    state = jnp.zeros((b, heads, k.shape[-1], p), v.dtype)
    return delta_rule(q, k, v, g, beta, state, jnp.zeros((b, l), bool))[0]


def _delta_rule_stepped(q: Any, k: Any, v: Any, g: Any, beta: Any, **how: Any) -> Any:
    step = functools.partial(jaxkern.gated_delta_rule_step, **how)
    before = jnp.zeros((q.shape[0], v.shape[2], q.shape[-1], v.shape[-1]))
    return _token_by_token(step, before, (q, k, v, g, beta))


def _unit(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Keys of length 1."""
    keys = normal(key, shape)
    return keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-6)


# They forget half of a state in 5 tokens.
_log_decays = lambda key, shape: -jax.nn.softplus(normal(key, shape) - 2)
_fractions = lambda key, shape: jax.nn.sigmoid(normal(key, shape))
_OF_DELTA = arguments(q="b l g n", k=("b l g n", _unit), v="b l heads p")
_BETA = Argument("beta", "b l heads", _fractions)
_DELTA: dict[str, Any] = _CARRIES | {
    "op": "gated_delta_rule",
    "axes": "b l heads p n g",
    "split": "b heads",
}
_DELTA |= {"result": "b l heads p"}


def _delta_of(decays: str, keys: str) -> dict[str, Any]:
    """The rule with decays, and products of keys, of these axes; it counts chunks of 64 tokens."""
    of_values = "{} b l heads p + {} b l heads p n"
    return _DELTA | {
        "arguments": (*_OF_DELTA, Argument("g", decays, _log_decays, "float32"), _BETA),
        "forward": Cost(
            "2 b l g n + 2 b l heads p + b l heads",
            nbytes=f"4 {decays}",
            operations=f"{of_values.format(256, 6)} + 256 {keys}",
        ),
        "backward": Cost(
            "4 b l g n + 3 b l heads p + 2 b l heads",
            nbytes=f"8 {decays}",
            operations=f"{of_values.format(640, 16)} + 768 {keys}",
        ),
    }


_GATED = _delta_of("b l heads", "b l g n")
_KDA = _delta_of("b l heads n", "b l heads n")
_DELTA_SIZES = [
    *((*s, 128, 128, s[2]) for s in ((1, 32768, 32), (8, 4096, 16), (1, 8192, 32))),
    *((1, l, 32, 128, 128, 16) for l in (32768, 8192)),
    *((1, 8192, 64, 64, 64, 64), (1, 16384, 8, 128, 128, 8)),
]
"""Batch, length, value heads, size of a value, size of a key, key heads."""
_DELTA_PACKED = _DELTA_SIZES[1], (32, 1024, 16, 128, 128, 16)
_DELTA_ERRORS = Errors((2, 1024, 8, 64, 64, 4), (2, 64, 4, 8, 16, 2))

_QWEN, _KIMI, _NARROW = (
    Shape((b, 16, 32, size, size, g))
    for b, size, g in ((64, 128, 16), (64, 128, 32), (256, 64, 32))
)
"""A layer of Qwen3-Next, one of Kimi Linear, and one that has heads of 64 channels."""


def _stepped_delta(of: dict[str, Any], decays: str, *shapes: Shape, word: str = "") -> Case:
    cost = Cost("2 b l g n + 2 b l heads p + b l heads", nbytes=f"8 b l heads p n + 4 {decays}")
    of = of | {"options": {"qk_l2norm": True}}
    return _decoded(of, _delta_rule_stepped, cost, *shapes, word=word)


DELTA_RULES = [
    *(
        Case(
            **of,
            variant=variant,
            expression=_delta_rule,
            peers=of_peers,
            shapes=[*map(Shape, _DELTA_SIZES)],
            small=Shape((2, 256, 4, 16, 16, 4), "float32"),
            errors=_DELTA_ERRORS,
            strict=True,
        )
        for variant, of, of_peers in (
            ("", _GATED, peers.GATED_DELTA_RULE),
            ("KDA", _KDA, peers.KDA),
        )
    ),
    Case(
        **_DELTA,
        variant="DeltaNet",
        arguments=(*_OF_DELTA, _BETA),
        run=lambda q, k, v, beta, **how: jaxkern.gated_delta_rule(q, k, v, None, beta, **how),
        expression=lambda q, k, v, beta: _delta_rule(q, k, v, jnp.zeros(v.shape[:3]), beta),
        errors=_DELTA_ERRORS,
    ),
    _packed(_GATED | _NUMBERED, *_DELTA_PACKED),
    _packed(_KDA | _NUMBERED, *_DELTA_PACKED, word="KDA-"),
    _continued(_DELTA | _NUMBERED, _GATED["arguments"], "b heads n p", qk_l2norm=True),
    _step(_DELTA, _GATED["arguments"], "b heads n p", "b heads p n g", result="b heads p"),
    _stepped_delta(_GATED, "b l heads", _QWEN, _NARROW),
    _stepped_delta(_KDA, "b l heads n", _KIMI, word="KDA-"),
]

CASES = [*CONVOLUTIONS, *LINEAR_SCANS, *SELECTIVE_SCANS, *SSDS, *DELTA_RULES]
