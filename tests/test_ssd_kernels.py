"""ssd's kernels: what they compute, what they refuse, and their cells of the matrix."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.mosaic import launch
from jaxkern.ops.ssd import backward, carry, tiles
from jaxkern.ops.ssd.reference import Options, by_group
from tests import check
from tests.ssd import ALONG, NAMES, check_case, cotangents, inputs_and_state, packed_ids, scan

HALF = functools.partial(inputs_and_state, dtype="bfloat16", weight_dtype="float32")
SIZE = (1, 70, 2, 64, 16)
"""More than a step of 64 tokens, states that are padded."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "groups", "options"),
    [
        pytest.param(SIZE, 1, {}, id="interpreted"),
        pytest.param((1, 200, 2, 128, 80), 2, {"checkpoint_every": None}, id="several chunks"),
        pytest.param(SIZE, 1, {"segment_ids": packed_ids(1, 70)}, id="packed"),
        pytest.param((1, 70, 2, 80, 144), 2, {}, id="channels and states between"),
        *(
            pytest.param(size, groups, options, marks=pytest.mark.compiled, id=name)
            for name, size, groups, options in [
                ("one token", (4, 1, 3, 64, 20), 1, {}),
                ("whole chunks", (2, 512, 6, 64, 128), 2, {"checkpoint_every": 256}),
                ("more heads than a block", (3, 300, 7, 64, 64), 1, {}),
                ("more heads than whole blocks", (2, 300, 12, 64, 64), 1, {}),
                ("wide heads", (1, 1000, 4, 256, 128), 4, {"checkpoint_every": 128}),
                ("narrow heads", (2, 1000, 4, 16, 128), 2, {"checkpoint_every": 256}),
                ("many states", (2, 1000, 4, 64, 256), 1, {"segment_ids": packed_ids(2, 1000)}),
                ("many states in parts", (1, 5000, 2, 128, 256), 1, {"checkpoint_every": None}),
                ("parts", (1, 5000, 2, 64, 128), 1, {"dt_limit": (0.05, 0.3)}),
                ("parts of several chunks", (1, 1000, 64, 64, 64), 1, {"checkpoint_every": None}),
                ("no parts", (8, 1030, 32, 64, 128), 1, {"checkpoint_every": None}),
                ("packed chunks", (2, 1000, 4, 64, 128), 2, {"segment_ids": packed_ids(2, 1000)}),
            ]
        ),
    ],
)
def test_ssd_kernels_accuracy(size, groups, options):
    """With everything: a gate, D of heads or, of several groups, of channels, both states.

    With rates at which some heads remember their first token to the end.
    """
    x, dt, A, *rest = HALF(*size, groups, of_channels=groups > 1)
    check_case((x, dt, A * min(1, 16 / size[1]), *rest), "mosaic", **options)


@pytest.mark.compiled
def test_ssd_kernels_forget_and_grow():
    """Decays of exactly 0 amid others, and a rate above 0."""
    x, dt, A, *rest = HALF(2, 300, 4, 64, 64)
    A = A.at[0].set(-1e6).at[1].set(-1e30).at[2].set(0.01)
    dt = dt.at[0, 4].set(80.0)
    check_case((x, dt, A, *rest), "mosaic")


@pytest.mark.gpu
def test_ssd_kernels_keep_a_bad_head_alone():
    """A NaN in one head of one row leaves every other head with the bits it had."""
    arrays = HALF(*SIZE)
    given = cotangents(arrays)
    run = check.program(scan, implementation="mosaic", return_final_state=True)
    bad = (arrays[0].at[0, 4, 1].set(np.nan), *arrays[1:])
    with check.running("mosaic"):
        results = (run(arrays, given), run(bad, given))
    (want, want_final), want_grads = results[0]
    (out, final), grads = results[1]
    assert np.isnan(out[0, 4, 1]).all()
    np.testing.assert_array_equal(out[:, :, 0], want[:, :, 0])
    np.testing.assert_array_equal(final[:, 0], want_final[:, 0])
    for name, got, before in zip(NAMES, grads, want_grads, strict=True):
        if name in ("x", "dt", "z"):
            np.testing.assert_array_equal(got[:, :, 0], before[:, :, 0])
        elif name in ("A", "D", "dt_bias"):
            np.testing.assert_array_equal(got[0], before[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "dout"])
def test_ssd_kernels_nan_stays_in_its_segment(name):
    """In the same chunk, and in the states that the segments behind it and before it begin from."""
    arrays = dict(zip(NAMES, HALF(*SIZE), strict=True))
    dout, dfinal = cotangents(tuple(arrays.values()))
    ids = jnp.repeat(jnp.array([[3, 1, 2]]), jnp.array([20, 20, 30]), axis=1)
    run = functools.partial(
        check.program(scan, implementation="mosaic", return_final_state=True), segment_ids=ids
    )
    with check.running("mosaic"):
        (out, final), grads = run(tuple(arrays.values()), (dout, dfinal))
        if name == "dout":
            dout = dout.at[0, 25].set(np.nan)
        else:
            arrays[name] = arrays[name].at[0, 25].set(np.nan)
        (bad, bad_final), bad_grads = run(tuple(arrays.values()), (dout, dfinal))
    close = functools.partial(check.assert_close, tolerance=2.0**-6)
    assert name == "dout" or np.isnan(bad[0, 25].astype(np.float32)).all()
    close(bad_final, final)
    for n, got, want in zip(("out", *NAMES), (bad, *bad_grads), (out, *grads), strict=True):
        if n in ("out", *ALONG):
            close(np.delete(got[0], slice(20, 40), 0), np.delete(want[0], slice(20, 40), 0))
    close(bad_grads[-1], grads[-1])


