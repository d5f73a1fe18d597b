"""The command line: flags, help, and one clear line for every mistake."""

import dataclasses
import errno
import io
import os
import platform
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import jaxkern
from jaxkern.core import cache, target
from jaxkern.lm import cli, memory, tokenizer
from jaxkern.lm import doctor as doctor_module
from jaxkern.lm import train as train_module
from jaxkern.lm.config import PRESETS, ModelConfig, RunError, TrainConfig
from jaxkern.lm.program import Programs, keep_programs
from jaxkern.lm.report import Progress
from jaxkern.lm.train import changed
from tests.language_models import command

MESH = "--mesh must be axes and their sizes such as data=2,fsdp=4, each of data, sequence, fsdp"
WHOLE, RATE = "must be from 1 to 2^31 - 1, got", "must be from 1e-30 to 1e+30, got"
WRONG_FLAGS = {
    "": "train, sample, export, warm, doctor",
    "fly": "fly",
    "train --preset huge": "130m",
    "train --devices none": "--devices must be a number, all or auto, got 'none'",
    "train --remat most": "'auto', 'none', 'cheap', 'scan', 'layer'",
    "train --speed 9": "--speed",
    "train --out=": "--out must have a value, got ''",
    "train --log-to comet": "invalid choice 'comet'",
    "train --log-to none wandb": "--log-to must be none alone, or without it, got",
    **dict.fromkeys((f"train --mesh {m}" for m in ("data=2,", "rows=2", "fsdp=0")), MESH),
    **dict.fromkeys((f"train --mesh {m}" for m in ("data=9999999", "data=2,data=2")), MESH),
    "train --parallel fsdp --mesh data=2": "--mesh data=2 name different axes; leave one out",
    "train --steps 1.5": "--steps",
    "train --steps": "--steps",
    "train --steps 0": f"--steps {WHOLE} 0 (see jaxkern train --help)",
    "train --batch-size 2147483648": f"--batch-size {WHOLE} 2147483648",
    "train --seed=-1": "--seed must be from 0 to 2^31 - 1, got -1",
    "train --lr 0": f"--optimizer.lr {RATE} 0.0",
    "train --lr nan": f"--optimizer.lr {RATE} nan",
    "train --optimizer.b1 1": "--optimizer.b1 must be at least 0 and below 1, got 1.0",
    "train --model.d-model 0": "--model.d_model must be at least 1, got 0",
    "train --model.d-modle 8": "--model.d-modle",
    "train --model.layers mamba3": "--model.layers must be names of mamba, mamba2",
    "train --config nowhere.yaml": "nowhere.yaml cannot be read (No such file",
    **dict.fromkeys((f"train --profile {p}" for p in ("0:5", "5:0", "x")), "must be STEP:COUNT"),
    **dict.fromkeys((f"train --coordinator {h}" for h in ("h", "h:", ":1")), "must be HOST:PORT"),
    "train --coordinator h:65536": "--coordinator must be HOST:PORT, such as node1:62100, got 'h:6",
    "train --mixed-precision params=float64": "params=float64: float64 is more than the float32",
    "sample --run x --hf y": "--run or --hf must be given, and not both",
    "sample --run x --temperature=-1": "--temperature must be at least 0 and finite, got -1",
    f"sample --run x --length {'9' * 9999}": "--length",
    "export --run x": "--hf",
    "export --run x --hf y --step 0": "--step must be at least 1, got 0",
    "warm": "--gpu must be given",
}


def test_a_wrong_flag_is_told_in_one_line(capsys):
    for argv, words in WRONG_FLAGS.items():
        line = command(capsys, *argv.split(), code=2)
        assert words in line, line
        assert line.startswith("jaxkern: error: "), line
        assert re.search(r" \(see jaxkern( \w+)? --help\)$", line), line


