"""gated_delta_rule_step: its accuracy, the kernel, a layer's state, where NaN goes, meshes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.ops.delta_rule import step as step_kernel
from tests import check, sequences
from tests.test_delta_rule import KINDS, NAMES, cotangents, drawn, exhaustive


@KINDS
def test_delta_rule_step_by_step(by_channel):
    """The step, token by token, gives the oracle's outputs, final state and gradients."""
    arrays = drawn(2, 20, 4, 3, 5, 2, by_channel=by_channel)

    def stepped(v, k, q, g, beta, state):
        def step(state, token):
            v, k, q, g, beta = token
            run = functools.partial(jaxkern.gated_delta_rule_step, qk_l2norm=True)
            return run(state, q, k, v, g, beta)[::-1]

        tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (v, k, q, g, beta))
        state, outs = jax.lax.scan(step, state, tokens)
        return jnp.moveaxis(outs, 0, 1), state

    given = cotangents(arrays)
    wide = [np.asarray(a, np.float64) for a in (*arrays, *given)]
    want = sequences.gated_delta_rule(*wide, qk_l2norm=True)
    check.assert_close(check.program(stepped)(arrays, given), want, 2e-6)
    if not by_channel:
        half = tuple(v.astype(jnp.bfloat16) for v in arrays[:-1])
        outs, state = jax.jit(stepped)(*half, arrays[-1])
        assert (outs.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
        wide = [np.asarray(a, np.float64) for a in (*half, arrays[-1], *given)]
        want, _ = sequences.gated_delta_rule(*wide, qk_l2norm=True)
        check.assert_close((outs, state), want, 4e-3)


def token(*size, layers=None, **kind):
    """The arguments of a step by their names."""
    batch, *of_token = size
    *arrays, state = drawn(batch, 1, *of_token, **kind)
    if layers is not None:
        state = jnp.stack([state / (1 + i) for i in range(layers)])
    return {n: a[:, 0] for n, a in zip(NAMES, arrays, strict=False)} | {"state": state}


def step(arrays, implementation, **options):
    with check.running(implementation):
        options |= {"implementation": implementation}
        run = functools.partial(jaxkern.gated_delta_rule_step, **options)
        return jax.jit(lambda arrays: run(**arrays))(arrays)


TOKENS = {
    "groups": ((2, 4, 32, 16, 2), {}),
    "three parts": ((1, 2, 96, 48, 2), {}),
    "KDA": ((1, 4, 64, 32, 2), {"by_channel": True}),
    "wide blocks": ((2, 2, 128, 64, 1), {}),
    "Qwen3-Next": ((64, 32, 128, 128, 16), {}),
    "Kimi Linear": ((16, 32, 128, 128, 32), {"by_channel": True}),
    "most keys": ((3, 5, 256, 256, 5), {"by_channel": True}),
    "sizes between": ((5, 6, 192, 96, 2), {}),
    "more keys than values": ((40, 8, 64, 192, 8), {}),
}
LANES_ACROSS = {"KDA": 4, "wide blocks": 8}
"""Lanes beside each other in tiles that only many heads would get."""
LARGE = [*TOKENS][4:]
"""Cases that take the interpreter too long."""

DTYPES, ABSENT = ("float32", "bfloat16", "float16"), ((), ("g",), ("beta",))


@pytest.mark.parametrize(
    ("name", "dtype", "absent"),
    [
        pytest.param(
            *(name, DTYPES[k], ABSENT[(i + k) % 3]),
            marks=[
                pytest.mark.compiled if name in LARGE else pytest.mark.gpu,
                *[exhaustive][: k != i % 3],
            ],
        )
        for i, name in enumerate(TOKENS)
        for k in range(3)
    ],
)
def test_delta_rule_step_kernel_accuracy(name, dtype, absent, monkeypatch):
    """At most twice plain JAX's error."""
    size, kind = TOKENS[name]
    if name in LANES_ACROSS:
        monkeypatch.setattr(step_kernel, "num_sms", lambda: 1)
        tile = step_kernel.DeltaStepTile.of(size[3], size[2], size[0] * size[1])
        assert tile.across == LANES_ACROSS[name]
    arrays = token(*size, dtype=dtype, **kind)
    arrays["beta"] = arrays["beta"].astype(dtype)
    full = arrays | {"g": 0 * arrays["g"]} if "g" in absent else arrays
    full = full | {"beta": 0 * arrays["beta"] + 1} if "beta" in absent else full
    along = lambda a: np.asarray(a, np.float64)[:, None]
    wide = [*(along(full[n]) for n in NAMES[:-1]), np.asarray(full["state"], np.float64)]
    options = {"qk_l2norm": dtype != "float32"}
    (out, final), _ = sequences.gated_delta_rule(*wide, wide[0], **options)
    given = arrays | dict.fromkeys(absent)
    got, plain = (step(given, how, **options) for how in ("mosaic", "xla"))
    for results in got, plain:
        assert [v.dtype for v in results] == [jnp.dtype(dtype), jnp.float32]
    for mine, theirs, true in zip(got, plain, (out[:, 0], final), strict=True):
        error = lambda v, true=true: check.relative_error(np.asarray(v), true)
        assert error(mine) <= 2 * max(error(theirs), 2**-23)


@check.BOTH
def test_delta_rule_step_of_a_layer(implementation):
    """It is updated as it would be alone, and no other, in a loop over the layers too."""
    arrays = token(2, 2, 32, 16, 2, layers=3)
    want = step(arrays | {"state": arrays["state"][1]}, implementation)
    got, states = step(arrays, implementation, layer=1)
    check.assert_close((got, states[1]), want, 1e-6)
    np.testing.assert_array_equal(states[::2], arrays["state"][::2])

    @jax.jit
    def loop(state, arrays):
        def body(state, layer):
            how = {"layer": layer, "implementation": implementation}
            with check.running(implementation):
                return jaxkern.gated_delta_rule_step(**arrays | {"state": state}, **how)[::-1]

        return jax.lax.scan(body, state, jnp.arange(-1, 2))

    states, outs = loop(arrays["state"], arrays)  # the first is none, and counts as 0
    check.assert_close((outs[2], states[1]), want, 1e-6)
    np.testing.assert_array_equal(states[2], arrays["state"][2])
    with pytest.raises(ValueError, match="layer must be from 0 to 2"):
        step(arrays, implementation, layer=3)


@pytest.mark.gpu
def test_delta_rule_step_keeps_nan_in_its_head():
    """A NaN of q is in both heads that share it; one of v in its channel of the state alone."""
    arrays = token(2, 4, 32, 16, 2)
    want = step(arrays, "mosaic")
    for name, at, heads in (("v", (1, 2, 5), slice(2, 3)), ("q", (1, 1, 3), slice(2, 4))):
        out, state = step(arrays | {name: arrays[name].at[at].set(jnp.nan)}, "mosaic")
        others = np.ones((2, 4), bool)
        others[1, heads] = False
        for got, before in ((out, want[0]), (state, want[1])):
            np.testing.assert_array_equal(got[others], before[others])
        if name == "v":
            assert jnp.isnan(state[1, 2]).any(0).tolist() == [c == 5 for c in range(32)]
        assert jnp.isnan(out[1, heads]).all(-1).all() == (name == "q")


def mapped(f):
    return lambda *arrays: jax.vmap(f)(*(jnp.stack([a, 0.5 * a, 0.9 * a]) for a in arrays))


OF_ALL = functools.partial(jax.grad, argnums=tuple(range(len(NAMES))))
AROUND = {
    "vmap(grad)": lambda f: mapped(OF_ALL(f)),
    "vmap": mapped,
    "grad": OF_ALL,
    "checkpoint": lambda f: jax.checkpoint(OF_ALL(f)),
}


@pytest.mark.gpu
@check.combinations("around layers", AROUND, [None, 2], few=2)
def test_delta_rule_step_transformations(around, layers):
    """Gradients, of the output and the state, as plain JAX has them."""
    arrays = token(1, 2, 32, 16, 1, layers=layers)
    layer = None if layers is None else 1

    def call(implementation, *values):
        with check.running(implementation):
            options = {"qk_l2norm": True, "layer": layer, "implementation": implementation}
            named = dict(zip(arrays, values, strict=True))
            out, state = jaxkern.gated_delta_rule_step(**named, **options)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

    got, want = (
        jax.jit(around(functools.partial(call, how)))(*arrays.values()) for how in ("mosaic", "xla")
    )
    check.assert_close(got, want, 1e-5)


@check.FOUR_DEVICES
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_delta_rule_step_on_a_mesh(kind):
    """Batch and heads are split with no gather."""
    mesh = check.mesh_of(kind, 2, 2, names=("data", "x"))
    arrays = token(2, 4, 32, 16, 2)
    split = NamedSharding(mesh, P("data", "x"))
    placed = {name: jax.device_put(a, split) for name, a in arrays.items()}
    run = jax.jit(lambda arrays: jaxkern.gated_delta_rule_step(**arrays))
    compiled = run.lower(placed).compile()
    check.assert_close(compiled(placed), run(arrays))
    assert not re.search("all-gather|all-reduce|all-to-all|permute", compiled.as_text())


def test_delta_rule_step_chooses():
    """By default the kernel, in place, where a GPU is and it takes the call."""
    arrays = token(1, 2, 32, 16, 1, layers=2)
    run = lambda arrays: jaxkern.gated_delta_rule_step(**arrays, layer=1)
    (call,) = [line for line in check.lowered(run, arrays).splitlines() if "@mosaic_gpu" in line]
    assert call.count("output_operand_alias<") == 1  # the state
    alone = lambda *size: token(1, 2, *size, 1)
    half = alone(32, 16) | {"state": jnp.zeros((1, 2, 16, 32), jnp.bfloat16)}
    for reason, refused in (
        ("q has 24 channels a head, and the kernel takes multiples of 16 up to", alone(32, 24)),
        ("q has 272 channels a head", alone(32, 272)),
        ("v has 48 channels a head, and the kernel takes multiples of 32", alone(48, 16)),
        ("state is bfloat16, and the kernel updates", half),
    ):
        by_default = lambda arrays=refused: jaxkern.gated_delta_rule_step(**arrays)
        with pytest.raises(NotImplementedError, match=reason):
            jaxkern.gated_delta_rule_step(**refused, implementation="mosaic")
        with (
            pytest.raises(NotImplementedError, match=reason),
            jaxkern.default_implementation("mosaic"),
        ):
            by_default()
        assert not check.kernel_calls(check.lowered(by_default))
