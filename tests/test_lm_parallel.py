"""A language model split between devices: the same losses, and less memory on each."""

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxkern.lm import cli, config, data, program
from jaxkern.lm.config import ModelConfig, Preset, RunError, TrainConfig
from jaxkern.lm.flags import parser
from jaxkern.lm.model import Options, initial_params
from jaxkern.lm.parallel import Split, split_of
from jaxkern.lm.resume import resume_config
from jaxkern.lm.step import loss_fn, make_model
from jaxkern.nn import mamba, mamba2

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(len(jax.devices()) < 4, reason="the model is split between four devices"),
]

BATCH, LENGTH, STEPS = 8, 12, 3

MODELS = {
    "micro": ModelConfig(mamba.Sizes(16, d_state=4), 2),
    "micro-odd": ModelConfig(
        mamba.Sizes(8, d_state=2, use_bias=True, use_conv_bias=False),
        1,
        vocab_size=1100,
        tie_embeddings=False,
    ),
    "mamba2-micro": ModelConfig(mamba2.Sizes(16, d_state=4, headdim=8), 2),
    "mamba2-odd": ModelConfig(
        mamba2.Sizes(16, d_state=4, headdim=4, ngroups=2, use_bias=True), 1, tie_embeddings=False
    ),
}
"""Vocabularies above 1024 are read otherwise; biases and groups are split, too."""


@pytest.fixture(autouse=True)
def models(monkeypatch):
    for name, model in MODELS.items():
        monkeypatch.setitem(config.PRESETS, name, Preset(model, 50, BATCH, LENGTH, 1e-2, 10))


def configured(**flags):
    return TrainConfig.from_flags({"scan_layers": True} | flags)


def placed(configuration):
    sizes = config.axes_of(configuration.mesh) if configuration.mesh else {"data": 1}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return program.Placement.of(configuration, devices)


@functools.cache
def windows(vocab_size, length=LENGTH):
    rng = np.random.default_rng(0)
    shape = STEPS, BATCH, length + 1
    return rng.integers(0, vocab_size, shape, dtype=data.dtype_of(vocab_size))


