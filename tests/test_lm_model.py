"""The language model, its embedding and its training step, as functions."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkern.lm import program
from jaxkern.lm.config import PRESETS, ModelConfig, TrainConfig
from jaxkern.lm.data import Packed
from jaxkern.lm.layers import rows_of
from jaxkern.lm.model import Options, count_params, decayed, initial_params, of_layers
from jaxkern.lm.step import (
    init_state,
    learning_rate,
    loss_fn,
    make_model,
    make_optimizer,
    make_train_step,
    schedule_of,
)
from jaxkern.precision import Policy
from tests import check
from tests.language_models import (
    GDN,
    HYBRID,
    KDA,
    MICRO,
    MICRO2,
    ROTARY,
    check_gradients,
    jit,
    logits_float64,
    loss_float64,
    random_params,
)

# Of the second, tokens are too many to be read by a product, and all biases are there.
OF_BLOCK = {"d_state": 4, "head_dim": 8, "n_groups": 2, "use_bias": True}
OTHER = ModelConfig(16, 2, "mamba2", **OF_BLOCK, vocab_size=1030, tie_embeddings=False)
ONE, ONE2 = (dataclasses.replace(shape, n_layers=1) for shape in (MICRO, MICRO2))
SHAPES = {"mamba": MICRO, "mamba2": OTHER, "hybrid": HYBRID, "rotary": ROTARY}
SHAPES |= {"gdn": GDN, "kda": KDA}
KIND = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
EXHAUSTIVE = pytest.mark.exhaustive
FP32 = Policy()


def config_of(shape, **flags):
    return TrainConfig.from_flags({"preset": "micro", "model": shape} | flags)


def windows(batch=4, length=24, seed=0):
    return np.random.default_rng(seed).integers(1, 256, (batch, length + 1), dtype=np.uint8)


@KIND
def test_logits_are_those_of_float64(shape):
    """A row has two documents, neither of which sees the other."""
    tokens, params = windows()[:, :-1].astype(np.int32), random_params(shape)
    segments = jnp.broadcast_to(np.repeat([3, 1], 12), tokens.shape)
    model = lambda tokens: nnx.merge(make_model(shape, Options()), params)(
        tokens, segment_ids=segments
    )
    forward = jit(model)
    out = forward(tokens)
    assert out.dtype == jnp.float32
    alone = [[logits_float64(shape, params, half) for half in np.split(row, 2)] for row in tokens]
    expected = np.reshape(alone, out.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())

    # No token sees those after it, and one outside the vocabulary stays in its document.
    tokens[0, 10], tokens[1:3, 20] = 255 - tokens[0, 10], (-1, shape.vocab_size)
    changed = np.asarray(forward(tokens))
    np.testing.assert_array_equal(changed[0, :10], out[0, :10])
    assert (changed[0, 10:12] != out[0, 10:12]).any(-1).all()
    np.testing.assert_array_equal(changed[0, 12:], out[0, 12:])
    same = 20 if shape is MICRO else 12  # ssd and attention multiply by 0 what is not seen
    np.testing.assert_array_equal(changed[1:3, :same], out[1:3, :same])
    assert np.isnan(changed[1:3, 20:]).all()
    np.testing.assert_array_equal(changed[3], out[3])


LENGTHS = 9, 1, 5, 14
SEGMENTS = np.repeat([7, 3, 7, 9], LENGTHS)[None]  # not counted, as they need not be


def rows_of_documents(row):
    """The documents of a row padded to one length, and which tokens are theirs."""
    tokens, mask = np.full((4, 14), -100), np.zeros((4, 14), bool)
    documents = np.split(row, np.cumsum(LENGTHS)[:-1])
    # On the right, nowhere to speak of, on the left, and nowhere.
    for i, (document, start) in enumerate(zip(documents, (0, 6, 9, 0), strict=True)):
        tokens[i, start : start + len(document)] = document
        mask[i, start : start + len(document)] = True
    return tokens, mask


ROW = windows(1, 28)[0].astype(np.int64)
LONGER, OF_LONGER = np.array([[300, *ROW, -300]]), np.array([[7, *SEGMENTS[0], 9]])
DOCUMENTS = {
    "packed": (ROW[None], SEGMENTS, None),
    "padded": (rows_of_documents(ROW)[0], None, rows_of_documents(ROW)[1]),
    "both": (LONGER, OF_LONGER, np.arange(31)[None] % 30 != 0),
}


@pytest.mark.parametrize(
    ("shape", "documents", "options"),
    [
        pytest.param(ONE, "both", {}, marks=EXHAUSTIVE),
        (dataclasses.replace(OTHER, n_layers=1), "both", {}),
        (MICRO, "packed", {"remat": "layer", "scan_layers": True}),
        (HYBRID, "both", {"remat": "cheap", "scan_layers": True}),
        (ROTARY, "packed", {"remat": "layer"}),
        *(pytest.param(s, d, {}, marks=EXHAUSTIVE) for s in SHAPES.values() for d in DOCUMENTS),
        pytest.param(OTHER, "packed", {"remat": "cheap", "scan_layers": True}, marks=EXHAUSTIVE),
    ],
)
def test_documents_of_a_row_see_neither_each_other_nor_padding(shape, documents, options):
    """Loss and gradients are those of each document alone, in float64."""
    tokens, segment_ids, mask = DOCUMENTS[documents]
    params, graphdef = random_params(shape), make_model(shape, Options(**options))
    f = lambda params, tokens, *more: loss_fn(
        graphdef, params, tokens, **dict(zip(("segment_ids", "mask"), more, strict=True))
    )
    run = jit(jax.value_and_grad(f))
    loss, grads = run(params, tokens, segment_ids, mask)
    alone = [each for each in np.split(ROW, np.cumsum(LENGTHS)[:-1]) if len(each) > 1]
    np.testing.assert_allclose(loss, loss_float64(shape, params, alone), rtol=1e-5)
    check_gradients(shape, params, grads, alone)
    if documents == "both":
        # Nothing is predicted of padding and of documents of one token.
        assert run(params, tokens, segment_ids, np.zeros_like(mask))[0] == 0
        assert run(params, tokens, np.arange(31)[None], mask)[0] == 0
        # A token outside the vocabulary is told, the last one, too, which is only predicted.
        for at in (5, 29):
            for wrong in (-1, shape.vocab_size, 2**31 - 1, -100):
                tokens_with = np.where(np.arange(31) == at, wrong, tokens)
                assert np.isnan(run(params, tokens_with, segment_ids, mask)[0])


@pytest.mark.parametrize("policy", ["fp32", pytest.param("bf16", marks=EXHAUSTIVE)])
@KIND
def test_prompts_that_are_read_go_on_as_whole_sequences(shape, policy):
    """Prompts with padding wherever it stands, one of them of padding alone."""
    tokens, mask = rows_of_documents(ROW)
    mask[3, 5:7], mask[1] = False, False
    after = windows(4, 4, 1)[:, :-1].astype(np.int32)
    params = jax.tree.map(lambda leaf: leaf / (1 if policy == "fp32" else 5), random_params(shape))
    graphdef = make_model(shape, Options(Policy.parse(policy)))

    @jit
    def read_and_step(params, tokens, mask, after):
        model = nnx.merge(graphdef, params)
        logits, state = model.prefill(tokens, model.init_state(4, 16), mask=mask)
        step = lambda state, token: model.step(token, state)[::-1]
        return logits, jax.lax.scan(step, state, after.T)[1].swapaxes(0, 1), state

    logits, more, state = read_and_step(params, tokens, mask.astype(np.int8), after)
    assert all(not leaf[:, 1].any() for leaf in jax.tree.leaves(state))
    for i, following in enumerate(after):
        prompt = tokens[i][mask[i]]
        expected = logits_float64(shape, params, [*prompt, *following])
        rtol, atol = {"fp32": (1e-4, 1e-4), "bf16": (0.05, 0.05 * np.abs(expected).max())}[policy]
        found = np.concatenate([logits[i][None], more[i]])
        found, expected = (a[-len(following) - bool(len(prompt)) :] for a in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


INTS, ONES = np.ones((1, 3), int), np.ones((1, 3), "f")
OTHER_SHAPE = r"segment_ids must have shape \(1, 3\).* got \(1, 2\)"
MAMBA2_OF_8 = {"layers": "mamba2", "head_dim": 8}
GDN_OF_8 = {"layers": "gdn", "head_dim": 8}
HEADS = {"layers": "mamba, attention", "n_layers": 2, "n_heads": 2}


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, r"tokens must have shape \(B, L\).*tokens\[None\]", lambda m: m(INTS[0])),
        (TypeError, "tokens must have an integer dtype, got float32", lambda m: m(ONES)),
        (
            TypeError,
            "tokens must have an integer dtype, got float32",
            lambda m: m.step(ONES[0], {}),
        ),
        (ValueError, r"tokens must have shape \(B,\).*prefill", lambda m: m.step(INTS, {})),
        (ValueError, OTHER_SHAPE, lambda m: m(INTS, segment_ids=INTS[:, 1:])),
        (TypeError, "mask must have an integer dtype, got float32", lambda m: m(INTS, mask=ONES)),
        (ValueError, "at least one token a row", lambda m: m.prefill(INTS[:, :0])),
        (ValueError, "remat must be one of none, cheap.*; got True", lambda _: Options(remat=True)),
        (TypeError, "d_state must be a whole number or None, got True", {"d_state": True}),
        (TypeError, "tie_embeddings must be True or False, got 1", {"tie_embeddings": 1}),
        (ValueError, "eps must be above 0 and finite, got nan", {"eps": math.nan}),
        (ValueError, "dropout must be .*below 1, got 1.0", {"dropout": 1.0}),
        (ValueError, "dt_limit must be two numbers in order", {"dt_limit": [2, 1]}),
        (TypeError, "unexpected keyword argument 'headdim'", {"headdim": 4}),
        (ValueError, "layers must be names of mamba, .* got 'mamba3'", {"layers": "mamba3"}),
        (ValueError, r"got 'mamba\*0'", {"layers": "mamba*0"}),
        (ValueError, "must have one of mamba, mamba2, gdn, kda, and not", {"layers": "mlp"}),
        (ValueError, "and not several", {"layers": "gdn, kda", "n_layers": 2}),
        (
            ValueError,
            "n_layers must be a multiple of the 3 of",
            {"layers": "mamba, mlp*2"},
        ),
        (ValueError, "head_dim must divide .* got 64", {"layers": "mamba2"}),
        (ValueError, "n_key_heads must divide .* 2, got 3", GDN_OF_8 | {"n_key_heads": 3}),
        (ValueError, "n_groups must divide .* 2, got 3", MAMBA2_OF_8 | {"n_groups": 3}),
        (ValueError, "norm_groups must divide .* 16, got 3", MAMBA2_OF_8 | {"norm_groups": 3}),
        (ValueError, "n_heads must divide d_model = 8, got 3", HEADS | {"n_heads": 3}),
        (ValueError, "n_kv_heads must divide n_heads = 2", HEADS | {"n_kv_heads": 4}),
        (ValueError, "rotary_dim must be even and at most the 4", HEADS | {"rotary_dim": 6}),
    ],
)
def test_wrong_calls_and_shapes_say_what_is_wrong(error, words, call):
    model = nnx.merge(make_model(MICRO, Options()), random_params(MICRO))
    shape = lambda _: ModelConfig(**{"d_model": 8, "n_layers": 1} | call)
    with pytest.raises(error, match=words):
        (shape if isinstance(call, dict) else call)(model)


@functools.cache
def gradients(shape, **options):
    """The loss and its gradients; how many products and calls that compute again, and loops."""
    graphdef = make_model(shape, Options(**options))
    f = jit(jax.value_and_grad(functools.partial(loss_fn, graphdef)))
    traced = f.trace(random_params(shape), jnp.asarray(windows()))
    lowered = traced.lower()
    products, loops = map(lowered.as_text().count, ("stablehlo.dot_general", "stablehlo.while"))
    found = lowered.compile()(random_params(shape), windows())
    return found, products + str(traced.jaxpr).count("remat"), loops


@pytest.mark.parametrize("count", [5, 6])
def test_parameters_of_layers_and_their_gradients(count):
    """Gradients are stacked in one step, or in two."""
    stacked = {"w": np.arange(count * 6.0).reshape(count, 2, 3), "norm": np.ones((count, 3))}
    layers, pullback = jax.vjp(lambda tree: of_layers(tree, count), stacked)
    want = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(count)]
    check.assert_close(layers, want, 0)
    check.assert_close(pullback(layers)[0], stacked, 0)


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("shape", "remat", "scan_layers"),
    [
        *((MICRO, remat, False) for remat in ("layer", "cheap", "scan")),
        *((MICRO, remat, True) for remat in ("none", "layer")),
        *((MICRO2, remat, looped) for remat, looped in (("layer", True), ("cheap", False))),
        (MICRO2, "scan", True),
    ],
)
def test_loops_and_remat_change_the_program_and_not_gradients(shape, remat, scan_layers):
    plain, _, loops = gradients(shape, remat="none", scan_layers=False)
    _, computed, _ = gradients(shape, remat="none", scan_layers=scan_layers)
    got, more_computed, more_loops = gradients(shape, remat=remat, scan_layers=scan_layers)
    assert (more_computed > computed) == (remat != "none")
    assert more_loops > loops or not scan_layers
    errors = jax.tree.map(check.relative_error, got, plain)
    assert max(jax.tree.leaves(errors)) < 2e-6
    assert all(np.any(leaf) for leaf in jax.tree.leaves(plain))


@pytest.mark.parametrize(
    ("preset", "kept"),
    [
        ("130m", {"none": 15.4, "cheap": 8.1, "scan": 5.1, "layer": 3.0}),
        ("mamba2-130m", {"none": 11.7, "cheap": 9.7, "scan": 5.4, "layer": 3.0}),
        ("gdn-130m", {"none": 21.1, "cheap": 15.1, "scan": 10.1, "layer": 6.0}),  # d_model channels
        ("kda-130m", {"none": 26.8, "cheap": 12.7, "scan": 8.7, "layer": 6.0}),
    ],
)
def test_remat_keeps_less_for_the_backward(preset, kept):
    """Bytes that a layer keeps, for each of its tokens and inner channels."""
    shape = PRESETS[preset].model
    shape = dataclasses.replace(shape, n_layers=2, layers=shape.block.name)
    params = jax.eval_shape(lambda: initial_params(shape))
    tokens = jax.ShapeDtypeStruct((1, 257), "int32")
    found = {}
    for remat in kept:
        options = Options(Policy.parse("bf16"), remat=remat, scan_layers=True)
        graphdef = make_model(shape, options)
        pullback = lambda p, w: jax.vjp(functools.partial(loss_fn, graphdef, windows=w), p)[1]  # noqa: B023
        leaves = jax.tree.leaves(jax.eval_shape(pullback, params, tokens))
        stacked = [leaf for leaf in leaves if leaf.shape[:2] == (2, 1)]
        bytes_kept = sum(leaf.size * leaf.dtype.itemsize for leaf in stacked)
        found[remat] = bytes_kept / (2 * 256 * shape.sizes.d_inner)
    assert found == pytest.approx(kept, abs=0.05)


def test_forward_mode_of_what_is_computed_again():
    graphdef = make_model(MICRO2, Options(remat="cheap"))
    loss = functools.partial(loss_fn, graphdef, windows=jnp.asarray(windows()))
    params = random_params(MICRO2)
    _, along = jit(lambda p: jax.jvp(loss, (p,), (p,)))(params)
    products = jax.tree.map(jnp.vdot, jit(jax.grad(loss))(params), params)
    assert float(along) == pytest.approx(float(sum(jax.tree.leaves(products))), rel=1e-4)


def test_attention_in_fp16_is_lowered():
    """JAX's own has products then that a CPU does not have."""
    loss = functools.partial(loss_fn, make_model(ROTARY, Options(Policy.parse("fp16"))))
    grads = jax.jit(jax.grad(functools.partial(loss, windows=windows())))
    assert "f16" in grads.lower(random_params(ROTARY)).as_text()


