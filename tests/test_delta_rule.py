"""gated_delta_rule: its accuracy at any decay, states, where NaN goes, its kernels, the matrix."""

import dataclasses
import functools
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxkern
from bench.cases.scans import delta_rule
from jaxkern.ops.chunks import CHUNK
from jaxkern.ops.delta_rule import call as kernel_arrays
from jaxkern.ops.delta_rule import devices, reference
from jaxkern.ops.delta_rule.reference import SAVED_EVERY, DeltaRuleOptions
from tests import check, sequences, ssd
from tests.check import exhaustive
from tests.ssd import check_other_segments, cotangents, packed_ids, results_by_name

NAMES = ("v", "k", "q", "g", "beta", "initial_state")
SIZE = (2, 130, 4, 8, 16, 2)
"""One size for tests that differ in their numbers alone: batch, length, heads, V, K and groups."""

GDN, KDA = pytest.param(False, id="GDN"), pytest.param(True, id="KDA")
KINDS = pytest.mark.parametrize("by_channel", [GDN, KDA])
GDN_FIRST = pytest.mark.parametrize("by_channel", [GDN, exhaustive(True, id="KDA")])
KDA_FIRST = pytest.mark.parametrize("by_channel", [exhaustive(False, id="GDN"), KDA])
EVERY = pytest.mark.parametrize("implementation", [None, exhaustive("xla")])
"""The pair of passes, and plain JAX that JAX differentiates."""


def drawn(*size, by_channel=False, dtype="float32", seed=0):
    """Arrays in the order of NAMES; states, g and beta have float32 unless all is float64."""
    batch, length, heads, values, keys, groups = size
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)
    k, q = normal(2, batch, length, groups, keys)
    k = k / np.maximum(np.linalg.norm(k, axis=-1, keepdims=True), 1e-6)
    v, state = normal(batch, length, heads, values), normal(batch, heads, keys, values)
    steps = batch, length, heads
    g = -np.logaddexp(normal(*steps, keys) if by_channel else normal(*steps), 0) / 8
    beta = 1 / (1 + np.exp(-normal(*steps)))
    wide = "float64" if dtype == "float64" else "float32"
    kinds = dtype, dtype, dtype, wide, wide, wide
    arrays = v, k, q, g, beta, state
    return tuple(jnp.asarray(a.astype(jnp.dtype(d))) for a, d in zip(arrays, kinds, strict=True))


def scan(v, k, q, g, beta, state=None, *, implementation=None, **options):
    options |= {"initial_state": state, "implementation": implementation}
    return jaxkern.gated_delta_rule(q, k, v, g, beta, **options)


def with_gates(make, arrays):
    """The arrays with g and beta replaced by `make` of the originals and a generator."""
    v, k, q, g, beta, state = arrays
    g, beta = make(np.array(g), np.array(beta), np.random.default_rng(1))
    return v, k, q, jnp.asarray(g, jnp.float32), jnp.asarray(beta, jnp.float32), state


def parallel(arrays):
    """Keys of length 1 that all point nearly the same way."""
    v, k, q, *rest = arrays
    k = k[:, :1] + 1e-3 * k
    return v, k / jnp.linalg.norm(k, axis=-1, keepdims=True), q, *rest


def amid_others(g, beta, rng):
    """Decays of exactly 0 and of e^−30 amid others: these keep all their digits, none is NaN."""
    kept = rng.random(g.shape)
    return np.select([kept < 0.05, kept < 0.3, kept < 0.6], [-np.inf, -30.0, 0.0], g), beta


