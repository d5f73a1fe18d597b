"""What the tests of layers share: each library's own and ours, made and run in the same way."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxkern.nn.equinox as jk_equinox
import jaxkern.nn.flax as jk_nnx
import jaxkern.nn.linen as jk_linen
from jaxkern.nn import mamba

K = 40  # features
BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32


def jit(f):
    """Unoptimised code of the same program is made much sooner."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(lambda *args, **kwargs: f(*args, **kwargs), compiler_options=options)


def normal(*shape, seed=0, dtype=FP32, scale=1.0):
    values = scale * (np.random.default_rng(seed).normal(size=shape) + 0.3)
    return jnp.asarray(values.astype(dtype))


def moved(tree, seed=1):
    """Parameters away from ones and zeros."""
    leaves, treedef = jax.tree.flatten(tree)
    noise = [normal(*leaf.shape, seed=seed + i, dtype=leaf.dtype) for i, leaf in enumerate(leaves)]
    sums = [jnp.asarray(np.asarray(a) + np.asarray(b)) for a, b in zip(leaves, noise, strict=True)]
    return jax.tree.unflatten(treedef, sums)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# Each library's own module of layers and ours; how one is made from a name and its options, and
# run: (layer, its initial parameters, (parameters, x) -> result).


def of_nnx(module, name, **options):
    size = (K, 24) if name == "Linear" else (K,)
    layer = getattr(module, name)(*size, **options, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    return nnx.to_pure_dict(params), lambda params, x: nnx.merge(graphdef, params)(x)


def of_linen(module, name, **options):
    name, size = ("Dense", (24,)) if name == "Linear" else (name, ())
    layer = getattr(module, name)(*size, **options)
    # A module computes where its parameters are made, too, which "mosaic" does on a GPU alone.
    made = layer.clone(implementation="xla") if "implementation" in options else layer
    return made.init(jax.random.key(0), jnp.ones((1, K))), layer.apply


def of_equinox(module, name, **options):
    options.pop("param_dtype", None)
    size = (K,)
    if name == "Linear":
        size, options["key"] = (K, 24), jax.random.key(0)
    layer = getattr(module, name)(*size, **options)
    params, rest = eqx.partition(layer, eqx.is_array)

    def run(params, x):
        layer = eqx.combine(jax.tree.unflatten(jax.tree.structure(params_of), params), rest)
        return jax.vmap(jax.vmap(layer))(x)

    params_of = params
    return jax.tree.leaves(params), run


LIBRARIES = {
    "nnx": (of_nnx, nnx, jk_nnx),
    "linen": (of_linen, linen, jk_linen),
    "equinox": (of_equinox, eqx.nn, jk_equinox),
}


def pair(library, name, **options):
    make, theirs, ours = LIBRARIES[library]
    return make(theirs, name, **options), make(ours, name, **options)


LIBRARY = pytest.mark.parametrize("library", LIBRARIES)


def in_every_library(name, *size, weights, **options):
    """The layer in each library as a function of x, from one dict of weights by nnx's names."""
    make = functools.partial(getattr(jk_nnx, name), *size, **options)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    layer = nnx.merge(graphdef, weights)
    sizes = size[1:] if name == "SwiGLU" else size
    module = getattr(jk_linen, name)(*sizes, **options)
    if name == "SwiGLU":
        make = functools.partial(jk_equinox.SwiGLU, *size)
        ours = [weights[part]["kernel"].T for part in ("gate_proj", "up_proj", "down_proj")]
    else:
        options.pop("dtype", None)
        make = functools.partial(jk_equinox.Mamba, *size, **options)
        ours = [weights[part] for part in mamba.Weights._fields if part in weights]
    ours = jax.tree.unflatten(
        jax.tree.structure(eqx.filter_eval_shape(make, key=jax.random.key(0))), ours
    )
    return {
        "nnx": layer,
        "linen": functools.partial(module.apply, {"params": weights}),
        "equinox": ours,
    }


def mamba_token(w, carry, row, xp=jnp):
    """The block on one token (D,), as the paper writes it: the next carry, and the output."""
    window, state = carry
    rank, n = w.dt_proj.shape[0], w.A_log.shape[1]
    u, z = xp.split(row @ w.in_proj + (0 if w.in_bias is None else w.in_bias), 2)
    window = xp.column_stack([window[:, 1:], u])
    u = (window * w.conv_weight).sum(1) + (0 if w.conv_bias is None else w.conv_bias)
    u = u / (1 + xp.exp(-u))
    low, B, C = xp.split(u @ w.x_proj, [rank, rank + n])
    dt = xp.logaddexp(0, low @ w.dt_proj + w.dt_bias)[:, None]
    state = xp.exp(-dt * xp.exp(w.A_log)) * state + dt * u[:, None] * B
    out = (state @ C + w.D * u) * z / (1 + xp.exp(-z)) @ w.out_proj
    return (window, state), out + (0 if w.out_bias is None else w.out_bias)


def mamba_float64(w, x):
    """The block on one sequence (L, D) in NumPy."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), w)
    carry, outs = (np.zeros(w.conv_weight.shape), np.zeros(w.A_log.shape)), []
    for row in np.asarray(x, np.float64):
        carry, out = mamba_token(w, carry, row, np)
        outs.append(out)
    return np.stack(outs)


def rms_float64(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
