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
from tests.ssd import cotangents
from tests.test_delta_rule import KINDS, NAMES, drawn
from tests.test_scans import AROUND, check_aliased, check_around, check_layers, check_step, step

STEP = jaxkern.gated_delta_rule_step


@KINDS
def test_delta_rule_step_by_step(by_channel):
    """The step, token by token, gives the oracle's outputs, final state and gradients."""
    arrays = drawn(2, 20, 4, 3, 5, 2, by_channel=by_channel)

    def stepped(v, k, q, g, beta, state):
        def step(state, token):
            v, k, q, g, beta = token
            run = functools.partial(STEP, qk_l2norm=True)
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
                *[pytest.mark.exhaustive][: k != i % 3],
            ],
        )
        for i, name in enumerate(TOKENS)
        for k in range(3)
    ],
)
def test_delta_rule_step_kernel_accuracy(name, dtype, absent, monkeypatch):
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
    check_step(STEP, arrays | dict.fromkeys(absent), (out[:, 0], final), dtype, **options)


@check.BOTH
def test_delta_rule_step_of_a_layer(implementation):
    check_layers(STEP, token(2, 2, 32, 16, 2, layers=3), implementation)


@pytest.mark.gpu
def test_delta_rule_step_keeps_nan_in_its_head():
    """A NaN of q is in both heads that share it; one of v in its channel of the state alone."""
    arrays = token(2, 4, 32, 16, 2)
    run = functools.partial(step, STEP, implementation="mosaic")
    want = run(arrays)
    for name, at, heads in (("v", (1, 2, 5), slice(2, 3)), ("q", (1, 1, 3), slice(2, 4))):
        out, state = run(arrays | {name: arrays[name].at[at].set(jnp.nan)})
        others = np.ones((2, 4), bool)
        others[1, heads] = False
        for got, before in ((out, want[0]), (state, want[1])):
            np.testing.assert_array_equal(got[others], before[others])
        if name == "v":
            assert jnp.isnan(state[1, 2]).any(0).tolist() == [c == 5 for c in range(32)]
        assert jnp.isnan(out[1, heads]).all(-1).all() == (name == "q")


@pytest.mark.gpu
@check.combinations("around layers", AROUND, [None, 2], few=2)
def test_delta_rule_step_transformations(around, layers):
    options = {"qk_l2norm": True, "layer": None if layers is None else 1}
    check_around(around, STEP, token(1, 2, 32, 16, 1, layers=layers), **options)


@check.FOUR_DEVICES
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_delta_rule_step_on_a_mesh(kind):
    """Batch and heads are split with no gather."""
    mesh = check.mesh_of(kind, 2, 2, names=("data", "x"))
    arrays = token(2, 4, 32, 16, 2)
    split = NamedSharding(mesh, P("data", "x"))
    placed = {name: jax.device_put(a, split) for name, a in arrays.items()}
    run = jax.jit(lambda arrays: STEP(**arrays))
    compiled = run.lower(placed).compile()
    check.assert_close(compiled(placed), run(arrays))
    assert not re.search("all-gather|all-reduce|all-to-all|permute", compiled.as_text())


def test_delta_rule_step_chooses():
    """By default the kernel, in place, where a GPU is and it takes the call."""
    check_aliased(STEP, token(1, 2, 32, 16, 1, layers=2))
    alone = lambda *size: token(1, 2, *size, 1)
    half = alone(32, 16) | {"state": jnp.zeros((1, 2, 16, 32), jnp.bfloat16)}
    for reason, refused in (
        ("q has 24 channels a head, and the kernel takes multiples of 16 up to", alone(32, 24)),
        ("q has 272 channels a head", alone(32, 272)),
        ("v has 48 channels a head, and the kernel takes multiples of 32", alone(48, 16)),
        ("state is bfloat16, and the kernel updates", half),
    ):
        by_default = lambda arrays=refused: STEP(**arrays)
        with pytest.raises(NotImplementedError, match=reason):
            STEP(**refused, implementation="mosaic")
        with (
            pytest.raises(NotImplementedError, match=reason),
            jaxkern.default_implementation("mosaic"),
        ):
            by_default()
        assert not check.kernel_calls(check.lowered(by_default))