def some_strong(arrays):
    """In the first 64 tokens half of the decays are as in :func:`amid_others`; no other is strong.

    Of channels so are those of the first half: only with these, a chunk's pairs of near tokens take
    a way of their own.
    """

    def make(g, beta, rng):
        own = (slice(None), slice(0, 64), *[slice(None)] * (g.ndim - 3), slice(0, g.shape[-1] // 2))
        g[own] = amid_others(g[own], beta, rng)[0]
        return g, beta

    return with_gates(make, arrays)


GATES = {
    "as drawn": lambda arrays: arrays,
    "decays of e^-30": lambda a: with_gates(lambda g, beta, _: (0 * g - 30, beta), a),
    "no decay": lambda a: with_gates(lambda g, beta, _: (0 * g, beta), a),
    "all at once": lambda a: with_gates(amid_others, a),
    "beta near 2": lambda a: with_gates(lambda g, beta, _: (g, 2 - 0.01 * beta), a),
    "parallel keys": parallel,
    "parallel keys, no decay": lambda a: parallel(GATES["no decay"](a)),
}

KERNEL_GATES = GATES | {
    "growing": lambda a: with_gates(lambda g, beta, _: (-g / 8, beta), a),
    "some strong": lambda a: some_strong(a),
}

REFLECTING = {
    "no decay": lambda a: with_gates(lambda g, beta, _: (0 * g, 2 - 0.001 * beta), a),
    "parallel keys": lambda a: parallel(GATES["beta near 2"](a)),
    "both": lambda a: parallel(REFLECTING["no decay"](a)),
}


# Accuracy


@EVERY
@KINDS
@pytest.mark.parametrize("gates", GATES)
def test_delta_rule_accuracy(gates, by_channel, implementation):
    """Errors of results and gradients are at most twice those of the recurrence in fp32."""
    arrays = GATES[gates](drawn(*SIZE, by_channel=by_channel))
    sequences.check_case(scan, sequences.gated_delta_rule, arrays, implementation)


@KINDS
@pytest.mark.parametrize("gates", REFLECTING)
def test_delta_rule_of_reflections(gates, by_channel):
    """With β near 2 a token reflects the state, and of parallel keys it takes back the last one.

    A chunk's values then follow from differences of sums of products of keys. Of fp32's 24 bits
    nine are lost at most; powers of the couplings would leave none.
    """
    arrays = REFLECTING[gates](drawn(*SIZE, by_channel=by_channel))
    given = cotangents(arrays)
    got = check.value_and_grads(scan, arrays, given, return_final_state=True)
    want = sequences.gated_delta_rule(*(np.asarray(a, np.float64) for a in (*arrays, *given)))
    check.assert_close(got, want, 2.0 ** (9 - 24))


@pytest.mark.parametrize(
    ("length", "by_channel"),
    [
        *((1, False), (17, True), (65, False)),
        *(exhaustive(n, n % 2 == 0) for n in (1, 2, 15, 16, 17, 63, 64)),
        *(exhaustive(n, True) for n in (1, 65, 300)),
    ],
)
def test_delta_rule_of_any_length(length, by_channel):
    arrays = drawn(
        1, length, 2, 1 if length == 1 else 3, 1 if length == 1 else 11, 2, by_channel=by_channel
    )
    sequences.check_case(scan, sequences.gated_delta_rule, arrays, None, rounding=3e-6)


@pytest.mark.parametrize(
    ("dtype", "by_channel"), [("bfloat16", False), exhaustive("float16", True)]
)
def test_delta_rule_in_16_bits(dtype, by_channel):
    """All is computed in fp32, and rounded once: normalised queries and keys, too."""
    arrays = drawn(2, 70, 4, 8, 16, 2, by_channel=by_channel, dtype=dtype)
    options = {"rounding": 3e-6, "qk_l2norm": True}
    sequences.check_case(scan, sequences.gated_delta_rule, arrays, None, **options)


@pytest.mark.parametrize(
    ("by_channel", "implementation"),
    [(False, "xla"), *(exhaustive(True, i) for i in (None, "xla"))],
)
def test_delta_rule_in_float64(by_channel, implementation):
    """The specification itself, gradients included, is right far below fp32's rounding."""
    ids = packed_ids(2, 130, every=40)
    options = {"segment_ids": ids, "qk_l2norm": True}
    with jax.enable_x64(True):
        arrays = drawn(*SIZE, by_channel=by_channel, dtype="float64")
        given = cotangents(arrays)
        how = options | {"implementation": implementation, "return_final_state": True}
        got = check.value_and_grads(scan, arrays, given, **how)
        assert {v.dtype for v in jax.tree.leaves(got)} == {jnp.dtype("float64")}
        with pytest.raises(NotImplementedError, match="q is float64, and the kernels take"):
            scan(*arrays, implementation="mosaic")
    wide = map(np.asarray, (*arrays, *given))
    check.assert_close(got, sequences.gated_delta_rule(*wide, **options), 1e-13)


@pytest.mark.parametrize("size", [37, *(exhaustive(n) for n in (1, 2, 16))])
def test_inverse_of_a_triangle(size):
    """Couplings of parallel keys and β = 2 have powers beyond fp32's digits."""
    with jax.enable_x64(True):
        lower = np.tril(2 + 0.01 * np.random.default_rng(0).normal(size=(3, size, size)), -1)
        whole = np.eye(size) + lower
        got = reference.unit_lower_inverse(jnp.asarray(lower))
        np.testing.assert_allclose(got, np.linalg.inv(whole), rtol=0, atol=1e-10)
        tangent = np.tril(np.ones_like(lower), -1)
        _, along = jax.jvp(reference.unit_lower_inverse, (jnp.asarray(lower),), (tangent,))
        inverse = np.linalg.inv(whole)
        np.testing.assert_allclose(along, -inverse @ tangent @ inverse, rtol=0, atol=1e-8)
        rhs = jnp.ones((1, 1, 3, size, 2))
        solved = reference.solve(jnp.einsum, jnp.asarray(lower)[None, None], rhs)
        np.testing.assert_allclose(solved[0, 0], inverse @ rhs[0, 0], rtol=0, atol=1e-10)


# Absent arguments, options


@pytest.mark.parametrize("absent", ["g", exhaustive("beta"), "both"])
def test_delta_rule_absent_arguments(absent):
    """Without g nothing decays, without beta it is 1, without a state it begins at 0."""
    v, k, q, g, beta, state = drawn(1, 12, 2, 3, 4, 1)
    given = {"v": v, "k": k, "q": q, "g": g, "beta": beta}
    left_out = {"g", "beta"} if absent == "both" else {absent}
    given = {name: a for name, a in given.items() if name not in left_out}
    dout = jnp.sin(3 * v)
    run = lambda given: scan(**{"g": None, "beta": None} | given)
    out, (grads,) = check.program(run)((given,), dout)
    full = {"v": v, "k": k, "q": q, "g": 0 * g, "beta": 1 + 0 * beta} | given
    want, of_all = sequences.gated_delta_rule(
        *(np.asarray(a, np.float64) for a in (*full.values(), 0 * state, dout))
    )
    of_all = dict(zip(full, of_all[:5], strict=True))
    check.assert_close((out, grads), (want[0], {n: of_all[n] for n in grads}), 2e-6)


def test_delta_rule_scale():
    arrays = drawn(1, 5, 2, 3, 4, 1)
    check.assert_close(scan(*arrays, scale=-3.0), -6.0 * scan(*arrays), 1e-6)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"dtype": "float32"}, "q is float32, and the kernels take bfloat16"),
        ({"by_channel": True, "dtype": "float16"}, "q is float16, and the kernels take bfloat16"),
        ({"keys": 129}, "q has 129 channels a head, and the kernels take at most 128"),
        ({"num_segments": 2}, "it has num_segments"),
    ],
)
def test_delta_rule_kernels_refuse(kind, reason):
    size = 1, 5, 2, 3, kind.pop("keys", 4), 1
    options = {"segment_ids": jnp.zeros((1, 5), int), **kind} if "num_segments" in kind else {}
    arrays = drawn(*size, **({"dtype": "bfloat16"} | (kind if not options else {})))[:5]
    with pytest.raises(NotImplementedError, match=reason):
        scan(*arrays, implementation="mosaic", **options)
    assert not check.kernel_calls(check.lowered(functools.partial(scan, **options), *arrays))


