"""One token of the scans by the kernel that updates the state in place, and states of layers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops import scan_step
from tests import check

SSD, SELECTIVE = jaxkern.ssd_step, jaxkern.selective_scan_step
NAMES = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")


def ssd_inputs(batch, heads, size, states, groups=1, dtype="float32", layers=None, of_channels=0):
    """The arguments of ssd_step by their names; D (H,), or (H, P) `of_channels`."""
    tokens, of_heads = (batch, heads, size), (heads, size) if of_channels else (heads,)
    weights = (batch, groups, states)
    return _draw(
        (*tokens, states), tokens, (batch, heads), (heads,), weights, of_heads, dtype, layers
    )


def selective_inputs(batch, channels, states, groups=None, dtype="float32", layers=None):
    """The arguments of selective_scan_step by their names."""
    tokens, weights = (batch, channels), (batch, *([groups] if groups else []), states)
    rates = (channels, states)
    return _draw((*tokens, states), tokens, tokens, rates, weights, (channels,), dtype, layers)


def _draw(state, tokens, steps, rates, weights, skips, dtype, layers):
    rng = np.random.default_rng(0)
    draw = lambda shape, dtype="float32": jnp.asarray(
        rng.normal(size=shape).astype(jnp.dtype(dtype))
    )
    state = draw(state if layers is None else (layers, *state))
    x, dt, B, C, z = (draw(shape, dtype) for shape in (tokens, steps, weights, weights, tokens))
    A = jnp.asarray(-np.exp(rng.normal(size=rates)), "float32")
    return dict(zip(NAMES, (state, x, dt, A, B, C, draw(skips), z, draw(steps[1:])), strict=True))


def oracle(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, low=0.0, high=np.inf):
    """A step in float64, x (b, h, p): dt (b, h, 1 or p), A (h, 1 or p, 1 or n), B, C (b, h, n)."""
    dt = np.logaddexp(0, dt if dt_bias is None else dt + dt_bias)
    dt = np.clip(dt, low, high)
    entering = (dt * x)[..., None] * B[:, :, None]
    state = np.exp(dt[..., None] * A) * state + entering
    out = np.sum(state * C[:, :, None], -1) + (0 if D is None else D * x)
    return out if z is None else out * z / (1 + np.exp(-z)), state


def of_heads(op, arrays):
    """The arrays of a call in float64 with axes for heads and channels, as `oracle` has them."""
    v = {name: np.asarray(a, np.float64) for name, a in arrays.items() if a is not None}
    if op is SELECTIVE:  # channels are heads of size 1
        for name in {"state", "x", "z"} & v.keys():
            v[name] = v[name][:, :, None]
        for name in {"D", "dt_bias", "A"} & v.keys():
            v[name] = v[name][:, None]
        v["dt"] = v["dt"][..., None]
        if v["B"].ndim == 2:
            v["B"], v["C"] = v["B"][:, None], v["C"][:, None]
    else:
        v["A"], v["dt"] = v["A"][:, None, None], v["dt"][..., None]
        for name in {"D", "dt_bias"} & v.keys():
            v[name] = v[name] if v[name].ndim == 2 else v[name][:, None]
    per = v["x"].shape[1] // v["B"].shape[1]
    v["B"], v["C"] = np.repeat(v["B"], per, 1), np.repeat(v["C"], per, 1)
    return v


def step(op, arrays, implementation, **options):
    with check.running(implementation):
        run = functools.partial(op, dt_softplus=True, implementation=implementation, **options)
        return jax.jit(lambda arrays: run(**arrays))(arrays)


SIZES = {
    "heads": (SSD, ssd_inputs, (2, 4, 16, 128, 2)),
    "channels of D": (SSD, functools.partial(ssd_inputs, of_channels=1), (3, 2, 64, 64)),
    "two accesses": (SSD, ssd_inputs, (1, 2, 8, 256)),
    "few states": (SSD, ssd_inputs, (2, 6, 32, 16, 3)),
    "channels": (SELECTIVE, selective_inputs, (2, 256, 16)),
    "groups": (SELECTIVE, selective_inputs, (3, 128, 16, 2)),
    "least states": (SELECTIVE, selective_inputs, (2, 128, 8)),
    "mamba2-130m": (SSD, ssd_inputs, (64, 24, 64, 128)),
    "most states": (SSD, ssd_inputs, (4, 3, 128, 512)),
    "130m": (SELECTIVE, selective_inputs, (64, 1536, 16)),
}
LARGE = ("mamba2-130m", "most states", "130m")
"""What takes the interpreter too long."""

COMPILED, EXHAUSTIVE = pytest.mark.compiled, [pytest.mark.exhaustive]
DTYPES, ABSENT = ("float32", "bfloat16", "float16"), ((), ("D",), ("z", "dt_bias"))


@pytest.mark.parametrize(
    ("size", "dtype", "absent"),
    [
        pytest.param(
            *(size, DTYPES[k], ABSENT[(i + k) % 3]),
            marks=[COMPILED if size in LARGE else pytest.mark.gpu, *EXHAUSTIVE[: k != i % 3]],
        )
        for i, size in enumerate(SIZES)
        for k in range(3)
    ],
)
def test_accuracy(size, dtype, absent, monkeypatch):
    """At most twice plain JAX's error."""
    op, make, sizes = SIZES[size]
    if size == "heads":  # several rows a lane
        monkeypatch.setattr(scan_step, "num_sms", lambda: 1)
    given = make(*sizes, dtype=dtype) | dict.fromkeys(absent)
    want = oracle(**of_heads(op, given), low=0.1, high=0.9)
    got, plain = (step(op, given, how, dt_limit=(0.1, 0.9)) for how in ("mosaic", "xla"))
    for results in got, plain:
        assert [v.dtype for v in results] == [jnp.dtype(dtype), jnp.float32]
    for mine, theirs, true in zip(got, plain, want, strict=True):
        error = lambda v, true=true: check.relative_error(np.asarray(v), true.reshape(v.shape))
        assert error(mine) <= 2 * max(error(theirs), 2**-23)


