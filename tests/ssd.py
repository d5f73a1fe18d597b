"""Tools of tests of scans: a float64 oracle, plain JAX, inputs, results by name, checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from tests import check

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
ALONG = ("x", "dt", "B", "C", "z")
INF = float("inf")
STEP = jaxkern.ssd_step


def oracle(*arrays, dt_softplus=True, dt_limit=(0.0, INF), segment_ids=None):
    """Output, final state and gradients in NumPy, one token at a time, up and back.

    `arrays` are those of NAMES and the cotangents of both results; D, z, dt_bias, the states and
    their cotangents may be None. With A (H, N), a rate for each state, heads of one channel are
    those of selective_scan.
    """
    x, dt, A, B, C, D, z, dt_bias, h, dout, dfinal = arrays
    batch, length, heads, channels = x.shape
    groups = B.shape[2]
    of_head = lambda v: np.repeat(v, heads // groups, axis=1)[:, :, None]  # (B, H, 1, N)
    of_group = lambda v: v.reshape(batch, groups, -1, *v.shape[2:]).sum((2, 3))
    D = np.zeros(heads) if D is None else D
    h, dh = (
        np.zeros((batch, heads, channels, B.shape[3])) if v is None else v.copy()
        for v in (h, dfinal)
    )
    ids = np.zeros((batch, length)) if segment_ids is None else np.asarray(segment_ids)
    keep = np.ones((batch, length, 1, 1, 1))
    keep[:, 1:, 0, 0, 0] = ids[:, 1:] == ids[:, :-1]
    raw = dt if dt_bias is None else dt + dt_bias
    smooth = np.logaddexp(raw, 0) if dt_softplus else raw
    slope = 1 / (1 + np.exp(-raw)) if dt_softplus else np.ones_like(raw)
    slope = slope * (smooth >= dt_limit[0]) * (smooth <= dt_limit[1])
    step = np.minimum(np.maximum(smooth, dt_limit[0]), dt_limit[1])
    rates, weight = A.reshape(heads, 1, -1), D.reshape(heads, -1)
    decays = np.exp(step[..., None, None] * rates)  # (B, L, H, 1, 1 or N)
    gate, dgate = (1.0, 0.0) if z is None else check.activated("silu", z)
    before = np.empty((length, *h.shape))
    y = np.empty_like(x)
    for t in range(length):
        before[t] = keep[:, t] * h
        enters = (step[:, t, :, None] * x[:, t])[..., None] * of_head(B[:, t])
        h = decays[:, t] * before[t] + enters
        y[:, t] = np.sum(of_head(C[:, t]) * h, axis=-1) + weight * x[:, t]
    final, out = h, y * gate
    dy, dz = dout * gate, dout * y * dgate
    dx, dstep = dy * weight, np.zeros_like(dt)
    dA, dB, dC = np.zeros((heads, rates.shape[2])), np.zeros_like(B), np.zeros_like(C)
    for t in reversed(range(length)):
        entered = (step[:, t, :, None] * x[:, t])[..., None]
        after = decays[:, t] * before[t] + entered * of_head(B[:, t])
        dh += dy[:, t, :, :, None] * of_head(C[:, t])
        dC[:, t] = of_group(dy[:, t, :, :, None] * after)
        dB[:, t] = of_group(dh * entered)
        into = np.sum(dh * of_head(B[:, t]), axis=-1)
        ddecay = dh * before[t] * decays[:, t]
        dx[:, t] += into * step[:, t, :, None]
        dstep[:, t] = np.sum(into * x[:, t], axis=-1) + np.sum(ddecay * rates, axis=(-2, -1))
        by_rate = np.sum(ddecay * step[:, t, :, None, None], axis=(0, 2))  # (H, N)
        dA += by_rate if A.ndim == 2 else by_rate.sum(-1, keepdims=True)
        dh = keep[:, t] * dh * decays[:, t]
    ddt, dD = dstep * slope, (dy * x).sum((0, 1))
    dD = dD if D.ndim == 2 else dD.sum(-1)
    return (out, final), (dx, ddt, dA.reshape(A.shape), dB, dC, dD, dz, ddt.sum((0, 1)), dh)


def plain(*arrays, dt_softplus=True, dt_limit=(0.0, INF), segment_ids=None):
    """What a user would write: a scan over time, in the dtype of x."""
    x, dt, A, B, C, D, z, dt_bias, h = (v.astype(arrays[0].dtype) for v in arrays)
    dt = dt + dt_bias
    dt = jax.nn.softplus(dt) if dt_softplus else dt
    dt = jnp.where(dt < dt_limit[0], dt_limit[0], jnp.where(dt > dt_limit[1], dt_limit[1], dt))
    B, C = (jnp.repeat(v, x.shape[2] // v.shape[2], axis=2) for v in (B, C))
    ids = jnp.zeros(x.shape[:2], int) if segment_ids is None else segment_ids
    keep = (ids == jnp.concatenate([ids[:, :1], ids[:, :-1]], 1)).astype(x.dtype)
    rates = A.reshape(x.shape[2], 1, -1)

    def step(h, token):
        x, dt, b, c, keep = token
        decay = jnp.exp(dt[..., None, None] * rates) * keep[:, None, None, None]
        h = decay * h + (dt[..., None] * x)[..., None] * b[:, :, None]
        return h, jnp.sum(h * c[:, :, None], axis=-1)

    tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, keep))
    h, y = jax.lax.scan(step, h, tokens)
    D = D if D.ndim == 2 else D[:, None]
    return (jnp.moveaxis(y, 0, 1) + D * x) * jax.nn.silu(z), h


def drawn(x, dt, rates, B, D, state, dtype, weight_dtype=None, seed=0):
    """Arrays of these shapes in the order of NAMES, `rates` a function of a generator.

    Like a Mamba block's: step sizes from 0.01 to 1.
    """
    rng = np.random.default_rng(seed)
    normal = lambda shape: rng.normal(size=shape)
    of_tokens = normal(x), normal(dt) - 2, rates(rng), normal(B), normal(B)
    arrays = *of_tokens, 1 + 0.1 * normal(D), normal(x), 0.5 * normal(dt[2:]), normal(state)
    return tuple(
        jnp.asarray(v.astype(jnp.dtype(dtype if name in ALONG else weight_dtype or dtype)))
        for name, v in zip(NAMES, arrays, strict=True)
    )


def inputs_and_state(
    *size, groups=1, dtype="float32", weight_dtype=None, of_channels=False, seed=0
):
    """Like a Mamba-2 block's, with rates from 1 to 16; `size` is (B, L, H, P, N)."""
    batch, length, heads, channels, states = size
    return drawn(
        size[:4],
        size[:3],
        lambda rng: -rng.uniform(1.0, 16.0, heads),
        (batch, length, groups, states),
        (heads, channels) if of_channels else (heads,),
        (batch, heads, channels, states),
        *(dtype, weight_dtype, seed),
    )