def with_segments(batch, configuration):
    """A batch of documents that end elsewhere in every row, if the run packs them."""
    if not configuration.pack:
        return batch
    ends = 1 + np.arange(len(batch)) * (configuration.seq_len // len(batch))
    ids = (np.arange(batch.shape[-1]) >= ends[:, None]).astype(np.int32)
    return data.Packed(batch, ids)


def trained(preset, **flags):
    """Losses and norms of gradients of some steps, the averages after the first, the last loss."""
    configuration = configured(preset=preset, **flags)
    placement = placed(configuration)
    programs = program.compile_programs(configuration, placement, fresh=True)
    state, numbers, first = programs.init(), [], None
    batches = windows(MODELS[preset].vocab_size, configuration.seq_len)
    put = lambda tree, to: jax.device_put(jax.tree.map(placement.split.windows, tree), to)
    for batch in batches:
        in_parts = lambda leaf: leaf.reshape(configuration.grad_accum, -1, leaf.shape[-1])
        parts = jax.tree.map(in_parts, with_segments(batch, configuration))
        state, metrics = programs.step(state, put(parts, placement.second_split))
        numbers.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        if first is None:
            first = jax.tree.map(np.asarray, placement.to_stored(state).opt_state.mu)
    rows = with_segments(batches[0], configuration)
    rows = jax.tree.map(lambda leaf: leaf[: BATCH // configuration.grad_accum], rows)
    loss = programs.loss(state.params, put(rows, placement.first_split))
    return np.array(numbers), first, float(loss), programs


@functools.cache
def on_one_device(preset, **flags):
    return trained(preset, **flags)


@pytest.mark.parametrize(
    ("preset", "mesh", "flags"),
    [
        ("micro", "fsdp=4", {}),
        ("micro", "data=2,tensor=2", {"remat": "cheap", "pack": True}),
        ("micro", "fsdp=2", {"grad_accum": 2, "pack": True}),
        ("micro-odd", "fsdp=2,tensor=2", {}),
        ("mamba2-micro", "tensor=4", {}),
        ("mamba2-micro", "data=2,fsdp=2", {"scan_layers": False, "remat": "layer"}),
        ("mamba2-odd", "fsdp=2,tensor=2", {}),
        ("micro", "sequence=4", {"seq_len": 32, "pack": True, "remat": "scan"}),
        ("micro", "data=2,sequence=2", {"seq_len": 16, "grad_accum": 2, "pack": True}),
        ("micro-odd", "sequence=2,fsdp=2", {"seq_len": 16}),
        ("mamba2-micro", "sequence=2,tensor=2", {"seq_len": 256, "pack": True}),
    ],
)
def test_a_split_model_has_the_losses_and_gradients_of_one_device(preset, mesh, flags):
    parts = {name: flags[name] for name in ("grad_accum", "pack", "seq_len") if name in flags}
    expected, averages, loss, _ = on_one_device(preset, **parts)
    got, split_averages, split_loss, _ = trained(preset, mesh=mesh, **flags)
    np.testing.assert_allclose(got, expected, rtol=2e-5)
    assert split_loss == pytest.approx(loss, rel=2e-5)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(averages))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5 * scale)
    jax.tree.map(close, split_averages, averages)


@pytest.mark.parametrize("preset", ["micro", "mamba2-micro"])
def test_nothing_as_long_as_a_sequence_is_gathered(preset):
    flags = {"mesh": "data=2,sequence=2", "seq_len": 4096, "batch_size": 2, "pack": True}
    configuration = configured(preset=preset, **flags)
    text: Any = program.lowered_step(configuration, placed(configuration)).compile()
    collectives = re.findall(
        r"= (.*) (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
        text.as_text(),
    )
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
    arrays = {"blocks": {k: rng.random((3, *shape)) for k, (_, shape) in inits.items()}}
    arrays = jax.tree.map(np.float32, arrays)
    moved = jax.tree.map(np.asarray, split.to_devices(arrays))
    if isinstance(MODELS[name].sizes, mamba.Sizes):
        second = lambda a: np.split(a, 2, -1)[1]
        u, z = np.split(arrays["blocks"]["in_proj"], 2, -1)
        of_device = np.concatenate([second(u), second(z)], -1)
        np.testing.assert_array_equal(second(moved["blocks"]["in_proj"]), of_device)
    jax.tree.map(np.testing.assert_array_equal, split.to_stored(moved), arrays)


def test_no_device_holds_the_whole_of_a_split_model():
    configuration = configured(preset="tiny", mesh="fsdp=2,tensor=2")
    placement = placed(configuration)
    state = program.abstract_state(configuration, placement)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    made: Any = program.lowered_init(configuration, placement).compile().memory_analysis()
    assert made.output_size_in_bytes < 0.3 * whole
    assert made.output_size_in_bytes + made.temp_size_in_bytes < 0.7 * whole


@pytest.mark.parametrize(
    ("flags", "devices", "message"),
    [
        (
            {"mesh": "fsdp=3"},
            3,
            r"--mesh fsdp=3 cannot split the model's width d_model of 16 into equal parts; choose "
            r"2, 4, 8 or 16, or another axis",
        ),
        (
            {"parallel": "tensor"},
            3,
            r"--parallel tensor over 3 devices cannot split the model's 32 inner channels into "
            r"equal parts; choose --devices 2, 4, 8, 16 or 32, or another --parallel",
        ),
        ({"mesh": "data=2,tensor=3"}, 6, "--mesh tensor=3 cannot split the model's 32 inner ch"),
        ({"mesh": "tensor=8"}, 8, r"--mesh tensor=8 cannot .* 4 heads .*; choose 2 or 4, or anot"),
        (
            {"mesh": "tensor=8,fsdp=8"},
            64,
            r"--mesh fsdp=8,tensor=8 cannot split the model's 32 inner channels into equal parts; "
            r"choose sizes whose product is 2, 4, 8, 16 or 32, or another axis",
        ),
        (
            {"mesh": "data=3"},
            3,
            r"--batch-size 8 cannot be split over 3 devices; choose a multiple of 3, or a smaller "
            r"data in --mesh",
        ),
        ({}, 3, "--batch-size 8 cannot be split over 3 devices; .*, or fewer --devices"),
        (
            {"parallel": "sequence"},
            4,
            r"--parallel sequence over 4 devices cannot split the 12 tokens .*, or fewer --devices",
        ),
    ],
)
def test_what_cannot_be_split_is_told_by_the_flags_that_were_given(flags, devices, message):
    with pytest.raises(RunError, match=f"^{message}"):
        split_of(configured(preset="mamba2-micro", **flags), devices)


def test_groups_that_cannot_be_split_are_told(monkeypatch):
    model = MODELS["mamba2-micro"]
    groups = dataclasses.replace(model, sizes=dataclasses.replace(model.sizes, ngroups=2))
    monkeypatch.setitem(config.PRESETS, "groups", Preset(groups, 50, BATCH, LENGTH, 1e-2, 10))
    with pytest.raises(RunError, match="tensor=4 cannot split the model's 2 groups that share B"):
        split_of(configured(preset="groups", mesh="tensor=4"), 4)


def run(capsys, *argv, code=0):
    try:
        returned = cli.main([str(arg) for arg in argv])
    except SystemExit as exit:
        returned = exit.code
    assert returned == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    return err if code else out


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line).get("loss") for line in lines][1:]