@pytest.mark.parametrize(("remat", "whole"), [("cheap", True), ("scan", False), ("layer", False)])
def test_remat_of_products_computes_logits_in_parts(remat, whole):
    """All of the logits at once would take 655 MB."""
    shape = dataclasses.replace(MICRO, vocab_size=40_000)
    params = jax.eval_shape(lambda: initial_params(shape))
    loss = functools.partial(loss_fn, make_model(shape, Options(remat=remat)))
    text = str(jax.make_jaxpr(loss)(params, jax.ShapeDtypeStruct((1, 4097), "int32")))
    assert ("f32[1,4096,40000]" in text) == whole


def test_presets_have_the_papers_sizes():
    """Mamba's are the published checkpoints', less their vocabulary of 50280 plus ours of 256."""
    published = {"130m": (129_135_360, 768), "370m": (371_516_416, 1024)}
    published["1.4b"] = 1_372_178_432, 2048
    sizes = {name: size - (50_280 - 256) * width for name, (size, width) in published.items()}
    # Heads of 64 channels, one group, 128 states, four taps, twice as many inner channels.
    for name, d, layers in (("130m", 768, 24), ("370m", 1024, 48), ("780m", 1536, 48)):
        inner, heads, convolved = 2 * d, 2 * d // 64, 2 * d + 2 * 128
        block = d * (inner + convolved + heads) + 5 * convolved + 3 * heads + inner + inner * d
        sizes[f"mamba2-{name}"] = layers * (block + d) + (256 + 1) * d
    # As many channels as d_model in heads of 128, and a gated MLP after each of them.
    for name, d, layers, inner in (("gdn-130m", 768, 12, 2048), ("gdn-370m", 1024, 24, 2688)):
        heads, norms = d // 128, 2 * d + 128
        block = d * (4 * d + 2 * heads) + 3 * d * 4 + 2 * heads + d * d
        sizes[name] = layers * (block + 3 * d * inner + norms) + (256 + 1) * d
        low = d * (3 * d + heads + 2 * 128) + 2 * 128 * d + 3 * d * 4 + heads + d + d * d
        if name == "gdn-130m":
            sizes["kda-130m"] = layers * (low + 3 * d * inner + norms) + (256 + 1) * d
            sizes["gdn-hybrid-130m"] = sizes[name] - 3 * (block + 128 - 4 * d * d)
    for name, size in sizes.items():
        params = jax.eval_shape(lambda name=name: initial_params(PRESETS[name].model))
        assert count_params(params) == size, name