def test_delta_rule_wrong_calls():
    v, k, q, g, beta, state = drawn(1, 5, 4, 3, 4, 2)
    right = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    for words, wrong in [
        (r"q must have shape \(B, L, G, K\).*got \(1, 5, 2, 0\)", {"q": q[..., :0]}),
        (r"k must have shape \(1, 5, 2, 4\) = \(B, L, G, K\), as q", {"k": k[..., :3]}),
        (r"v must have shape \(B, L, H, V\), with \(1, 5\) of q", {"v": v[:, :4]}),
        (r"q must have a number of heads that divides the 3 heads of v", {"v": v[:, :, :3]}),
        (r"g must have shape \(1, 5, 4\) = \(B, L, H\) of v, or \(B, L, H, K\)", {"g": g[0]}),
        (r"g must have shape \(1, 5, 4, 4\) = \(B, L, H, K\)", {"g": g[..., None]}),
        (r"beta must have shape \(1, 5, 4\) = \(B, L, H\)", {"beta": beta[..., None]}),
        (r"initial_state must have shape \(1, 4, 4, 3\)", {"initial_state": state[..., :2]}),
        ("scale must be finite", {"scale": float("inf")}),
    ]:
        with pytest.raises(ValueError, match=words):
            jaxkern.gated_delta_rule(**right | wrong)