@check.BOTH
@pytest.mark.parametrize(
    ("op", "make"),
    [
        pytest.param(SSD, lambda: ssd_inputs(2, 4, 16, 32, layers=3), marks=pytest.mark.exhaustive),
        (SELECTIVE, lambda: selective_inputs(2, 128, 16, layers=3)),
    ],
    ids=["ssd", "selective_scan"],
)
def test_a_layer_is_updated_and_no_other(op, make, implementation):
    """As its state alone would be, in a loop over the layers too."""
    arrays = make()
    alone = arrays | {"state": arrays["state"][1]}
    want = step(op, alone, implementation)
    for layer in (1, np.int64(1)) if check.ON_GPU else (np.int64(1),):
        got, states = step(op, arrays, implementation, layer=layer)
        check.assert_close((got, states[1]), want, 1e-6)
        np.testing.assert_array_equal(states[::2], arrays["state"][::2])

    def loop(state, arrays):
        def body(state, layer):
            with check.running(implementation):
                options = {"dt_softplus": True, "layer": layer, "implementation": implementation}
                return op(**arrays | {"state": state}, **options)[::-1]

        return jax.lax.scan(body, state, jnp.arange(3))

    states, outs = jax.jit(loop)(arrays["state"], arrays)
    check.assert_close((outs[1], states[1]), want, 1e-6)


@check.BOTH
def test_a_layer_that_there_is_not(implementation):
    """A traced number counts as the nearest, and writes nowhere else."""
    arrays = ssd_inputs(1, 2, 16, 32, layers=2)

    @jax.jit
    def run(layer):
        with check.running(implementation):
            return SSD(**arrays, layer=layer, implementation=implementation)

    for number, nearest in ((-1, 0), (2, 1), (2**31 - 1, 1)):
        jax.tree.map(np.testing.assert_array_equal, run(number), run(nearest))