def test_layers_begin_apart_with_outputs_for_their_number():
    shape = ModelConfig(64, 3)
    blocks = jit(lambda: init_state(config_of(shape), FP32))().params["blocks"]
    assert (np.array(blocks["norm"]) == 1).all()
    bound = 128**-0.5 / 3**0.5
    assert 0.98 * bound < np.abs(blocks["out_proj"]).max() <= bound
    assert not np.array_equal(*blocks["in_proj"][:2])  # layers differ


def test_weight_decay_is_on_matrices_only():
    kept = {"norm", "norm_weight", "conv_bias", "dt_bias", "A_log", "D", "in_bias", "out_bias"}
    kept |= {"head_norm"}
    for shape in (MICRO, MICRO2, HYBRID, ROTARY, GDN, KDA):
        shape = dataclasses.replace(shape, tie_embeddings=False, use_bias=True)
        found = decayed(jax.eval_shape(lambda shape=shape: initial_params(shape)))
        for path, decays in jax.tree.leaves_with_path(found):
            assert decays == (path[-1].key not in kept), path

    config, ones = config_of(MICRO), {"norm": np.ones(3), "head": np.ones(3)}
    zeros = jax.tree.map(np.zeros_like, ones)
    optimizer = make_optimizer(config, schedule_of(config))
    update = jit(lambda p, g: optimizer.update(g, optimizer.init(p), p)[0])(ones, zeros)
    assert {name: np.any(leaf) for name, leaf in update.items()} == {"norm": False, "head": True}


