"""dropout: the generator, the mask's independence of everything but key, rate and place."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkern
from bench.modules import kernel_modules
from jaxkern.mosaic import elementwise as generator
from jaxkern.ops import dropout as op
from tests import check
from tests.check import PLAIN
from tests.test_activations import cases, exhaustive, gradients, normal, oracle_of

KEY = jax.random.key(5)
MOSAIC_FIRST = check.combinations("implementation", ["mosaic", "xla"], few=1)


def philox(counter, key):
    """Philox-4x32-10 in Python's integers."""
    a, b, c, d = counter
    k, l = key
    for _ in range(10):
        low, high = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (high >> 32) ^ b ^ k, high % 2**32, (low >> 32) ^ d ^ l, low % 2**32
        k, l = (k + 0x9E3779B9) % 2**32, (l + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def halves(group, words):
    """The eight random numbers of 16 bits of a group of elements, by four words of a key."""
    drawn = philox((group % 2**32, group >> 32, *words[2:]), words[:2])
    return [half for w in drawn for half in (w & 0xFFFF, w >> 16)]


def keep(key, rate, shape):
    """The mask by its definition."""
    words = [int(w) for w in np.asarray(jax.random.key_data(key))]
    words += [0] * (4 - len(words))
    size, threshold = int(np.prod(shape)), round(float(np.float32(rate)) * 65536)
    bits = [half for group in range(-(-size // 8)) for half in halves(group, words)]
    p = threshold / 65536
    return (np.asarray(bits[:size]) >= threshold).reshape(shape), 1 / (1 - p) if p < 1 else 0.0


def dropped(x, rate=0.3, key=KEY):
    mask, scale = keep(key, rate, x.shape)
    return np.where(mask, np.asarray(x) * np.float32(scale), np.float32(0))


PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]  # its digits


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (PI[:4], PI[4:], "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_generator_gives_the_published_numbers(counter, key, words):
    """The known answers that come with Random123."""
    got = generator.philox([jnp.uint32(c) for c in counter], [jnp.uint32(k) for k in key])
    assert " ".join(f"{int(w):08x}" for w in got) == words
    assert " ".join(f"{w:08x}" for w in philox(counter, key)) == words


@pytest.mark.parametrize(
    ("shape", "key", "implementation"),
    cases(
        [((3, 1000), jax.random.key(11, impl="rbg")), ((5, 33), jax.random.PRNGKey(11))],
        [((), jax.random.key(11)), ((2, 3, 44), jax.random.PRNGKey(11))],
    ),
)
def test_mask_is_as_defined(shape, key, implementation):
    x = jnp.ones(shape)
    f = functools.partial(jaxkern.dropout, rate=0.3, key=key)
    [(out, (dx,))] = gradients(implementation, [(f, (x,), x)])
    np.testing.assert_array_equal(out, dropped(x, 0.3, key))
    np.testing.assert_array_equal(dx, out)


MASKS = {shape: keep(KEY, 0.25, shape)[0] for shape in ((3, 304), (8, 2, 40))}


def plain_dropout(x, activation=None):
    """What a user would write, with our mask."""
    value = PLAIN[activation](x) if activation else x
    return jnp.where(MASKS[x.shape], value / jnp.asarray(0.75, x.dtype), jnp.zeros((), x.dtype))


@pytest.mark.parametrize(
    ("activation", "dtype", "implementation"),
    cases(
        [(None, "bfloat16"), ("silu", "float32")],
        # Of which sigmoid is not 0 of 0.
        [("relu_squared", "float32"), ("sigmoid", "float32"), ("gelu_tanh", "bfloat16")],
    ),
)
def test_dropout_accuracy(activation, dtype, implementation):
    call, plain = functools.partial(jaxkern.dropout, rate=0.25, key=KEY), plain_dropout
    x, options = normal((3, 304), dtype), {"activation": activation}
    check.check_accuracy(call, plain, oracle_of(plain), (x,), implementation, **options)


@MOSAIC_FIRST
@pytest.mark.gpu
def test_dropout_add_accuracy(implementation):
    arrays = normal((3, 304), "float32", seed=1), normal((3, 304), "bfloat16")
    call = lambda r, x, **how: jaxkern.dropout_add(x, r, 0.25, KEY, **how)
    plain = lambda r, x: r + plain_dropout(x)
    check.check_accuracy(call, plain, oracle_of(plain), arrays, implementation)


@MOSAIC_FIRST
@pytest.mark.gpu
def test_rates(implementation):
    """Rates of 0 and 1, and mapped ones; a NaN that is dropped is a zero, activated too."""
    x = jnp.asarray([1.0, -2.5, np.inf, np.nan, 1e-37, 1e38] * 60)
    f = lambda rate: functools.partial(jaxkern.dropout, rate=rate, key=KEY)
    run = lambda x, rate, **how: jax.vmap(lambda rate: f(rate)(x, **how))(rate)
    rates = jnp.asarray([0.3, 1.5])
    bad = jnp.ones(x.size).at[::2].set(np.nan)
    calls = [(f(rate), (x,), x) for rate in (0, jnp.float32(1), 0.3)]
    calls += [(functools.partial(run, rate=rates), (x,), jnp.stack([x, x]))]
    calls += [(functools.partial(f(0.3), activation="silu"), (bad,), x)]
    *found, (mapped, _), (of_bad, _) = gradients(implementation, calls)
    wants = x, np.zeros(x.size), dropped(x, 0.3)
    for want, (out, (dx,)) in zip(wants, found, strict=True):
        np.testing.assert_array_equal(out, want)
        np.testing.assert_array_equal(dx, want)
    np.testing.assert_array_equal(mapped, [wants[2], wants[1]])
    np.testing.assert_allclose(of_bad, dropped(jax.nn.silu(bad)), rtol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def many(n, rate, key):
    return jaxkern.dropout(jnp.ones(n), rate, key, implementation="xla")


@pytest.mark.exhaustive
def test_masks_are_independent():
    """From those of neighbours, other places in a group, other and split keys, and other rows.

    All within five standard deviations over 2²⁰ elements, and the fraction of zeros too.
    """
    n = 1 << 20
    for rate, seed in itertools.product((0.01, 0.1, 0.5, 0.9), range(3)):
        zeros = np.mean(np.asarray(many(n, rate, jax.random.key(seed))) == 0)
        assert abs(zeros - rate) < 5 * np.sqrt(rate * (1 - rate) / n), (rate, seed)
    draw = lambda key: np.asarray(many(n, 0.5, key)) - 1  # ±1
    base = draw(KEY)
    others = [np.roll(base, shift) for shift in (*range(1, 18), 64, 1024, 4096)]
    keys = [jax.random.key(4), jax.random.key(6), *jax.random.split(KEY, 4)]
    keys += [jax.random.fold_in(KEY, 1), jax.random.key(5 + 2**16)]
    others += [draw(key) for key in keys]
    for i, other in enumerate(others):
        deviation = float(np.sum(base * other)) / np.sqrt(n)
        assert abs(deviation) < 5, (i, deviation)
    # All 256 patterns of a group are equally frequent.
    patterns = np.packbits((base > 0).reshape(-1, 8), axis=1).reshape(-1)
    expected = patterns.size / 256
    chi_squared = np.sum((np.bincount(patterns, minlength=256) - expected) ** 2 / expected)
    assert abs(chi_squared - 255) < 5 * np.sqrt(2 * 255), chi_squared


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "parts"),
    [((4, 6, 12), (1, 3, 3)), exhaustive((4, 6, 32), (2, 2, 1)), exhaustive((6, 21), (2, 7))],
)
def test_kernel_of_a_part_draws_the_part(shape, parts):
    """The kernel that a device of a mesh launches, here for the last block of the array."""
    x = normal(shape, "float32")
    want = dropped(x)
    options = op.DropoutOptions("dropout", None, "mosaic", shape)
    here = options if check.ON_GPU else dataclasses.replace(options, mode="interpret")
    seeds = op._key_words(KEY), op._rate_words(0.3)
    sizes = [n // p for n, p in zip(shape, parts, strict=True)]
    where = tuple(slice(n - size, n) for n, size in zip(shape, sizes, strict=True))
    args = x[where], None, *seeds, *(jnp.arange(s.start, s.stop, dtype="uint32") for s in where)
    with check.in_kernels():
        (got,) = jax.jit(functools.partial(op.launch_forward, here))(*args)
    np.testing.assert_array_equal(got, want[where])
    assert len(kernel_modules(functools.partial(op.launch_forward, options), *args)) == 1


def test_positions_beyond_32_bits():
    """Where an array has more than 2³⁵ elements the counter's second word counts on."""
    key = op._key_words(KEY)
    row = 2**19 + 3
    positions = jnp.asarray([row], jnp.uint32), jnp.arange(16, dtype=jnp.uint32)
    bits = jax.jit(functools.partial(op.random_bits, (2**20, 2**17)))(key, positions)
    groups = [(row * 2**17 + c) // 8 for c in (0, 8)]
    assert groups[0] > 2**32
    words = [int(w) for w in np.asarray(jax.random.key_data(KEY))] + [0, 0]
    want = [half for group in groups for half in halves(group, words)]
    np.testing.assert_array_equal(bits[0], want)


@pytest.mark.parametrize(
    ("of_x", "of_key", "implementation"), cases([(0, 0)], [(0, None), (None, 0)])
)
def test_vmap_of_keys(of_x, of_key, implementation):
    x = normal((3, 70), "float32") if of_x == 0 else normal((70,), "float32")
    key = jax.random.split(KEY, 3) if of_key == 0 else KEY

    def run(x, key):
        f = functools.partial(jaxkern.dropout, rate=0.3, key=key, implementation=implementation)
        out, vjp = jax.vjp(f, x)
        return out, *vjp(jnp.ones_like(out))

    with check.running(implementation):
        results = jax.jit(jax.vmap(run, (of_x, of_key)))(x, key)
    for i, (out, dx) in enumerate(zip(*results, strict=True)):
        of_i = key[i] if of_key == 0 else KEY
        np.testing.assert_array_equal(out, dropped(x[i] if of_x == 0 else x, key=of_i))
        np.testing.assert_array_equal(dx, dropped(jnp.ones(70), key=of_i))


def test_backward_saves_no_mask():
    x = normal((4, 64), "bfloat16")
    saved = lambda f: jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(f, x)[1], x))
    large = lambda f: [a for a in saved(f) if a.size >= x.size]
    for implementation in (None, "xla"):
        run = functools.partial(jaxkern.dropout, rate=0.5, key=KEY, implementation=implementation)
        assert large(run) == []
        assert [a.dtype for a in large(functools.partial(run, activation="silu"))] == [x.dtype]


def test_dropout_errors():
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"rate must be between 0 and 1, got 1.5"):
        jax.jit(lambda x: jaxkern.dropout(x, 1.5, KEY))(x)
    for error, message, wrong in (
        (ValueError, "rate must be between 0 and 1, got nan", {"rate": float("nan")}),
        (TypeError, r"rate must be .* got an array of shape \(2,\)", {"rate": jnp.zeros(2)}),
        (TypeError, "rate must be a number, got str", {"rate": "half"}),
        (TypeError, "rate must be a real number, got", {"rate": True}),
        (TypeError, "rate must be a real number, got", {"rate": 1j}),
        (TypeError, r"key must be a key of jax\.random, got 3; jax\.random", {"key": 3}),
        (TypeError, r"one key of .*\(3,\).*jax.vmap", {"key": jax.random.split(KEY, 3)}),
        (ValueError, r'activation must be one of "relu".*got \'mish\'', {"activation": "mish"}),
    ):
        with pytest.raises(error, match=message):
            jaxkern.dropout(x, **{"rate": 0.5, "key": KEY} | wrong)
    with pytest.raises(ValueError, match=r"residual must have shape \(2, 4\).*got \(4,\)"):
        jaxkern.dropout_add(x, x[0], 0.5, KEY)


@pytest.mark.compiled
@pytest.mark.large
def test_dropout_beyond_int32():
    """More than 2³¹ elements: the last are right."""
    m, n = (1 << 19) + 3, 4096 + 256
    x = jnp.ones((m, n), jnp.bfloat16)
    out = jax.jit(lambda x: jaxkern.dropout(x, 0.5, KEY))(x)
    key = op._key_words(KEY)
    for first in (0, m // 2, m - 5):
        positions = jnp.arange(first, first + 5, dtype=jnp.uint32), jnp.arange(n, dtype=jnp.uint32)
        want = 2 * (op.random_bits((m, n), key, positions) >= 32768)
        np.testing.assert_array_equal(out[first : first + 5].astype(jnp.int32), want)


DROPOUT = check.Op(
    name="dropout",
    call=lambda x, **how: jaxkern.dropout(x, 0.25, KEY, activation="silu", **how),
    reference=functools.partial(plain_dropout, activation="silu"),
    arrays=lambda key: (jax.random.normal(key, (8, 2, 40)),),
    kernels=("dropout_fwd", "dropout_bwd"),
    axes="mtd -> mtd",
    features="d",
    vmaps=[(0,), (1,)],
    runs_again=False,
    once=True,
    # Each shard is a whole array and draws its own mask: test_dropout_in_shard_map.
    without=("shard_map", "shard_map unchecked"),
)
test_dropout_transformations = check.transformations(DROPOUT)


@pytest.mark.gpu
@pytest.mark.parametrize("check_vma", [True, exhaustive(False)])
def test_dropout_in_shard_map(check_vma):
    """Each shard draws as an array of its own; a gradient of what is shared is summed."""
    count = min(4, len(jax.devices()))
    mesh = check.mesh_of(AxisType.Auto, count, names=("data",))
    x, residual = normal((8, 40), "float32"), normal((8 // count, 40), "float32", seed=1)

    def local(x, residual):
        key = jax.random.fold_in(KEY, jax.lax.axis_index("data"))
        return jaxkern.dropout_add(x, residual, 0.3, key)

    specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "check_vma": check_vma}
    mapped = jax.shard_map(local, mesh=mesh, **specs)
    plain = lambda x, residual, implementation: mapped(x, residual)
    [(out, (dx, dresidual))] = gradients(None, [(plain, (x, residual), jnp.ones_like(x))])
    keys = [jax.random.fold_in(KEY, i) for i in range(count)]
    shards = lambda x: zip(np.split(np.asarray(x), count), keys, strict=True)
    drop = lambda x: np.stack([dropped(shard, key=key) for shard, key in shards(x)])
    check.assert_close(out, (residual + drop(x)).reshape(8, 40), 1e-6)
    np.testing.assert_array_equal(dresidual, jnp.full_like(residual, count))
    np.testing.assert_array_equal(dx, drop(jnp.ones_like(x)).reshape(8, 40))
