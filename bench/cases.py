"""What is measured: for every op its shapes, the bytes that it must move, and whom it is beside."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from bench.steps import Step, steps

DROP_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
      op: the op's public name.
      shape: what the table calls the shape.
      dtype: of the activations.
      arrays: draws the arguments from a key.
      call: ``call(*arrays, implementation)``.
      bytes_forward: bytes that the forward must read and write, each array once.
      bytes_backward: the same for the backward, from the saved residuals.
      operations_forward, operations_backward: multiplications and additions of the products, where
        these are what takes the time.
      exponentials: that each pass must take at least, where these take longer than the bytes.
      differentiated: whether there is a backward.
      drawn: whether the result is random, and another library's another one.
      models: names of models that have this shape, of :data:`MODELS`.
    """

    op: str
    shape: str
    dtype: str
    arrays: Callable[[Any], tuple[Any, ...]]
    call: Callable[..., Any]
    bytes_forward: int
    bytes_backward: int
    operations_forward: int = 0
    operations_backward: int = 0
    exponentials: int = 0
    differentiated: bool = True
    drawn: bool = False
    models: tuple[str, ...] = ()


def _norm(op: str, m: int, n: int, dtype: str, extra: str = "", **options: Any) -> Case:
    """`extra` names what the norm takes of bias, residual and gate."""
    itemsize = jnp.dtype(dtype).itemsize
    names = extra.split()

    def arrays(key: Any) -> tuple[Any, ...]:
        k = jax.random.split(key, 5)
        x, weight = jax.random.normal(k[2], (m, n), dtype), jax.random.normal(k[0], (n,))
        bias = 0.1 * jax.random.normal(k[1], (n,))
        full = iter(k[3:])
        more = [
            bias if v == "bias" else jax.random.normal(next(full), (m, n), dtype) for v in names
        ]
        return x, 1 + 0.1 * weight, *([bias] if op == "layer_norm" else []), *more

    def call(x: Any, *rest: Any, implementation: Any) -> Any:
        count = len(rest) - len(names)
        named = dict(zip(names, rest[count:], strict=True))
        norm = getattr(jaxkern, op)
        return norm(x, *rest[:count], **named, **options, implementation=implementation)

    gated, summed = "gate" in names, "residual" in names
    words = [*names, *(str(v) for v in options.values())]
    return Case(
        op=op,
        shape="-".join([f"{m}x{n}", *words]),
        dtype=dtype,
        arrays=arrays,
        call=lambda *a: call(*a[:-1], implementation=a[-1]),
        bytes_forward=(2 + gated + 2 * summed) * m * n * itemsize,
        bytes_backward=(3 + 2 * gated + summed) * m * n * itemsize,
    )