TRAINED = """
--data a b --eval-data c --vocab-size 512 --pack --init-hf x --out y --steps 3 --lr 1e-3
--seq-len=64 --mixed_precision bf16 --remat cheap --scan-layers --devices 2 --resume
--log-to tensorboard wandb --profile 9:2 --coordinator h:1 --processes 2 --process 0
--model.layers mamba2*3,attention --model.n_layers 4 --model.no-tie-embeddings
--optimizer.weight-decay 0.2 --optimizer.clip-norm None
"""
TRAIN = {"data": ("a", "b"), "eval_data": ("c",), "vocab_size": 512, "pack": True, "init_hf": "x"}
TRAIN |= {"out": Path("y"), "steps": 3, "optimizer.lr": 1e-3, "seq_len": 64, "remat": "cheap"}
TRAIN |= {"mixed_precision": "bf16", "scan_layers": True, "devices": "2", "resume": True}
TRAIN |= {"log_to": ("tensorboard", "wandb"), "profile": "9:2", "coordinator": "h:1"}
TRAIN |= {"processes": 2, "process": 0, "model.layers": "mamba2*3,attention", "model.n_layers": 4}
TRAIN |= {"model.tie_embeddings": False, "optimizer.weight_decay": 0.2, "optimizer.clip_norm": None}
SAMPLED = {"length": 400, "temperature": 0.8, "top_k": 40, "top_p": 1.0, "seed": 0, "stop": ()}
SAMPLED |= {"run": None, "hf": None, "prompt": (), "prompts": None, "dtype": None, "timing": False}
EXPORTED = {"run": Path("x"), "hf": Path("y"), "step": None, "dtype": "fp32"}
FLAGS = {
    f"train {TRAINED}": TRAIN,
    "train --remat --profile --log-to none": {"remat": "layer", "profile": "auto", "log_to": ()},
    "train --mesh data=2,fsdp=4": {"mesh": "data=2,fsdp=4"},
    "warm --gpu h200 --preset 130m --devices 4": {"gpu": "h200", "preset": "130m", "devices": "4"},
    "doctor": {"empty_cache": False},
    "doctor --empty-cache": {"empty_cache": True},
    "sample --run x --prompt a--b=c": SAMPLED | {"run": Path("x"), "prompt": ("a--b=c",)},
    "sample --hf x --prompt a --prompt=--b --stop c --stop d --timing --prompts f": SAMPLED
    | {"hf": Path("x"), "prompt": ("a", "--b"), "stop": ("c", "d"), "timing": True}
    | {"prompts": Path("f")},
    "sample --run x --length 5 --temperature 0 --top-k 0 --top-p 0.5 --seed 3": SAMPLED
    | {"run": Path("x"), "length": 5, "temperature": 0.0, "top_k": 0, "top_p": 0.5, "seed": 3},
    "export --run x --hf y": EXPORTED,
    "export --run x --hf y --step 3 --dtype bf16": EXPORTED | {"step": 3, "dtype": "bf16"},
}


def test_flags_and_their_values():
    for line, flags in FLAGS.items():
        assert cli.parse(line.split()) == (line.split()[0], flags), line