@pytest.mark.gpu
def test_nan_stays_in_its_head():
    arrays = ssd_inputs(2, 4, 16, 32)
    run = jax.jit(lambda arrays: step(SSD, arrays, "mosaic"))
    bad = arrays | {"x": arrays["x"].at[1, 2].set(jnp.nan)}
    for got, want in zip(run(bad), run(arrays), strict=True):
        assert jnp.isnan(got[1, 2]).all()
        whole = np.ones((2, 4), bool)
        whole[1, 2] = False
        np.testing.assert_array_equal(got[whole], want[whole])


of_all = functools.partial(jax.grad, argnums=tuple(range(len(NAMES))))
mapped = lambda f: lambda *v: jax.vmap(f)(*(jnp.stack([a, 0.5 * a, -a]) for a in v))
AROUND = {
    "grad": of_all,
    "vmap": mapped,
    "vmap(grad)": lambda f: mapped(of_all(f)),
    "checkpoint": lambda f: jax.checkpoint(of_all(f)),
}


IN_DEFAULT = ("grad", None), ("vmap(grad)", 2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("around", "layers"),
    [
        pytest.param(*of, marks=[] if of in IN_DEFAULT else pytest.mark.exhaustive)
        for of in itertools.product(AROUND, (None, 2))
    ],
)
def test_transformations(around, layers):
    """Gradients, of the output and the state, as plain JAX has them."""
    arrays = ssd_inputs(2, 2, 16, 32, layers=layers)
    layer = None if layers is None else 1

    def call(implementation, *values):
        with check.running(implementation):
            options = {"dt_softplus": True, "layer": layer, "implementation": implementation}
            out, state = SSD(*values[:-1], dt_bias=values[-1], **options)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

    got, want = (
        jax.jit(AROUND[around](functools.partial(call, how)))(*arrays.values())
        for how in ("mosaic", "xla")
    )
    check.assert_close(got, want, 1e-5)


def test_the_state_is_aliased():
    """Where the program is for a GPU the kernel writes the state to where it was."""
    arrays = ssd_inputs(2, 4, 64, 128, layers=3)
    run = lambda arrays: SSD(**arrays, layer=1, implementation="mosaic")
    text = jax.jit(run).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    assert call.count("output_operand_alias<") == 2  # the state, and x that becomes the output


def test_errors():
    arrays = ssd_inputs(2, 4, 16, 32, layers=3)
    run = functools.partial(SSD, **{k: v for k, v in arrays.items() if k != "state"})
    state = arrays["state"]
    with pytest.raises(ValueError, match=r"state must have shape \(2, 4, 16, 32\) = \(B, H, P, N"):
        run(state)
    with pytest.raises(ValueError, match=r"with layer, state must have shape \(layers, 2, 4, 16, "):
        run(state[0], layer=0)
    with pytest.raises(ValueError, match=r"layer must be from 0 to 2, as state has them; got 3"):
        run(state, layer=3)
    with pytest.raises(TypeError, match=r"layer must be a whole number or an integer.*got 1\.0"):
        run(state, layer=1.0)
    with pytest.raises(TypeError, match=r"layer must be a whole number or an integer"):
        run(state, layer=jnp.arange(2))
    kernel = functools.partial(SSD, implementation="mosaic")
    for sizes, reason in (
        ((2, 4, 16, 24), "it has 24 states, and the kernel takes a power of two from 8 to 512"),
        ((2, 4, 16, 4), "it has 4 states"),
        ((2, 4, 24, 16), "a head has 24 channels, and the kernel takes multiples of 32"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            kernel(**ssd_inputs(*sizes))
    with pytest.raises(NotImplementedError, match="a group has 100 channels"):
        SELECTIVE(**selective_inputs(2, 100, 16), implementation="mosaic")
    with pytest.raises(NotImplementedError, match="state is bfloat16, and the kernel updates"):
        kernel(**arrays | {"state": state[0].astype(jnp.bfloat16)})