@pytest.mark.gpu
def test_ssd_kernels_need_not_isolate_nan():
    """Finite arguments give the same bits with `isolate_nan` and without."""
    arrays, ids = HALF(*SIZE), packed_ids(1, 70)
    options: Any = {"implementation": "mosaic", "return_final_state": True}
    with check.running("mosaic"):
        isolated, free = (
            check.program(scan, isolate_nan=flag, **options)(
                arrays, cotangents(arrays), segment_ids=ids
            )
            for flag in (True, False)
        )
    jax.tree.map(np.testing.assert_array_equal, free, isolated)


@pytest.mark.parametrize("isolate_nan", [True, False])
def test_ssd_kernels_wait_to_isolate_nan(isolate_nan):
    """The host waits for the condition of a loop, once a pass."""
    ids = packed_ids(1, 70)
    loss = lambda *arrays: jnp.sum(
        scan(*arrays, implementation="mosaic", segment_ids=ids, isolate_nan=isolate_nan)
    )
    program = jax.jit(jax.value_and_grad(loss)).trace(*HALF(*SIZE))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert ("stablehlo.while" in text) == isolate_nan


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("chunks", "part", "sms"), [(7, 4, 4), (5, 2, 1), (6, 4, 8)])
def test_parts_begin_where_the_sequence_is(chunks, part, sms, reverse, monkeypatch):
    """`part_starts` gives the recurrence's states, from one finer part or several, one short."""
    keys = jax.random.split(jax.random.key(0), 4)
    bf16 = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    tokens = bf16(keys[0], (1, chunks * tiles.CHUNK, 2, 64))
    weights = bf16(keys[1], (1, chunks * tiles.CHUNK, 1, 64))
    decays = -jax.random.uniform(keys[2], (1, 2, chunks, tiles.CHUNK)).cumsum(-1) / tiles.CHUNK
    steps = jnp.stack([decays, jnp.ones_like(decays)], axis=3)
    initial = jax.random.normal(keys[3], (1, 2, 64, 64))

    own = decays if reverse else decays[..., -1:] - decays
    own = own.reshape(1, 2, chunks * tiles.CHUNK).swapaxes(1, 2)[..., None]
    own = (jnp.exp2(own) * tokens).astype(jnp.bfloat16)  # as the tensor cores take them
    own = own.astype(jnp.float32).reshape(1, chunks, tiles.CHUNK, 2, 64)
    own = jnp.einsum("bcthp,bctn->cbhpn", own, weights.reshape(1, chunks, tiles.CHUNK, 64))
    state, want = initial, {}
    for n in range(chunks)[:: -1 if reverse else 1]:
        ends = n in (chunks - 1, n // part * part + part - 1)
        if ends if reverse else n % part == 0:
            want[n // part] = state
        state = jnp.exp2(decays[:, :, n, -1])[..., None, None] * state + own[n]

    monkeypatch.setattr(tiles, "num_sms", lambda: sms)
    sizes = tiles.Scan(1, 2, 1, 64, 64, chunks, warpgroups=2, part_chunks=part)
    with launch.interpreter():
        starts = carry.part_starts(sizes, reverse, tokens, weights, steps, initial)
    want = jnp.stack([want[n] for n in range(sizes.parts)], axis=1)
    np.testing.assert_allclose(starts, want, atol=2**-12 * float(jnp.abs(want).max()))


def test_gradients_after_the_last_chunk_are_not_stored(monkeypatch):
    """The last chunk's, where nothing comes after, is left out of memory and counts as zeros."""
    x, dt, A, B, C, D, *_ = HALF(1, 200, 1, 64, 16)
    given = by_group((x, dt, A, B, C, D, None, None, None), 2)
    x, dt, A, B, C, D, *_ = given
    dt = jax.nn.softplus(dt.astype(jnp.float32))
    given = x, dt, dt * A, B, C, D, None, None, None, None, None, None, jnp.sin(x)
    zeros = jnp.zeros((1, 1, 1, 64, 16), jnp.float32)
    stored = []
    launch_grads = backward.launch_grads

    def spy(chunks, arrays, dy, h, dh):
        stored.append(dh.shape[1])
        return launch_grads(chunks, arrays, dy, h, dh)

    monkeypatch.setattr(backward, "launch_grads", spy)
    monkeypatch.setattr(tiles, "num_sms", lambda: 1)  # else the sequence is cut
    options = Options(False, None, "mosaic")
    with launch.interpreter():
        got, want = (backward.launch_bwd(options, *given, dfinal) for dfinal in (None, zeros))
    assert stored == [1, 2]
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.compiled
def test_ssd_kernels_end_in_zeros():
    """Gradients have the bits without a final state that they have with zeros for its gradient."""
    arrays = HALF(8, 1030, 32, 64, 128)
    dout, dfinal = cotangents(arrays)
    run = lambda final: check.program(scan, implementation="mosaic", return_final_state=final)
    out, grads = run(False)(arrays, dout)
    (want_out, _), want = run(True)(arrays, (dout, jnp.zeros_like(dfinal)))
    jax.tree.map(np.testing.assert_array_equal, (out, grads), (want_out, want))


@pytest.mark.compiled
def test_ssd_kernels_same_bits():
    arrays = HALF(4, 1000, 8, 64, 128)
    run = check.program(scan, implementation="mosaic", return_final_state=True)
    check.assert_same_bits(lambda: run(arrays, cotangents(arrays)))


@pytest.mark.compiled
@pytest.mark.large
def test_ssd_kernels_beyond_int32():
    """More than 2³¹ elements of x, and of its states: the last rows are right."""
    batch = (1 << 12) + 3
    few = HALF(2, 128, 64, 64, 128)
    tile = lambda v: jnp.tile(v, ((batch + 1) // 2, *(1,) * (v.ndim - 1)))[:batch]
    x, dt, A, B, C, *_ = few
    arrays = tile(x), tile(dt), A / 8, tile(B), tile(C)
    last = tuple(v[-2:] if v.ndim > 1 else v for v in arrays)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, x, *others):
        ssd = functools.partial(jaxkern.ssd, dt_softplus=True, implementation=implementation)
        out, vjp = jax.vjp(lambda x: ssd(x, *others), x)
        return out, vjp(out)[0]

    got = [v[-2:] for v in run("mosaic", *arrays)]
    check.assert_close(got, run("mosaic", *last), 2.0**-9)
    check.assert_close(got, run("xla", *last), 2.0**-8)


@pytest.mark.parametrize(
    ("arrays", "options", "reason"),
    [
        (inputs_and_state(*SIZE), {}, "x is float32, and the kernels take bfloat16"),
        (HALF(*SIZE[:3], 15, 16), {}, "x has 15 channels a head, and the kernels take 16 or more"),
        (HALF(*SIZE[:4], 257), {}, "B has 257 states, and the kernels take at most 256"),
        (
            (*HALF(*SIZE)[:-1], None),
            {"segment_ids": packed_ids(1, 70), "num_segments": 3},
            "it has num_segments, and the kernels keep one state of a row",
        ),
    ],
)
def test_ssd_kernels_refuse(arrays, options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        scan(*arrays, implementation="mosaic", **options)


def lowered(arrays, implementation, **options):
    run = jax.jit(functools.partial(scan, implementation=implementation, **options))
    return run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("gpu", ["b200", "a100"])
def test_ssd_kernels_are_hoppers(gpu):
    with (
        jaxkern.lowering_for(gpu),
        pytest.raises(NotImplementedError, match="multiply by wgmma, which Hopper alone has"),
    ):
        lowered(HALF(*SIZE), "mosaic")


@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_ssd_kernels_run(implementation):
    assert check.kernel_calls(lowered(HALF(*SIZE), implementation))


def test_ssd_kernels_leave_the_rest_to_plain_jax():
    assert not check.kernel_calls(lowered(inputs_and_state(*SIZE), None))


def scan_of_both_results(*arrays, implementation="xla"):
    """In bf16, with results and gradients in fp32, so small that no sine of them turns round."""
    x, dt, A, B, C, D, dt_bias, state = arrays
    x, B, C = (v.astype(jnp.bfloat16) for v in (x, B, C))
    out, final = scan(
        *(x, dt, A, B, C, D, None, dt_bias, state),
        implementation=implementation,
        return_final_state=True,
    )
    return (out.astype(jnp.float32) + jnp.sum(final, axis=-1)[:, None]) / 32


def without_gate(key):
    arrays = inputs_and_state(4, 3, 4, 64, 16)
    return arrays[:6] + arrays[7:]


test_ssd_kernels_transformations = check.transformations(
    check.Op(
        name="ssd, kernels",
        call=scan_of_both_results,
        reference=scan_of_both_results,
        arrays=without_gate,
        kernels=("ssd_fwd", "ssd_bwd"),
        axes="blhp blh h blgn blgn h h bhpn -> blhp",
        features="h",
        channels="h",
        all_reduces=1,
        vmaps=[(0,) + (None,) * 7, (None, None, 0, None, 1, 0, None, 0)],
        tolerance=2.0**-6,  # of what kernels round to 16 bits, where terms of A's gradient cancel
        cells=[
            (name, check.ALONE.get(name, "mosaic"))
            for name in check.TRANSFORMATIONS
            # Those with gradients show three of them, and by default plain JAX is exported.
            if name not in ("value", "vmap", "vmap(vmap)", "export")
        ],
    )
)