def test_flags_override_a_file_and_that_its_preset(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "preset: mamba2-micro\nsteps: 50\nparallel: fsdp\nlog_to: [wandb]\n"
        "optimizer: {lr: 1e-3, b1: 0}\nmodel: {d_state: 8}\n"
    )
    argv = ["train", "--config", str(file), "--steps", "60", "--model.head-dim", "4"]
    _, flags = cli.parse(argv)
    config = TrainConfig.from_flags(flags, flags.pop("config"))
    assert (config.steps, config.batch_size, config.log_to) == (60, 4, ("wandb",))
    assert (config.parallel, config.optimizer.lr, config.optimizer.b2) == ("fsdp", 1e-3, 0.95)
    assert config.model == ModelConfig(16, 2, "mamba2", d_state=8, head_dim=4)
    _, flags = cli.parse(["train", "--config", str(file), "--mesh", "data=2,tensor=2"])
    meshed = TrainConfig.from_flags(flags, flags.pop("config"))
    assert (meshed.mesh, meshed.parallel, meshed.devices) == ("data=2,tensor=2", None, "auto")
    grown = TrainConfig.from_flags({"tokenizer": "bpe:300"}, file).for_tokens(300)
    assert (grown.vocab_size, grown.model.vocab_size, grown.pack) == (320, 320, True)
    for written in (config, meshed, grown, *PRESETS.values()):
        written.save(file)
        assert TrainConfig.load(file) == written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stesp: 3", "stesp is no setting of a run; did you mean steps?"),
        ("model: {d_modle: 3}", "model.d_modle is no setting of a run; did you mean model.d_mod"),
        ("steps: many", "steps must be a whole number, got 'many'"),
        ("model: {d_model: wide}", "model.d_model must be a whole number, got 'wide'"),
        ("model: {head_dim: 7, layers: mamba2}", "model.head_dim must divide"),
        ("model: 3", "model must be a table, got 3"),
        ("optimizer: {lr: high}", "optimizer.lr must be a number, got 'high'"),
        ("optimizer: {clip_norm: 0}", "optimizer.clip_norm must be from 1e-30"),
        ("preset: huge", "preset must be one of micro, tiny, 130m"),
        ("data: text", "data must be a list, got 'text'"),
        ("log_to: [comet]", "log_to must be one of tensorboard, wandb, none, got ['comet']"),
        ("devices: 2", "devices must be a text, got 2"),
        ("mesh: rows=2", "mesh must be axes and their sizes"),
        ("[1, 2]", "must be a table of names and values"),
        ("a: [", "cannot be read (while parsing"),
    ],
)
def test_a_file_that_is_wrong_is_told_of_in_one_line(tmp_path, text, words):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(RunError) as raised:
        TrainConfig.load(file)
    assert str(raised.value).startswith(str(file))
    assert words in str(raised.value)


