"""The language model and its training step, as functions."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkern.lm.config import PRESETS, ModelConfig, TrainConfig
from jaxkern.lm.model import (
    DECAYED,
    MambaLM,
    Options,
    count_params,
    initial_params,
    one_hot,
)
from jaxkern.lm.step import (
    init_state,
    learning_rate,
    loss_fn,
    make_model,
    make_optimizer,
    make_train_step,
)
from jaxkern.nn import mamba
from jaxkern.precision import Policy
from tests import check
from tests.language_models import logits_float64

CONFIG, CONFIG2 = (TrainConfig.from_flags({"preset": name}) for name in ("micro", "mamba2-micro"))
MICRO, MICRO2 = CONFIG.model, CONFIG2.model
KIND = pytest.mark.parametrize("shape", [MICRO, MICRO2], ids=["mamba", "mamba2"])
FP32 = Policy()
# Most of the time here is compilation; unoptimised code of the same program is made much sooner.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def windows(batch=4, length=24, seed=0):
    return np.random.default_rng(seed).integers(1, 256, (batch, length + 1), dtype=np.uint8)


def cross_entropy(logits, tokens):
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probs, tokens[..., None].astype(int), -1)[..., 0]


@functools.cache
def trained(shape):
    """Parameters away from their initial symmetries."""
    leaves, tree = jax.tree.flatten(jit(lambda: initial_params(shape))())
    keys = jax.random.split(jax.random.key(5), len(leaves))
    moved = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


@functools.cache
def forward(shape):
    return jit(lambda params, tokens: nnx.merge(make_model(shape, Options()), params)(tokens))


@KIND
def test_model_is_the_papers(shape):
    tokens = windows()[:, :-1]
    out = forward(shape)(trained(shape), tokens)
    assert out.shape == (4, 24, 256)
    assert out.dtype == jnp.float32
    expected = np.stack([logits_float64(shape, trained(shape), row) for row in tokens])
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_loss_is_the_mean_cross_entropy():
    w = windows()
    logits = np.stack([logits_float64(MICRO, trained(MICRO), row) for row in w[:, :-1]])
    expected = cross_entropy(logits, w[:, 1:]).mean()
    loss = loss_fn(make_model(MICRO, Options()), trained(MICRO), jnp.asarray(w))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@KIND
def test_steps_give_the_logits_of_the_whole_sequence(shape):
    tokens = jnp.asarray(windows(2, 17)[:, :-1])
    graphdef = make_model(shape, Options())

    @jit
    def stepwise(params, tokens):
        model = nnx.merge(graphdef, params)

        def step(state, token):
            logits, state = model.step(token, state)
            return state, logits

        return jax.lax.scan(step, model.init_state(2), tokens.T)[1]

    whole = forward(shape)(trained(shape), tokens)
    np.testing.assert_allclose(
        stepwise(trained(shape), tokens).swapaxes(0, 1), whole, rtol=1e-4, atol=1e-4
    )


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


@pytest.mark.newest
@KIND
def test_documents_of_a_row_do_not_see_each_other_nor_padding(shape):
    """Logits, loss and gradients: packed in a row, and as rows with padding."""
    row = windows(1, 28)[0]
    tokens, mask = rows_of_documents(row)

    def loss_and_logits(options, params, tokens, segment_ids, mask):
        graphdef = make_model(shape, options)
        loss = loss_fn(graphdef, params, tokens, segment_ids=segment_ids, mask=mask)
        call = nnx.merge(graphdef, params)
        return loss, call(tokens, segment_ids=segment_ids, mask=mask)

    def run(*arrays, **options):
        f = functools.partial(loss_and_logits, Options(**options))
        return jit(jax.value_and_grad(f, has_aux=True))(trained(shape), *arrays)

    packed = run(row[None], SEGMENTS, None)
    looped = run(row[None], SEGMENTS, None, remat="cheap", scan_layers=True)
    padded = run(tokens, None, mask)
    both = run(
        np.append(row, [300, 300])[None], np.append(SEGMENTS, [[9, 9]], 1), np.arange(31)[None] < 29
    )

    documents = [tokens[i][mask[i]] for i in range(4)]
    expected = [logits_float64(shape, trained(shape), document) for document in documents]
    losses = [cross_entropy(e[:-1], d[1:]) for e, d in zip(expected, documents, strict=True)]
    for (loss, logits), _ in (packed, looped, padded, both):
        np.testing.assert_allclose(loss, np.concatenate(losses).mean(), rtol=1e-5)
        theirs = logits[mask] if len(logits) == 4 else logits[0, :29]
        np.testing.assert_allclose(theirs, np.concatenate(expected), rtol=1e-4, atol=1e-4)
    for _, grads in (looped, padded, both):
        errors = jax.tree.map(check.relative_error, grads, packed[1])
        assert max(jax.tree.leaves(errors)) < 3e-6


def test_nothing_is_predicted_of_padding_and_of_documents_of_one_token():
    f = jit(functools.partial(loss_fn, make_model(MICRO, Options())))
    tokens = windows(1, 7)
    assert f(trained(MICRO), tokens, mask=np.zeros((1, 8), np.int8)) == 0
    assert f(trained(MICRO), tokens, segment_ids=np.arange(8)[None]) == 0


@KIND
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_prefill_is_as_steps_without_the_padding(shape, policy):
    """Logits and states after prompts, one with padding in between, and one of padding alone."""
    tokens, mask = rows_of_documents(windows(1, 28)[0])
    mask[3, 5:7], mask[1] = False, False
    graphdef = make_model(shape, Options(Policy.parse(policy)))

    @jit
    def stepwise(params, tokens, mask):
        model = nnx.merge(graphdef, params)

        def step(carry, column):
            token, read = column
            after = model.step(token, carry[1])
            chosen = lambda axis, a, b: jnp.where(jnp.expand_dims(read, axis), a, b)
            over = lambda a, b: chosen((0, *range(2, a.ndim)), a, b)
            cache = jax.tree.map(over, after[1], carry[1])
            return (chosen(1, after[0], carry[0]), cache), None

        start = jnp.zeros((4, 256), jnp.float32), model.init_state(4)
        return jax.lax.scan(step, start, (tokens.T, mask.T))[0]

    prefill = jit(lambda params, *rows: nnx.merge(graphdef, params).prefill(rows[0], mask=rows[1]))
    got, want = (f(trained(shape), tokens, mask.astype(np.int8)) for f in (prefill, stepwise))
    tol = 1e-4 if policy == "fp32" else 0.05
    np.testing.assert_allclose(got[0][mask.any(1)], want[0][mask.any(1)], rtol=tol, atol=tol)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol), got[1], want[1])
    assert jax.tree.map(lambda a: a.dtype, got[1]) == jax.tree.map(lambda a: a.dtype, want[1])


@KIND
def test_tokens_outside_the_vocabulary_are_not_passed_over(shape):
    tokens, params = np.tile(windows(1, 24)[:, :-1].astype(np.int32), (4, 1)), trained(shape)
    expected = forward(shape)(params, tokens)
    tokens[:3, 20] = -1, 256, 2**31 - 1
    logits = np.asarray(forward(shape)(params, tokens))
    if shape.block is mamba.BLOCK:  # ssd multiplies by chunks: there NaN may be before its token
        np.testing.assert_array_equal(logits[:, :20], expected[:, :20])
    assert np.isnan(logits[:3, 20:]).all()
    np.testing.assert_array_equal(logits[3], expected[3])
    loss = jit(functools.partial(loss_fn, make_model(shape, Options())))
    assert np.isnan(loss(params, tokens[:1, :21]))  # as the last, which is only predicted
    assert np.isfinite(loss(params, tokens[3:, :21]))
    tokens[0, 20] = -100  # the label of linear_cross_entropy for rows without a loss
    assert np.isnan(loss(params, tokens[:1, :21]))


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (
            ValueError,
            r"tokens must have shape \(B, L\).*tokens\[None\]",
            lambda m: m(np.ones(3, int)),
        ),
        (
            TypeError,
            "tokens must have an integer dtype, got float32",
            lambda m: m(np.ones((1, 3), "f")),
        ),
        (
            ValueError,
            r"segment_ids must have shape \(1, 3\).* got \(1, 2\)",
            lambda m: m(np.ones((1, 3), int), segment_ids=np.ones((1, 2), int)),
        ),
        (
            TypeError,
            "mask must have an integer dtype, got float32",
            lambda m: m(np.ones((1, 3), int), mask=np.ones((1, 3), "f")),
        ),
        (ValueError, "at least one token a row", lambda m: m.prefill(np.ones((2, 0), int))),
    ],
)
def test_wrong_calls_say_what_is_wrong(error, words, call):
    with pytest.raises(error, match=words):
        call(nnx.merge(make_model(MICRO, Options()), trained(MICRO)))


@KIND
def test_no_byte_sees_those_after_it(shape):
    tokens = windows()[:, :-1]
    changed = tokens.copy()
    changed[:, 10] ^= 255
    before, after = (forward(shape)(trained(shape), t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert not np.array_equal(before[:, 10:], after[:, 10:])


@pytest.mark.newest
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (MICRO, {"scan_layers": True}),
        (MICRO, {"remat": "layer"}),
        (MICRO, {"scan_layers": True, "remat": "layer"}),
        (MICRO2, {"scan_layers": True, "remat": "layer"}),
        (MICRO, {"remat": "cheap"}),
        (MICRO, {"remat": "scan"}),
        (MICRO2, {"remat": "cheap"}),
        (MICRO2, {"scan_layers": True, "remat": "scan"}),
    ],
    ids=[
        *("scan_layers", "remat", "scan_layers+remat", "mamba2-scan_layers+remat"),
        *("cheap", "scan", "mamba2-cheap", "mamba2-scan_layers+scan"),
    ],
)
def test_loops_and_remat_change_the_program_and_not_gradients(shape, options):
    def gradients(**options):
        graphdef = make_model(shape, Options(**options))
        f = jit(jax.value_and_grad(functools.partial(loss_fn, graphdef)))
        traced = f.trace(trained(shape), jnp.asarray(windows()))
        lowered = traced.lower()
        loops = lowered.as_text().count("stablehlo.while")
        return lowered.compile()(trained(shape), windows()), str(traced.jaxpr).count("remat"), loops

    plain, remats, loops = gradients()
    got, more_remats, more_loops = gradients(**options)
    assert (more_remats > remats) == ("remat" in options)
    assert more_loops > loops or "scan_layers" not in options
    errors = jax.tree.map(check.relative_error, got, plain)
    assert max(jax.tree.leaves(errors)) < 2e-6
    assert all(np.any(leaf) for leaf in jax.tree.leaves(plain))


@pytest.mark.parametrize(
    ("preset", "kept"),
    [
        ("130m", {"none": 24.4, "cheap": 17.1, "scan": 7.1, "layer": 3.0}),
        ("mamba2-130m", {"none": 17.7, "cheap": 11.4, "scan": 7.4, "layer": 3.0}),
    ],
)
def test_remat_keeps_less_for_the_backward(preset, kept):
    """Bytes that a layer keeps, for each of its tokens and inner channels."""
    shape = dataclasses.replace(PRESETS[preset].model, n_layers=2)
    params = jax.eval_shape(lambda: initial_params(shape))
    tokens = jax.ShapeDtypeStruct((1, 257), "int32")
    found = {}
    for remat in kept:
        graphdef = make_model(shape, Options(Policy.parse("bf16"), remat=remat))
        pullback = lambda p, w: jax.vjp(functools.partial(loss_fn, graphdef, windows=w), p)[1]  # noqa: B023
        leaves = jax.tree.leaves(jax.eval_shape(pullback, params, tokens))
        of_layers = [leaf for leaf in leaves if leaf.shape[:2] == (2, 1)]
        bytes_kept = sum(leaf.size * leaf.dtype.itemsize for leaf in of_layers)
        found[remat] = bytes_kept / (2 * 256 * shape.sizes.d_inner)
    assert found == pytest.approx(kept, abs=0.05)


@pytest.mark.parametrize(("remat", "whole"), [("cheap", True), ("scan", False), ("layer", False)])
def test_remat_of_products_computes_logits_in_parts(remat, whole):
    """Of 655 MB of logits."""
    shape = dataclasses.replace(MICRO, vocab_size=40_000)
    params = jax.eval_shape(lambda: initial_params(shape))
    loss = functools.partial(loss_fn, make_model(shape, Options(remat=remat)))
    text = str(jax.make_jaxpr(loss)(params, jax.ShapeDtypeStruct((1, 4097), "int32")))
    assert ("f32[1,4096,40000]" in text) == whole


def test_remat_is_one_of_its_words():
    old: Any = True
    with pytest.raises(ValueError, match="remat must be one of none, cheap, scan, layer; got True"):
        Options(remat=old)


@pytest.mark.parametrize(
    ("name", "paper"), [("130m", 129_135_360), ("370m", 371_516_416), ("1.4b", 1_372_178_432)]
)
def test_presets_have_the_papers_sizes(name, paper):
    """The published checkpoints' parameters, less their vocabulary of 50280 plus ours of 256."""
    config = TrainConfig.from_flags({"preset": name})
    shapes = jax.eval_shape(lambda: init_state(config, FP32)).params
    assert count_params(shapes) == paper - (50_280 - 256) * config.model.d_model


