"""The command line: flags, help, and one clear line for every mistake."""

import dataclasses
import errno
import importlib.util
import io
import os
import platform
import re
import subprocess
import sys
import types
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import jaxkern
from jaxkern.lm import cli, memory
from jaxkern.lm import doctor as doctor_module
from jaxkern.lm import train as train_module
from jaxkern.lm.config import DEFAULTS, PRESETS, RunError, TrainConfig
from jaxkern.lm.flags import parser
from jaxkern.lm.program import Programs, keep_programs
from jaxkern.lm.report import Progress
from jaxkern.lm.run import changed
from jaxkern.lowering import cache, target
from tests.language_models import command

MESH = "must be axes and their sizes such as data=2,fsdp=4, got 'data=2,': '' is not one of"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "COMMAND"),
        ("fly", "'fly'"),
        ("train --preset huge", "'130m'"),
        ("train --devices none", "--devices"),
        ("train --implementation cuda", "mosaic"),
        ("train --remat most", "'none', 'cheap', 'scan', 'layer'"),
        ("train --speed 9", "--speed"),
        ("train --data=", "--data: must be a path, got ''"),
        ("train --out=", "--out: must be a path, got ''"),
        ("train --log-to comet", "invalid choice: 'comet'"),
        ("train --parallel rows", "invalid choice: 'rows'"),
        ("train --mesh data=2,", MESH),
        ("train --mesh rows=2", "'rows' is not one of data, sequence, fsdp, tensor (see jaxkern"),
        ("train --mesh data=2,data=2", "data is named twice"),
        ("train --mesh data=9999999", "size of data must be from 1 to 999999, not '9999999'"),
        ("train --mesh fsdp=0", "size of fsdp must be from 1 to 999999, not '0'"),
        ("train --mesh fsdp", "size of fsdp must be from 1 to 999999, not ''"),
        ("sample", "--run"),
        ("sample --run x --temperature 1e-9", "must be 0, or a number from 0.0001"),
        ("sample --run x --length " + "9" * 9999, "--length: must be a whole number"),
    ],
)
def test_wrong_flags(capsys, argv, words):
    line = command(capsys, *argv.split(), code=2)
    assert words in line
    assert "--help" in line


NUMBERS = "batch-size seq-len grad-accum log-every eval-every eval-batches checkpoint-every keep"
NO_PORT = ["host", "host:", ":1", "host:x", "host:65536"]
NOT_WHOLE = ["-1", "1e400", "inf", "nan", "2147483648", "", "9" * 9999]


@pytest.mark.parametrize(
    ("flag", "texts", "words"),
    [
        ("steps", ["0", *NOT_WHOLE], "must be a whole number from 1 to 2^31 - 1, got"),
        *((name, NOT_WHOLE, "must be a ") for name in [*NUMBERS.split(), "seed"]),
        ("lr", ["0", *NOT_WHOLE[:4], "", "9" * 9999], "must be a number from 1e-30 to 1e+30, got"),
        ("profile", ["0:5", "5:0", "x", ":3"], "must be STEP:COUNT, such as 100:5, got"),
        ("coordinator", NO_PORT, "must be HOST:PORT, such as node1:62100, got"),
    ],
)
def test_values_have_limits(capsys, flag, texts, words):
    for text in texts:
        line = command(capsys, "train", f"--{flag}={text}", code=2)
        assert f"argument --{flag}: {words}" in line
        assert f"got '{text[:9]}" in line


def test_flags_that_may_be_left_out_or_short():
    for argv, flags in (
        ([], {}),
        (["--remat"], {"remat": "layer"}),
        (["--remat", "cheap"], {"remat": "cheap"}),
        (["--mesh= data = 2, fsdp=4 "], {"mesh": "data=2,fsdp=4"}),
    ):
        told = vars(parser().parse_args(["train", *argv]))
        assert {name: told[name] for name in told if name in ("remat", "mesh")} == flags


