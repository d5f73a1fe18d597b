"""One token of the scans by the kernel that updates the state in place, and states of layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.ops import scan_step
from tests import check, selective_scan, ssd
from tests.pairs import combinations

SSD = ssd.STEP


def inputs(of, batch, *sizes, layers=None, dtype="float32", **options):
    """The arguments of a step by their names: those of a scan at its only token."""
    options |= {"dtype": dtype, "weight_dtype": "float32"}
    arrays = dict(zip(ssd.NAMES, of.inputs_and_state(batch, 1, *sizes, **options), strict=True))
    state = arrays.pop("initial_state")
    if layers is not None:
        state = jnp.stack([state / (1 + i) for i in range(layers)])
    tokens = {name: arrays[name][:, 0] for name in ssd.ALONG}
    return arrays | tokens | {"state": state}


def step(op, arrays, implementation, **options):
    with check.running(implementation):
        run = functools.partial(op, dt_softplus=True, implementation=implementation, **options)
        return jax.jit(lambda arrays: run(**arrays))(arrays)


SIZES = {
    "heads": (ssd, (2, 4, 16, 128), {"groups": 2}),
    "channels of D": (ssd, (3, 2, 64, 64), {"of_channels": True}),
    "two accesses": (ssd, (1, 2, 8, 256), {}),
    "few states": (ssd, (2, 6, 32, 16), {"groups": 3}),
    "channels": (selective_scan, (2, 256, 16), {}),
    "groups": (selective_scan, (3, 128, 16), {"groups": 2}),
    "least states": (selective_scan, (2, 128, 8), {}),
    "mamba2-130m": (ssd, (64, 24, 64, 128), {}),
    "most states": (ssd, (4, 3, 128, 512), {}),
    "130m": (selective_scan, (64, 1536, 16), {}),
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
    of, sizes, options = SIZES[size]
    if size == "heads":  # several rows a lane
        monkeypatch.setattr(scan_step, "num_sms", lambda: 1)
    given = inputs(of, *sizes, dtype=dtype, **options) | dict.fromkeys(absent)
    token = {name: None if given[name] is None else given[name][:, None] for name in ssd.ALONG}
    scanned = [(given | token).get(name, given["state"]) for name in ssd.NAMES]
    wide = jax.tree.map(lambda v: np.asarray(v, np.float64), scanned)
    want, _ = of.oracle(*wide, wide[0], None, dt_limit=(0.1, 0.9))
    got, plain = (step(of.STEP, given, how, dt_limit=(0.1, 0.9)) for how in ("mosaic", "xla"))
    for results in got, plain:
        assert [v.dtype for v in results] == [jnp.dtype(dtype), jnp.float32]
    for mine, theirs, true in zip(got, plain, want, strict=True):
        error = lambda v, true=true: check.relative_error(np.asarray(v), true.reshape(v.shape))
        assert error(mine) <= 2 * max(error(theirs), 2**-23)


@check.BOTH
@pytest.mark.parametrize(
    ("of", "size"),
    [
        pytest.param(ssd, (2, 4, 16, 32), marks=pytest.mark.exhaustive, id="ssd"),
        pytest.param(selective_scan, (2, 128, 16), id="selective_scan"),
    ],
)
def test_a_layer_is_updated_and_no_other(of, size, implementation):
    """As its state alone would be, in a loop over the layers too."""
    op, arrays = of.STEP, inputs(of, *size, layers=3)
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
    arrays = inputs(ssd, 1, 2, 16, 32, layers=2)

    @jax.jit
    def run(layer):
        with check.running(implementation):
            return SSD(**arrays, layer=layer, implementation=implementation)

    for number, nearest in ((-1, 0), (2, 1), (2**31 - 1, 1)):
        jax.tree.map(np.testing.assert_array_equal, run(number), run(nearest))


@pytest.mark.gpu
def test_nan_stays_in_its_head():
    arrays = inputs(ssd, 2, 4, 16, 32)
    run = jax.jit(lambda arrays: step(SSD, arrays, "mosaic"))
    bad = arrays | {"x": arrays["x"].at[1, 2].set(jnp.nan)}
    for got, want in zip(run(bad), run(arrays), strict=True):
        assert jnp.isnan(got[1, 2]).all()
        ssd.check_others({"final": got}, {"final": want})


of_all = functools.partial(jax.grad, argnums=tuple(range(len(ssd.NAMES))))
mapped = lambda f: lambda *v: jax.vmap(f)(*(jnp.stack([a, 0.5 * a, 0.9 * a]) for a in v))
AROUND = {
    "grad": of_all,
    "vmap(grad)": lambda f: mapped(of_all(f)),
    "vmap": mapped,
    "checkpoint": lambda f: jax.checkpoint(of_all(f)),
}


@pytest.mark.gpu
@combinations("around layers", AROUND, [None, 2], few=2)
def test_transformations(around, layers):
    """Gradients, of the output and the state, as plain JAX has them."""
    arrays = inputs(ssd, 2, 2, 16, 32, layers=layers)
    layer = None if layers is None else 1

    def call(implementation, *values):
        with check.running(implementation):
            options = {"dt_softplus": True, "layer": layer, "implementation": implementation}
            out, state = SSD(**dict(zip(arrays, values, strict=True)), **options)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

    got, want = (
        jax.jit(around(functools.partial(call, how)))(*arrays.values()) for how in ("mosaic", "xla")
    )
    check.assert_close(got, want, 1e-5)


def test_the_state_is_aliased():
    """Where the program is for a GPU the kernel writes the state to where it was."""
    arrays = inputs(ssd, 2, 4, 64, 128, layers=3)
    run = lambda arrays: SSD(**arrays, layer=1, implementation="mosaic")
    text = jax.jit(run).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    assert call.count("output_operand_alias<") == 2  # the state, and x that becomes the output


def test_errors():
    arrays = inputs(ssd, 2, 4, 16, 32, layers=3)
    state, unfit = arrays["state"], {"implementation": "mosaic"}
    for error, words, changed in (
        (ValueError, r"state must have shape \(2, 4, 16, 32\) = \(B, H, P, N", {}),
        (
            ValueError,
            r"with layer, state must have shape \(layers, 2, 4, 16, ",
            {"state": state[0], "layer": 0},
        ),
        (ValueError, r"layer must be from 0 to 2, as state has them; got 3", {"layer": 3}),
        (TypeError, r"layer must be a whole number or an integer.*got 1\.0", {"layer": 1.0}),
        (TypeError, r"layer must be a whole number or an integer", {"layer": jnp.arange(2)}),
        *(
            (NotImplementedError, reason, inputs(ssd, *size) | unfit)
            for reason, size in (
                (
                    "it has 24 states, and the kernel takes a power of two from 8 to 512",
                    (2, 4, 16, 24),
                ),
                ("it has 4 states", (2, 4, 16, 4)),
                ("a head has 24 channels, and the kernel takes multiples of 32", (2, 4, 24, 16)),
            )
        ),
        (
            NotImplementedError,
            "state is bfloat16, and the kernel updates",
            unfit | {"state": state[0].astype(jnp.bfloat16)},
        ),
    ):
        with pytest.raises(error, match=words):
            SSD(**arrays | changed)
    with pytest.raises(NotImplementedError, match="a group has 100 channels"):
        selective_scan.STEP(**inputs(selective_scan, 2, 100, 16), **unfit)
