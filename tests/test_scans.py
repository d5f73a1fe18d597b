"""What ssd and selective_scan have in common, and one token of both by a kernel in place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxkern
from jaxkern.ops import scan_step
from jaxkern.ops.columns import Columns
from tests import check, selective_scan, ssd
from tests.check import exhaustive
from tests.ssd import INF, NAMES, cotangents
from tests.test_selective_scan import SELECTIVE_SCAN
from tests.test_ssd import SSD

EACH = pytest.mark.parametrize("of", [ssd, selective_scan], ids=["ssd", "selective_scan"])


def name_of(value):
    """The id of an op among a test's parameters."""
    return value.__name__.removeprefix("tests.") if hasattr(value, "__name__") else None


cases = functools.partial(pytest.mark.parametrize, ids=name_of)


def runs(mark):
    """Both ops in plain JAX, and the kernels of one where `mark` says."""
    plain = (ssd, None), exhaustive(ssd, "xla"), (selective_scan, "xla")
    kernels = pytest.param(selective_scan, "mosaic", marks=mark)
    return cases(("of", "implementation"), [*plain, kernels])


@pytest.mark.exhaustive
@EACH
def test_by_finite_differences(of):
    """In forward mode, too."""
    with jax.enable_x64(True):
        size = (1, 6, 2, 2, 2) if of is ssd else (1, 6, 2, 2)
        arrays = of.inputs_and_state(*size, groups=2, dtype="float64")
        ids = jnp.array([[0, 0, 0, 1, 1, 1]])
        options = {"return_final_state": True, "segment_ids": ids, "dt_limit": (0.06, 0.3)}
        run = jax.jit(functools.partial(of.scan, implementation="xla", **options))
        check_grads(run, arrays, order=1, modes=["fwd", "rev"], eps=1e-6, atol=1e-7, rtol=1e-7)