def _segments(b: int, l: int) -> jax.Array:
    """Eight sequences in each row, (b, l)."""
    return jnp.broadcast_to(jnp.arange(l) // -(-l // 8), (b, l))


def _selective_scan(
    b: int,
    l: int,
    d: int,
    n: int,
    dtype: str,
    checkpoint_every: int | None = 8,
    packed: bool = False,
) -> Case:
    itemsize = jnp.dtype(dtype).itemsize

    def arrays(key: Any) -> tuple[Any, ...]:
        k = jax.random.split(key, 5)
        x, dt, z = (jax.random.normal(k[i], (b, l, d), dtype) for i in range(3))
        B, C = (jax.random.normal(k[3 + i], (b, l, n), dtype) for i in range(2))
        A = -jnp.broadcast_to(jnp.arange(1.0, n + 1), (d, n))
        return x, dt, A, B, C, jnp.ones(d), z, jnp.linspace(-6.0, -2.0, d)

    def call(x, dt, A, B, C, D, z, dt_bias, implementation):
        return jaxkern.selective_scan(
            *(x, dt, A, B, C, D, z),
            dt_bias=dt_bias,
            dt_softplus=True,
            segment_ids=_segments(b, l) if packed else None,
            checkpoint_every=checkpoint_every,
            implementation=implementation,
        )

    wide, narrow = b * l * d * itemsize, b * l * n * itemsize
    return Case(
        op="selective_scan",
        shape=f"{b}x{l}x{d}x{n}"
        + ("" if checkpoint_every == 8 else f"/{checkpoint_every}")
        + "-packed" * packed,
        dtype=dtype,
        arrays=arrays,
        call=call,
        bytes_forward=4 * wide + 2 * narrow,
        bytes_backward=7 * wide + 4 * narrow,
        exponentials=b * l * d * n,
    )


def _causal_conv1d(b: int, l: int, d: int, w: int, dtype: str, packed: bool = False) -> Case:
    nbytes = b * l * d * jnp.dtype(dtype).itemsize

    def arrays(key: Any) -> tuple[Any, ...]:
        k = jax.random.split(key, 3)
        x = jax.random.normal(k[0], (b, l, d), dtype)
        return x, 0.5 * jax.random.normal(k[1], (d, w)), 0.1 * jax.random.normal(k[2], (d,))

    def call(x, weight, bias, implementation):
        return jaxkern.causal_conv1d(
            *(x, weight, bias),
            activation="silu",
            segment_ids=_segments(b, l) if packed else None,
            implementation=implementation,
        )

    return Case(
        op="causal_conv1d",
        shape=f"{b}x{l}x{d}x{w}" + "-packed" * packed,
        dtype=dtype,
        arrays=arrays,
        call=call,
        bytes_forward=2 * nbytes,
        bytes_backward=3 * nbytes,
    )


def _linear_scan(b: int, l: int, d: int, dtype: str, packed: bool = False) -> Case:
    nbytes = b * l * d * jnp.dtype(dtype).itemsize

    def arrays(key: Any) -> tuple[Any, ...]:
        a, x = jax.random.split(key)
        decay = jax.nn.sigmoid(jax.random.normal(a, (b, l, d)) + 2)
        return decay.astype(dtype), jax.random.normal(x, (b, l, d), dtype)

    def call(a: Any, x: Any, implementation: Any) -> Any:
        ids = _segments(b, l) if packed else None
        return jaxkern.linear_scan(a, x, segment_ids=ids, implementation=implementation)

    return Case(
        op="linear_scan",
        shape=f"{b}x{l}x{d}" + "-packed" * packed,
        dtype=dtype,
        arrays=arrays,
        call=call,
        bytes_forward=3 * nbytes,
        bytes_backward=5 * nbytes,
    )


def _linear(m: int, k: int, n: int, dtype: str, **options: Any) -> Case:
    """With a bias where there is an activation."""

    def arrays(key: Any) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (m, k), dtype)
        weight = jax.random.normal(keys[1], (k, n), dtype) / math.sqrt(k)
        return (x, weight, jax.random.normal(keys[2], (n,))) if options else (x, weight)

    call = lambda *a: jaxkern.linear(*a[:-1], **options, implementation=a[-1])
    return _products("linear", (m, k, n), dtype, arrays, call, 1, options)


def _gated_linear_unit(
    m: int, k: int, n: int, dtype: str, joined: bool = False, **options: Any
) -> Case:
    """Of two weights, or `joined` ones, with what gpt-oss adds to them: biases and limits."""

    def arrays(key: Any) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        weights = [jax.random.normal(i, (k, n), dtype) / math.sqrt(k) for i in keys[1:]]
        x = jax.random.normal(keys[0], (m, k), dtype)
        return (x, jnp.concatenate(weights, 1), jnp.zeros(2 * n)) if joined else (x, *weights)

    def call(*args: Any) -> Any:
        *arrays, implementation = args
        if not joined:
            return jaxkern.gated_linear_unit(*arrays, **options, implementation=implementation)
        x, w, b = arrays
        clamped: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
        return jaxkern.gated_linear_unit(x, w, None, b, **clamped, implementation=implementation)

    words = {"joined": joined, **options}
    return _products("gated_linear_unit", (m, k, n), dtype, arrays, call, 2, words)


def _layer_norm_linear(m: int, k: int, n: int, dtype: str) -> Case:
    def arrays(key: Any) -> tuple[Any, ...]:
        x, w = jax.random.split(key)
        weight = jax.random.normal(w, (k, n), dtype) / math.sqrt(k)
        return jax.random.normal(x, (m, k), dtype), jnp.ones(k), jnp.zeros(k), weight

    call = lambda *a: jaxkern.layer_norm_linear(*a[:-1], implementation=a[-1])
    return _products("layer_norm_linear", (m, k, n), dtype, arrays, call, 1, {})


def _accumulate_weight_grad(batches: int, m: int, k: int, n: int, dtype: str) -> Case:
    """Over micro-batches, of which each reads and writes the accumulator."""

    def arrays(key: Any) -> tuple[Any, ...]:
        x, dout = jax.random.split(key)
        return (
            jax.random.normal(x, (batches, m, k), dtype),
            jax.random.normal(dout, (batches, m, n), dtype),
        )

    def call(x: Any, dout: Any, implementation: Any) -> Any:
        def step(accumulator: Any, micro: Any) -> Any:
            add = jaxkern.accumulate_weight_grad
            return add(accumulator, *micro, implementation=implementation), None

        return jax.lax.scan(step, jnp.zeros((k, n)), (x, dout))[0]

    return Case(
        op="accumulate_weight_grad",
        shape=f"{batches}x{m}x{k}x{n}",
        dtype=dtype,
        arrays=arrays,
        call=call,
        bytes_forward=batches * (m * (k + n) * jnp.dtype(dtype).itemsize + 8 * k * n),
        bytes_backward=0,
        operations_forward=2 * batches * m * k * n,
        differentiated=False,
    )