def test_learning_rate_warms_up_and_decays():
    config = config_of(MICRO, steps=200, lr=1e-2)
    rates = np.array(jit(jax.vmap(learning_rate(schedule_of(config))))(np.arange(201)))
    assert config.warmup == 20
    np.testing.assert_allclose(rates[:20], 1e-2 * np.arange(1, 21) / 20, rtol=1e-5)
    assert (np.diff(rates[20:]) <= 0).all()
    np.testing.assert_allclose(rates[110], 5.5e-3, rtol=1e-5)
    np.testing.assert_allclose(rates[200], 1e-3, rtol=1e-4)
    flat = config_of(MICRO, steps=200, lr=1e-2, optimizer={"warmup": 0, "decay": 50, "final": 0.0})
    for kind, rest in ("wsd", np.linspace(1, 0, 51)[1:]), ("constant", np.ones(50)):
        rates = np.array(jax.vmap(learning_rate(schedule_of(flat), kind))(np.arange(201)))
        np.testing.assert_allclose(rates, 1e-2 * np.concatenate([np.ones(151), rest]), atol=1e-8)


def step_of(config, model):
    step = make_train_step(config, model)
    packed = lambda windows: windows if isinstance(windows, Packed) else Packed(windows)
    return lambda state, windows: step(state, packed(windows), schedule_of(config))


