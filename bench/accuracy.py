"""Errors in ulp against float64: ``python -m bench.accuracy`` writes JSON and a table.

Each op runs on random arguments in each dtype, forward and backward: by the kernels, by this
library's plain JAX (``implementation="xla"``), and as the plain expression that a user would write,
computed in that dtype (with XLA free, as it is by default, to keep more precision inside a fusion).
The truth is the same expression of the same arguments in float64.

An ulp is the distance between neighbouring numbers of the result's dtype at the true value; values
below the root mean square of the true array count in ulps of that, so that a value near zero, a
rest of terms that cancel, tells no more than the others. A correctly rounded result has errors of
at most 0.5. On a CPU there are no kernels; ``--interpret`` runs them in Pallas's interpreter.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from bench.report import FOLDER, NAMES, OURS, RESULTS, table
from bench.run import machine
from jaxkern.core.dispatch import interpret_kernels

DTYPES = ("float32", "bfloat16", "float16")
EXPRESSION = "expression"
IMPLEMENTATIONS = (OURS, "xla", EXPRESSION)
ACCURACY = FOLDER / "accuracy.md"

_RATE = 0.125  # a multiple of 2⁻¹⁶: exactly what is kept is scaled by
_KEY = 11

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """An op whose errors are measured.

    Attributes:
      op: its public name, and what is special of the call.
      names: of its arguments.
      arrays: draws them in fp32, from a key.
      call: ``call(*arrays, implementation)``.
      expression: the same as a user would write it, in the dtypes of the arguments.
      wide: names of arguments that stay in fp32 whatever the dtype.
      bound: of another library's test, relative and absolute: the share of errors beyond their
        sum is told of the result, and nothing of gradients.
    """

    op: str
    names: tuple[str, ...]
    arrays: Callable[[Any], Arrays]
    call: Callable[..., Any]
    expression: Callable[..., Any]
    wide: tuple[str, ...] = ()
    bound: tuple[float, float] | None = None

    def cast(self, key: Any, dtype: str) -> Arrays:
        """The arguments in `dtype`."""
        arrays = zip(self.names, self.arrays(key), strict=True)
        return tuple(a if name in self.wide else a.astype(dtype) for name, a in arrays)


def _normal(*shapes: tuple[int, ...]) -> Callable[[Any], Arrays]:
    def draw(key: Any) -> Arrays:
        keys = jax.random.split(key, len(shapes))
        return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))

    return draw


def _op(name: str, **options: Any) -> Callable[..., Any]:
    f = getattr(jaxkern, name)
    return lambda *a: f(*a[:-1], **options, implementation=a[-1])


def _rms_norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


# As gpt-oss's, of smaller numbers.
_CLAMPED: dict[str, Any] = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}


def _clamped(gate: Any, up: Any) -> Any:
    limit = jnp.asarray(1.5, gate.dtype)
    near = jnp.where(gate > limit, limit, gate)  # whose slope at the limit is 1, as PyTorch's
    up = jnp.where(jnp.abs(up) > limit, jnp.sign(up) * limit, up)
    return near * jax.nn.sigmoid(1.702 * near) * (up + 1)


def _layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight + bias


def _linear_arrays(m: int, k: int, n: int) -> Callable[[Any], Arrays]:
    """x, what a norm has, and two weights."""

    def arrays(key: Any) -> Arrays:
        x, scale, bias, w, v = _normal((m, k), (k,), (k,), (k, n), (k, n))(key)
        return x, 1 + 0.1 * scale, 0.1 * bias, w / k**0.5, v / k**0.5

    return arrays


def _causal_conv1d(x: Any, weight: Any, bias: Any) -> Any:
    width = weight.shape[1]
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    length = x.shape[1]
    y = sum(padded[:, i : i + length] * weight[:, i] for i in range(width)) + bias
    return jax.nn.silu(y)


def _linear_scan(a: Any, b: Any) -> Any:
    def step(h: Any, now: Any) -> Any:
        h = now[0] * h + now[1]
        return h, h

    along = lambda v: jnp.moveaxis(v, 1, 0)
    _, h = jax.lax.scan(step, jnp.zeros_like(b[:, 0]), (along(a), along(b)))
    return jnp.moveaxis(h, 0, 1)


def _selective_scan(x, dt, A, B, C, D, z, dt_bias):
    dt = jax.nn.softplus(dt + dt_bias.astype(dt.dtype))
    decay = jnp.exp(dt[..., None] * A.astype(dt.dtype))
    b, l, d, n = decay.shape
    added = (dt * x)[..., None] * B[:, :, None]
    h = _linear_scan(decay.reshape(b, l, d * n), added.reshape(b, l, d * n)).reshape(decay.shape)
    y = jnp.sum(h * C[:, :, None], -1) + D.astype(x.dtype) * x
    return y * jax.nn.silu(z)


def _scan_arrays(b: int, l: int, d: int, n: int) -> Callable[[Any], Arrays]:
    draw = _normal((b, l, d), (b, l, d), (b, l, n), (b, l, n), (b, l, d))

    def arrays(key: Any) -> Arrays:
        x, dt, B, C, z = draw(key)
        A = -jnp.broadcast_to(jnp.arange(1.0, n + 1), (d, n))
        return x, dt, A, B, C, jnp.ones(d), z, jnp.linspace(-6.0, -2.0, d)

    return arrays


@functools.cache
def subjects(small: bool) -> Sequence[Subject]:
    """All ops; `small` for a machine without a GPU."""
    m, n = (16, 256) if small else (512, 4096)
    b, l, d = (2, 32, 128) if small else (4, 512, 1024)
    one, two = _normal((m, n)), _normal((m, n), (m, n))
    gelu, erf = jax.nn.gelu, functools.partial(jax.nn.gelu, approximate=False)

    def normed(key: Any) -> Arrays:
        x, weight, bias = _normal((m, n), (n,), (n,))(key)
        return x, 1 + 0.1 * weight, 0.1 * bias

    def recurrent(key: Any) -> Arrays:
        a, x = _normal((b, l, d), (b, l, d))(key)
        return jax.nn.sigmoid(a + 2), x

    def convolved(key: Any) -> Arrays:
        x, weight, bias = _normal((b, l, d), (d, 4), (d,))(key)
        return x, 0.5 * weight, 0.1 * bias

    def gated(name: str, f: Callable[..., Any]) -> Subject:
        return Subject(name, ("gate", "up"), two, _op(name), lambda gate, up: f(gate) * up)

    def halved(name: str, f: Callable[..., Any]) -> Subject:
        halves = lambda x: f(x[:, : n // 2]) * x[:, n // 2 :]
        return Subject(name, ("x",), one, _op(name), halves)

    def dropped(name: str, names: tuple[str, ...], expression: Callable[..., Any]) -> Subject:
        f = getattr(jaxkern, name)
        call = lambda *a: f(*a[:-1], rate=_RATE, key=jax.random.key(_KEY), implementation=a[-1])
        return Subject(name, names, two if len(names) > 1 else one, call, expression)

    # What dropout keeps depends on key and shape alone.
    kept = jaxkern.dropout(jnp.ones((m, n)), _RATE, jax.random.key(_KEY), implementation="xla") != 0
    chosen = np.asarray(kept)
    drop = lambda x: jnp.where(chosen, x / (1 - _RATE), 0)
    x, gate = ("x",), ("x", "weight", "gate")
    products = _linear_arrays(m, 128 if small else 1024, 256 if small else 1024)
    pick = lambda *which: lambda key: tuple(products(key)[i] for i in which)
    scan = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    rms = lambda key: normed(key)[:2]
    with_gate = lambda x, w, gate, how: jaxkern.rms_norm(x, w, gate=gate, implementation=how)
    return [
        Subject("rms_norm", ("x", "weight"), rms, _op("rms_norm"), _rms_norm),
        Subject(
            "rms_norm, gate",
            gate,
            lambda key: (*rms(key), *one(jax.random.fold_in(key, 1))),
            with_gate,
            lambda x, w, gate: _rms_norm(x, w) * jax.nn.silu(gate),
        ),
        Subject(
            "rms_norm, bias",
            ("x", "weight", "bias"),
            normed,
            _op("rms_norm"),
            lambda x, weight, bias: _rms_norm(x, weight) + bias,
        ),
        Subject("layer_norm", ("x", "weight", "bias"), normed, _op("layer_norm"), _layer_norm),
        Subject("linear", ("x", "weight"), pick(0, 3), _op("linear"), jnp.matmul),
        Subject(
            "gated_linear_unit",
            ("x", "w_gate", "w_up"),
            pick(0, 3, 4),
            _op("gated_linear_unit"),
            lambda x, w_gate, w_up: jax.nn.silu(x @ w_gate) * (x @ w_up),
        ),
        Subject(
            "gated_linear_unit, one weight",
            ("x", "w", "b"),
            lambda key: (*pick(0, 3)(key), pick(4)(key)[0][0]),
            lambda x, w, b, how: jaxkern.gated_linear_unit(
                x, w, None, b, **_CLAMPED, implementation=how
            ),
            lambda x, w, b: _clamped(*jnp.split(x @ w + b, 2, -1)),
        ),
        Subject(
            "rms_norm_linear",
            ("x", "weight", "w"),
            pick(0, 1, 3),
            _op("rms_norm_linear"),
            lambda x, weight, w: _rms_norm(x, weight) @ w,
        ),
        Subject(
            "layer_norm_linear",
            ("x", "weight", "bias", "w"),
            pick(0, 1, 2, 3),
            _op("layer_norm_linear"),
            lambda x, weight, bias, w: _layer_norm(x, weight, bias) @ w,
        ),
        Subject(
            "accumulate_weight_grad",
            ("accumulator", "x", "dout"),
            _normal((128, 256), (m, 128), (m, 256)),
            _op("accumulate_weight_grad"),
            lambda total, x, dout: total + (x.T @ dout).astype(total.dtype),
            wide=("accumulator",),
        ),
        *(
            Subject(
                f"accumulate_weight_grad, {m}x{k}x{n}",
                ("accumulator", "x", "dout"),
                _normal((m, n), (k, m), (k, n)),  # as quack draws them
                _op("accumulate_weight_grad"),
                lambda total, x, dout: (
                    total + jnp.matmul(x.T, dout, preferred_element_type=total.dtype)
                ),
                wide=("accumulator",),
                bound=(1e-5, 1e-4),
            )
            for m, k, n in (() if small else ((1920, 1024, 1504), (1920, 736, 2048)))
        ),
        Subject("relu", x, one, _op("relu"), jax.nn.relu),
        Subject("relu_squared", x, one, _op("relu_squared"), lambda x: jax.nn.relu(x) ** 2),
        Subject("silu", x, one, _op("silu"), jax.nn.silu),
        Subject("gelu", x, one, _op("gelu"), gelu),
        Subject("gelu, erf", x, one, _op("gelu", approximate=False), erf),
        Subject("quick_gelu", x, one, _op("quick_gelu"), lambda x: x * jax.nn.sigmoid(1.702 * x)),
        Subject("sigmoid", x, one, _op("sigmoid"), jax.nn.sigmoid),
        Subject("tanh", x, one, _op("tanh"), jnp.tanh),
        gated("swiglu", jax.nn.silu),
        gated("geglu", gelu),
        gated("reglu", jax.nn.relu),
        gated("glu", jax.nn.sigmoid),
        Subject("swiglu, clamped", ("gate", "up"), two, _op("swiglu", **_CLAMPED), _clamped),
        halved("silu_and_mul", jax.nn.silu),
        halved("gelu_and_mul", gelu),
        dropped("dropout", x, drop),
        dropped("dropout_add", ("x", "residual"), lambda x, r: r + drop(x)),
        Subject(
            "causal_conv1d",
            ("x", "weight", "bias"),
            convolved,
            _op("causal_conv1d", activation="silu"),
            _causal_conv1d,
        ),
        Subject("linear_scan", ("a", "b"), recurrent, _op("linear_scan"), _linear_scan),
        Subject(
            "selective_scan",
            scan,
            _scan_arrays(2, 16 if small else 512, 128 if small else 256, 16),
            lambda x, dt, A, B, C, D, z, dt_bias, how: jaxkern.selective_scan(
                x, dt, A, B, C, D, z, dt_bias=dt_bias, dt_softplus=True, implementation=how
            ),
            _selective_scan,
            wide=("A", "D", "dt_bias"),
        ),
    ]


def ulps(got: Any, want: np.ndarray) -> np.ndarray:
    """Errors of `got` in ulps of its dtype, as the module's docstring defines them."""
    kind = jnp.finfo(got.dtype)
    size = np.maximum(np.abs(want), np.sqrt(np.mean(want * want)))
    _, exponent = np.frexp(np.maximum(size, float(kind.tiny)))  # size in [½, 1) · 2^exponent
    errors = np.abs(np.asarray(got).astype(np.float64) - want)
    return np.where(np.isfinite(errors), errors, np.inf) * 2.0 ** (kind.nmant + 1 - exponent)