def _mlp(m: int, d: int, h: int, dtype: str) -> Case:
    """A block: layer norm and linear layer, gated projections, linear layer, residual."""

    def arrays(key: Any) -> tuple[Any, ...]:
        keys = jax.random.split(key, 5)
        sizes = ((d, d), (d, h), (d, h), (h, d))
        weights = (
            jax.random.normal(k, s, dtype) / math.sqrt(s[0])
            for k, s in zip(keys[1:], sizes, strict=True)
        )
        return jax.random.normal(keys[0], (m, d), dtype), jnp.ones(d), jnp.zeros(d), *weights

    def call(*args: Any) -> Any:
        x, scale, bias, w, w_gate, w_up, w_down, implementation = args
        options = {"implementation": implementation}
        y = jaxkern.layer_norm_linear(x, scale, bias, w, **options)
        hidden = jaxkern.gated_linear_unit(y, w_gate, w_up, **options)
        return x + jaxkern.linear(hidden, w_down, **options)

    weights = d * d + 3 * d * h
    once = (4 * m * d + 2 * m * h + weights) * jnp.dtype(dtype).itemsize
    return Case(
        op="mlp",
        shape=f"{m}x{d}x{h}",
        dtype=dtype,
        arrays=arrays,
        call=call,
        bytes_forward=once,
        bytes_backward=2 * once,
        operations_forward=2 * m * weights,
        operations_backward=4 * m * weights,
    )


def _products(
    op: str,
    sizes: tuple[int, int, int],
    dtype: str,
    arrays: Callable[[Any], tuple[Any, ...]],
    call: Callable[..., Any],
    count: int,
    options: dict[str, Any],
) -> Case:
    m, k, n = sizes
    itemsize = jnp.dtype(dtype).itemsize
    once = (m * k + count * k * n + m * n) * itemsize
    words = [word if isinstance(word, str) else name for name, word in options.items() if word]
    return Case(
        op=op,
        shape="-".join([f"{m}x{k}x{n}", *words]),
        dtype=dtype,
        arrays=arrays,
        call=call,
        bytes_forward=once,
        bytes_backward=2 * once,
        operations_forward=2 * count * m * k * n,
        operations_backward=4 * count * m * k * n,
    )


def _gated(op: str, m: int, h: int, dtype: str, **options: Any) -> Case:
    """A gated unit of two arrays, or of one that holds both; `options` are gpt-oss's."""
    nbytes = m * h * jnp.dtype(dtype).itemsize
    shape = (m, 2 * h) if op.endswith("_and_mul") else (m, h)
    count = 1 if op.endswith("_and_mul") else 2

    def arrays(key: Any) -> tuple[Any, ...]:
        return tuple(jax.random.normal(k, shape, dtype) for k in jax.random.split(key, count))

    def call(*args):
        *arrays, implementation = args
        return getattr(jaxkern, op)(*arrays, **options, implementation=implementation)

    return Case(
        op=op,
        shape=f"{m}x{h}" + ("-clamped" if options else ""),
        dtype=dtype,
        arrays=arrays,
        call=call,
        bytes_forward=3 * nbytes,
        bytes_backward=5 * nbytes,
    )


def _pointwise(op: str, m: int, n: int, dtype: str, **options: Any) -> Case:
    nbytes = m * n * jnp.dtype(dtype).itemsize
    return Case(
        op=op,
        shape=f"{m}x{n}" + ("" if options.get("approximate", True) else "-erf"),
        dtype=dtype,
        arrays=lambda key: (jax.random.normal(key, (m, n), dtype),),
        call=lambda x, implementation: getattr(jaxkern, op)(
            x, implementation=implementation, **options
        ),
        bytes_forward=2 * nbytes,
        bytes_backward=3 * nbytes,
    )