@pytest.mark.parametrize(
    ("name", "width", "layers"),
    [("130m", 768, 24), ("370m", 1024, 48), ("780m", 1536, 48), ("1.3b", 2048, 48)],
)
def test_presets_of_mamba2_have_the_papers_sizes(name, width, layers):
    """Heads of 64 channels, one group, 128 states, four taps, twice as many inner channels."""
    inner, heads, convolved = 2 * width, 2 * width // 64, 2 * width + 2 * 128
    block = width * (inner + convolved + heads) + 5 * convolved + 3 * heads + inner + inner * width
    config = TrainConfig.from_flags({"preset": f"mamba2-{name}"})
    shapes = jax.eval_shape(lambda: init_state(config, FP32)).params
    assert count_params(shapes) == layers * (block + width) + (256 + 1) * width


def test_initialisation_is_the_papers():
    config = ModelConfig(mamba.Sizes(64), 3)
    preset = dataclasses.replace(PRESETS["micro"], model=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "micro", preset)
        params = jit(lambda: init_state(CONFIG, FP32))().params
    blocks = params["blocks"]
    dt = jax.nn.softplus(blocks["dt_bias"])
    assert 0.9e-3 < dt.min() < 2e-3
    assert 5e-2 < dt.max() < 1.1e-1
    np.testing.assert_allclose(
        jnp.exp(blocks["A_log"]), np.broadcast_to(np.arange(1, 17), (3, 128, 16)), rtol=1e-6
    )
    assert (blocks["D"] == 1).all()
    assert (blocks["norm"] == 1).all()
    bound = 128**-0.5 / 3**0.5
    assert 0.98 * bound < jnp.abs(blocks["out_proj"]).max() <= bound
    assert not np.array_equal(blocks["in_proj"][0], blocks["in_proj"][1])  # layers differ


