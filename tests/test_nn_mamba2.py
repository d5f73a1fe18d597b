"""What the Mamba-2 block has of its own: sizes, norms of groups, initial values, transformers'."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.nn import mamba2
from tests import check
from tests.layers import MAMBA2

SIZES = mamba2.Sizes(8, d_state=3, d_conv=3, headdim=4, ngroups=2)


def draw(sizes, *, seed=0):
    """Random parameters, with the rates and step sizes of a block at the start of its training."""
    rng = np.random.default_rng(seed)
    d, e, h, u = sizes.d_model, sizes.d_inner, sizes.heads, sizes.d_convolved
    shapes = {
        "in_proj": (d, e + u + h),
        "conv_weight": (u, sizes.d_conv),
        "conv_bias": (u,),
        "dt_bias": (h,),
        "A_log": (h,),
        "D": (h,),
        "norm_weight": (e,),
        "out_proj": (e, d),
        "in_bias": (e + u + h,),
        "out_bias": (d,),
    }
    values = {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()}
    values |= {"A_log": np.log(rng.uniform(1, 16, h)), "dt_bias": values["dt_bias"] - 3}
    return mamba2.Weights(**{n: jnp.asarray(v, jnp.float32) for n, v in values.items()})


def block_float64(weights, sizes, x):
    """The block on x (B, L, D) in float64."""
    return np.stack([MAMBA2.float64(weights, sizes, row) for row in x])


@functools.cache
def jitted(f, **options):
    return jax.jit(functools.partial(f, **options), static_argnums=1)


def inputs(sizes, length=9):
    return jax.random.normal(jax.random.key(1), (2, length, sizes.d_model))


@pytest.mark.parametrize(
    "options",
    [
        {"norm_groups": 1},
        {"norm_groups": 8, "ngroups": 1},
        {"dt_limit": (0.04, 0.06), "norm_eps": 0.1},
        {"headdim": 16, "ngroups": 1},
        {"headdim": 1, "ngroups": 16},
    ],
    ids=str,
)
def test_mamba2_of_other_sizes(options):
    """Norms of other groups than the scan's, limits of step sizes, one head, heads of a channel."""
    sizes = dataclasses.replace(SIZES, **options)
    weights, x = draw(sizes), inputs(sizes)
    got = jitted(mamba2.mamba2)(weights, sizes, x)
    check.assert_close(got, block_float64(weights, sizes, x), 1e-6)


def test_mamba2_with_weights_of_the_input_for_each_channel():
    weights, x = draw(SIZES), inputs(SIZES)
    D = jax.random.normal(jax.random.key(2), (SIZES.heads, SIZES.headdim))
    weights = weights._replace(D=D)
    out, cache = jitted(mamba2.mamba2, return_cache=True)(weights, SIZES, x[:, :-1])
    last, _ = jitted(mamba2.mamba2_step)(weights, SIZES, x[:, -1], cache)
    got = jnp.concatenate([out, last[:, None]], 1)
    check.assert_close(got, block_float64(weights, SIZES, x), 1e-6)