# States and segments


@GDN_FIRST
def test_delta_rule_in_two_runs(by_channel):
    """A run that goes on from the state of another is one run of both."""
    *tokens, state = drawn(1, 38, 2, 3, 5, 1, by_channel=by_channel)

    def in_two(*arrays):
        *tokens, state = arrays
        outs = []
        for span in slice(0, 19), slice(19, 38):
            out, state = scan(*(v[:, span] for v in tokens), state, return_final_state=True)
            outs.append(out)
        return jnp.concatenate(outs, axis=1), state

    arrays = *tokens, state
    given = cotangents(arrays)
    whole = check.value_and_grads(scan, arrays, given, return_final_state=True)
    check.assert_close(check.program(in_two)(arrays, given), whole, 2e-6)


@EVERY
@KDA_FIRST
def test_delta_rule_of_packed_sequences(by_channel, implementation):
    """Segments that begin and end anywhere, some of one token."""
    arrays = drawn(*SIZE, by_channel=by_channel)
    how = {"segment_ids": packed_ids(2, 130, every=20), "rounding": 3e-6}
    sequences.check_case(scan, sequences.gated_delta_rule, arrays, implementation, **how)


@GDN_FIRST
def test_delta_rule_of_segments_with_states(by_channel):
    """Each as a run of its own; a segment that is absent leaves its state as it is."""
    *tokens, _ = drawn(1, 90, 2, 3, 5, 1, by_channel=by_channel)
    states = jnp.stack([drawn(1, 1, 2, 3, 5, 1, seed=i)[-1][0] for i in range(4)])[None]
    ids = jnp.repeat(jnp.array([[2, 0, 1]]), jnp.array([30, 30, 30]), axis=1)
    options = {"segment_ids": ids, "num_segments": 4, "return_final_state": True}
    out, final = scan(*tokens, states, **options)
    np.testing.assert_array_equal(final[:, 3], states[:, 3])
    for number, span in (2, slice(0, 30)), (0, slice(30, 60)), (1, slice(60, 90)):
        own = [v[:, span] for v in tokens]
        alone = scan(*own, states[:, number], return_final_state=True)
        check.assert_close((out[:, span], final[:, number]), alone, 1e-6)


@pytest.mark.parametrize(
    ("implementation", "by_channel", "order"),
    [
        (None, True, 1),
        *(exhaustive(*case) for case in [(None, False, 1), ("xla", True, 2)]),
    ],
)
def test_delta_rule_of_growing_states_in_short_segments(implementation, by_channel, order):
    """Over a chunk a state would grow by e^128, and over a segment of two tokens it does by e^4."""
    ones = jnp.ones((1, 2 * CHUNK, 1, 1))
    ids = jnp.arange(2 * CHUNK)[None] // 2
    run = functools.partial(jaxkern.gated_delta_rule, ones, ones, ones, segment_ids=ids)
    run = functools.partial(run, beta=0.1 * ones[..., 0], implementation=implementation)
    g = 2 * ones if by_channel else 2 * ones[..., 0]
    f = lambda g: jnp.sum(run(g=g))
    if order == 2:
        f = lambda g, f=f: jnp.sum(jax.grad(f)(g) ** 2)
    got = jax.jit(jax.grad(f))(g)
    assert np.isfinite(got).all()
    if order == 1:  # S = 0.1 and S' = 0.1 e²; o[1] = S' + 0.1 (1 − S')
        np.testing.assert_allclose(got.reshape(-1, 2)[0], [0, 0.9 * 0.1 * np.e**2], rtol=1e-5)


