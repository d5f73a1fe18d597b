"""The command line: flags, help, and one clear line for every mistake."""

import dataclasses
import errno
import importlib.util
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest

import jaxkern
from jaxkern.lm import cli, memory, stop
from jaxkern.lm import doctor as doctor_module
from jaxkern.lm import train as train_module
from jaxkern.lm.config import DEFAULTS, PRESETS, RunError, TrainConfig
from jaxkern.lm.doctor import doctor
from jaxkern.lm.flags import parser
from jaxkern.lm.program import Programs, keep_programs
from jaxkern.lm.report import Progress
from jaxkern.lm.resume import resume_config
from jaxkern.lowering import cache, target


def fails(capsys, *argv, code=1):
    """Run a command that must fail, and return its one line."""
    try:
        returned = cli.main([str(arg) for arg in argv])
    except SystemExit as stop:
        returned = stop.code
    captured = capsys.readouterr()
    assert returned == code, captured
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("jaxkern: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["fly"], "'fly'"),
        (["train", "--preset", "huge"], "'130m'"),
        (["train", "--steps", "0"], "--steps: must be a whole number from 1 to 2^31 - 1, got '0'"),
        (["train", "--lr", "nan"], "--lr: must be a number from 1e-30 to 1e+30, got 'nan'"),
        (["train", "--seed", "-1"], "--seed"),
        (["train", "--devices", "none"], "--devices"),
        (["train", "--implementation", "cuda"], "mosaic"),
        (["train", "--remat", "most"], "'none', 'cheap', 'scan', 'layer'"),
        (["train", "--speed", "9"], "--speed"),
        (["train", "--data", ""], "--data: must be a path, got ''"),
        (["train", "--out", ""], "--out: must be a path, got ''"),
        (["sample"], "--run"),
        (["sample", "--run", "x", "--temperature", "1e-9"], "must be 0, or a number from 0.0001"),
        (["sample", "--run", "x", "--length", "9" * 9999], "--length: must be a whole number"),
        (["sample", "--run", "x", "--temperature", "-1"], "--temperature"),
    ],
)
def test_wrong_flags(capsys, argv, words):
    line = fails(capsys, *argv, code=2)
    assert words in line
    assert "--help" in line


NUMBERS = ["steps", "batch-size", "seq-len", "grad-accum", "lr", "seed", "log-every", "eval-every"]
NUMBERS += ["eval-batches", "checkpoint-every", "keep"]


@pytest.mark.parametrize(
    ("argv", "flags"),
    [([], {}), (["--remat"], {"remat": "layer"}), (["--remat", "cheap"], {"remat": "cheap"})],
)
def test_remat_alone_means_whole_layers(argv, flags):
    told = vars(parser().parse_args(["train", *argv]))
    assert {name: told[name] for name in told if name == "remat"} == flags


@pytest.mark.parametrize("flag", NUMBERS)
def test_numbers_have_limits(capsys, flag):
    for text in (
        "-1",
        "1e400",
        "inf",
        "nan",
        "2147483648" if flag != "lr" else "0",
        "",
        "9" * 9999,
    ):
        line = fails(capsys, "train", f"--{flag}", text, code=2)
        assert f"argument --{flag}: must be a " in line
        assert f"got '{text[:9]}" in line


def test_what_a_run_cannot_begin_with(capsys, tmp_path):
    """Each is told in one line, and leaves no folder behind."""
    out = tmp_path / "run"
    text = tmp_path / "text.txt"
    text.write_text("some words " * 500)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff")
    (tmp_path / "lines.jsonl").write_text('{"content": "some words"}\n')
    micro = ["train", "--preset", "micro", "--out", out, "--data"]
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
    ]:
        assert words in fails(capsys, *argv)
        assert not out.exists()