@functools.cache
def train_step(precision, shape=ONE):
    """The compiled step, and the state before the first."""
    config, policy = config_of(shape), Policy.parse(precision)
    step = jit(step_of(config, make_model(shape, Options(policy))))
    return step, jit(lambda: init_state(config, policy))()


@EXHAUSTIVE
def test_accumulated_gradients_are_those_of_the_whole_batch():
    w = windows(8)
    step, state = train_step("fp32")
    whole, parts = step(state, w[None]), step(state, w.reshape(4, 2, -1))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(whole[1][name], parts[1][name], rtol=2e-6)
    # After one step, mu is a tenth of the clipped gradient.
    mu = [state.opt_state.mu for state, _ in (whole, parts)]
    for a, b in zip(*map(jax.tree.leaves, mu), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(a).max())


@EXHAUSTIVE
def test_fp16_skips_a_step_with_infinite_gradients():
    step, state = train_step("fp16")
    w = windows(8)[None]
    scale = dataclasses.replace(state.loss_scale, loss_scale=jnp.float32(2.0**60))
    too_high = state._replace(loss_scale=scale)
    after, metrics = step(too_high, w)
    held = lambda state: (state.params, state.opt_state[:3])  # count and averages
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, held(after), held(too_high))))
    assert not np.isfinite(metrics["grad_norm"])
    assert np.isfinite(metrics["loss"])
    assert metrics["skipped"] == after.opt_state.total_notfinite == 1
    assert after.step == 1
    assert after.loss_scale.loss_scale == 2.0**59

    after, metrics = step(state, w)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), after.params, state.params)
    assert all(jax.tree.leaves(changed))
    assert metrics["skipped"] == 0
    assert after.loss_scale.counter == 1