def with_rates(factor, arrays):
    """Rates near 0 forget nothing, so that rounding errors add up; above 0 states grow."""
    x, dt, A, *rest = arrays
    return x, dt, factor * A, *rest


def below_zero(x, dt, A, B, C, D, z, dt_bias, *initial_state):
    """Step sizes for no softplus, some below 0."""
    dt = jnp.exp(dt) - 0.1
    assert 0 < jnp.sum(dt < 0) < dt.size
    return x, dt, A, B, C, D, z, 0.01 * dt_bias, *initial_state


def scan(*arrays, implementation, op=jaxkern.ssd, dt_softplus=True, **options):
    """An op of arrays in the order of NAMES."""
    options |= {"dt_softplus": dt_softplus, "implementation": implementation}
    return op(*arrays[:7], **dict(zip(NAMES[7:], arrays[7:], strict=False)), **options)


def cotangents(arrays):
    """Cotangents of the output and of the final state."""
    return jnp.sin(3 * arrays[0]), jnp.cos(arrays[-1])


def results_by_name(arrays, of=scan, names=NAMES, **how):
    """``run(name, *at)``: results and gradients by name, where an array has NaN at an index.

    Without a name none has. Those of ``out`` and ``final`` are of the cotangents.
    """
    names = (*names, "out", "final")
    given = dict(zip(names, (*arrays, *cotangents(arrays)), strict=True))

    def run(name=None, *at, **options):
        values = {n: np.array(v) if n == name else v for n, v in given.items()}
        if name is not None:
            values[name][at] = np.nan
        *values, dout, dfinal = values.values()
        program = check.program(of, return_final_state=True, **how)
        results, grads = program(tuple(values), (dout, dfinal), **options)
        return dict(zip(names, (*grads, *results), strict=True))

    return run


def check_others(got, want):
    """Every row and head but the third head of row 1 has the bits that it had, by name."""
    others = lambda v: np.delete(v.reshape(-1, *v.shape[2:]), v.shape[1] + 2, 0)
    of_kinds = [
        (("out", "x", "dt", "z"), lambda v: others(v.swapaxes(1, 2))),
        (("final", "initial_state"), others),
        (("B", "C"), lambda v: v[0]),  # sums over heads: the other row's and group's stay
        (("B", "C"), lambda v: v[:, :, 0] if v.ndim == 4 else v[0]),
        (("A", "D", "dt_bias"), lambda v: np.delete(v, 2, 0)),  # over rows: the other heads'
    ]
    for names, kept in of_kinds:
        for n in got.keys() & set(names):
            np.testing.assert_array_equal(kept(got[n]), kept(want[n]))