def test_a_step_that_memory_cannot_hold_is_refused(capsys, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("some words " * 500)

    class Compiled:
        def memory_analysis(self):
            sizes = {"temp": 2**40, "argument": 9, "output": 9, "alias": 9}
            return types.SimpleNamespace(**{f"{k}_size_in_bytes": v for k, v in sizes.items()})

    compiled = []

    def compile_programs(*args, fresh):
        compiled.append(fresh)
        return Programs(None, Compiled(), None)

    monkeypatch.setattr(train_module, "compile_programs", compile_programs)
    argv = ["train", "--preset", "micro", "--data", text, "--out", tmp_path / "run"]
    for available, words in ((1000, "a step needs 0.0 GiB"), (2**30, "a step needs 1,024.0 GiB")):
        monkeypatch.setattr(memory, "available_memory", lambda device, size=available: size)
        line = fails(capsys, *argv)
        assert words in line
        assert "--batch-size" in line
        assert not (tmp_path / "run").exists()
    assert compiled == [True]  # the first is refused before


def test_sizes_beyond_what_jax_counts_with_are_one_line(capsys, tmp_path, monkeypatch):
    def compile_programs(*args, fresh):
        raise OverflowError("Python int too large to convert to C long")

    monkeypatch.setattr(train_module, "compile_programs", compile_programs)
    line = fails(capsys, "train", "--preset", "micro", "--out", tmp_path / "run")
    assert "the arrays of a step are too large (Python int too large to convert to C long)" in line
    assert "lower --batch-size" in line
    assert not (tmp_path / "run").exists()


def test_memory_of_this_machine_is_known():
    available = memory.available_memory(jax.local_devices()[0])
    assert available is not None
    assert 2**20 < available < 2**50


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "the disk is full"),
        (
            ValueError("RESOURCE_EXHAUSTED: Failed: No space left on device [28]"),
            "the disk is full",
        ),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "the quota is used up"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "/x/y: Permission denied"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError(errno.EFBIG, "File too large", "/x"), "/x: File too large; raise the limit of"),
        (MemoryError(), "out of memory; lower --batch-size"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "out of memory"),
        (NotImplementedError("no kernel\nhere"), "no kernel here"),
        (
            NotImplementedError('no kernel. Use implementation="xla", or None to have it chosen.'),
            "no kernel. Use --implementation auto, or xla.",
        ),
        (RunError("two\nlines"), "two lines"),
    ],
)
def test_errors_of_the_machine_are_one_line(capsys, monkeypatch, error, words):
    def broken(flags):
        raise error

    monkeypatch.setattr(cli, "_train", broken)
    assert words in fails(capsys, "train")


def test_an_error_of_an_interrupted_import_is_the_interruption(capsys, monkeypatch):
    def broken(flags):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise ImportError("an extension could not be initialised") from None

    monkeypatch.setattr(cli, "_train", broken)
    assert cli.main(["train"]) == 143
    assert capsys.readouterr().err == "jaxkern: stopped (SIGTERM)\n"