def test_what_a_command_cannot_begin_with(capsys, tmp_path, monkeypatch):
    """Each is told in one line before a tokenizer is trained, and leaves no folder behind."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):  # warm sets them, for JAX to start with
        monkeypatch.setenv(name, os.environ.get(name, ""))
    out, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("some words " * 500)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff")
    (tmp_path / "lines.jsonl").write_text('{"content": "some words"}\n')
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(tokenizer, "train_bpe", lambda *_, **__: 1 / 0)
    size = "the size must be a whole number from 257 to 2^24"
    micro = ["train", "--preset", "micro", "--out", out, "--data"]
    tokens = [*micro, text, "--tokenizer"]
    warm, hub = ["warm", "--gpu"], "state-spaces/mamba-130m-hf"
    told = ["--coordinator", "a:1", "--processes", 2, "--process", 2]
    for argv, words in [
        ([*micro, tmp_path / "nowhere"], "no such file"),
        ([*micro, tmp_path / "binary"], "binary"),
        ([*micro, tmp_path / "short.txt"], "--seq-len"),
        ([*micro, text, "--devices", "4096"], "--devices 4096 is more than this machine's"),
        ([*micro, text, "--mixed-precision", "fp8"], "--mixed-precision fp8"),
        ([*micro, tmp_path / "lines.jsonl"], 'lines.jsonl: line 1 has no "text" of a document'),
        ([*micro, text, "--batch-size", 2**31 - 1], "GiB of memory"),
        (["train", "--preset", "micro", "--out", text / "run"], "text.txt/run: Not a directory"),
        (["train", "--preset", "micro", "--out", tmp_path / ("x" * 999)], "File name too long"),
        ([*tokens, "bpe:256"], f"--tokenizer bpe:256: {size}"),
        ([*tokens, "bpe:many"], f"--tokenizer bpe:many: {size}"),
        ([*tokens, "x.json"], "--tokenizer x.json: no such tokenizer; give bytes, bpe:32000"),
        ([*tokens, tmp_path], r"tokenizer\.json cannot be read"),
        ([*tokens, "bpe:300", "--vocab-size", 299], "300 tokens, more than the 299 of --vocab-s"),
        ([*tokens, "bpe:300", "--data-cache", text / "a"], "/text.txt/a: Not a directory"),
        ([*micro, text, "--vocab-size", 512], "--vocab-size 512: bytes are 256 tokens; add --to"),
        ([*micro, text, "--eval-data", "nowhere"], "--eval-data nowhere: no such file or folder"),
        ([*micro, f"{text}=1", text], "some have a weight and some do not"),
        ([*micro, text, "--grad-accum", 3], "--batch-size 4 cannot be split over --grad-accum 3"),
        ([*micro, text, "--profile", "19:3"], "are steps 19 to 21, and those to come are 1 to 20"),
        (["train", "--resume"], "--resume needs --out"),
        (["train", "--resume", "--out", out], "holds no run"),
        (["sample", "--run", out], "holds no run"),
        (["train", "--preset", "micro", "--out", text], "text.txt: Not a directory"),
        (["train", "--preset", "micro", "--out", tmp_path], "is not empty"),
        (["train", *told[:2]], "--coordinator a:1, --processes None, .* do not go together; name"),
        (["train", *told], "--processes 2, --process 2 do not go together; .* --process from 0 to"),
        (["sample", "--hf", hub], f"{hub} is no folder; .*: hf download OWNER/NAME"),
        ([*warm, "h300"], "--gpu h300 is not known; choose one of a100, a10g, .*, rtx-pro-6000$"),
        ([*warm, "t4"], "--gpu t4 has no kernels: .* capability 7.5, .*; choose one of a100, "),
        ([*warm, "h200", "--tokenizer", "x.json"], "--tokenizer x.json: no such tokenizer"),
        ([*warm, "h200", "--parallel", "fsdp"], "--parallel fsdp needs --devices"),
        ([*warm, "h200", "--devices", "3"], "--batch-size 8 cannot be split .* 3 devices"),
    ]:
        line = command(capsys, *argv, code=1)
        assert words in line or re.search(words, line), line
        assert not out.exists()


def test_a_step_that_memory_cannot_hold_is_refused(capsys, tmp_path, monkeypatch):
    assert 2**20 < (memory.available_memory(jax.local_devices()[0]) or 0) < 2**50
    sizes = {"temp": 2**40, "argument": 2**39, "output": 2**38, "alias": 2**38}
    needed = types.SimpleNamespace(**{f"{k}_size_in_bytes": v for k, v in sizes.items()})
    compiled = types.SimpleNamespace(memory_analysis=lambda: needed)
    too_large = OverflowError("Python int too large to convert to C long")
    compilations = mock.Mock(side_effect=[Programs(None, compiled, None), too_large])
    monkeypatch.setattr(train_module, "compile_programs", compilations)
    monkeypatch.setattr(memory, "available_memory", lambda device: 2**30)
    for words in ("a step needs 1,536.0 GiB", "the arrays of a step are too large (Python int too"):
        line = command(capsys, "train", "--preset", "micro", "--out", tmp_path / "run", code=1)
        assert words in line
        assert "lower --batch-size" in line
        assert not (tmp_path / "run").exists()


def test_errors_of_the_machine_are_one_line(capsys, monkeypatch):
    of_system = lambda number, *path: OSError(number, os.strerror(number), *path)
    no_kernel = 'no kernel. Use implementation="xla", or None to have it chosen.'
    for error, words in (
        (ValueError("RESOURCE_EXHAUSTED: No space left on device [28]"), "the disk is full"),
        (of_system(errno.EDQUOT), "the quota is used up"),
        (of_system(errno.EACCES, "/x/y"), "/x/y: Permission denied"),
        (of_system(errno.EIO), "Input/output error"),
        (MemoryError(), "out of memory; lower --batch-size"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "out of memory"),
        (NotImplementedError("no kernel\nhere"), "no kernel here"),
        (NotImplementedError(no_kernel), "no kernel. Use --implementation auto, or xla."),
        (RunError("two\nlines"), "two lines"),
        (ModuleNotFoundError(name="orbax.checkpoint"), "run: pip install orbax-checkpoint"),
    ):
        monkeypatch.setitem(cli._COMMANDS, "train", (cli.Train, mock.Mock(side_effect=error)))
        assert words in command(capsys, "train", code=1)
    monkeypatch.setitem(cli._COMMANDS, "train", (cli.Train, lambda flags: 1 / 0))
    with pytest.raises(ZeroDivisionError):  # a bug keeps its stack trace
        cli.main(["train"])


@pytest.mark.parametrize("error", [RuntimeError("Unknown backend cuda"), AssertionError()])
def test_devices_that_are_not_there_are_one_line(capsys, monkeypatch, error):
    monkeypatch.setattr(jax, "local_devices", mock.Mock(side_effect=error))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    told = f"JAX cannot start with JAX_PLATFORMS=cuda: {str(error) or 'there is no such device'}"
    assert told in command(capsys, "sample", "--run", "x", code=1)
    assert "devices  JAX cannot start: " in command(capsys, "doctor")


def test_help_shows_every_flag_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    told = command(capsys, "train", "--help")
    fields = {field.name: field for field in dataclasses.fields(cli.Train)}
    names = fields.keys() - {"model", "optimizer"}
    names |= {f"model.{field.name}" for field in dataclasses.fields(ModelConfig)}
    for name in names:
        assert f"--{name.replace('_', '-')}" in told, name
    assert told.count("(default: ") > 40
    assert "`" not in told
    assert all(preset in told for preset in PRESETS)
    assert "optimizer steps. (default: 10000)" in command(
        *(capsys, "train", "--preset", "130m", "--help")
    )
    gpus = command(capsys, "warm", "--help").split("that is trained on: ")[1].split(".")[0]
    taken = [name for name, gpu in target.GPUS.items() if gpu.unsupported is None]
    assert set(re.findall("[a-z0-9-]+[0-9][a-z]?", gpus)) == {*taken}
    assert command(capsys, "--version") == f"jaxkern {jaxkern.__version__}\n"
    assert {"train", "sample", "doctor"} <= {*command(capsys, "--help").replace(",", " ").split()}


def test_help_waits_for_nothing_and_doctor_needs_no_extra():
    """Help imports no JAX, and neither of them flax and the like."""
    code = """
