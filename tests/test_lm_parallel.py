"""A language model split between devices: the same losses, and less memory on each."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxkern
from jaxkern.lm import config, data, program, sample
from jaxkern.lm import train as train_module
from jaxkern.lm.config import ModelConfig, RunError, TrainConfig
from jaxkern.lm.model import Options, initial_params
from jaxkern.lm.parallel import Split, split_of
from jaxkern.lm.report import read_metrics
from jaxkern.lm.step import loss_fn, make_model, schedule_of
from jaxkern.lm.tokenizer import dtype_of
from tests.check import exhaustive
from tests.language_models import HYBRID, check_gradients, command, loss_float64, random_params

pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 4, reason="the model is split between four devices"
)

BATCH, LENGTH, STEPS = 8, 12, 3

# Vocabularies above 1024 are read otherwise; biases and groups are split, too.
ODD = ModelConfig(8, 1, d_state=2, use_bias=True, use_conv_bias=False)
ODD2 = ModelConfig(16, 1, "mamba2", d_state=4, head_dim=4, n_groups=2, use_bias=True)
MODELS = {
    "micro": ModelConfig(16, 2, d_state=4),
    "micro-odd": dataclasses.replace(ODD, vocab_size=1100, tie_embeddings=False),
    "mamba2-micro": ModelConfig(16, 2, "mamba2", d_state=4, head_dim=8),
    "mamba2-odd": dataclasses.replace(ODD2, tie_embeddings=False),
    "gdn": ModelConfig(16, 1, "gdn", d_state=4, head_dim=8, n_key_heads=2, use_bias=True),
    "kda": ModelConfig(16, 1, "kda", d_state=4, head_dim=8, use_conv_bias=False),
    "kda-swiglu": ModelConfig(16, 2, "kda, swiglu", head_dim=8, d_mlp=24),
}
OTHERS = {
    "one": ModelConfig(16, 1, d_state=4),
    "mamba2-one": ModelConfig(16, 1, "mamba2", d_state=4, head_dim=8),
    "groups": ModelConfig(16, 2, "mamba2", d_state=4, head_dim=8, n_groups=2),
    "long": ModelConfig(16, 1, d_state=4, d_conv=12),
    "hybrid": dataclasses.replace(HYBRID, n_layers=4),
}


@pytest.fixture(autouse=True)
def models(monkeypatch):
    for name, model in (MODELS | OTHERS).items():
        of_test = {"steps": 50, "batch_size": BATCH, "seq_len": LENGTH, "eval_every": 10}
        flags = {"preset": "micro", "model": model, "lr": 1e-2} | of_test
        preset = dataclasses.replace(TrainConfig.from_flags(flags), preset=name)
        monkeypatch.setitem(config.PRESETS, name, preset)


def configured(**flags):
    return TrainConfig.from_flags({"scan_layers": True} | flags)


def placed(configuration):
    sizes = config.axes_of(configuration.mesh).values()
    devices = jax.devices()[: math.prod(sizes)]
    return program.Placement.of(configuration, devices)


@functools.cache
def windows(vocab_size, length=LENGTH):
    shape = STEPS, BATCH, length + 1
    dtype = dtype_of(vocab_size)
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=dtype)


def with_segments(batch, configuration):
    """A batch of documents that end elsewhere in every row, if the run packs them."""
    if not configuration.pack:
        return data.Packed(batch)
    ends = 1 + np.arange(len(batch)) * (configuration.seq_len // len(batch))
    ids = (np.arange(batch.shape[-1]) >= ends[:, None]).astype(np.int32)
    return data.Packed(batch, ids)


def begun(configuration, placement):
    """The state of a run before its first step, away from the symmetries of a new one."""
    state = program.abstract_state(configuration, placement, stored=True)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    params = jax.tree.map(np.asarray, random_params(configuration.model))
    state = placement.split.to_devices(zeros._replace(params=params))
    return jax.device_put(state, placement.shardings(state))


def put(placement, batch, to):
    return jax.device_put(jax.tree.map(placement.split.windows, batch), to)


def stored(placement, tree):
    return jax.tree.map(np.asarray, placement.split.to_stored(jax.tree.map(np.asarray, tree)))


@pytest.mark.parametrize(
    ("preset", "mesh", "length"),
    [
        ("micro-odd", "fsdp=2,tensor=2", 4),
        exhaustive("one", "sequence=2", 16),
        ("mamba2-one", "tensor=2", 4),
        ("kda", "tensor=2", 4),
        ("hybrid", "data=2,fsdp=2", 4),
    ],
)
def test_gradients_of_a_split_model_are_those_of_float64(monkeypatch, preset, mesh, length):
    # In place of new parameters a step gives the gradients: the optimizer takes long to compile.
    gradients = lambda _, grads, opt_state, *args, **options: (grads, opt_state)
    monkeypatch.setattr(jaxkern, "apply", gradients)
    model = (MODELS | OTHERS)[preset]
    configuration = configured(preset=preset, mesh=mesh, seq_len=length, batch_size=4)
    placement = placed(configuration)
    batch = windows(model.vocab_size, length)[0, :4]
    step = program.lowered_step(configuration, placement).compile()
    state = begun(configuration, placement)
    parts = put(placement, data.Packed(batch[None]), placement.windows(None))
    state, metrics = step(state, parts, schedule_of(configuration))
    params, grads = random_params(model), stored(placement, state.params)
    squares = sum((grad.astype(float) ** 2).sum() for grad in jax.tree.leaves(grads))
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(squares), rtol=2e-5)
    np.testing.assert_allclose(metrics["loss"], loss_float64(model, params, batch), rtol=2e-5)
    check_gradients(model, params, grads, batch)


@functools.cache
def trained(preset, **flags):
    """Losses and norms of gradients of some steps, the averages after the first, the last loss."""
    configuration = configured(preset=preset, **flags)
    placement = placed(configuration)
    step = program.lowered_step(configuration, placement).compile()
    state, numbers, first = begun(configuration, placement), [], None
    batches = windows(MODELS[preset].vocab_size, configuration.seq_len)
    for batch in batches:
        in_parts = lambda leaf: leaf.reshape(configuration.grad_accum, -1, leaf.shape[-1])
        parts = jax.tree.map(in_parts, with_segments(batch, configuration))
        parts = put(placement, parts, placement.windows(None))
        state, metrics = step(state, parts, schedule_of(configuration))
        numbers.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        if first is None:
            first = stored(placement, state.opt_state.mu)
    rows = with_segments(batches[0], configuration)
    rows = jax.tree.map(lambda leaf: leaf[: BATCH // configuration.grad_accum], rows)
    loss = program.lowered_loss(configuration, placement).compile()
    return np.array(numbers), first, loss(state.params, put(placement, rows, placement.windows()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("preset", "mesh", "flags"),
    [
        ("micro", "data=2,tensor=2", {"scan_layers": False, "remat": "cheap", "pack": True}),
        ("micro", "fsdp=2", {"grad_accum": 2, "pack": True}),
        ("mamba2-micro", "data=2,fsdp=2", {"scan_layers": False, "remat": "layer"}),
        ("mamba2-odd", "fsdp=2,tensor=2", {}),
        ("micro", "sequence=4", {"seq_len": 32, "pack": True, "remat": "scan"}),
        ("micro", "data=2,sequence=2", {"seq_len": 16, "grad_accum": 2, "pack": True}),
        ("micro-odd", "sequence=2,fsdp=2", {"seq_len": 16}),
        ("mamba2-micro", "sequence=2,tensor=2", {"seq_len": 256, "pack": True}),
        ("gdn", "fsdp=2,tensor=2", {}),
        ("kda", "fsdp=2,tensor=2", {"pack": True}),
        ("kda-swiglu", "sequence=2,fsdp=2", {"seq_len": 512, "pack": True}),
    ],
)
def test_a_split_model_has_the_losses_and_gradients_of_one_device(preset, mesh, flags):
    parts = {name: flags[name] for name in ("grad_accum", "pack", "seq_len") if name in flags}
    expected, averages, loss = trained(preset, **parts)
    got, split_averages, split_loss = trained(preset, mesh=mesh, **flags)
    np.testing.assert_allclose(got, expected, rtol=2e-5)
    np.testing.assert_allclose(split_loss, loss, rtol=2e-5)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(averages))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5 * scale)
    jax.tree.map(close, split_averages, averages)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["micro", "mamba2-micro"])
def test_nothing_as_long_as_a_sequence_is_gathered(preset):
    flags = {"mesh": "data=2,sequence=2", "seq_len": 4096, "batch_size": 2, "pack": True}
    configuration = configured(preset=preset, **flags)
    compiled: Any = program.lowered_step(configuration, placed(configuration)).compile()
    kinds = "all-gather|all-to-all|collective-permute|reduce-scatter"
    collectives = re.findall(rf"= (.*) ({kinds})(?:-start)?\(", compiled.as_text())
    assert {kind for _, kind in collectives} == {"all-gather", "collective-permute"}
    for shapes, kind in collectives:
        for sizes in re.findall(r"\[([\d,]*)\]", shapes):
            numbers = np.prod([int(size) for size in sizes.split(",") if size])
            assert numbers < configuration.seq_len, (kind, shapes)


def test_windows_of_parts_overlap_by_a_token():
    split = Split(MODELS["micro"], sequence=3)
    np.testing.assert_array_equal(
        split.windows(np.arange(14).reshape(2, 7)),
        [[0, 1, 2, 2, 3, 4, 4, 5, 6], [7, 8, 9, 9, 10, 11, 11, 12, 13]],
    )


@pytest.mark.exhaustive
def test_a_batch_in_parts_is_exchanged_once():
    configuration = configured(preset="micro", mesh="fsdp=4", grad_accum=2)
    compiled: Any = program.lowered_step(configuration, placed(configuration)).compile()
    before, entry = compiled.as_text().split("\nENTRY ")
    assert len(re.findall(r" reduce-scatter\(", entry)) == 5  # a matrix each, all layers at once
    assert not re.findall(r" (?:reduce-scatter|all-gather|all-reduce)\(", before)  # in no loop


@pytest.mark.parametrize("name", MODELS)
def test_columns_come_back_from_the_order_of_devices(name):
    split = Split(MODELS[name], tensor=2)
    inits = MODELS[name].block.initializers(MODELS[name].sizes)
    rng = np.random.default_rng(0)
    arrays = {"blocks": {k: np.float32(rng.random((3, *s))) for k, (_, s) in inits.items()}}
    moved = jax.tree.map(np.asarray, split.to_devices(arrays))
    jax.tree.map(np.testing.assert_array_equal, split.to_stored(moved), arrays)
    assert not np.array_equal(moved["blocks"]["in_proj"], arrays["blocks"]["in_proj"])


def test_no_device_holds_the_whole_of_a_split_model():
    configuration = configured(preset="tiny", mesh="fsdp=2,tensor=2")
    placement = placed(configuration)
    state = program.abstract_state(configuration, placement)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    made: Any = program.lowered_init(configuration, placement).compile().memory_analysis()
    assert made.output_size_in_bytes < 0.3 * whole
    assert made.output_size_in_bytes + made.temp_size_in_bytes < 0.7 * whole


WHOLE = "cannot split the 12 tokens .* whole chunks of 128 .* choose --seq-len 512, or a smaller"
SHORT = "cannot .* and at least 11; choose --seq-len 32,"
DIVISOR = "equal parts; choose a divisor of"
BATCH_8 = "--batch-size 8 cannot be split over"


@pytest.mark.parametrize(
    ("flags", "devices", "words"),
    [
        ("micro --mesh fsdp=3", 3, f"cannot .* width d_model of 16 into 3 {DIVISOR} 16"),
        ("micro --parallel tensor", 3, f"over 3 devices cannot .* 32 inner .* 3 {DIVISOR} 32"),
        ("micro --mesh tensor=3,data=2", 6, f"cannot .* 32 inner channels into 3 {DIVISOR} 32"),
        ("micro --mesh fsdp=8,tensor=8", 64, f"cannot .* 32 inner channels into 64 {DIVISOR} 32"),
        ("micro-odd --mesh tensor=8", 8, "cannot .* vocabulary of 1100 tokens into 8 equal parts"),
        ("mamba2-micro --mesh tensor=8", 8, f"cannot .* 4 heads into 8 {DIVISOR} 4"),
        ("groups --mesh tensor=4", 4, "cannot split the model's 2 groups that share B and C"),
        (
            "hybrid --mesh tensor=2",
            2,
            "cannot split layers .* tensor splits models of blocks",
        ),
        ("hybrid --parallel sequence", 2, "over 2 devices cannot .* and sequence those without"),
        ("gdn --mesh tensor=4", 4, f"cannot split the model's 2 key heads into 4 {DIVISOR} 2"),
        ("kda --mesh fsdp=2,tensor=8", 16, f"cannot split the model's 4 heads into 8 {DIVISOR} 4"),
        ("kda --mesh fsdp=16,tensor=2", 32, f"cannot .* 16 key channels into 32 {DIVISOR} 16"),
        ("mamba2-micro --parallel sequence", 4, f"over 4 devices {WHOLE}"),
        ("mamba2-micro --mesh sequence=4", 4, WHOLE),
        ("long --mesh sequence=2 --seq-len 16", 2, SHORT),
        ("micro --mesh data=4", 2, "is of 4 devices and --devices says 2; leave one out, or"),
        ("micro --batch-size 9", 2, "cannot .* × 2 devices .--parallel data .* multiple of 2"),
        (
            "micro --mesh data=3",
            3,
            f"{BATCH_8} --grad-accum 1 × 3 devices .* of 3",
        ),
        ("micro --mesh fsdp=2 --grad-accum 8", 2, f"{BATCH_8} --grad-accum 8 × 2 .* of 16"),
    ],
)
def test_what_cannot_be_split_is_told_by_the_flags_that_were_given(flags, devices, words):
    preset, *given = flags.split(" --")
    values = dict(flag.replace("-", "_").split() for flag in given)
    values = {name: int(value) if value.isdigit() else value for name, value in values.items()}
    told = words if words.startswith("--") else f"--{given[0]} {words}"
    with pytest.raises(RunError, match=f"^{told}"):
        split_of(configured(preset=preset, **values), devices)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "first", "then"),
    [
        ("--preset mamba2-micro", "--mesh tensor=2,fsdp=2", "--mesh tensor=4"),
        ("--preset micro --pack --seq-len 16", "--parallel sequence --devices 2", "--devices 1"),
    ],
)
def test_a_run_goes_on_on_another_mesh_with_the_same_losses(
    capsys, tmp_path, monkeypatch, flags, first, then
):
    compile_programs = train_module.compile_programs
    monkeypatch.setattr(train_module, "compile_programs", functools.cache(compile_programs))
    monkeypatch.setattr(sample.LanguageModel, "write", lambda *args, **options: None)
    text, whole, out = (tmp_path / name for name in ("text.txt", "whole", "run"))
    text.write_text("what is split between devices, and what is not; " * 200)
    argv = ["train", *flags.split(), "--data", text, "--eval-batches", 2, "--steps", 4]
    argv += ["--scan-layers", "--checkpoint-every", 2]
    assert "mesh" not in command(capsys, *argv, "--out", whole)
    assert "mesh     " in command(capsys, *argv, *first.split(), "--out", out)
    # The checkpoint of the second step, as if the run had been killed there.
    (out / "checkpoints" / "4").rename(tmp_path / "4")
    again = command(capsys, "train", "--resume", "--out", out, *then.split())
    assert "continued from step 2" in again
    assert ("mesh     tensor=4\n" in again) == ("tensor" in then)
    records = [read_metrics(folder / "metrics.jsonl") for folder in (out, whole)]
    for name in ("loss", "validation_loss"):
        got, expected = ([each[name] for each in found if name in each] for found in records)
        np.testing.assert_allclose(got, expected, rtol=2e-5)
    assert len(records[0]) == len(records[1]) == 5


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "dimension"), [("micro", 1), ("micro-odd", 0), ("mamba2-odd", -1)]
)
def test_split_parameters_of_an_explicit_mesh_are_gathered(name, dimension):
    """The batch is split, too; one vocabulary is so large that rows of the embedding are read."""
    model = dataclasses.replace(MODELS[name], n_layers=1)
    structure = make_model(model, Options(scan_layers=True))
    params, rows = initial_params(model), windows(model.vocab_size)[0]
    loss = jax.value_and_grad(lambda params, rows: loss_fn(structure, params, rows))
    expected = jax.jit(loss)(params, rows)
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(AxisType.Explicit,))

    def split(leaf):
        at = dimension % leaf.ndim if leaf.ndim > 1 else 0
        spec = ["d" if i == at and leaf.shape[i] % 4 == 0 else None for i in range(leaf.ndim)]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    with jax.set_mesh(mesh):
        rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("d")))
        got = jax.jit(loss)(jax.tree.map(split, params), rows)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, got, expected)