def test_signals_that_are_ignored_or_handled_already_stay_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stop.handled():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("error", [RuntimeError("Unknown backend cuda"), AssertionError()])
def test_devices_that_are_not_there_are_one_line(capsys, monkeypatch, tmp_path, error):
    def none(*args, **options):
        raise error

    monkeypatch.setattr(jax, "local_devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    for argv in (["train", "--out", tmp_path / "run"], ["sample", "--run", "x"]):
        line = fails(capsys, *argv)
        assert "JAX cannot start with JAX_PLATFORMS=cuda: " in line
        assert (str(error) or "there is no such device") in line
    assert not (tmp_path / "run").exists()
    assert cli.main(["doctor"]) == 0
    assert "devices  JAX cannot start: " in capsys.readouterr().out


def test_a_name_of_the_hub_is_no_folder_here(capsys):
    line = fails(capsys, "sample", "--hf", "state-spaces/mamba-130m-hf")
    assert "hf download state-spaces/mamba-130m-hf --local-dir mamba-130m-hf" in line


def test_a_bug_keeps_its_stack_trace(monkeypatch):
    def broken(flags):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_train", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_a_missing_extra_is_named(capsys, monkeypatch):
    find = importlib.util.find_spec
    missing = ("flax", "orbax")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    for argv in (["train"], ["sample", "--run", "x"]):
        line = fails(capsys, *argv)
        assert "flax, orbax-checkpoint" in line
        assert 'pip install "jaxkern[lm]"' in line


def test_help_shows_every_flag_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    flags = [*DEFAULTS, "steps", "batch_size", "seq_len", "lr", "eval_every", "out", "resume"]
    flags += ["profile", "coordinator", "processes", "process"]
    parts = text.split("\n  --")[1:]
    shown = {part.split()[0].replace("-", "_"): part for part in parts}
    assert shown.keys() == set(flags)
    for name, part in shown.items():
        assert "(default: " in part, name
    assert "(default: tiny)" in shown["preset"]
    assert "tiny 240" in shown["steps"]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(capsys, monkeypatch, terminal):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(start=10, steps=30)
    progress.update(
        [
            {"step": 19, "loss": 1.0, "tokens_per_second": 4.0},
            {"step": 20, "loss": 3.0, "tokens_per_second": 1234.5, "validation_bits_per_byte": 2.5},
        ]
    )
    progress.close()
    shown = "loss 2.000 · 2.885 bits/byte · 1,234 tokens/s · "
    plain = capsys.readouterr().out
    if terminal:
        assert "20/30 · " + shown in stream.getvalue()
        assert plain == "step 20 · validation 2.500 bits/byte\n"
    else:
        assert stream.getvalue() == ""
        assert plain == f"step 20/30 · {shown}0:00 left · validation 2.500 bits/byte\n"


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"jaxkern {jaxkern.__version__}\n"


def test_help_and_doctor_need_no_extra():
    """With flax, orbax, matplotlib and tqdm out of reach, both still answer."""
    code = (
        "import sys\n"
        "for name in ('flax', 'orbax', 'matplotlib', 'tqdm'): sys.modules[name] = None\n"
        "from jaxkern.__main__ import main\n"
        "main(['doctor'])\n"
        "main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: jaxkern" in done.stdout
    assert "selective_scan " in done.stdout


def test_doctor_names_every_op_and_a_reason(capsys):
    doctor()
    text = capsys.readouterr().out
    assert f"jax {jax.__version__}" in text
    assert jax.local_devices()[0].device_kind in text
    of_others = {"apply", "accumulate_gradients", "lowering_for", "Gpu"}  # run what they are given
    ops = {name for name in dir(jaxkern) if callable(getattr(jaxkern, name))} - of_others
    assert len(ops) >= 5
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in text.splitlines() if line}
    for op in ops:
        chosen, why = rows[op]
        assert chosen in ("mosaic", "xla")
        assert len(why) > 10
    if jax.default_backend() == "cpu":
        assert rows["rms_norm"][0] == "xla"
        assert "NVIDIA" in rows["rms_norm"][1]


def test_doctor_tells_what_a_report_of_a_bug_needs(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS_OF_THIS_TEST", "set")
    monkeypatch.setattr(doctor_module, "CALLS", {})
    monkeypatch.setattr(doctor_module, "_choice", lambda *_: ("xla", ""))
    jax.config.update("jax_numpy_rank_promotion", "warn")
    try:
        doctor()
    finally:
        jax.config.update("jax_numpy_rank_promotion", "allow")
    told = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert re.search(r"0\.\d+\.\d+.*, Python 3\.", told["jaxkern"])
    assert platform.release() in told["system"]
    assert re.search(r"\d+ CPU cores, \d+ GiB of memory available, \d+ GiB of disk", told["system"])
    assert f"numpy {np.__version__}" in told["besides"]
    assert "XLA_FLAGS_OF_THIS_TEST=set" in told["environ"]
    assert "jax_numpy_rank_promotion=warn" in told["config"]
    assert "run on GPUs of compute capability 9.0 (H100, H200); for 8.0, 8.6, 8.9" in told["tested"]


def test_resumed_configuration():
    config = TrainConfig.from_flags({"preset": "micro", "data": ("a", "b")})
    stored = json.loads(json.dumps(vars(config)))
    assert resume_config(stored, {}) == config
    assert resume_config(stored, {"data": ("a", "b"), "lr": config.lr}) == config
    assert resume_config(stored, {"steps": 99}).steps == 99
    for flags, words in (
        ({"steps": 3}, "--steps 3 differs from the run's 20 and can only grow"),
        ({"lr": 1.0}, "--lr 1.0 differs from the run's 0.01 and cannot change"),
        ({"batch_size": 8}, "--batch-size 8"),
        ({"data": ("a",)}, "--data a differs from the run's a b"),
    ):
        with pytest.raises(RunError, match=words.replace(".", r"\.")):
            resume_config(stored, flags)
    others: dict[str, Any] = {"devices": "2", "implementation": "xla", "remat": "cheap"}
    others |= {"log_every": 1, "checkpoint_every": 7}
    assert resume_config(stored, others) == dataclasses.replace(config, **others)
    for earlier, remat in ((False, "none"), (True, "layer")):
        assert resume_config(stored | {"remat": earlier}, {}).remat == remat
    for broken, words in (
        ({}, "flags.batch_size is missing"),
        ([], '"flags" is \\[\\]'),
        (stored | {"unknown": 1}, "flags.unknown is no flag of this version"),
        (stored | {"preset": "gone"}, "flags.preset cannot be 'gone'"),
        (stored | {"steps": 1.5}, "flags.steps cannot be 1.5"),
        (stored | {"steps": True}, "flags.steps cannot be True"),
        (stored | {"lr": "high"}, "flags.lr cannot be 'high'"),
        (stored | {"remat": 1}, "flags.remat cannot be 1"),
        (stored | {"data": "text"}, "flags.data cannot be 'text'"),
        (stored | {"devices": "-1"}, "flags.devices cannot be '-1'"),
        (stored | {"implementation": None}, "flags.implementation cannot be None"),
        (stored | {"mixed_precision": 16}, "flags.mixed_precision cannot be 16"),
    ):
        with pytest.raises(RunError, match=words):
            resume_config(broken, {})


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "h300"], "--gpu h300 is not known; choose one of a100, a10g, .*, rtx-pro-6000$"),
        (["--gpu", "t4"], "--gpu t4 has no kernels: .* capability 7.5, .*; choose one of a100, "),
        (["--gpu", "h200", "--tokenizer", "x.json"], "--tokenizer x.json: no such tokenizer"),
        (["--gpu", "h200", "--parallel", "fsdp"], "--parallel fsdp does not say .*; add --devices"),
        (["--gpu", "h200", "--devices", "3"], "--batch-size 8 cannot be split .* 3 devices"),
    ],
)
def test_warm_says_what_it_cannot(own_cache, capsys, monkeypatch, flags, words):
    del own_cache
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):  # warm sets them, for JAX to start with
        monkeypatch.setenv(name, os.environ.get(name, ""))
    assert re.search(words, fails(capsys, "warm", *flags))


def test_help_of_warm_names_the_gpus_that_it_takes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["warm", "--help"])
    told = capsys.readouterr().out.split("that is trained on: ")[1]
    taken = [name for name, gpu in target.GPUS.items() if gpu.unsupported is None]
    assert " ".join(told.split()) == ", ".join(taken)
    assert {"a10g", "b300"} < {*taken}


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
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_remove_custom_partitioning_ptr_from_cache_key",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update(names[0], "of the user")
        keep_programs()
        assert jax.config.jax_compilation_cache_dir == "of the user"
        jax.config.update(names[0], None)
        keep_programs()
        assert jax.config.jax_compilation_cache_dir == str(own_cache / "programs")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
