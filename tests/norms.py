"""The norms' oracle, plain JAX and cases, for the tests of both."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from tests import check
from tests.test_activations import ELEMENTWISE

OPS = {"rms_norm": jaxkern.rms_norm, "layer_norm": jaxkern.layer_norm}
PLAIN = {name: f for name, (_, f) in ELEMENTWISE.items()} | {"gelu": jax.nn.gelu}


def oracle(
    op,
    a,
    dout,
    dsum=None,
    *,
    eps=None,
    weight_offset=0.0,
    activation=None,
    gate_activation="silu",
    norm_before_gate=True,
    group_size=None,
):
    """Outputs, gradients by name and the norm of what dx is summed from, in float64."""
    centered = op == "layer_norm"
    eps = (1e-5 if centered else 1e-6) if eps is None else eps
    n = a["x"].shape[-1]
    size = group_size or n
    h = a["x"] + a.get("residual", 0)
    z = a.get("gate")
    scale = a.get("weight", np.ones(n)) + (weight_offset if "weight" in a else 0)
    bias = a.get("bias", np.zeros(n))
    opened, of_gate = (1.0, 0.0) if z is None else check.activated(gate_activation, z)
    groups = lambda array: array.reshape(*array.shape[:-1], n // size, size)
    whole = lambda array: array.reshape(h.shape)
    mean = lambda array: array.sum(-1, keepdims=True) / size
    v = groups(h if norm_before_gate else h * opened)
    r = v - (mean(v) if centered else 0)
    std = (mean(r**2) + eps) ** 0.5
    xhat = r / std
    inner, slope = check.activated(activation, xhat * groups(scale) + groups(bias))
    inner, dy = whole(inner), dout * (opened if norm_before_gate else 1.0) * whole(slope)
    out = inner * (opened if norm_before_gate else 1.0)
    g = groups(dy) * groups(scale)
    terms = whole(g / std)
    # d x̂_k / d v_j = (δ_kj − 1/n) / std − x̂_k x̂_j / (n std)
    dv = whole((g - xhat * mean(g * xhat) - (mean(g) if centered else 0)) / std)
    rows = tuple(range(h.ndim - 1))
    grads = {"weight": (dy * whole(xhat)).sum(rows), "bias": dy.sum(rows)}
    if z is not None:
        grads["gate"] = (dout * inner if norm_before_gate else dv * h) * of_gate
        dv, terms = (dv, terms) if norm_before_gate else (dv * opened, terms * opened)
    dv = dv if dsum is None else dv + dsum
    grads |= {"x": dv, "residual": dv}
    return (out, h), {k: grads[k] for k in a}, (terms**2).sum() ** 0.5


def plain(
    op,
    a,
    *,
    eps,
    weight_offset=0.0,
    activation=None,
    gate_activation="silu",
    norm_before_gate=True,
    group_size=0,
):
    """What a user would write, in the dtype of x."""
    x = a["x"]
    cast = lambda name: a[name].astype(x.dtype)
    h = x if "residual" not in a else x + cast("residual")
    v = h
    if "gate" in a and not norm_before_gate:
        v = v * PLAIN[gate_activation](cast("gate"))
    v = v.reshape(*x.shape[:-1], -1, group_size or x.shape[-1])
    if op == "layer_norm":
        v = v - jnp.mean(v, axis=-1, keepdims=True)
    square = jnp.mean(v * v, axis=-1, keepdims=True)
    y = (v / jnp.sqrt(square + jnp.asarray(eps, x.dtype))).reshape(x.shape)
    if "weight" in a:
        y = y * (a["weight"] + jnp.asarray(weight_offset, a["weight"].dtype)).astype(x.dtype)
    if "bias" in a:
        y = y + cast("bias")
    if activation:
        y = PLAIN[activation](y)
    if "gate" in a and norm_before_gate:
        y = y * PLAIN[gate_activation](cast("gate"))
    return (y, h) if "residual" in a else (y, None)


def inputs(op, shape, dtype, extra="", weight_dtype=None, offset=0.0, seed=0):
    """Arrays by name: x, weight, the bias of layer_norm, and those in `extra`."""
    extra = extra.split()
    names = ["x", "weight", *(["bias"] if op == "layer_norm" and "bias" not in extra else [])]
    names += extra
    arrays = {}
    for i, name in enumerate(names):
        # Drawn by NumPy: nothing to compile for every shape.
        rng = np.random.default_rng([seed, i])
        if name in ("weight", "bias"):
            array = (name == "weight") + 0.1 * rng.standard_normal(shape[-1:])
            arrays[name] = jnp.asarray(array, weight_dtype or dtype)
        else:
            array = rng.standard_normal(shape) + (offset if name == "x" else 0)
            arrays[name] = jnp.asarray(array, jnp.float32).astype(dtype)
    return arrays


def run(op, arrays, implementation, **options):
    """(out, sum or None) of the op."""
    out = OPS[op](**arrays, implementation=implementation, **options)
    return out if "residual" in arrays else (out, None)


def of_values(*arrays, op, names, **options):
    return run(op, dict(zip(names, arrays, strict=True)), **options)


def plain_of_values(*arrays, op, names, **options):
    return plain(op, dict(zip(names, arrays, strict=True)), **options)


def oracle_of_values(*arrays, op, names, **options):
    """In rows of one or two elements the terms of dx cancel."""
    count = len(names)
    given = dict(zip(names, arrays[:count], strict=True))
    outs, grads, terms = oracle(op, given, *arrays[count:], **options)
    outs = outs[: 1 + ("residual" in names)]
    of_terms = {i + len(outs): terms for i, n in enumerate(names) if n in ("x", "residual")}
    return outs, [grads[name] for name in names], of_terms


def check_case(op, arrays, implementation, *, eps=1e-5, **options):
    """Outputs and gradients at most twice as far from the truth as plain JAX's."""
    summed = [jnp.result_type(*(arrays[n] for n in ("x", "residual") if n in arrays))]
    dtypes = [arrays["x"].dtype, *(summed if "residual" in arrays else [])]
    check.check_accuracy(
        of_values,
        plain_of_values,
        functools.partial(check.in_float64, oracle_of_values),
        tuple(arrays.values()),
        implementation,
        dtypes=[str(dtype) for dtype in dtypes],
        op=op,
        names=tuple(arrays),
        eps=eps,
        **options,
    )