import sys
for name in ("flax", "orbax", "matplotlib", "tqdm"): sys.modules[name] = None
from jaxkern.__main__ import main
try: main(["train", "--help"])
except SystemExit: pass
assert not {"jax", "numpy", "grain"} & sys.modules.keys()
from jaxkern.lm import doctor
doctor.CALLS = {name: doctor.CALLS[name] for name in ("selective_scan",)}
main(["doctor"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: jaxkern" in done.stdout
    assert "selective_scan " in done.stdout


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(capsys, monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(start=10, steps=30)
    last = {"step": 20, "loss": 3.0, "tokens_per_second": 1234.5, "validation_bits_per_byte": 2.5}
    progress.update([{"step": 19, "loss": 1.0, "tokens_per_second": 4.0}, last])
    progress.close()
    plain, shown = capsys.readouterr().out, "loss 2.000 · 2.885 bits/byte · 1,234 tokens/s · "
    written = f"step 20/30 · {shown}00:00 left · validation 2.500 bits/byte\n"
    assert plain == ("step 20 · validation 2.500 bits/byte\n" if terminal else written)
    assert ("20/30 · " + shown in stream.getvalue()) if terminal else not stream.getvalue()


def test_doctor_tells_what_a_report_of_a_bug_needs(capsys, monkeypatch):
    """With every op, its implementation and the reason."""
    monkeypatch.setenv("XLA_FLAGS_OF_THIS_TEST", "set")
    with jax.numpy_rank_promotion("warn"):
        doctor_module.doctor()
    text = capsys.readouterr().out
    assert f"jax {jax.__version__}" in text
    assert jax.local_devices()[0].device_kind in text
    told = {line.split()[0]: line for line in text.splitlines() if line}
    for name, words in (
        ("jaxkern", r"0\.\d+\.\d+.*, Python 3\."),
        ("system", re.escape(platform.release())),
        ("system", r"\d+ CPU cores, \d+ GiB of memory available, \d+ GiB of disk"),
        ("besides", f"numpy {np.__version__}"),
        ("environ", "XLA_FLAGS_OF_THIS_TEST=set"),
        ("config", "jax_numpy_rank_promotion=warn"),
        ("tested", r"run on GPUs of compute capability 9.0 \(H100, H200\); for 8.0, 8.6, 8.9"),
    ):
        assert re.search(words, told[name])
    of_others = {"apply", "accumulate_gradients", "lowering_for", "Gpu"}  # run what they are given
    of_others |= {"default_implementation", "precision", "custom_op", "triton_call"}
    ops = {*jaxkern.__all__} - of_others
    assert len(ops) >= 5
    for op in ops:
        assert re.match(r"\s*\S+\s+(mosaic|xla)\s+\S.{10,}", told[op])
    if jax.default_backend() == "cpu":
        assert re.search(" xla .*NVIDIA", told["rms_norm"])


def test_what_a_resumed_run_may_change():
    config = TrainConfig.from_flags({"preset": "micro", "data": ("a", "b")})
    assert changed(config, {}) == config
    assert changed(config, {"data": ["a", "b"], "lr": 0.01}) == config
    assert changed(config, {"steps": 99}).steps == 99
    for flags, words in (
        ({"steps": 3}, "--steps 3 differs from the run's 20 and can only grow"),
        ({"lr": 1.0}, "--optimizer.lr 1.0 differs from the run's 0.01 and cannot change"),
        ({"batch_size": 8}, "--batch-size 8"),
        ({"data": ("a",)}, "--data a differs from the run's a b"),
    ):
        with pytest.raises(RunError, match=words.replace(".", r"\.")):
            changed(config, flags)
    others = {"devices": "2", "implementation": "xla", "remat": "cheap", "log_every": 1}
    assert changed(config, others) == dataclasses.replace(config, **others)
    # Flags of axes that differ are refused, and one that names axes stands for all.
    split = dataclasses.replace(config, mesh="data=2,tensor=2")
    told = "--parallel fsdp and --mesh data=2 name different axes; leave one out"
    with pytest.raises(RunError, match=told):
        changed(split, {"parallel": "fsdp", "mesh": "data=2"})
    for flags, expected in (
        ({"parallel": "fsdp", "mesh": "fsdp=2"}, ("fsdp=2", "fsdp", "auto")),
        ({"parallel": "tensor", "devices": "2"}, ("", "tensor", "2")),
        ({"devices": "4"}, ("data=2,tensor=2", None, "4")),
        ({"mesh": "fsdp=4"}, ("fsdp=4", None, "auto")),
    ):
        found = changed(split, flags)
        assert (found.mesh, found.parallel, found.devices) == expected


def test_presets_are_whole():
    files = Path(cli.__file__).with_name("presets").glob("*.yaml")
    assert {path.stem for path in files} == {*PRESETS}
    for name, preset in PRESETS.items():
        assert TrainConfig.from_flags({"preset": name}) == preset
        assert 1 <= preset.warmup < preset.steps


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXKERN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.exhaustive
def test_warm_keeps_the_kernels_of_a_run(own_cache):
    def run(*flags):
        command = [sys.executable, "-m", "jaxkern", "warm", "--preset", "micro", "--gpu", "h200"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
        return re.search(r"(\d+) kernels lowered for NVIDIA H200.*, (\d+) were there", done.stdout)

    lowered, found = map(int, run().groups())
    assert lowered == len(list((own_cache / "kernels").glob("*.kernel"))) > 0 == found
    assert tuple(map(int, run().groups())) == (0, lowered)
    split, found = map(int, run("--devices", "2").groups())
    assert split > 0  # the optimizer's, of every parameter alone


def test_doctor_tells_of_the_cache_and_empties_it(own_cache, monkeypatch, capsys):
    cache.store("a kernel", bytes(2**20))
    assert cache.load("a kernel")
    assert doctor_module._cache().startswith(f"1 kept in {own_cache}, 1.0 MiB, 1 hits, 0 misses")
    assert f"removed 1 files from {own_cache}" in command(capsys, "doctor", "--empty-cache")
    assert cache.summary().entries == 0
    monkeypatch.setenv("JAXKERN_CACHE", "0")
    assert "switched off" in doctor_module._cache()


def test_training_keeps_compiled_programs_beside_the_kernels(own_cache):
    names = ["compilation_cache_dir", "persistent_cache_min_compile_time_secs"]
    names += ["remove_custom_partitioning_ptr_from_cache_key"]
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    try:
        for folder, kept in (("of the user", "of the user"), (None, str(own_cache / "programs"))):
            jax.config.update("jax_compilation_cache_dir", folder)
            keep_programs()
            assert jax.config.jax_compilation_cache_dir == kept
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