def test_a_run_goes_on_on_another_mesh_with_the_same_losses(capsys, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("what is split between devices, and what is not; " * 200)
    argv = ["train", "--preset", "mamba2-micro", "--data", text, "--eval-batches", 1]
    argv += ["--scan-layers", "--steps", 4, "--checkpoint-every", 2]
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert "mesh" not in run(capsys, *argv, "--out", whole)
    started = run(capsys, *argv, "--mesh", "tensor=2,fsdp=2", "--out", out)
    assert "device   4 × cpu, fp32\nmesh     fsdp=2,tensor=2\n" in started
    np.testing.assert_allclose(losses(out), losses(whole), rtol=2e-5)
    # The checkpoint of the second step, as if the run had been killed there.
    for folder in (out, whole):
        for later in (folder / "checkpoints").glob("4"):
            later.rename(tmp_path / f"{folder.name}-4")
    resume = functools.partial(run, capsys, "train", "--resume", "--out")
    again = resume(out, "--parallel", "fsdp", "--devices", 2)
    assert "continued from step 2" in again
    assert "mesh     fsdp=2\n" in again
    assert "continued from step 2" in resume(whole, "--mesh", "tensor=4")
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    assert resume(whole, code=1) == (
        "jaxkern: error: the run's --mesh tensor=4 is more than this machine's 1 (cpu); choose "
        "another for --resume by --mesh, --parallel or --devices\n"
    )
    assert "error: --mesh fsdp=2 is more than" in resume(whole, "--mesh", "fsdp=2", code=1)
    np.testing.assert_allclose(losses(out), losses(whole), rtol=2e-5)
    assert len(losses(out)) == 4


def test_parallel_alone_is_over_all_devices(capsys, tmp_path, monkeypatch):
    """Also on a CPU, where a run without it takes one; where there is one, the run says so."""
    text = tmp_path / "text.txt"
    text.write_text("what is split between devices, and what is not; " * 200)
    argv = ["train", "--preset", "micro", "--data", text, "--eval-batches", 1, "--steps", 2]
    count = len(jax.devices())
    flags = lambda name: ["--batch-size", count, "--scan-layers", "--out", tmp_path / name]
    assert "device   1 × cpu" in run(capsys, *argv, *flags("one"))
    for axis in ("data", "fsdp"):
        printed = run(capsys, *argv, *flags(axis), "--parallel", axis)
        assert f"device   {count} × cpu, fp32\nmesh     {axis}={count}\n" in printed
    again = ["train", "--resume", "--steps", 3, "--out", tmp_path / "one"]
    assert f"mesh     fsdp={count}\n" in run(capsys, *again, "--parallel", "fsdp")
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    printed = run(capsys, *argv, *flags("alone"), "--parallel", "fsdp")
    assert "1 × cpu, fp32\nmesh     none: one device has what --parallel fsdp would" in printed


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        ("data=2,tensor=2", "4", ("data=2,tensor=2", "data")),
        ("data=2,tensor=2", "1", ("", "data")),
        ("tensor=4", "2", ("", "tensor")),
        ("data=1,fsdp=4", "all", ("", "fsdp")),
        ("data=2,tensor=2", "2", None),
        ("data=2,tensor=2", "all", None),
    ],
)
def test_devices_alone_do_not_drop_the_mesh_of_a_run(mesh, devices, expected):
    stored = vars(configured(preset="micro", mesh=mesh))
    if expected is not None:
        resumed = resume_config(stored, {"devices": devices})
        assert (resumed.mesh, resumed.parallel, resumed.devices) == (*expected, devices)
        return
    message = f"^--devices {devices} does not say how they share .* --mesh {mesh} of the run splits"
    with pytest.raises(RunError, match=f"{message} between 4; add --mesh or --parallel$"):
        resume_config(stored, {"devices": devices})
    assert resume_config(stored, {"devices": devices, "parallel": "tensor"}).parallel == "tensor"