def test_what_a_command_cannot_begin_with(capsys, tmp_path, monkeypatch):
    """Each is told in one line, and leaves no folder behind."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):  # warm sets them, for JAX to start with
        monkeypatch.setenv(name, os.environ.get(name, ""))
    out, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("some words " * 500)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff")
    (tmp_path / "lines.jsonl").write_text('{"content": "some words"}\n')
    micro = ["train", "--preset", "micro", "--out", out, "--data"]
    warm, hub = ["warm", "--gpu"], "state-spaces/mamba-130m-hf"
    told = ["--coordinator", "a:1", "--processes", 2, "--process", 2]
    for argv, words in [
        ([*micro, tmp_path / "nowhere"], "no such file"),
        ([*micro, tmp_path / "binary"], "binary"),
        ([*micro, tmp_path / "short.txt"], "--seq-len"),
        ([*micro, text, "--grad-accum", "3"], "--grad-accum 3"),
        ([*micro, text, "--devices", "4096"], "--devices 4096 is more than this machine's"),
        ([*micro, text, "--mixed-precision", "fp8"], "--mixed-precision fp8"),
        ([*micro, tmp_path / "lines.jsonl"], 'lines.jsonl: line 1 has no "text" of a document'),
        ([*micro, text, "--batch-size", 2**31 - 1], "GiB of memory"),
        (["train", "--preset", "micro", "--out", text / "run"], "text.txt/run: Not a directory"),
        (["train", "--preset", "micro", "--out", tmp_path / ("x" * 999)], "File name too long"),
        (["train", "--resume"], "--resume needs --out"),
        (["train", "--resume", "--out", out], "holds no run"),
        (["sample", "--run", out], "holds no run"),
        (["train", "--preset", "micro", "--out", text], "is a file"),
        (["train", "--preset", "micro", "--out", tmp_path], "is not empty"),
        (["train", *told[:2]], "--coordinator a:1 needs --processes and --process, too"),
        (["train", *told[2:]], "needs --coordinator, too; give every process"),
        (["train", *told], "--process 2 is not one of --processes 2; they are numbered from 0 to"),
        (["sample", "--hf", hub], f"hf download {hub} --local-dir mamba-130m-hf"),
        ([*warm, "h300"], "--gpu h300 is not known; choose one of a100, a10g, .*, rtx-pro-6000$"),
        ([*warm, "t4"], "--gpu t4 has no kernels: .* capability 7.5, .*; choose one of a100, "),
        ([*warm, "h200", "--tokenizer", "x.json"], "--tokenizer x.json: no such tokenizer"),
        ([*warm, "h200", "--parallel", "fsdp"], "--parallel fsdp does not say .*; add --devices"),
        ([*warm, "h200", "--devices", "3"], "--batch-size 8 cannot be split .* 3 devices"),
    ]:
        line = command(capsys, *argv, code=1)
        assert words in line or re.search(words, line), line
        assert not out.exists()


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("field", ["params", "compute", "output"])
def test_float64_is_refused(capsys, tmp_path, field, x64):
    """Without x64 JAX would compute in float32 and say nothing."""
    whole = "params=float32,compute=float32,output=float32"
    policy = whole.replace(f"{field}=float32", f"{field}=float64")
    with jax.enable_x64(x64):
        line = command(
            capsys, "train", "--out", tmp_path / "run", "--mixed-precision", policy, code=1
        )
    assert f"--mixed-precision {policy}: float64 is more than the float32 that" in line
    assert line.endswith("; write float32")
    assert not (tmp_path / "run").exists()


def test_a_step_that_memory_cannot_hold_is_refused(capsys, tmp_path, monkeypatch):
    assert 2**20 < (memory.available_memory(jax.local_devices()[0]) or 0) < 2**50
    sizes = {"temp": 2**40, "argument": 9, "output": 9, "alias": 9}
    needed = types.SimpleNamespace(**{f"{k}_size_in_bytes": v for k, v in sizes.items()})
    compiled = types.SimpleNamespace(memory_analysis=lambda: needed)
    too_large = OverflowError("Python int too large to convert to C long")
    compilations = mock.Mock(side_effect=[Programs(None, compiled, None), too_large])
    monkeypatch.setattr(train_module, "compile_programs", compilations)
    for available, words, fresh in (
        (1000, "a step needs 0.0 GiB", []),
        (2**30, "a step needs 1,024.0 GiB", [True]),
        (2**30, "the arrays of a step are too large (Python int too large to conv", [True] * 2),
    ):
        monkeypatch.setattr(memory, "available_memory", lambda device, size=available: size)
        line = command(capsys, "train", "--preset", "micro", "--out", tmp_path / "run", code=1)
        assert words in line
        assert "lower --batch-size" in line
        assert [call.kwargs["fresh"] for call in compilations.mock_calls] == fresh
        assert not (tmp_path / "run").exists()


NO_KERNEL = 'no kernel. Use implementation="xla", or None to have it chosen.'
OF_SYSTEM = lambda number, *path: OSError(number, os.strerror(number), *path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OF_SYSTEM(errno.ENOSPC), "the disk is full"),
        (ValueError("RESOURCE_EXHAUSTED: Failed: No space left on device [28]"), "the disk is f"),
        (OF_SYSTEM(errno.EDQUOT), "the quota is used up"),
        (OF_SYSTEM(errno.EACCES, "/x/y"), "/x/y: Permission denied"),
        (OF_SYSTEM(errno.EIO), "Input/output error"),
        (OF_SYSTEM(errno.EFBIG, "/x"), "/x: File too large; raise the limit of"),
        (MemoryError(), "out of memory; lower --batch-size"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "out of memory"),
        (NotImplementedError("no kernel\nhere"), "no kernel here"),
        (NotImplementedError(NO_KERNEL), "no kernel. Use --implementation auto, or xla."),
        (RunError("two\nlines"), "two lines"),
    ],
)
def test_errors_of_the_machine_are_one_line(capsys, monkeypatch, error, words):
    monkeypatch.setattr(cli, "_train", mock.Mock(side_effect=error))
    assert words in command(capsys, "train", code=1)
    monkeypatch.setattr(cli, "_train", lambda flags: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a bug keeps its stack trace
        cli.main(["train"])


@pytest.mark.parametrize("error", [RuntimeError("Unknown backend cuda"), AssertionError()])
def test_devices_that_are_not_there_are_one_line(capsys, monkeypatch, tmp_path, error):
    monkeypatch.setattr(jax, "local_devices", mock.Mock(side_effect=error))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    for argv in (["train", "--out", tmp_path / "run"], ["sample", "--run", "x"]):
        line = command(capsys, *argv, code=1)
        assert "JAX cannot start with JAX_PLATFORMS=cuda: " in line
        assert (str(error) or "there is no such device") in line
    assert not (tmp_path / "run").exists()
    assert cli.main(["doctor"]) == 0
    assert "devices  JAX cannot start: " in capsys.readouterr().out


def test_missing_packages_are_named(capsys, monkeypatch):
    find = importlib.util.find_spec
    trainer = "flax, orbax-checkpoint; run: pip install flax orbax-checkpoint"
    of_hf = "sample --hf needs safetensors, tokenizers; run: pip install safetensors tokenizers"
    for argv, missing, words in (
        ("train", ("flax", "orbax"), f"train needs {trainer}"),
        ("sample --run x", ("flax", "orbax"), f"sample needs {trainer}"),
        ("sample --hf x", ("safetensors", "tokenizers"), of_hf),
    ):
        hide = lambda name, missing=missing: None if name in missing else find(name)
        monkeypatch.setattr(importlib.util, "find_spec", hide)
        assert words in command(capsys, *argv.split(), code=1)


def test_help_shows_every_flag_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    parts = command(capsys, "train", "--help").split("\n  --")[1:]
    flags = [*DEFAULTS, "steps", "batch_size", "seq_len", "lr", "eval_every", "out", "resume"]
    flags += ["profile", "coordinator", "processes", "process"]
    told = {part.split()[0].replace("-", "_"): part for part in parts}
    assert told.keys() == set(flags)
    for name, part in told.items():
        assert "(default: " in part, name
    assert "(default: tiny)" in told["preset"]
    assert "tiny 240" in told["steps"]
    gpus = command(capsys, "warm", "--help").split("that is trained on: ")[1]
    taken = [name for name, gpu in target.GPUS.items() if gpu.unsupported is None]
    assert " ".join(gpus.split()) == ", ".join(taken)
    assert {"a10g", "b300"} < {*taken}
    assert command(capsys, "--version") == f"jaxkern {jaxkern.__version__}\n"


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
    written = f"step 20/30 · {shown}0:00 left · validation 2.500 bits/byte\n"
    assert plain == ("step 20 · validation 2.500 bits/byte\n" if terminal else written)
    assert ("20/30 · " + shown in stream.getvalue()) if terminal else not stream.getvalue()


def test_help_and_doctor_need_no_extra():
    """With flax, orbax, matplotlib and tqdm out of reach, both still answer."""
    code = (
        "import sys\n"
        "for name in ('flax', 'orbax', 'matplotlib', 'tqdm'): sys.modules[name] = None\n"
        "from jaxkern.__main__ import main\n"
        "from jaxkern.lm import doctor\n"
        "doctor.CALLS = {name: doctor.CALLS[name] for name in ('selective_scan',)}\n"
        "main(['doctor'])\n"
        "main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: jaxkern" in done.stdout
    assert "selective_scan " in done.stdout


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
    of_others |= {"default_implementation", "precision"}
    ops = {*jaxkern.__all__} - of_others
    assert len(ops) >= 5
    for op in ops:
        assert re.match(r"\s*\S+\s+(mosaic|xla)\s+\S.{10,}", told[op])
    if jax.default_backend() == "cpu":
        assert re.search(" xla .*NVIDIA", told["rms_norm"])


def test_what_a_resumed_run_may_change():
    config = TrainConfig.from_flags({"preset": "micro", "data": ("a", "b")})
    assert changed(config, {}) == config
    assert changed(config, {"data": ("a", "b"), "lr": config.lr}) == config
    assert changed(config, {"steps": 99}).steps == 99
    for flags, words in (
        ({"steps": 3}, "--steps 3 differs from the run's 20 and can only grow"),
        ({"lr": 1.0}, "--lr 1.0 differs from the run's 0.01 and cannot change"),
        ({"batch_size": 8}, "--batch-size 8"),
        ({"data": ("a",)}, "--data a differs from the run's a b"),
    ):
        with pytest.raises(RunError, match=words.replace(".", r"\.")):
            changed(config, flags)
    others: dict[str, Any] = {"devices": "2", "implementation": "xla", "remat": "cheap"}
    others |= {"log_every": 1, "checkpoint_every": 7}
    assert changed(config, others) == dataclasses.replace(config, **others)


def test_presets_are_whole():
    mamba2 = ["mamba2-130m", "mamba2-370m", "mamba2-780m", "mamba2-1.3b"]
    assert list(PRESETS) == ["tiny", "130m", "370m", "1.4b", *mamba2, "micro", "mamba2-micro"]
    for name, preset in PRESETS.items():
        config = TrainConfig.from_flags({"preset": name})
        assert config.model == preset.model
        assert 1 <= config.warmup < config.steps


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
    assert cli.main(["doctor", "--empty-cache"]) == 0
    assert f"removed 1 files from {own_cache}" in capsys.readouterr().out
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