@EVERY
@GDN_FIRST
def test_delta_rule_bad_head_stays_alone(by_channel, implementation):
    """A NaN in one head of one row leaves every other head and row with the bits it had."""
    arrays = drawn(2, 70, 2, 3, 5, 2, by_channel=by_channel)  # a key head for each
    run = results_by_name(arrays, scan, NAMES, implementation=implementation)
    want = run()
    for name in ("v", "k", "q", "g", "beta"):
        got = run(name, 1, 4, 1)
        assert np.isnan(got["out"][1, 4, 1]).any()
        for n, v in got.items():
            heads = 1 if n in ("initial_state", "final") else 2
            for index in (0, slice(None)), (1, 0):
                at = (index[0], *[slice(None)] * (heads - 1), index[1])
                np.testing.assert_array_equal(v[at], want[n][at])


@EVERY
@KDA_FIRST
def test_delta_rule_nan_stays_in_its_segment(by_channel, implementation):
    """In the same chunk, behind it and before it, in the gradients too."""
    ids = jnp.repeat(jnp.array([[3, 1, 2]]), jnp.array([10, 10, 12]), axis=1).repeat(2, 0)
    arrays = drawn(2, 32, 2, 3, 5, 2, by_channel=by_channel)
    run = results_by_name(arrays, scan, NAMES, implementation=implementation)
    run = functools.partial(run, segment_ids=ids)
    check_other_segments(run, NAMES[:-1], implementation, 13, slice(10, 20))


@GDN_FIRST
def test_delta_rule_what_a_part_does_to_a_state(by_channel):
    """P S + R, and of the gradient its transpose; the last result is 0 where a segment begins."""
    v, k, q, g, beta, state = drawn(1, 20, 2, 3, 4, 1, by_channel=by_channel)
    grouped = lambda x: x[:, :, None]
    args = k, grouped(v), grouped(g), grouped(beta)
    dout, dfinal = cotangents((v, state))
    run = lambda v, state: scan(v, k, q, g, beta, state, return_final_state=True)
    (_, after), (_, before) = check.program(run)((v, state), (dout, dfinal))
    options = DeltaRuleOptions(True, "auto", 0.5)
    carry, back_carry = (
        jax.jit(functools.partial(each, options)) for each in (devices.CARRY, devices.BWD_CARRY)
    )
    P, R, whole = carry(*args, None)
    check.assert_close((P[:, 0] @ state + R[:, 0], whole), (after, np.ones(1)), 1e-6)
    back = q, k, *args[2:], grouped(dout)
    P, R, _ = back_carry(*back, None)
    check.assert_close(P[:, 0] @ dfinal + R[:, 0], before, 1e-6)
    ids = jnp.arange(20)[None] // 15
    P, _, whole = carry(*args, ids)
    assert not P.any()
    assert whole == 0