def test_a_run_whose_sequences_are_split_goes_on_with_whole_ones(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("what is split between devices, and what is not; " * 200)
    argv = ["train", "--preset", "micro", "--data", text, "--eval-batches", 2, "--pack"]
    argv += ["--scan-layers", "--steps", 2, "--seq-len", 16]
    whole, out = tmp_path / "whole", tmp_path / "run"
    run(capsys, *argv, "--out", whole)
    run(capsys, *argv, "--parallel", "sequence", "--devices", 2, "--out", out)
    again = ["train", "--resume", "--steps", 3, "--out"]
    assert "from step 2" in run(capsys, *again, whole, "--mesh", "data=2,sequence=2")
    assert "from step 2" in run(capsys, *again, out, "--devices", 1)
    np.testing.assert_allclose(losses(out), losses(whole), rtol=2e-5)
    validated = lambda folder: [
        json.loads(line).get("validation_loss")
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    pairs = zip(validated(out), validated(whole), strict=True)
    assert all(a == b or a == pytest.approx(b, rel=2e-5) for a, b in pairs)


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        ("rows=2", "'rows' is not one of data, sequence, fsdp, tensor"),
        ("data=2,", "'' is not one of data, sequence, fsdp, tensor"),
        ("data=2,data=2", "data is named twice"),
        ("data=99999999999999", "size of data must be from 1 to 999999, not '99999999999999'"),
        ("fsdp=0", "size of fsdp must be from 1 to 999999, not '0'"),
        ("fsdp", "size of fsdp must be from 1 to 999999, not ''"),
    ],
)
def test_a_mesh_that_cannot_be_read_is_told_why(capsys, mesh, reason):
    line = run(capsys, "train", "--mesh", mesh, code=2)
    assert f"must be axes and their sizes such as data=2,fsdp=4, got {mesh!r}: " in line
    assert f"{reason} (see jaxkern train --help)" in line


@pytest.mark.parametrize("mesh", ["data=2", "data=2,fsdp=2"])
def test_axes_that_differ_from_parallel_are_refused(capsys, tmp_path, mesh):
    flags = ["--parallel", "fsdp", "--mesh", mesh, "--out", tmp_path / "run"]
    line = run(capsys, "train", "--preset", "micro", *flags, code=1)
    assert f"--parallel fsdp and --mesh {mesh} name different axes; leave --parallel out" in line
    stored = vars(configured(preset="micro"))
    with pytest.raises(RunError, match="name different axes"):
        resume_config(stored, {"parallel": "fsdp", "mesh": mesh})
    assert resume_config(stored, {"parallel": "fsdp", "mesh": "fsdp=2"}).mesh == "fsdp=2"


def test_a_mesh_may_have_spaces():
    mesh = parser().parse_args(["train", "--mesh", " data = 2, fsdp=4 "]).mesh
    assert mesh == "data=2,fsdp=4"


def test_flags_that_do_not_fit_are_one_line(capsys, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("some text " * 100)
    argv = ["train", "--preset", "mamba2-micro", "--data", text, "--out", tmp_path / "run"]
    told = functools.partial(run, capsys, *argv)
    assert "invalid choice: 'rows'" in told("--parallel", "rows", code=2)
    assert "--mesh data=4096 is more than this machine's" in told("--mesh", "data=4096", code=1)
    assert "is of 4 devices and --devices says 2" in told(
        "--mesh", "data=4", "--devices", 2, code=1
    )
    assert "--batch-size 8 cannot be split over --grad-accum 8 × 2" in told(
        "--mesh", "fsdp=2,tensor=2", "--grad-accum", 8, code=1
    )
    assert "cannot split the 12 tokens of --seq-len into equal parts of whole chunks of 128 " in (
        refused := told("--mesh", "sequence=4", code=1)
    )
    assert "choose --seq-len 512, or a smaller axis" in refused
    assert not (tmp_path / "run").exists()
    long = dataclasses.replace(MODELS["micro"].sizes, d_conv=12)
    monkeypatch.setitem(
        config.PRESETS, "long", Preset(ModelConfig(long, 1), 50, BATCH, LENGTH, 1e-2, 10)
    )
    with pytest.raises(RunError, match=r"a part is shorter than the 11 .* choose --seq-len 32,"):
        placed(configured(preset="long", mesh="sequence=2", seq_len=16))


@pytest.mark.parametrize(("name", "dimension"), [("micro", 1), ("mamba2-odd", -1)])
def test_split_parameters_of_an_explicit_mesh_are_gathered(name, dimension):
    model = dataclasses.replace(MODELS[name], n_layers=1)
    structure = make_model(model, Options(scan_layers=True))
    params, rows = initial_params(model), windows(256)[0]
    loss = jax.value_and_grad(lambda params, rows: loss_fn(structure, params, rows))
    expected = jax.jit(loss)(params, rows)
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(AxisType.Explicit,))

    def split(leaf):
        at = dimension % leaf.ndim if leaf.ndim > 1 else 0
        spec = ["d" if i == at and leaf.shape[i] % 4 == 0 else None for i in range(leaf.ndim)]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    with jax.set_mesh(mesh):
        got = jax.jit(loss)(jax.tree.map(split, params), split(rows))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, got, expected)