@KIND
def test_weight_decay_is_on_matrices_only(shape):
    sizes = dataclasses.replace(shape.sizes, use_bias=True)
    shape = dataclasses.replace(shape, tie_embeddings=False, sizes=sizes)
    params = nnx.to_pure_dict(nnx.state(MambaLM(shape, rngs=nnx.Rngs(0))))
    names = set(params["blocks"]) | set(params) - {"blocks"}
    kept = {"norm", "conv_bias", "dt_bias", "A_log", "D", "in_bias", "out_bias"}
    own = {"mamba": {"x_proj", "dt_proj"}, "mamba2": {"norm_weight"}}[shape.block.name]
    assert names - DECAYED == kept | (own - DECAYED)
    assert names >= DECAYED - {"x_proj", "dt_proj"} | own
    optimizer = make_optimizer(CONFIG)
    zeros = jax.tree.map(jnp.zeros_like, params)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(ones), ones)
    for path, update in jax.tree.leaves_with_path(updates):
        assert (update != 0).all() == (path[-1].key in DECAYED), path


def test_learning_rate_warms_up_and_decays():
    config = dataclasses.replace(CONFIG, steps=200, lr=1e-2)
    rates = np.array([learning_rate(config)(step) for step in range(201)])
    assert config.warmup == 20
    np.testing.assert_allclose(rates[:20], 1e-2 * np.arange(1, 21) / 20, rtol=1e-5)
    assert (np.diff(rates[20:]) <= 0).all()
    np.testing.assert_allclose(rates[110], 5.5e-3, rtol=1e-5)
    np.testing.assert_allclose(rates[200], 1e-3, rtol=1e-4)