def check_other_segments(run, names, implementation, time, own):
    """A NaN of row 1 at a time in tokens `own`, in any of these arrays, leaves all others' bits.

    `run` is a :func:`results_by_name`.
    """
    want, same = run(), np.testing.assert_array_equal
    others = lambda v: np.delete(v[1], own, 0)
    # JAX's own derivative of a product takes NaN of a cotangent to all of a chunk.
    for name in (*names, *(["out"] if implementation is None else [])):
        got = run(name, 1, time)
        assert name == "out" or np.isnan(got["out"][1, time]).all()
        assert any(np.isnan(got[n][1, own]).any() for n in names)
        for n in ("final", "initial_state"):
            same(got[n], want[n])
        for n in ("out", *names):
            same(others(got[n]), others(want[n]))
            same(got[n][0], want[n][0])


def check_scan(scan, plain, oracle, arrays, implementation, rounding=0.0, **options):
    """With an initial state among the arrays, the final state and its cotangent are checked too.

    A `rounding` of None bounds errors by plain JAX's alone. Terms of dD, dout · silu(z) · x, may
    cancel, and rounding one in fp32 is no error of the op's.
    """
    full, length = len(arrays) == len(NAMES), arrays[0].shape[1]

    def of_case(*wide, **options):
        x, z, dout = wide[0], wide[6], wide[8 + full]
        given = wide if full else (*wide[:8], None, dout, None)
        results, grads = oracle(*given, **options)
        terms = np.linalg.norm(np.abs(dout * z / (1 + np.exp(-z)) * x).sum((0, 1)))
        return (results, grads, {7: terms}) if full else (results[0], grads[:8], {6: terms})

    own = {name: options.pop(name) for name in {"checkpoint_every"} & options.keys()}
    check.check_accuracy(
        scan,
        plain,
        of_case,
        arrays,
        implementation,
        own=own | {"return_final_state": full},
        dtypes=[str(arrays[0].dtype), "float32"][: 1 + full],
        rounding=None if rounding is None else rounding + 3e-6 * max(1, length / 1024) ** 0.5,
        **options,
    )


def check_case(arrays, implementation, **options):
    """Kernels may round what their products take to 16 bits, and so may the states that are saved.

    So the second bound, on the error alone, is plain JAX's.
    """
    saved = 2.0**-9 if arrays[0].dtype == jnp.bfloat16 and implementation is None else 0.0
    rounding = None if implementation == "mosaic" else saved
    check_scan(scan, plain, oracle, arrays, implementation, rounding, **options)


def check_reference(scan, oracle, make, limits, tolerance, implementation=None, **options):
    """Holds the specification itself, gradients included, to far below fp32's rounding.

    ``make(dtype=...)`` gives its arrays; where the lower limit is below 0 there is no softplus.
    """
    of_steps = {"dt_limit": limits, "dt_softplus": limits[0] > 0}
    with jax.enable_x64(True):
        arrays = make(dtype="float64")
        given = cotangents(arrays)
        options |= of_steps | {"implementation": implementation, "return_final_state": True}
        got = check.value_and_grads(scan, arrays, given, **options)
        assert got[0][0].dtype == got[0][1].dtype == jnp.float64
        of_steps["segment_ids"] = options["segment_ids"]
        check.assert_close(got, check.in_float64(oracle, *arrays, *given, **of_steps), tolerance)
        with pytest.raises(NotImplementedError, match="x is float64"):
            scan(*arrays, implementation="mosaic")


def packed_ids(batch, length, every=4):
    """Segments of `every` tokens in the mean, with other ends in each row."""
    new = np.random.default_rng(0).integers(0, every, (batch, length)) == 0
    return jnp.asarray(np.cumsum(new, axis=1), jnp.int32)


def both_results(scan, *arrays, implementation="xla", axis=-1, **options):
    """One array that depends on the output and on the final state, a sum over `axis` of this."""
    if jnp.issubdtype(arrays[-1].dtype, jnp.integer):
        *arrays, options["segment_ids"] = arrays
    out, final = scan(*arrays, implementation=implementation, return_final_state=True, **options)
    return out + jnp.sum(final, axis=axis)[:, None]


def with_groups(op, arrays, axes, slow=()):
    """An op of the matrix with groups and segments, both of which can be split."""
    return dataclasses.replace(
        op,
        name=f"{op.name}, groups",
        arrays=lambda key: (*arrays(), packed_ids(4, 5)),
        axes=axes,
        channels=f"{op.features}g",
        vmaps=[(0,) * 10],
        slow=slow,
        cells=[
            *(("auto mesh", None), ("vmap(grad)", None)),
            *(("rows and channels split", i) for i in (None, "xla")),
        ],
    )