EACH = pytest.mark.parametrize("op", list(OPS))
DTYPES = ["bfloat16", "float16", "float32"]


def each_way(interpreted, compiled=()):
    """Cases for the kernels, of which the interpreter, slow as it is, takes some; all for XLA."""
    kernels = [(interpreted, pytest.mark.gpu), (compiled, pytest.mark.compiled)]
    cases = [pytest.param(c, "mosaic", marks=mark) for cs, mark in kernels for c in cs]
    cases += [pytest.param(c, "xla") for c in (*interpreted, *compiled)]
    return pytest.mark.parametrize(("case", "implementation"), cases)


def in_turn(i):
    """Every op and dtype on a GPU, elsewhere one after the other as `i` grows."""
    every = [(op, dtype) for dtype in DTYPES for op in OPS]
    return every if check.ON_GPU else [every[i % 6]]


def run_vjp(op, arrays, implementation, **options):
    """Outputs, and gradients by name for cotangents that are all different."""
    names = list(arrays)
    call = lambda *a: run(op, dict(zip(names, a, strict=True)), implementation, **options)
    rng = np.random.default_rng(3)
    with check.running(implementation):
        outs, vjp = jax.vjp(call, *arrays.values())
        draw = lambda o: jnp.asarray(rng.standard_normal(o.shape), jnp.float32).astype(o.dtype)
        grads = vjp(jax.tree.map(draw, outs))
    return outs, dict(zip(names, grads, strict=True))


@dataclasses.dataclass(frozen=True)
class Variant:
    extra: str = ""
    options: Any = ()


VARIANTS = {
    "residual": Variant("residual"),
    "silu": Variant(options={"activation": "silu"}),
    "gelu": Variant(options={"activation": "gelu"}),
    "relu": Variant(options={"activation": "relu"}),
    "gate after": Variant("gate"),
    "gate before": Variant("gate", {"norm_before_gate": False}),
    "groups": Variant(options={"group_size": 128}),
    "bias and offset": Variant("bias", {"weight_offset": 1.0}),
    "bias, sigmoid of a gate after": Variant("bias gate", {"gate_activation": "sigmoid"}),
    "tanh, erf of a gate before": Variant(
        "gate bias",
        {"activation": "tanh", "gate_activation": "gelu_erf", "norm_before_gate": False},
    ),
    "all, bias and offset": Variant(
        "bias residual gate",
        {
            "activation": "quick_gelu",
            "gate_activation": "tanh",
            "group_size": 384,
            "weight_offset": 1.0,
        },
    ),
    "all, gate after": Variant("residual gate", {"activation": "silu", "group_size": 384}),
    "all, gate before": Variant(
        "residual gate", {"activation": "gelu", "norm_before_gate": False, "group_size": 96}
    ),
}