@functools.cache
def train_step(precision, config=CONFIG):
    """The compiled step on windows (1, 8, 25), and the state before the first."""
    policy = Policy.parse(precision)
    step = jit(make_train_step(config, make_model(config.model, Options(policy))))
    return step, jit(lambda: init_state(config, policy))()


@pytest.mark.newest
def test_accumulated_gradients_are_those_of_the_whole_batch():
    w = windows(8)
    step, state = train_step("fp32")
    whole = step(state, w[None])
    parts = jit(make_train_step(CONFIG, make_model(MICRO, Options())))(state, w.reshape(4, 2, -1))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(whole[1][name], parts[1][name], rtol=2e-6)
    # After one step, mu is a tenth of the clipped gradient.
    mu = [state.opt_state.mu for state, _ in (whole, parts)]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(a).max()), *mu
    )


@pytest.mark.newest
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


@functools.cache
def learn(precision, config):
    """Losses of thirty steps on eight windows, which a model can begin to learn by heart."""
    step, state = train_step(precision, config)
    losses = []
    for _ in range(30):
        state, metrics = step(state, windows(8)[None])
        losses.append(float(metrics["loss"]))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    return np.array(losses)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("config", "precision"),
    [(CONFIG, "bf16"), (CONFIG, "fp16"), (CONFIG2, "bf16")],
    ids=["bf16", "fp16", "mamba2-bf16"],
)
def test_low_precision_learns_as_fp32_does(config, precision):
    full, low = learn("fp32", config), learn(precision, config)
    assert full[-1] < full[0] - 0.3
    np.testing.assert_allclose(low, full, rtol=0.01)
    assert not np.array_equal(low, full)