@pytest.mark.newest
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_that_of_transformers(groups):
    """On random weights."""
    reason = "transformers and torch are not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason=reason)
        modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2", reason=reason)
        sizes = mamba2.Sizes(16, d_state=8, headdim=4, ngroups=groups)
        config = modeling.Mamba2Config(
            hidden_size=sizes.d_model,
            num_heads=sizes.heads,
            head_dim=sizes.headdim,
            state_size=sizes.d_state,
            conv_kernel=sizes.d_conv,
            n_groups=groups,
            chunk_size=8,
            num_hidden_layers=1,
            use_bias=True,
            layer_norm_epsilon=sizes.norm_eps,
        )
        theirs = modeling.Mamba2Mixer(config, layer_idx=0).eval()
    # Before its version 5, its norm was of all channels together, whatever the groups.
    channels = getattr(theirs.norm, "group_size", sizes.d_inner)
    sizes = dataclasses.replace(sizes, norm_groups=sizes.d_inner // channels)
    weights, x = draw(sizes), inputs(sizes, length=21)
    tensor = lambda v: torch.from_numpy(np.array(v))
    given = {
        "in_proj.weight": weights.in_proj.T,
        "in_proj.bias": weights.in_bias,
        "conv1d.weight": weights.conv_weight[:, None],
        "conv1d.bias": weights.conv_bias,
        "dt_bias": weights.dt_bias,
        "A_log": weights.A_log,
        "D": weights.D,
        "norm.weight": weights.norm_weight,
        "out_proj.weight": weights.out_proj.T,
        "out_proj.bias": weights.out_bias,
    }
    theirs.load_state_dict({name: tensor(v) for name, v in given.items()})
    with torch.no_grad():
        want = theirs(tensor(x)).numpy()
    check.assert_close(jitted(mamba2.mamba2)(weights, sizes, x), want, 1e-5)


def test_mamba2_begins_as_in_the_papers_code():
    sizes = mamba2.Sizes(32, headdim=1, d_state=16)
    inits = mamba2.initializers(sizes, n_layers=4)
    draw = lambda key: {name: f(key, shape, jnp.float32) for name, (f, shape) in inits.items()}
    w = mamba2.Weights(**jax.jit(draw)(jax.random.key(0)))
    dt, A = jax.nn.softplus(w.dt_bias), jnp.exp(w.A_log)
    assert 1e-3 < float(dt.min()) < 2e-3
    assert 5e-2 < float(dt.max()) < 0.1
    assert 1 < float(A.min()) < 2
    assert 15 < float(A.max()) < 16
    for leaf in (w.D, w.norm_weight):
        np.testing.assert_array_equal(leaf, 1)
    for leaf, bound in (
        (w.in_proj, 32**-0.5),
        (w.conv_weight, 0.5),
        (w.conv_bias, 0.5),
        (w.out_proj, 64**-0.5 / 2),
    ):
        assert 0.97 * bound < float(jnp.abs(leaf).max()) <= bound


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"d_state": 0}, ValueError, "d_state must be at least 1, got 0"),
        ({"d_conv": 4.0}, TypeError, r"d_conv must be a whole number, got 4\.0"),
        ({"norm_groups": "1"}, TypeError, "norm_groups must be a whole number or None, got '1'"),
        ({"use_bias": 1}, TypeError, "use_bias must be True or False, got 1"),
        ({"norm_eps": 0}, ValueError, "norm_eps must be above 0 and finite, got 0"),
        ({"headdim": 7}, ValueError, r"headdim must divide E = .* = 24, got 7; 6 divides it"),
        ({"headdim": 64}, ValueError, "got 64; 24 divides it"),
        ({"headdim": 4, "ngroups": 4}, ValueError, "ngroups must divide H = .* = 6, got 4; 3 div"),
        ({"headdim": 4, "norm_groups": 5}, ValueError, "norm_groups must divide E .*24, got 5; 4"),
        ({"headdim": 4, "dt_limit": (1, 0)}, ValueError, "dt_limit must be .* low <= high, got"),
        ({"headdim": 4, "dt_limit": 1}, TypeError, "dt_limit must be two numbers"),
    ],
)
def test_mamba2_names_sizes_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        mamba2.Sizes(12, **options)


def test_sizes_from_a_file_are_those_given():
    """JSON has lists for tuples, and other libraries' numbers are whole numbers, too."""
    sizes = mamba2.Sizes(np.int64(12), headdim=np.int32(4), dt_limit=[0, 1])
    assert sizes == mamba2.Sizes(12, headdim=4, dt_limit=(0.0, 1.0))
    assert hash(sizes) == hash(mamba2.Sizes(12, headdim=4, dt_limit=(0.0, 1.0)))