def learn(step, state, batch):
    """Losses of thirty steps on the same windows, which a model can begin to learn by heart."""
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    return np.array(losses)


@EXHAUSTIVE
@pytest.mark.parametrize(("shape", "precisions"), [(ONE, ["bf16", "fp16"]), (ONE2, ["bf16"])])
def test_low_precision_learns_as_fp32_does(shape, precisions):
    full = learn(*train_step("fp32", shape), windows(8)[None])
    assert full[-1] < full[0] - 0.3
    for precision in precisions:
        low = learn(*train_step(precision, shape), windows(8)[None])
        np.testing.assert_allclose(low, full, rtol=0.01)
        assert not np.array_equal(low, full)


@pytest.mark.compiled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_by_the_kernels_is_as_near_to_fp32_as_in_plain_jax(precision):
    """Losses of thirty steps on the same windows."""
    shape = dataclasses.replace(MICRO, d_model=128, d_state=None)
    batch = windows(8, 128)[None]

    def losses(precision, implementation):
        policy = Policy.parse(precision)
        config = config_of(shape, implementation=implementation or "auto")
        model = make_model(shape, Options(policy, implementation))
        state = jax.jit(lambda: init_state(config, policy))()
        step = jax.jit(step_of(config, model), donate_argnums=0)
        assert ("selective_scan_bwd" in step.lower(state, batch).as_text()) == (not implementation)
        return learn(step, state, batch)

    with jax.default_matmul_precision("highest"):
        truth, plain = losses("fp32", "xla"), losses(precision, "xla")
        kernels = losses(precision, None)
    assert truth[-1] < truth[0] - 0.3
    assert 0 < check.relative_error(kernels, truth) <= 2 * check.relative_error(plain, truth)


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("remat", "again"),
    [
        ("none", ""),
        ("cheap", ""),
        ("scan", "causal_conv1d selective_scan"),
        ("layer", "rms_norm causal_conv1d selective_scan"),
    ],
)
def test_training_on_a_gpu_runs_the_kernels(remat, again):
    """Two layers of the 130m preset, a step in bf16 lowered for CUDA: kernels both ways."""
    shape = dataclasses.replace(PRESETS["130m"].model, n_layers=2)
    flags = {"preset": "130m", "model": shape, "mixed_precision": "bf16", "remat": remat}
    plain, packed = (TrainConfig.from_flags(flags | {"pack": pack}) for pack in (False, True))
    one = program.Placement.of(plain, jax.devices()[:1])
    text, of_packed = (program.lowered_step(c, one, "cuda").as_text() for c in (plain, packed))
    calls = check.kernel_calls(text)
    for op, runs in (("rms_norm", 3), ("causal_conv1d", 2), ("selective_scan", 2)):
        assert sum(f"{op}_fwd" in call for call in calls) == runs + 2 * (op in again.split())
        assert f"{op}_bwd" in text
    assert "fused_adam" in text
    # On a GPU the host reads a loop's condition, and meanwhile starts no kernel.
    assert of_packed.count("stablehlo.while") == text.count("stablehlo.while")


