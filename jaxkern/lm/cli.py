"""The command line: jaxkern train, sample, export, warm, doctor.

Whatever a user can put right ends as one line on stderr and exit code 1 (2 for a wrong flag), never
as a stack trace. A flag is a field of a dataclass, its help what the docstring says of it. jax and
flax are imported only by the command that needs them.
"""

import contextlib
import dataclasses
import errno
import importlib.util
import io
import itertools
import math
import operator
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import UseAppendAction, subcommand

from jaxkern.lm import stop
from jaxkern.lm.config import ALIASES, FlagError, RunError, TrainConfig, axes_of, check_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """Train a language model of Mamba blocks and attention.

    Without flags: a tiny one, of bytes, on the sources of Python's standard library, in some
    minutes on a CPU. Flags override the file of --config, and that the preset.

    Attributes:
      config: a file of YAML with these names and values, such as the config.yaml of a run.
      out: new folder for the run; by default runs/PRESET-DATE-TIME.
      resume: continue the run in --out from its last checkpoint; of the other flags, --steps may
        grow, and --devices, --parallel, --mesh, --implementation, --remat, --log-every, --log-to
        (none ends it), --checkpoint-every, --keep and --data-cache may change.
      profile: steps to trace, for TensorBoard and Perfetto, into the run's folder, as STEP:COUNT;
        alone it takes 5, soon after the first.
      coordinator: host and port that process 0 listens to, the same for every process of the run;
        by default this and the next two are what Slurm, Open MPI or Kubernetes says.
      processes: how many there are; 1 asks nobody.
      process: which one this is, from 0.
    """

    config: Path | None = None
    out: Path | None = None
    resume: bool = False
    profile: str | None = None
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.profile and not re.fullmatch(r"auto|[1-9]\d{0,8}(:[1-9]\d{0,8})?", self.profile):
            raise FlagError("profile", f"must be STEP:COUNT, such as 100:5, got {self.profile!r}")
        host, _, port = (self.coordinator or "host:1").rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            rule = "must be HOST:PORT, such as node1:62100"
            raise FlagError("coordinator", f"{rule}, got {self.coordinator!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warm(TrainConfig):
    """Lower the kernels that jaxkern train needs with the same flags.

    For a GPU that need not be here; they are kept in the cache: in a container's image, or on a
    login node.

    Attributes:
      config: a file of YAML with these names and values, such as the config.yaml of a run.
      gpu: that is trained on: a100, a10g, l40s, h100, h200, b200, b300 or rtx-pro-6000.
    """

    config: Path | None = None
    gpu: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Write text with a trained model.

    Attributes:
      run: the --out folder of jaxkern train.
      hf: instead, a checkpoint in the layout of Hugging Face: config.json, model.safetensors and
        tokenizer.json.
      prompt: what the text begins with; given several times, several texts.
      prompts: a file of prompts, one in each line.
      length: tokens to write.
      temperature: lower is less random, 0 is not at all.
      top_k: draw from the K likeliest of them, 0 from all.
      top_p: draw from the likeliest that together have this probability.
      seed: of the draws of the first text; the next has the next.
      stop: end a text before this one; may be given several times.
      timing: say on stderr how many tokens a second were decoded.
    """

    run: Path | None = None
    hf: Path | None = None
    prompt: UseAppendAction[tuple[str, ...]] = ()
    prompts: Path | None = None
    length: int = 400
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0
    stop: UseAppendAction[tuple[str, ...]] = ()
    timing: bool = False

    def __post_init__(self):
        check_values(self)
        if (self.run is None) == (self.hf is None):
            raise FlagError("run", "or --hf must be given, and not both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's model in the layout of Hugging Face.

    transformers and jaxkern sample --hf read it: config.json, model.safetensors, and the tokenizer
    if the run has one.

    Attributes:
      run: the --out folder of jaxkern train.
      hf: the folder that is written.
      step: which checkpoint of the run; by default the newest.
      dtype: of the weights; they were trained in fp32.
    """

    run: Path
    hf: Path
    step: int | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self):
        check_values(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show what this machine has, what would run on it and why, and the cache.

    Attributes:
      empty_cache: remove the kernels and programs that are kept on disk, and do nothing else.
    """

    empty_cache: bool = False


_COMMANDS: dict[str, Any] = {
    "train": Train,
    "sample": Sample,
    "export": Export,
    "warm": Warm,
    "doctor": Doctor,
}
_ALONE = {"--remat": "layer", "--profile": "auto"}
"""What flags mean that are given without a value."""


def parse(argv: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command that arguments name, and its flags; of a configuration those that are given.

    Raises:
      SystemExit: on --help, --version and wrong flags, of which a line on stderr tells.
    """
    if [*argv] == ["--version"]:
        import jaxkern

        print(f"jaxkern {jaxkern.__version__}")
        raise SystemExit(0)
    name = next(iter(argv), "")
    told = io.StringIO()
    try:
        args = _spelled(argv)
        with contextlib.redirect_stderr(told):
            kinds = [_subcommand(name, kind, args) for name, kind in _COMMANDS.items()]
            parsed: Any = tyro.cli(
                tyro.conf.OmitSubcommandPrefixes[_union(kinds)],
                args=args,
                prog="jaxkern",
                description="Train and sample language models of Mamba blocks and attention.",
            )
        flags = _given(parsed, args)
        if isinstance(parsed, Warm) and "gpu" not in flags:
            raise FlagError("gpu", "must be given")
    except RunError as error:
        line = str(error)
    except SystemExit as exit:
        if not exit.code:
            raise
        # tyro draws a box: a title, what is wrong, a rule, and what may help.
        rows = (row.strip("│ ") for row in told.getvalue().splitlines()[1:])
        rows = itertools.dropwhile(_is_rule, rows)
        line = " ".join(itertools.takewhile(lambda row: not _is_rule(row), rows))
        line = re.sub(r"^Error parsing \S*model: ", "--model.", line)
    else:
        return name, flags
    command = f"jaxkern {name}" if name in _COMMANDS else "jaxkern"
    print(f"jaxkern: error: {line} (see {command} --help)", file=sys.stderr)
    raise SystemExit(2)


def _is_rule(row: str) -> bool:
    return not row.strip("-─╰╯")


def _spelled(argv: Sequence[str]) -> list[str]:
    """The arguments with every flag by its whole name, and with a value.

    Raises:
      FlagError: a flag has an empty one, as of a variable that is not set.
    """
    args: list[str] = []
    for arg, after in itertools.zip_longest(argv, argv[1:], fillvalue="--"):
        flag, equals, value = arg.partition("=")
        if flag.startswith("--") and flag[2:] in ALIASES:
            arg = f"--{ALIASES[flag[2:]]}{equals}{value}"
        empty = (equals and not value) or after == ""
        if flag.startswith("--") and empty and flag != "--prompt":
            raise FlagError(flag[2:], "must have a value, got ''")
        args.append(arg)
        if arg in _ALONE and after.startswith("--"):
            args.append(_ALONE[arg])
    return args


def _union(kinds: list[Any]) -> Any:
    union = kinds[0]
    for kind in kinds[1:]:
        union |= kind
    return union


@dataclasses.dataclass(frozen=True)
class _Base:
    preset: str | None = None
    config: Path | None = None


def _subcommand(name: str, kind: Any, args: list[str]) -> Any:
    """A command as tyro takes it; a configuration has the defaults of its preset and file."""
    if issubclass(kind, TrainConfig):
        base = _Base()
        if args[:1] == [name]:
            base, _ = tyro.cli(_Base, args=args[1:], return_unknown_args=True, add_help=False)
        flags = {} if base.preset is None else {"preset": base.preset}
        config = TrainConfig.from_flags(flags, base.config)
        names = [field.name for field in dataclasses.fields(TrainConfig)]
        default = kind(**{name: getattr(config, name) for name in names})
        return Annotated[kind, subcommand(name, default=default)]
    return Annotated[kind, subcommand(name)]


def _given(parsed: Any, args: list[str]) -> dict[str, Any]:
    """The flags of a command; of a configuration only those among its arguments."""
    if not isinstance(parsed, TrainConfig):
        return dict(vars(parsed))
    names = [arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")]
    flags = {}
    for name in names:
        name = re.sub(r"(^|\.)no_", r"\1", name)  # of --no-pack
        flags[name] = operator.attrgetter(name)(parsed)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        The exit code: 0; 1 after an error told on stderr; 128 and the signal's number after a
        signal, 141 where the output of a training run was closed.

    Raises:
        SystemExit: on --help, --version and wrong flags.
    """
    name, flags = parse(sys.argv[1:] if argv is None else argv)
    # Text of any language is sampled, and not every terminal can show it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    commands = {
        "train": _train,
        "sample": _sample,
        "export": _export,
        "warm": _warm,
        "doctor": _doctor,
    }
    from jaxkern.lm import processes

    try:
        code = _run(commands[name], flags)
    except Exception:  # a bug, whose stack trace is to be seen before JAX waits for others
        if not processes.current.name:
            raise
        traceback.print_exc()
        code = 1
    return processes.current.leave(code)


def _run(command: Callable[[dict[str, Any]], None], args: dict[str, Any]) -> int:
    """Run a command, and tell in a line of what a user can put right; returns the exit code."""
    with stop.handled():
        try:
            command(args)
        except RunError as error:
            return _fail(f"error: {error}")
        except stop.Stopped as stopped:
            return _fail(str(stopped), stopped.code)
        except BrokenPipeError:  # jaxkern sample | head
            stop.discard_closed_output()
        except Exception as error:
            # An extension module that a signal interrupts may raise an error of its own.
            if (signum := stop.requested()) is not None:
                return _fail(str(stop.Stopped(signum)), 128 + signum)
            message = _explain(error)
            if message is None:
                raise
            return _fail(f"error: {message}")
    return 0


def _fail(message: str, code: int = 1) -> int:
    """Print a line to stderr; on a terminal it may come after half a line on stdout."""
    stop.discard_closed_output()
    with contextlib.suppress(OSError):
        if code > 128 and sys.stdout.isatty() and sys.stderr.isatty():
            print(file=sys.stderr)
    # Where several processes share a terminal, each has a name.
    processes = sys.modules.get("jaxkern.lm.processes")
    name = processes.current.name if processes else ""
    stop.tell(name + " ".join(message.split()))
    return code


def _explain(error: BaseException) -> str | None:
    """One line for an error of the machine, or of a kernel that cannot run; None for a bug."""
    text = str(error)
    number = getattr(error, "errno", None)
    for full, what in ((errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the quota is used up")):
        if number == full or os.strerror(full) in text:
            return (
                f"{what}; free some space (a run that had begun has whole checkpoints, "
                "and goes on with --resume)"
            )
    if isinstance(error, OSError) and error.strerror:
        what = error.strerror
        if number == errno.EFBIG:
            what += "; raise the limit of a file's size (ulimit -f), or name another file system"
        return what if error.filename is None else f"{error.filename}: {what}"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        from jaxkern.lm.memory import REMEDY

        return f"out of memory; {REMEDY}"
    if isinstance(error, NotImplementedError):
        reason, asked, _ = text.partition(" Use implementation=")
        return f"{reason} Use --implementation auto, or xla." if asked else text
    return None


def _train(flags: dict[str, Any]) -> None:
    from jaxkern.lm import processes

    if "init_hf" in flags:
        _need_packages("train --init-hf", safetensors="safetensors")
    else:
        _need_packages("train")
    names = "coordinator", "processes", "process"
    found = processes.find(*(flags.pop(name, None) for name in names))
    with processes.joined(found, flags) as peers:
        _train_as(peers, flags)


def _train_as(peers: Any, flags: dict[str, Any]) -> None:
    """Train as one of the processes of a run."""
    resume, profile = flags.pop("resume", False), flags.pop("profile", None)
    out, file = flags.pop("out", None), flags.pop("config", None)
    if resume and (out is None or file is not None):
        raise RunError(
            "--resume needs --out, the folder of the run to continue"
            + ("" if file is None else ", and has its config.yaml; leave --config out")
        )
    if out is None:
        named = flags.get("preset") or flags.get("init_hf") or (file and file.stem)
        begun = peers.share(lambda: time.strftime("%Y%m%d-%H%M%S"))
        out = Path("runs", f"{Path(named or TrainConfig.preset).resolve().name}-{begun}")
    _start_jax()
    from jaxkern.lm.train import train

    train(flags, out, file=file, resume=resume, profile=profile)


def _sample(flags: dict[str, Any]) -> None:
    run, folder = flags.pop("run"), flags.pop("hf")
    prompts = _prompts(flags.pop("prompt"), flags.pop("prompts"))
    if folder is None:
        _need_packages("sample")
    else:
        _need_packages("sample --hf", safetensors="safetensors", tokenizers="tokenizers")
    _start_jax()
    from jaxkern.lm import sample

    if folder is None:
        model, notes = sample.load_run(run)
        for note in notes:
            stop.tell(f"warning: {note}")
    else:
        model = sample.load_hf(folder)
    timing = sample.Timing() if flags.pop("timing") else None
    model.write(prompts, timing=timing, **flags)
    if timing is not None:
        stop.tell(str(timing))


def _prompts(given: tuple[str, ...], file: Path | None) -> list[str]:
    prompts = [*given]
    if file is not None:
        lines = file.read_bytes().decode("utf-8", "surrogateescape").split("\n")
        prompts = prompts + [line.removesuffix("\r") for line in lines if line.strip()]
        if not prompts:
            raise RunError(f"--prompts {file} has no line of text; write one prompt in each")
    return prompts or [""]


def _export(flags: dict[str, Any]) -> None:
    _need_packages("export", safetensors="safetensors")
    _start_jax()
    from jaxkern.lm.hf import export

    export(flags.pop("run"), flags.pop("hf"), **flags)


def _warm(flags: dict[str, Any]) -> None:
    _need_packages("warm")
    gpu, file = flags.pop("gpu"), flags.pop("config", None)
    config = TrainConfig.from_flags(flags, file)
    if config.devices in ("auto", "all"):
        if config.parallel != TrainConfig.parallel and not config.mesh:
            raise RunError(
                f"--parallel {config.parallel} does not say how many GPUs share that; add "
                "--devices with their number"
            )
        devices = math.prod(axes_of(config.mesh).values()) if config.mesh else 1
    else:
        devices = int(config.devices)
    # The CPU stands for as many devices as there will be GPUs, so that XLA can split the program.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    )
    from jaxkern.lm.warm import warm

    warm(config, gpu, devices)


def _doctor(flags: dict[str, Any]) -> None:
    if flags["empty_cache"]:
        from jaxkern.core import cache

        print(f"removed {cache.empty()} files from {cache.folder() or 'no cache: it is off'}")
        return
    from jaxkern.lm.doctor import doctor

    doctor()


def _start_jax() -> None:
    """Have JAX find its devices, and say so where JAX_PLATFORMS asks for none that is there."""
    import jax

    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        named = os.environ.get("JAX_PLATFORMS")
        raise RunError(
            f"JAX cannot start{f' with JAX_PLATFORMS={named}' if named else ''}: "
            f"{str(error) or 'there is no such device'}; jaxkern doctor shows what there is"
        ) from None


def _need_packages(command: str, **more: str) -> None:
    """Raises RunError with the packages that are missing, by what installs them from anywhere."""
    packages = {
        "flax": "flax",
        "orbax-checkpoint": "orbax",
        "matplotlib": "matplotlib",
        "tqdm": "tqdm",
        **more,
    }
    missing = [name for name, module in packages.items() if not importlib.util.find_spec(module)]
    if missing:
        raise RunError(
            f"jaxkern {command} needs {', '.join(missing)}; run: pip install {' '.join(missing)}"
        )