def _beyond(got: Any, want: np.ndarray, bound: tuple[float, float]) -> float:
    relative, absolute = bound
    errors = np.abs(np.asarray(got).astype(np.float64) - want)
    return float(np.mean(~(errors <= relative * np.abs(want) + absolute)))


@functools.cache
def _both(f: Callable[..., Any]) -> Callable[..., Any]:
    """Result and gradients."""

    def run(arrays: Arrays, dout: Any) -> Any:
        out, vjp = jax.vjp(f, *arrays)
        return out, *vjp(dout)

    return jax.jit(run)


def truth(subject: Subject, arrays: Arrays, dout: Any) -> list[np.ndarray]:
    """Result and gradients in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = lambda a: jnp.asarray(np.asarray(a).astype(np.float64))
        results = _both(subject.expression)(tuple(wide(a) for a in arrays), wide(dout))
        return [np.asarray(r) for r in results]


def measure(
    op: str, dtype: str, names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """A row for the result and each gradient of `op` by each implementation.

    Besides, who refused to compute it, and who failed, a line each with the reason.
    """
    small = jax.default_backend() != "gpu"
    (subject,) = (s for s in subjects(small) if s.op == op)
    key = jax.random.key(3)
    arrays = subject.cast(key, dtype)
    shape = jax.eval_shape(subject.expression, *arrays)
    dout = jax.random.normal(jax.random.fold_in(key, 2), shape.shape).astype(arrays[0].dtype)
    want = truth(subject, arrays, dout)
    rows, refused, failed = [], [], []
    for name in names:
        by_us = lambda *a, name=name: subject.call(*a, name)
        try:
            got = _both(subject.expression if name == EXPRESSION else by_us)(arrays, dout)
        except (RuntimeError, NotImplementedError) as e:  # the others go on
            lines = refused if isinstance(e, NotImplementedError) else failed
            lines.append(f"{op} {dtype}, {NAMES.get(name, name)}: {[*str(e).splitlines(), ''][0]}")
            continue
        labels = ["out", *(f"d{argument}" for argument in subject.names)]
        results = [*zip(labels, got, want, strict=True)]
        for label, g, w in results[:1] if subject.bound else results:
            errors = ulps(g, w)
            rows.append(
                {
                    "op": subject.op,
                    "dtype": dtype,
                    "array": label,
                    "of": str(g.dtype),
                    "implementation": name,
                    "max_ulp": float(f"{errors.max():.4g}"),
                    "mean_ulp": float(f"{errors.mean():.4g}"),
                }
            )
            if subject.bound:
                rows[-1]["beyond"] = float(f"{_beyond(g, w, subject.bound):.4g}")
    return rows, refused, failed


def _told(op: str, dtype: str, names: Sequence[str]) -> Any:
    """:func:`measure`, and a line when it is done."""
    found = measure(op, dtype, names)
    print(f"{op}, {dtype}: measured", file=sys.stderr, flush=True)
    return found


def text(report: dict[str, Any]) -> str:
    """The ledger as a document."""
    by: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in report["rows"]:
        by.setdefault((row["op"], row["array"], row["dtype"]), {})[row["implementation"]] = row
    present = [n for n in IMPLEMENTATIONS if any(n in found for found in by.values())]
    cells = []
    for place, found in by.items():
        mark = " ▼" if _worse(found) else ""
        cells.append([*place, *(_cell(found[n]) if n in found else "" for n in present)])
        cells[-1][3] += mark
    told = ", ".join(f"{key} {report[key]}" for key in ("device", "jax", "commit", "date"))
    head = ["op", "array", "dtype", *(NAMES.get(name, name) for name in present)]
    parts = [
        "# Errors in ulp against float64",
        "Generated by `python -m bench.accuracy`; do not edit.",
        f"{told}; {report['clock']}.",
        "Largest error (mean error), in ulps of the array's dtype; values below the array's root "
        "mean square count in ulps of that. *plain JAX* is this library's, *expression* what a "
        "user would write, in the dtype of the arguments. ▼ marks a mean error of the first "
        "column over twice that of the expression. A share in percent is that of errors beyond "
        "1e-5 of the value plus 1e-4, the bound of quack's tests for PyTorch of its in-place "
        "product: fp32 sums that tensor cores, ours and cuBLAS's, do not add as fp32 would.",
        table(head, cells),
        *(f"Not computed: {line}" for line in report["refused"]),
        *(f"Failed: {line}" for line in report["failed"]),
    ]
    return "\n\n".join(parts) + "\n"


def _worse(found: dict[str, Any]) -> bool:
    ours = next(found[n] for n in IMPLEMENTATIONS if n in found)
    return EXPRESSION in found and ours["mean_ulp"] > 2 * found[EXPRESSION]["mean_ulp"]


def _cell(row: dict[str, Any]) -> str:
    beyond = f", {row['beyond']:.2%}" if "beyond" in row else ""
    return f"{row['max_ulp']:.3g} ({row['mean_ulp']:.2g}){beyond}"


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m bench.accuracy",
        description="Measure errors against float64.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--op", action="append", help="only this op; repeat for more")
    p.add_argument("--dtype", default=",".join(DTYPES), help="comma-separated")
    p.add_argument("--interpret", action="store_true", help="run the kernels without a GPU, slowly")
    p.add_argument("--jobs", type=int, default=1, help="processes")
    p.add_argument("--commit", default="", help="what to call this tree, where git cannot tell")
    p.add_argument("--out", type=Path, help="JSON file (bench/results/<device>-accuracy.json)")
    p.add_argument("--table", type=Path, default=ACCURACY, help="the document")
    args = p.parse_args(argv)
    if args.jobs > 1:  # before JAX takes hold of the device: they share its memory
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    gpu = jax.default_backend() == "gpu"
    known = [s.op for s in subjects(small=not gpu)]
    chosen = [op for op in known if not args.op or op in args.op]
    if not chosen:
        print(f"bench.accuracy: error: no such op; there are: {'; '.join(known)}", file=sys.stderr)
        return 2
    names = IMPLEMENTATIONS if gpu or args.interpret else IMPLEMENTATIONS[1:]
    clock = "KERNELS IN THE INTERPRETER ON A CPU" if args.interpret else "PLAIN JAX ON A CPU"
    # The last ops take longest to compile, and begin.
    tasks = [(op, dtype, names) for op in chosen[::-1] for dtype in args.dtype.split(",")]
    interpret = args.interpret and not gpu
    if interpret or args.jobs == 1:
        with interpret_kernels() if interpret else contextlib.nullcontext():
            found = [_told(*task) for task in tasks]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, context) as pool:
            found = list(pool.map(_told, *zip(*tasks, strict=True)))
    place = lambda row: (known.index(row["op"]), DTYPES.index(row["dtype"]))
    rows = sorted((row for of_task, _, _ in found for row in of_task), key=place)
    refused = [line for _, of_task, _ in found for line in of_task]
    failed = [line for _, _, of_task in found for line in of_task]
    where = machine(args.commit)
    about = {"clock": "compiled kernels" if gpu else clock, "refused": refused, "failed": failed}
    report = {**where, **about, "rows": rows}
    device = str(where["device"]).lower().replace(" ", "-")
    out = args.out or RESULTS / f"{device}-accuracy.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    args.table.write_text(text(report))
    print(args.table.read_text())
    print(f"wrote {out} and {args.table}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