def test_delta_rule_saved_states():
    """Besides the arguments, a float32 state of every `SAVED_EVERY`-th token, and T of chunks."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    options = DeltaRuleOptions(False, "auto", 1.0, save=True)
    run = lambda *a: reference.reference_fwd(options, *a, None, None, None, None, None)
    length = 2 * SAVED_EVERY + 1
    out, final, states, T = jax.eval_shape(
        run, shape(2, length, 1, 4), shape(2, length, 1, 4), shape(2, length, 1, 3, 5)
    )
    assert (out.shape, out.dtype, final) == ((2, length, 1, 3, 5), jnp.bfloat16, None)
    assert (states.shape, states.dtype) == ((2, 3, 1, 3, 4, 5), jnp.float32)
    assert (T.shape, T.dtype) == ((2, 10, 1, 3, 64, 64), jnp.bfloat16)  # an even number of chunks


@pytest.mark.exhaustive
@KINDS
def test_delta_rule_memory(by_channel):
    """Value and gradient take far less than the states of all tokens."""
    size = (1, 4096, 4, 32, 64, 4)
    arrays = jax.eval_shape(functools.partial(drawn, *size, by_channel=by_channel))
    loss = lambda *a: jnp.sum(scan(*a) ** 2)
    compiled = jax.jit(jax.grad(loss, range(len(NAMES)))).lower(*arrays).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 0.2 * 4 * np.prod(size[:5])


# Kernels


INTERPRETED = {
    "groups": ((1, 130, 2, 64, 64, 1), {}),
    "packed": ((1, 130, 2, 64, 64, 2), {"segment_ids": packed_ids(1, 130, 30)}),
    "sizes between": ((1, 70, 2, 80, 100, 2), {"qk_l2norm": True}),
}
COMPILED = {
    "one token": ((4, 1, 3, 64, 20, 1), {}),
    "several chunks": ((2, 300, 4, 128, 128, 2), {}),
    "whole chunks": ((2, 512, 6, 64, 128, 6), {"qk_l2norm": True}),
    "wide values": ((1, 1000, 4, 256, 128, 2), {}),
    "narrow keys": ((2, 1000, 4, 128, 16, 4), {}),
    "packed chunks": ((2, 1000, 4, 128, 128, 2), {"segment_ids": packed_ids(2, 1000)}),
    "in parts": ((1, 6000, 2, 128, 64, 1), {"segment_ids": packed_ids(1, 6000, 2000)}),
    "more blocks than multiprocessors": ((2, 130, 36, 128, 128, 36), {}),
}


def plain(*arrays, segment_ids=None, **options):
    """A scan over time in the dtype of v, as a user would write it."""
    v, k, q, g, beta, state = (x.astype(arrays[0].dtype) for x in arrays)
    ids = jnp.zeros(v.shape[:2], int) if segment_ids is None else segment_ids
    new = ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1)
    return delta_rule(q, k, v, g, beta, state, new, **options)


def check_kernels(arrays, **options):
    """Errors are at most twice those of a plain scan in bf16."""
    options |= {"own": {"return_final_state": True}, "dtypes": ["bfloat16", "float32"]}
    oracle = sequences.gated_delta_rule
    check.check_accuracy(scan, plain, oracle, arrays, "mosaic", **options)


@pytest.mark.gpu
@KINDS
@check.PRODUCTS
@pytest.mark.parametrize(
    ("size", "options"),
    [exhaustive(*case, id=name) for name, case in INTERPRETED.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.compiled) for name, case in COMPILED.items()],
)
def test_delta_rule_kernels_accuracy(size, options, products, by_channel):
    with products():
        check_kernels(drawn(*size, by_channel=by_channel, dtype="bfloat16"), **options)


def test_delta_rule_kernels():
    """Two chunks, the second with two tokens, and fewer channels than a tile."""
    check_kernels(drawn(1, 66, 1, 16, 16, 1, dtype="bfloat16"))


@pytest.mark.exhaustive
def test_delta_rule_kernels_of_channels():
    """The first of two chunks has strong decays, so that each takes near tokens in its own way."""
    check_kernels(some_strong(drawn(1, 100, 1, 16, 16, 1, by_channel=True, dtype="bfloat16")))


@pytest.mark.exhaustive
@KINDS
def test_delta_rule_kernels_in_parts(by_channel, monkeypatch):
    """Two parts of a sequence are scanned at once, the second with tokens that are not there."""
    monkeypatch.setattr(kernel_arrays, "_parts", parts := mock.Mock(return_value=2))
    arrays = drawn(1, 300, 2, 16, 16, 1, by_channel=by_channel, dtype="bfloat16")
    check_kernels(arrays, segment_ids=packed_ids(1, 300, 200))
    assert parts.called


def test_parts_of_a_sequence_fill_a_gpu():
    """The case "in parts" has parts on a GPU, and there are none where heads are enough."""

    def parts(batch, length, heads):
        sizes = SimpleNamespace(batch=batch, length=length, heads=heads, slices=2, columns=4)
        with jaxkern.lowering_for("h100"):
            return kernel_arrays._parts(sizes)

    assert parts(1, 6000, 2) > 1
    assert parts(1, 16384, 8) > 1
    assert parts(1, 32768, 32) == parts(8, 4096, 16) == parts(1, 1000, 1) == 1


@pytest.mark.exhaustive
@KINDS
def test_delta_rule_kernels_without_races(by_channel):
    """Two warpgroups hand tiles to each other; both ways of KDA's pairs."""
    arrays = some_strong(drawn(1, 130, 1, 128, 32, 1, by_channel=by_channel, dtype="bfloat16"))
    run = lambda *a: scan(*a, implementation="mosaic", return_final_state=True)
    with check.without_races():
        out, vjp = jax.vjp(run, *arrays)
        jax.block_until_ready(vjp(out))