@pytest.mark.parametrize("size", [11, 1025])
def test_gradient_of_the_embedding(size):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(size, 4)).astype(np.float32)
    every = [rng.integers(0, 11, shape) for shape in ((0,), (1,), (30, 2))]
    dout = [rng.normal(size=(*tokens.shape, 4)).astype(np.float32) for tokens in every]

    @jit
    def run(table, every, dout):
        vjp = lambda read, tokens, d: jax.vjp(lambda table: read(table, tokens), table)[1](d)[0]
        own = [vjp(rows_of, *each) for each in zip(every, dout, strict=True)]
        plain = [vjp(lambda t, n: t[n], *each) for each in zip(every, dout, strict=True)]
        return [rows_of(table, tokens) for tokens in every], own, plain

    for tokens, d, out, own, plain in zip(every, dout, *run(table, every, dout), strict=True):
        np.testing.assert_array_equal(out, table[tokens])
        expected = np.zeros((size, 4))
        np.add.at(expected, tokens, d)
        error, of_plain = (np.max(np.abs(dtable - expected)) for dtable in (own, plain))
        assert error <= 2 * of_plain
    read = lambda table: rows_of(table, jnp.array([1, 0, 1])).sum()
    assert jax.linearize(read, table)[1](np.ones_like(table)) == 12


def test_gradient_of_a_large_embedding():
    """It is as large as its tokens' dtype counts."""
    size = np.iinfo(np.int16).max
    tokens = np.array([3, size - 1, 3, 0, -1, 3], np.int16)
    dtable = jit(jax.grad(lambda table: rows_of(table, tokens).sum()))(np.ones((size, 2), "f4"))
    expected = np.zeros((size, 2))
    expected[[0, 3, size - 1]] = [[1], [3], [2]]
    np.testing.assert_array_equal(dtable, expected)

    # XLA sorts what it writes to rows of which two may be one, so as to keep an order.
    read = lambda table: rows_of(table, jnp.array([1, 0, 1])).sum()
    text = jax.jit(jax.grad(read)).lower(np.ones((size, 2), "f4")).as_text()
    assert "unique_indices = true" in text
    assert "unique_indices = false" not in text


@pytest.mark.parametrize("size", [300, 1030])  # gradients added up by a product, and sorted
def test_tokens_of_any_integer_dtype_are_the_same(size):
    shape = ModelConfig(8, 1, d_state=2, vocab_size=size)
    graphdef, params = make_model(shape, Options()), random_params(shape)
    tokens = np.array([[1, 44, 100, 127]])
    every = [tokens.astype(dtype) for dtype in ("int8", "uint8", "uint16", "int32")]

    def read(params, tokens):
        x = nnx.merge(graphdef, params)._embed(tokens)[0]
        return (x**2).sum(), x

    found = jit(lambda p, every: [jax.grad(read, has_aux=True)(p, t) for t in every])(params, every)
    for grads, x in found:
        np.testing.assert_array_equal(x, params["embedding"][tokens])
        np.testing.assert_array_equal(grads["embedding"], found[-1][0]["embedding"])


def test_a_sweep_compiles_once():
    """With another length, rate, warm-up or seed, the programs' texts are the same."""
    one = config_of(MICRO, steps=100, lr=1e-3, seed=0)
    others = {"warmup": 7, "weight_decay": 0.2, "final": 0.0, "decay": 9}
    other = config_of(MICRO, steps=250, lr=3e-4, seed=7, optimizer=others)
    assert all(a != b for a, b in zip(schedule_of(one), schedule_of(other), strict=True))
    placement = program.Placement.of(one, jax.devices()[:1])
    for lowered in program.lowered_step, program.lowered_init:
        assert lowered(one, placement).as_text() == lowered(other, placement).as_text()