def _dropout(m: int, n: int, dtype: str, *, add: bool = False, activation: Any = None) -> Case:
    nbytes = m * n * jnp.dtype(dtype).itemsize

    def call(*args):
        *arrays, implementation = args
        where = {"rate": DROP_RATE, "key": jax.random.key(0), "implementation": implementation}
        if add:
            return jaxkern.dropout_add(*arrays, **where)
        return jaxkern.dropout(*arrays, activation=activation, **where)

    def arrays(key: Any) -> tuple[Any, ...]:
        return tuple(jax.random.normal(k, (m, n), dtype) for k in jax.random.split(key, 1 + add))

    return Case(
        op="dropout_add" if add else "dropout",
        shape=f"{m}x{n}" + (f"-{activation}" if activation else ""),
        dtype=dtype,
        arrays=arrays,
        call=call,
        drawn=True,
        bytes_forward=(2 + add) * nbytes,
        bytes_backward=(2 + bool(activation)) * nbytes,
    )


def cases(small: bool) -> Sequence[Case | Step]:
    """All cases; `small` ones for a machine without a GPU, where no kernel is timed."""
    if small:
        return [
            _norm("rms_norm", 256, 4096, "float32"),
            _norm("layer_norm", 256, 4096, "float32", "residual gate"),
            _selective_scan(2, 256, 256, 16, "float32"),
            _causal_conv1d(2, 256, 256, 4, "float32"),
            _linear_scan(2, 256, 256, "float32"),
            _linear(256, 256, 256, "float32", activation="gelu"),
            _gated_linear_unit(256, 256, 256, "float32"),
            _layer_norm_linear(256, 256, 256, "float32"),
            _accumulate_weight_grad(2, 256, 256, 256, "float32"),
            _mlp(256, 256, 512, "float32"),
            _gated("swiglu", 256, 1024, "float32"),
            _dropout(256, 1024, "float32"),
            *steps(small),
        ]
    elements = 1 << 27
    bf16 = "bfloat16"
    norms = [
        _norm(op, min(16384, elements // n), n, bf16)
        for op in ("rms_norm", "layer_norm")
        for n in (64, 256, 512, 768, 1024, 2048, 4096, 5120, 8192, 11008, *_powers(16384, 262144))
    ]
    for op in ("rms_norm", "layer_norm"):
        norms += [_norm(op, 16384, n, d) for n in (4096, 8192) for d in ("float32", "float16")]
        norms += [_norm(op, 4096, 1024, bf16), _norm(op, 16384, 1000, bf16)]
        norms += [_norm(op, 16384, 4096, bf16, extra) for extra in ("residual", "gate")]
        norms += [_norm(op, 16384, 4096, bf16, activation="silu")]
    norms += [_norm("rms_norm", 16384, 4096, bf16, "bias")]
    square, large, thin = (8, 2048, 2048), (4, 4096, 5120), (1, 16384, 2048)
    scans = [_selective_scan(*s, 16, bf16) for s in (square, large, thin, (2, 512, 512))]
    scans += [_selective_scan(*square, 16, dtype) for dtype in ("float32", "float16")]
    scans += [_selective_scan(*large, 16, bf16, every) for every in (64, 128)]
    scans += [_selective_scan(*square, n, bf16) for n in (64, 128)]
    scans += [_selective_scan(*s, 16, bf16) for s in ((1, 65536, 2048), (8, 36864, 8192))]
    scans += [_selective_scan(*square, 16, bf16, every) for every in (64, None, 1)]
    scans += [_selective_scan(*square, 16, bf16, packed=True)]
    convolutions = [_causal_conv1d(*s, 4, bf16) for s in (square, large, thin, (8, 2048, 4096))]
    convolutions += [_causal_conv1d(*square, w, bf16) for w in (2, 8)]
    convolutions += [_causal_conv1d(*square, 4, "float32")]
    convolutions += [_causal_conv1d(*square, 4, bf16, packed=True)]
    linear = [
        _linear_scan(*shape, dtype)
        for shape in (square, large, (1, 65536, 1024))
        for dtype in (bf16, "float32")
    ]
    odd = ((1, 16384, 256), (64, 100, 128), (64, 2048, 64), (8, 2048, 1023))
    linear += [_linear_scan(*s, bf16) for s in odd]
    linear += [_linear_scan(*square, bf16, packed=True)]
    layers = [_linear(8192, 8192, 8192, bf16), _linear(8192, 4096, 4096, bf16)]
    layers += [_linear(16384, 4096, n, bf16) for n in (4096, 11008, 14336)]
    layers += [_linear(16384, 4096, 4096, bf16, activation=a) for a in ("relu", "silu", "gelu")]
    layers += [_linear(16384, 4096, 16, bf16), _linear(16384, 16, 4096, bf16)]
    layers += [_linear(8192, 4096, 4096, "float16")]
    layers += [_gated_linear_unit(8192, 4096, 14336, bf16, recompute=r) for r in (False, True)]
    layers += [_gated_linear_unit(8192, 4096, 14336, bf16, joined=True)]
    layers += [_layer_norm_linear(16384, 4096, 4096, bf16)]
    layers += [_accumulate_weight_grad(4, m, 4096, 4096, bf16) for m in (512, 2048)]
    layers += [_mlp(16384, 4096, 11008, bf16)]
    widths = (4096, 11008, 14336, 13000)
    gated = [_gated(op, 16384, h, bf16) for h in widths for op in ("swiglu", "silu_and_mul")]
    gated += [_gated(op, 16384, 4096, bf16) for op in ("geglu", "reglu", "glu", "gelu_and_mul")]
    gated += [_gated("swiglu", 16384, 4096, bf16, alpha=1.702, limit=7.0, up_offset=1.0)]
    gated += [_gated("swiglu", 16384, 4096, dtype) for dtype in ("float32", "float16")]
    gated += [_gated("swiglu", 16383, 4097, bf16), _gated("silu_and_mul", 16384, 4097, bf16)]
    curves = ("relu", "relu_squared", "silu", "gelu")
    pointwise = [_pointwise(op, 16384, 8192, bf16) for op in curves]
    pointwise += [_pointwise("gelu", 16384, 8192, bf16, approximate=False)]
    dropped = [_dropout(16384, n, bf16) for n in (*widths, 8192)] + [_dropout(16383, 4097, bf16)]
    dropped += [_dropout(16384, 8192, bf16, activation="silu")]
    dropped += [_dropout(16384, 8192, bf16, add=True), _dropout(16384, 8192, "float32")]
    found = {
        (case.op, case.shape, case.dtype): case
        for case in (
            *norms,
            *scans,
            *convolutions,
            *linear,
            *layers,
            *gated,
            *pointwise,
            *dropped,
        )
    }
    for name, of_model in MODELS.items():
        for case in of_model():
            key = (case.op, case.shape, case.dtype)
            case = found.get(key, case)
            found[key] = dataclasses.replace(case, models=(*case.models, name))
    return [*found.values(), *steps(small)]


def _mamba(width: int, batch: int = 8, length: int = 2048) -> list[Case]:
    """The ops of a Mamba of this width, whose blocks are twice as wide inside."""
    inside = (batch, length, 2 * width)
    return [
        _norm("rms_norm", batch * length, width, "bfloat16"),
        _norm("rms_norm", batch * length, width, "bfloat16", "residual"),
        _causal_conv1d(*inside, 4, "bfloat16"),
        _selective_scan(*inside, 16, "bfloat16"),
    ]


def _llama(width: int, hidden: int) -> list[Case]:
    """The ops of a Llama's layer with a gated unit of `hidden` channels."""
    return [
        _norm("rms_norm", 16384, width, "bfloat16"),
        _norm("rms_norm", 16384, width, "bfloat16", "residual"),
        _linear(16384, width, width, "bfloat16"),
        _gated_linear_unit(8192, width, hidden, "bfloat16"),
        _gated("swiglu", 16384, hidden, "bfloat16"),
    ]


def _gpt2() -> list[Case]:
    """The ops of a layer of the small GPT-2."""
    return [
        _norm("layer_norm", 16384, 768, "bfloat16"),
        _layer_norm_linear(16384, 768, 2304, "bfloat16"),
        _linear(16384, 768, 3072, "bfloat16", activation="gelu"),
        _dropout(16384, 768, "bfloat16", add=True),
    ]


MODELS: dict[str, Callable[[], list[Case]]] = {
    "gpt2": _gpt2,
    "llama-2-7b": lambda: _llama(4096, 11008),
    "llama-3-8b": lambda: _llama(4096, 14336),
    "mamba-130m": lambda: _mamba(768),
    "mamba-370m": lambda: _mamba(1024),
    "mamba-1.4b": lambda: _mamba(2048),
    "mamba-2.8b": lambda: _mamba(2560, 4, 4096),
}
"""Models whose ops are timed, at 16384 tokens a step but where it says otherwise.

Their widths are those of GPT-2 (124 million parameters), Llama (https://arxiv.org/abs/2307.09288,
https://arxiv.org/abs/2407.21783) and Mamba (https://arxiv.org/abs/2312.00752).
"""


def _powers(first: int, last: int) -> list[int]:
    """`first` and its doubles up to `last`."""
    return [first << i for i in range((last // first).bit_length())]


def bytes_of(arrays: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arrays))