@pytest.mark.compiled
@KINDS
@check.PRODUCTS
@pytest.mark.parametrize("gates", KERNEL_GATES)
def test_delta_rule_kernels_gates(gates, products, by_channel):
    with products():
        arrays = drawn(1, 300, 2, 64, 128, 2, by_channel=by_channel, dtype="bfloat16")
        check_kernels(KERNEL_GATES[gates](arrays))


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("absent", "by_channel"),
    [("g", False), ("beta", False), pytest.param("beta", True, id="beta-KDA")],
)
def test_delta_rule_kernels_without(absent, by_channel):
    v, k, q, g, beta, _ = drawn(1, 70, 1, 64, 64, 1, by_channel=by_channel, dtype="bfloat16")
    full = {"g": jnp.zeros_like(g), "beta": jnp.ones_like(beta)}
    given = {"g": g, "beta": beta}
    call = functools.partial(scan, v, k, q, implementation="mosaic")
    with check.running("mosaic"):
        got = jax.jit(lambda: call(**given | {absent: None}))()
        want = jax.jit(lambda: call(**given | {absent: full[absent]}))()
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.exhaustive
@KINDS
def test_delta_rule_kernels_keep_nan_where_it_is(by_channel):
    """A NaN leaves other heads the bits they had, and of packed rows other segments' values.

    And their gradients.
    """
    arrays = drawn(1, 70, 2, 64, 64, 2, by_channel=by_channel, dtype="bfloat16")
    ids = jnp.repeat(jnp.array([[3, 1, 2]]), jnp.array([20, 20, 30]), axis=1)
    bad = (arrays[0].at[0, 25, 1].set(jnp.nan), *arrays[1:])
    dout = jnp.sin(3 * arrays[0])

    def call(arrays, **how):
        with check.running("mosaic"):
            found = check.value_and_grads(scan, arrays, dout, implementation="mosaic", **how)
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]

    others = np.delete(np.arange(70), slice(20, 40))
    for how in {}, {"segment_ids": ids}:
        (out, *grads), (bad_out, *bad_grads) = (call(a, **how) for a in (arrays, bad))
        assert np.isnan(bad_out[0, 25, 1]).all()
        assert any(np.isnan(x[:, 20:40, 1]).any() for x in bad_grads[:-1])
        for there, before in zip((bad_out, *bad_grads[:-1]), (out, *grads[:-1]), strict=True):
            if not how:
                np.testing.assert_array_equal(there[:, :, 0], before[:, :, 0])
                continue
            check.assert_close(there[:, :, 0], before[:, :, 0], 2.0**-6)
            check.assert_close(there[0, others, 1], before[0, others, 1], 2.0**-6)


def test_delta_rule_kernels_need_shared_memory():
    """With decays of channels a pass whose kernels find too little of it is plain JAX."""

    def runs(gpu, by_channel):
        arrays = drawn(1, 70, 1, 128, 128, 1, by_channel=by_channel, dtype="bfloat16")
        with jaxkern.lowering_for(gpu):
            return check.kernel_calls(check.lowered(scan, *arrays))

    assert runs("h100", True)
    assert runs("a10g", False)
    assert not runs("a10g", True)


# Transformations and meshes


both_results = functools.partial(ssd.both_results, scan, axis=2)


def token_by_token(v, k, q, g, beta, state, ids=None):
    out, final = plain(v, k, q, g, beta, state, segment_ids=ids)
    return out + jnp.sum(final, axis=2)[:, None]