@cases(("of", "size"), [(ssd, (2, 70, 4, 3, 5)), (selective_scan, (2, 9, 6, 3))])
def test_step_by_step(of, size):
    """The step, token by token, gives the oracle's outputs, final state and gradients."""
    arrays = of.inputs_and_state(*size, groups=2)
    options = {"dt_softplus": True, "dt_limit": (0.05, 0.6)}

    def stepped(x, dt, A, B, C, D, z, dt_bias, state):
        def step(state, token):
            x, dt, b, c, z = token
            return of.STEP(state, x, dt, A, b, c, D, z, dt_bias=dt_bias, **options)[::-1]

        tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, z))
        state, outs = jax.lax.scan(step, state.astype(jnp.float32), tokens)
        return jnp.moveaxis(outs, 0, 1), state

    given = cotangents(arrays)
    want = check.in_float64(of.oracle, *arrays, *given, **options)
    check.assert_close(check.program(stepped)(arrays, given), want, 2e-6)
    half = tuple(v.astype(jnp.bfloat16) for v in arrays)
    outs, state = jax.jit(stepped)(*half)
    assert (outs.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    want, _ = check.in_float64(of.oracle, *half, *given, **options)
    check.assert_close((outs, state), want, 4e-3)


def test_one_chunk_is_no_loop():
    """XLA of JAX 0.12 did not end to inline one, of a Mamba-2 block split over an Auto mesh."""
    arrays = ssd.inputs_and_state(1, 16, 2, 4, 3)[:5]
    both = jax.value_and_grad(lambda *a: jaxkern.ssd(*a, implementation="xla").sum(), range(5))
    assert "scan[" not in str(jax.make_jaxpr(both)(*arrays))


@EACH
def test_step_keeps_its_state_in_float32(of):
    """Ten thousand additions of 1e-3, each lost if the state were bf16."""
    size = [1] * (5 if of is ssd else 4)
    x, dt, A, B, *_, state = map(jnp.ones_like, of.inputs_and_state(*size, dtype="bfloat16"))
    x, dt, weight = 1e-3 * x[:, 0], dt[:, 0], B[:, 0]
    step = lambda state, _: of.STEP(state, x, dt, 0 * A, weight, weight)[::-1]
    state, _ = jax.lax.scan(step, 0 * state.astype(jnp.float32), length=10_000)
    np.testing.assert_allclose(state, 1e4 * float(x.max()), rtol=1e-3)


@runs(pytest.mark.gpu)
def test_without_tokens(of, implementation):
    """The final state is the initial one, and so are their gradients."""
    arrays = of.inputs_and_state(2, 0, *((2, 3, 2) if of is ssd else (3, 2)), dtype="bfloat16")
    given = cotangents(arrays)
    with check.running(implementation):
        run = check.program(of.scan, implementation=implementation, return_final_state=True)
        (_, final), grads = run(arrays, given)
    np.testing.assert_array_equal(final, arrays[-1].astype(jnp.float32))
    np.testing.assert_array_equal(grads[-1], given[1])


@runs(pytest.mark.compiled)
@pytest.mark.parametrize("limits", [(0.125, 2.0), None, (-INF, 1)])
def test_dt_limit(of, implementation, limits):
    """A step outside the limits is the limit, with no gradient; one at a limit has its own."""
    raw = jnp.array([-3.0, 0.0, 0.125, 0.25, 1.0, 2.0, 5.0, np.nan])[None, None]
    x, A = (raw[..., None], raw[0, 0]) if of is ssd else (raw, raw[0, 0, :, None])
    x, A, weight = jnp.ones_like(x), jnp.zeros_like(A), jnp.ones((1, 1, 1, 1))
    op = jaxkern.ssd if of is ssd else jaxkern.selective_scan
    options = {"implementation": implementation} | ({"dt_limit": limits} if limits else {})
    run = lambda dt: op(x, dt, A, weight, weight, **options).reshape(raw.shape)
    out, (ddt,) = check.program(run)((raw,), jnp.ones_like(raw))
    low, high = limits or ((0.0, INF) if of is ssd else (-INF, INF))
    np.testing.assert_array_equal(out, np.clip(raw, low, high))  # NaN where raw is
    np.testing.assert_array_equal(ddt[..., :-1], ((raw >= low) & (raw <= high))[..., :-1])


@cases(
    ("of", "size", "implementation", "every", "least", "most"),
    [
        (ssd, (1, 2048, 4, 32, 64), None, 128, 0, 0.2),
        exhaustive(ssd, (1, 2048, 4, 32, 64), None, None, 0, 0.2),
        exhaustive(ssd, (1, 2048, 4, 32, 64), "xla", 128, 0, 0.2),
        exhaustive(ssd, (1, 2048, 4, 32, 64), "xla", None, 0, 0.2),
        exhaustive(selective_scan, (1, 512, 64, 64), "xla", 8, 0, 0.35),
        exhaustive(selective_scan, (1, 512, 64, 64), "xla", 1, 1, INF),
        exhaustive(selective_scan, (1, 512, 64, 64), None, 64, 0, 0.25),
        exhaustive(selective_scan, (1, 512, 64, 64), None, None, 0, 0.25),
    ],
)
def test_memory(of, size, implementation, every, least, most):
    """Value and gradient take far less than the states of all tokens, unless asked for."""
    call = functools.partial(of.scan, implementation=implementation, checkpoint_every=every)
    loss = lambda *a: jnp.sum(call(*a) ** 2)
    arrays = jax.eval_shape(functools.partial(of.inputs_and_state, *size))
    compiled = jax.jit(jax.grad(loss, range(len(NAMES)))).lower(*arrays).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert least < temporary / (4 * np.prod(size)) < most


# On devices


@cases(
    ("of", "op", "size", "along"),
    [(ssd, SSD, (1, 5, 8, 2, 3), "h"), (selective_scan, SELECTIVE_SCAN, (1, 5, 8, 2), "d")],
)
def test_groups_of_parts_on_mesh(of, op, size, along):
    """Fewer groups than devices: gathered on a mesh with Explicit axes."""
    arrays = of.inputs_and_state(*size, groups=2)
    mesh = check.mesh_of(AxisType.Explicit, 4, names=("data",))
    # Specs of B and C without groups are short of an axis, which is not split.
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    placed = [place(a, spec) for a, spec in zip(arrays, op.specs(data=along)[:-1], strict=True)]
    run = jax.jit(functools.partial(of.scan, implementation=None))
    check.assert_close(run(*placed), run(*arrays))


@pytest.mark.compiled
@cases(("of", "size"), [(ssd, (4, 1000, 8, 64, 128)), (selective_scan, (4, 1000, 640, 16))])
def test_same_bits(of, size):
    arrays = of.inputs_and_state(*size, dtype="bfloat16", weight_dtype="float32")
    run = check.program(of.scan, implementation="mosaic", return_final_state=True)
    check.assert_same_bits(lambda: run(arrays, cotangents(arrays)))


@pytest.mark.exhaustive
@EACH
def test_plain_paths_agree_on_whatever_they_are_given(of):
    """The passes and JAX's own derivative, whole and split, by rates of both signs, with a NaN."""
    length, every = (256, 128) if of is ssd else (32, 8)
    size = (1, length, 2, 3, 2) if of is ssd else (1, length, 3, 2)
    along = NamedSharding(check.mesh_of(AxisType.Explicit, 2), P(None, "x"))

    def put(arrays):
        return [jax.device_put(v, along) if v.shape[1:2] == (length,) else v for v in arrays]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, arrays, ids, given):
        options = {"return_final_state": True, "checkpoint_every": every, "dt_softplus": True}
        options |= {"segment_ids": ids, "implementation": implementation}
        results, vjp = jax.vjp(lambda *arrays: of.scan(*arrays, **options), *arrays)
        return results, vjp(given)

    for draw in range(24):
        rng = np.random.default_rng(draw)
        arrays = of.inputs_and_state(*size, seed=draw)
        often, sign = [(0.05, 1), (0.5, 1), (0.5, -1), (0.1, -0.1)][draw // 2 % 4]
        arrays = ssd.with_rates(sign, arrays)
        ids = jnp.asarray(np.cumsum(rng.random((1, length)) < often, axis=1))
        given = cotangents(arrays)
        if draw % 2:
            name = NAMES[rng.integers(len(NAMES))]
            bad = [np.array(v) for v in arrays]
            v = bad[NAMES.index(name)]
            v[tuple(rng.integers(n) for n in v.shape)] = np.nan
            arrays = [jnp.asarray(v) for v in bad]
        want = run(None, arrays, ids, given)
        split = put(arrays), put([ids])[0], tuple(put(given))
        for got in (run("xla", arrays, ids, given), run("xla", *split), run(None, *split)):
            for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                finite = np.isfinite(one) & np.isfinite(other)
                check.assert_close(np.where(finite, one, 0), np.where(finite, other, 0), 1e-4)
                # NaN may fill more of its own segment, on the one path, than on the other.
                assert draw % 2 or finite.all()
                assert other.ndim > 2 or (finite == np.isfinite(other)).all()


# One token, by the kernel that updates the state in place; and states of layers


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
        run = functools.partial(op, implementation=implementation, **options)
        return jax.jit(lambda arrays: run(**arrays))(arrays)


def check_step(op, arrays, want, dtype, **options):
    """Both have at most twice plain JAX's error, the output in `dtype` and the state in fp32."""
    got, plain = (step(op, arrays, how, **options) for how in ("mosaic", "xla"))
    for results in got, plain:
        assert [v.dtype for v in results] == [jnp.dtype(dtype), jnp.float32]
    for mine, theirs, true in zip(got, plain, want, strict=True):
        error = lambda v, true=true: check.relative_error(np.asarray(v), true.reshape(v.shape))
        assert error(mine) <= 2 * max(error(theirs), 2**-23)


def check_layers(op, arrays, implementation, **options):
    """One of three is updated as its state alone would be, and no other, in a loop too."""
    want = step(op, arrays | {"state": arrays["state"][1]}, implementation, **options)
    for layer in (1, np.int64(1)) if check.ON_GPU else (np.int64(1),):
        got, states = step(op, arrays, implementation, layer=layer, **options)
        check.assert_close((got, states[1]), want, 1e-6)
        np.testing.assert_array_equal(states[::2], arrays["state"][::2])

    def loop(state, arrays):
        def body(state, layer):
            with check.running(implementation):
                how = {"layer": layer, "implementation": implementation}
                return op(**arrays | {"state": state}, **how, **options)[::-1]

        return jax.lax.scan(body, state, jnp.arange(-1, 2))

    states, outs = jax.jit(loop)(arrays["state"], arrays)  # the first is none, and counts as 0
    check.assert_close((outs[2], states[1]), want, 1e-6)
    np.testing.assert_array_equal(states[2], arrays["state"][2])
    with pytest.raises(ValueError, match="layer must be from 0 to 2"):
        step(op, arrays, implementation, layer=3, **options)


def of_all(f):
    return lambda *arrays: jax.grad(f, argnums=range(len(arrays)))(*arrays)


mapped = lambda f: lambda *v: jax.vmap(f)(*(jnp.stack([a, 0.5 * a, 0.9 * a]) for a in v))
AROUND = {
    "grad": of_all,
    "vmap(grad)": lambda f: mapped(of_all(f)),
    "vmap": mapped,
    "checkpoint": lambda f: jax.checkpoint(of_all(f)),
}


def check_around(around, op, arrays, **options):
    """Gradients, of the output and the state, as plain JAX has them."""

    def call(implementation, *values):
        with check.running(implementation):
            named = dict(zip(arrays, values, strict=True))
            out, state = op(**named, **options, implementation=implementation)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

    got, want = (
        jax.jit(around(functools.partial(call, how)))(*arrays.values()) for how in ("mosaic", "xla")
    )
    check.assert_close(got, want, 1e-5)


def check_aliased(op, arrays):
    """The kernel of a program for a GPU writes the state to where it was."""
    run = lambda arrays: op(**arrays, layer=1)
    (call,) = [line for line in check.lowered(run, arrays).splitlines() if "@mosaic_gpu" in line]
    assert call.count("output_operand_alias<") == 1


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
"""Cases that take the interpreter too long."""

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
def test_step_accuracy(size, dtype, absent, monkeypatch):
    of, sizes, options = SIZES[size]
    if size == "heads":  # several rows a lane
        monkeypatch.setattr(scan_step, "num_sms", lambda: 1)
    given = inputs(of, *sizes, dtype=dtype, **options) | dict.fromkeys(absent)
    token = {name: None if given[name] is None else given[name][:, None] for name in ssd.ALONG}
    scanned = [(given | token).get(name, given["state"]) for name in ssd.NAMES]
    wide = jax.tree.map(lambda v: np.asarray(v, np.float64), scanned)
    want, _ = of.oracle(*wide, wide[0], None, dt_limit=(0.1, 0.9))
    check_step(of.STEP, given, want, dtype, dt_softplus=True, dt_limit=(0.1, 0.9))


@check.BOTH
@pytest.mark.parametrize(
    ("of", "size"),
    [
        exhaustive(ssd, (2, 4, 16, 32), id="ssd"),
        pytest.param(selective_scan, (2, 128, 16), id="selective_scan"),
    ],
)
def test_a_layer_is_updated_and_no_other(of, size, implementation):
    check_layers(of.STEP, inputs(of, *size, layers=3), implementation, dt_softplus=True)


@check.BOTH
def test_a_layer_that_there_is_not(implementation):
    """A traced number counts as the nearest, and writes nowhere else."""
    arrays = inputs(ssd, 1, 2, 16, 32, layers=2)

    @jax.jit
    def run(layer):
        with check.running(implementation):
            return ssd.STEP(**arrays, layer=layer, implementation=implementation)

    for number, nearest in ((-1, 0), (2, 1), (2**31 - 1, 1)):
        jax.tree.map(np.testing.assert_array_equal, run(number), run(nearest))


@pytest.mark.gpu
def test_nan_stays_in_its_head():
    arrays = inputs(ssd, 2, 4, 16, 32)
    run = jax.jit(lambda arrays: step(ssd.STEP, arrays, "mosaic", dt_softplus=True))
    bad = arrays | {"x": arrays["x"].at[1, 2].set(jnp.nan)}
    for got, want in zip(run(bad), run(arrays), strict=True):
        assert jnp.isnan(got[1, 2]).all()
        ssd.check_others({"final": got}, {"final": want})


@pytest.mark.gpu
@check.combinations("around layers", AROUND, [None, 2], few=2)
def test_step_transformations(around, layers):
    options = {"dt_softplus": True, "layer": None if layers is None else 1}
    check_around(around, ssd.STEP, inputs(ssd, 2, 2, 16, 32, layers=layers), **options)


def test_the_state_is_aliased():
    check_aliased(ssd.STEP, inputs(ssd, 2, 4, 64, 128, layers=3))


# A token's arrays as columns of rows


def of_columns(name, first):
    """A step, its arrays but those of a token, and a row that has these from column `first` on."""
    if name == "causal_conv1d":
        state, x, weight, bias = (
            jax.random.normal(jax.random.key(i), s)
            for i, s in enumerate([(2, 3, 256), (2, 256), (256, 4), (256,)])
        )
        arrays = {"state": state, "x": x, "weight": weight, "bias": bias}
        op, options = jaxkern.causal_conv1d_step, {"activation": "silu"}
    else:
        of, size, groups = {
            "ssd": (ssd, (2, 4, 16, 32), 1),
            "groups of ssd": (ssd, (2, 4, 16, 32), 2),
            "selective_scan": (selective_scan, (2, 128, 16), 1),
        }[name]
        arrays, op, options = inputs(of, *size, groups=groups), of.STEP, {"dt_softplus": True}
    named = {n: arrays.pop(n) for n in ("z", "dt", "x", "B", "C") if n in arrays}
    groups = lambda n, a: (a.shape[0], 1, a.shape[1]) if n in "BC" and a.ndim == 2 else a.shape
    named = {n: a.reshape(groups(n, a)) for n, a in named.items()}
    parts = [jnp.ones((2, first)), *(a.reshape(2, -1) for a in named.values()), jnp.ones((2, 1))]
    starts = np.cumsum([part.shape[1] for part in parts])

    def run(arrays, row, implementation=None, copied=False):
        token = {
            n: Columns(row, int(start), a.shape[1:])
            for (n, a), start in zip(named.items(), starts, strict=False)
        }
        token = {n: c.copied() for n, c in token.items()} if copied else token
        with check.running(implementation):
            return op(**arrays, **token, **options, implementation=implementation)

    return run, arrays, jnp.concatenate(parts, axis=1)


STEPS = "ssd", "groups of ssd", "selective_scan", "causal_conv1d"


@check.BOTH
@pytest.mark.parametrize("first", [3, exhaustive(8)])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_columns_is_that_of_their_copies(name, first, implementation):
    """To the bit, with ``vmap`` and in its gradients, wherever the columns begin."""
    run, arrays, row = of_columns(name, first)
    row = jnp.pad(row, ((0, 0), (0, -row.shape[1] % 8))) if first == 8 else row

    def loss(row, copied):
        out, state = run(arrays, row, implementation, copied)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

    rows = jnp.stack([row, row / 2])
    of = lambda copied: (
        jax.jit(functools.partial(run, implementation=implementation, copied=copied))(arrays, row),
        jax.jit(jax.vmap(lambda row: run(arrays, row, implementation, copied)))(rows),
    )
    jax.tree.map(np.testing.assert_array_equal, of(False), of(True))
    got, want = (jax.jit(jax.grad(functools.partial(loss, copied=c)))(row) for c in (False, True))
    check.assert_close(got, want, 1e-6)


@check.FOUR_DEVICES
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_columns_on_a_mesh(name, kind):
    """Each device takes its own out of a whole row, and no state is gathered."""
    mesh = check.mesh_of(kind, 2, 2, names=("data", "x"))
    run, arrays, row = of_columns(name, 3)
    by_channel = NamedSharding(mesh, P("x"))
    place = lambda n, a: jax.device_put(a, states if n == "state" else by_channel)
    states = NamedSharding(mesh, P("data", None, "x") if "conv" in name else P("data", "x"))
    placed = {n: place(n, a) for n, a in arrays.items()}
    split_row = jax.device_put(row, NamedSharding(mesh, P("data")))
    compiled = jax.jit(run).lower(placed, split_row).compile()
    assert not re.search("all-gather|all-reduce|all-to-all|permute", compiled.as_text())
    check.assert_close(compiled(placed, split_row), jax.jit(run)(arrays, row), 1e-6)


def test_step_errors():
    arrays = inputs(ssd, 2, 4, 16, 32, layers=3)
    state, alone = arrays["state"], {"state": arrays["state"][0]}
    half = inputs(ssd, 2, 4, 16, 32) | {"state": state[0].astype(jnp.bfloat16)}
    channels = r"a head has 24 channels, and the kernel takes multiples of 32"
    states = "it has 24 states, and the kernel takes a power of two from 8 to 512"
    for error, words, changed in (
        (ValueError, r"state must have shape \(2, 4, 16, 32\) = \(B, H, P, N", {}),
        (ValueError, r"with layer, state .* shape \(layers, 2, 4, 16, ", alone | {"layer": 0}),
        (TypeError, r"layer must be a whole number or an integer.*got 1\.0", {"layer": 1.0}),
        (TypeError, r"layer must be a whole number or an integer", {"layer": jnp.arange(2)}),
    ):
        with pytest.raises(error, match=words):
            ssd.STEP(**arrays | changed)
    for of, reason, given in (
        (ssd, states, inputs(ssd, 2, 4, 16, 24)),
        (ssd, "it has 4 states", inputs(ssd, 2, 4, 16, 4)),
        (ssd, channels, inputs(ssd, 2, 4, 24, 16)),
        (ssd, "state is bfloat16, and the kernel updates", half),
        (selective_scan, "a group has 100 channels", inputs(selective_scan, 2, 100, 16)),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            of.STEP(**given, implementation="mosaic")