@pytest.mark.newest  # every version of JAX lowers each op
@pytest.mark.parametrize(
    ("name", "options", "again"),
    [
        ("130m", {"remat": "none"}, ""),
        ("130m", {"remat": "layer"}, "rms_norm causal_conv1d selective_scan"),
        ("130m", {"remat": "cheap"}, "causal_conv1d"),
        ("130m", {"remat": "scan"}, "causal_conv1d selective_scan"),
        ("mamba2-130m", {}, ""),
    ],
    ids=["False", "True", "cheap", "scan", "mamba2"],
)
def test_training_on_a_gpu_runs_the_kernels(name, options, again, monkeypatch):
    """Two layers of the 130m preset, a step in bf16 lowered for CUDA: kernels both ways."""
    preset = PRESETS[name]
    two = dataclasses.replace(preset, model=dataclasses.replace(preset.model, n_layers=2))
    monkeypatch.setitem(PRESETS, name, two)
    config = TrainConfig.from_flags({"preset": name})
    policy = Policy.parse("bf16")
    step = make_train_step(config, make_model(config.model, Options(policy, **options)))
    state = jax.eval_shape(lambda: init_state(config, policy))
    batch = jax.ShapeDtypeStruct((1, config.batch_size, config.seq_len + 1), np.uint8)
    text = jax.jit(step).trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()
    calls = check.kernel_calls(text)
    expected = {
        "mamba": {"rms_norm": 3, "causal_conv1d": 2, "selective_scan": 2},  # a norm is of no layer
        "mamba2": {"rms_norm": 5, "causal_conv1d": 4, "ssd": 2},
    }
    for op, of_blocks in expected[config.model.block.name].items():
        runs = sum(f"{op}_fwd" in call for call in calls)
        assert runs == of_blocks + 2 * (op in again.split())
        assert f"{op}_bwd" in text
    assert "fused_adam" in text


@pytest.mark.newest
@pytest.mark.parametrize("name", ["130m", "mamba2-130m"])
def test_training_on_packed_documents_waits_for_nothing(name):
    """On a GPU the host reads a loop's condition, and meanwhile starts no kernel.

    The loops over layers run once, and are none to XLA.
    """
    shape = dataclasses.replace(PRESETS[name].model, n_layers=1)
    graphdef = make_model(shape, Options(Policy.parse("bf16")))
    tokens = jax.ShapeDtypeStruct((2, 257), np.int32)
    params = jax.eval_shape(lambda: initial_params(shape))

    def lowered(**documents):
        gradients = jax.jit(jax.value_and_grad(functools.partial(loss_fn, graphdef)))
        program = gradients.trace(params, tokens, **documents)
        return program.lower(lowering_platforms=("cuda",)).as_text()

    packed, unpacked = lowered(segment_ids=tokens), lowered()
    assert check.kernel_calls(packed)
    assert packed.count("stablehlo.while") == unpacked.count("stablehlo.while")


@pytest.mark.compiled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_by_the_kernels_is_as_near_to_fp32_as_in_plain_jax(precision, monkeypatch):
    """Losses of thirty steps on the same windows."""
    shape = dataclasses.replace(MICRO, sizes=mamba.Sizes(128))
    monkeypatch.setitem(PRESETS, "micro", dataclasses.replace(PRESETS["micro"], model=shape))
    batch = windows(8, 128)[None]

    def losses(precision, implementation):
        policy = Policy.parse(precision)
        config = dataclasses.replace(CONFIG, implementation=implementation or "auto")
        model = make_model(shape, Options(policy, implementation))
        state = jax.jit(lambda: init_state(config, policy))()
        step = jax.jit(make_train_step(config, model), donate_argnums=0)
        assert ("selective_scan_bwd" in step.lower(state, batch).as_text()) == (not implementation)
        found = []
        for _ in range(30):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        return np.array(found)

    with jax.default_matmul_precision("highest"):
        truth, plain = losses("fp32", "xla"), losses(precision, "xla")
        kernels = losses(precision, None)
    assert truth[-1] < truth[0] - 0.3
    assert 0 < check.relative_error(kernels, truth) <= 2 * check.relative_error(plain, truth)


def test_one_hot_does_without_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        found = one_hot(jnp.array([[1, 3]], jnp.uint8), 3)
    assert found.tolist() == [[[False, True, False], [False, False, False]]]