RULES = ("vmap", "vmap(vmap)", "scan", "shard_map unchecked")
"""Transformations around a rule, which other ops show."""

DELTA_RULE = check.Op(
    name="gated_delta_rule",
    call=both_results,
    reference=token_by_token,
    arrays=lambda key: drawn(4, 3, 4, 2, 3, 1, seed=3),
    kernels=("", ""),
    axes="blhp blgn blgn blh blh bhnp -> blhp",
    features="h",
    channels="h",
    vmaps=[(0,) + (None,) * 5, (None, 0, None, 1, None, 0)],
    slow=[("grad", None), ("grad(grad)", None), ("jvp", None)],
    cells=[
        *((name, None) for name in check.TRANSFORMATIONS if name not in (*check.ALONE, *RULES)),
        *(("jvp", "xla"), ("explicit mesh", "xla")),
    ],
)
PACKED = check.Op(
    name="gated_delta_rule, KDA of groups",
    call=both_results,
    reference=token_by_token,
    arrays=lambda key: (*drawn(4, 5, 8, 2, 3, 4, by_channel=True, seed=3), packed_ids(4, 5)),
    kernels=("", ""),
    axes="blhp blgn blgn blhn blh bhnp bl -> blhp",
    features="h",
    channels="hg",
    vmaps=[(0,) * 7],
    slow=[("auto mesh", None)],
    cells=[
        *(("auto mesh", None), ("vmap(grad)", None), ("grad(grad)", None), ("jvp", None)),
        *(("rows and channels split", i) for i in (None, "xla")),
    ],
)
KERNELS = check.Op(
    name="gated_delta_rule, kernels",
    call=both_results,
    reference=both_results,
    arrays=lambda key: drawn(4, 5, 4, 2, 3, 4, dtype="bfloat16", seed=3),
    kernels=("gated_delta_rule_fwd", "gated_delta_rule_bwd"),
    axes="blhp blhn blhn blh blh bhnp -> blhp",
    features="h",
    channels="h",
    slow=[("kernels lowered", "mosaic")],
    vmaps=[(0,) + (None,) * 5, (None, 0, None, 1, None, 0)],
    tolerance=2.0**-6,
    cells=[
        (name, check.ALONE.get(name, "mosaic"))
        for name in check.TRANSFORMATIONS
        if name not in ("value", "vmap", "vmap(vmap)", "export")
        and (check.ON_GPU or name not in ("grad", "grad(grad)", "vmap(grad)"))
    ],
)
KDA_KERNELS = dataclasses.replace(
    KERNELS,
    name="gated_delta_rule, kernels of KDA",
    arrays=lambda key: drawn(4, 5, 4, 2, 3, 4, by_channel=True, dtype="bfloat16", seed=3),
    kernels=("gated_delta_rule_fwd", "gated_delta_rule_channels_bwd"),
    axes="blhp blhn blhn blhn blh bhnp -> blhp",
    slow=[("auto mesh", "mosaic"), *KERNELS.slow],
)
test_delta_rule_transformations = check.transformations(DELTA_RULE, PACKED, KERNELS, KDA_KERNELS)


def test_delta_rule_in_forward_mode():
    arrays = drawn(1, 3, 2, 2, 3, 1)
    along = lambda f: jax.jit(lambda *a: jax.jvp(f, a, tuple(map(jnp.cos, a))))
    f = functools.partial(both_results, implementation=None)
    check.assert_close(along(f)(*arrays), along(token_by_token)(*arrays), 2e-6)


@pytest.mark.exhaustive
@KINDS
def test_delta_rule_exported(by_channel):
    """Value and gradients, for a GPU that may not be here and for the CPU."""
    arrays = drawn(1, 70, 2, 3, 4, 1, by_channel=by_channel)
    f = jax.jit(jax.grad(lambda *a: jnp.sum(both_results(*a, implementation=None) ** 2), range(6)))
    exported = export.export(f, platforms=("cuda", "cpu"))(*arrays)
    again = export.deserialize(exported.serialize())
    check.assert_close(again.call(*arrays), f(*arrays))
