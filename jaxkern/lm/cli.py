"""The command line: jaxkern train, sample, export, warm, doctor.

Whatever a user can put right ends as one line on stderr and exit code 1 (2 for a wrong flag), never
as a stack trace. A flag is a field of a dataclass, its help what the docstring says of it. jax and
flax are imported only by the command that needs them.
"""

import contextlib
import dataclasses
import errno
import io
import itertools
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from tyro.conf import UseAppendAction, subcommand

from jaxkern.lm import stop
from jaxkern.lm.config import (
    ALIASES,
    FlagError,
    Rule,
    RunError,
    Sampling,
    Size,
    TrainConfig,
    Whole,
    check_fields,
)

_PROFILE = Rule(
    "STEP:COUNT, such as 100:5",
    lambda text: re.fullmatch(r"auto|[1-9]\d{0,8}(:[1-9]\d{0,8})?", text),
)
_COORDINATOR = Rule(
    "HOST:PORT, such as node1:62100",
    lambda text: (found := re.fullmatch(r".+:([1-9]\d{0,4})", text)) and int(found[1]) < 65536,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """Train a language model of Mamba blocks and attention.

    Without flags: a tiny one, of bytes, on the sources of Python's standard library, in some
    minutes on a CPU. Flags override the file of --config, and that the preset.

    Attributes:
      config: a file of YAML with these names and values, such as the config.yaml of a run.
      out: new folder for the run; by default runs/PRESET-DATE-TIME.
      resume: continue the run in --out from its last checkpoint. Of the other flags --steps may
        grow, and --devices, --parallel, --mesh, --implementation, --remat, --log-every, --log-to,
        which none ends, --checkpoint-every, --keep and --data-cache may change.
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
    profile: Annotated[str, _PROFILE] | None = None
    coordinator: Annotated[str, _COORDINATOR] | None = None
    processes: Size | None = None
    process: Whole | None = None


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
class Sample(Sampling):
    """Write text with a trained model.

    Attributes:
      run: the --out folder of jaxkern train.
      hf: instead, a checkpoint in the layout of Hugging Face: config.json, model.safetensors and
        tokenizer.json.
      prompt: what the text begins with; given several times, several texts.
      prompts: a file of prompts, one in each line.
      stop: end a text before this one; may be given several times.
      dtype: of matrices and products; by default bf16 on a GPU, and fp32 elsewhere.
      timing: say on stderr how many tokens a second were decoded.
    """

    run: Path | None = None
    hf: Path | None = None
    prompt: UseAppendAction[tuple[str, ...]] = ()
    prompts: Path | None = None
    stop: UseAppendAction[tuple[str, ...]] = ()
    dtype: Literal["fp32", "bf16"] | None = None
    timing: bool = False

    def __post_init__(self):
        check_fields(self)
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
    step: Size | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show what this machine has, what would run on it and why, and the cache.

    Attributes:
      empty_cache: remove the kernels and programs that are kept on disk, and do nothing else.
    """

    empty_cache: bool = False


_ALONE = {"--remat": "layer", "--profile": "auto"}
"""Values of flags that are given without one."""


def parse(argv: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command that arguments name, and its flags; of a configuration those that are given.

    SystemExit on --help, --version and wrong flags, of which a line on stderr tells.
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
            kinds = [_subcommand(each, kind, args) for each, (kind, _) in _COMMANDS.items()]
            parsed: Any = tyro.cli(
                tyro.conf.OmitSubcommandPrefixes[Union[*kinds]],
                args=args,
                prog="jaxkern",
                description="Train and sample language models of Mamba blocks and attention.",
            )
        flags = dict(vars(parsed))
        if isinstance(parsed, TrainConfig):
            names = re.findall(r"^--(?:no-)?([^=\n]+)", "\n".join(args), re.MULTILINE)
            names = [re.sub(r"\.no_", ".", each.replace("-", "_")) for each in names]
            flags = {each: operator.attrgetter(each)(parsed) for each in names}
        if isinstance(parsed, Warm) and "gpu" not in flags:
            raise FlagError("gpu", "must be given")
        return name, flags
    except RunError as error:
        line = str(error)
    except SystemExit as exit:
        if not exit.code:
            raise
        # tyro draws a box: a title, what is wrong, a rule, and what may help.
        rows = (row.strip("│ ") for row in told.getvalue().splitlines()[1:])
        is_rule = lambda row: not row.strip("-─╰╯")
        rows = itertools.dropwhile(is_rule, rows)
        line = " ".join(itertools.takewhile(lambda row: not is_rule(row), rows))
        line = re.sub(r"^Error parsing \S*model: ", "--model.", line)
    command = f"jaxkern {name}" if name in _COMMANDS else "jaxkern"
    print(f"jaxkern: error: {line} (see {command} --help)", file=sys.stderr)
    raise SystemExit(2)


def _spelled(argv: Sequence[str]) -> list[str]:
    """The arguments with every flag by its whole name, and with a value."""
    args: list[str] = []
    for arg, after in itertools.zip_longest(argv, argv[1:], fillvalue="--"):
        flag, equals, value = arg.partition("=")
        if flag.startswith("--") and flag != "--prompt" and ((equals and not value) or after == ""):
            raise FlagError(flag[2:], "must have a value, got ''")
        if flag.startswith("--"):
            arg = f"--{ALIASES.get(flag[2:], flag[2:])}{equals}{value}"
        args.append(arg)
        if arg in _ALONE and after.startswith("--"):
            args.append(_ALONE[arg])
    return args


@dataclasses.dataclass(frozen=True)
class _Base:
    preset: str | None = None
    config: Path | None = None


def _subcommand(name: str, kind: Any, args: list[str]) -> Any:
    """A command as tyro takes it; a configuration has the defaults of its preset and file."""
    if not issubclass(kind, TrainConfig):
        return Annotated[kind, subcommand(name)]
    base = _Base()
    if args[:1] == [name]:
        base, _ = tyro.cli(_Base, args=args[1:], return_unknown_args=True, add_help=False)
    flags = {} if base.preset is None else {"preset": base.preset}
    config = TrainConfig.from_flags(flags, base.config)
    values = vars(config) | {"parallel": None, "mesh": ""}  # a flag of one stands for both
    return Annotated[kind, subcommand(name, default=kind(**values))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command by these arguments, by default those of the process; SystemExit as `parse`.

    Returns the exit code: 0; 1 after an error told on stderr; 128 and the signal's number after a
    signal, 141 where the output of a training run was closed.
    """
    name, flags = parse(sys.argv[1:] if argv is None else argv)
    # Text of any language is sampled, and not every terminal can show it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    from jaxkern.lm import processes

    return processes.current.leave(_run(_COMMANDS[name][1], flags))


def _run(command: Callable[[dict[str, Any]], None], flags: dict[str, Any]) -> int:
    """Run a command, and tell in a line of what a user can put right; returns the exit code."""
    from jaxkern.lm import processes

    with stop.handled():
        try:
            command(flags)
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
            if message := _explain(error):
                return _fail(f"error: {message}")
            if not processes.current.name:
                raise
            traceback.print_exc()  # of a bug, before JAX waits for the other processes
            return 1
    return 0


def _fail(message: str, code: int = 1) -> int:
    """Print a line to stderr; on a terminal it may come after half a line on stdout."""
    from jaxkern.lm import processes

    stop.discard_closed_output()
    with contextlib.suppress(OSError):
        if code > 128 and sys.stdout.isatty() and sys.stderr.isatty():
            print(file=sys.stderr)
    # Where several processes share a terminal, each has a name.
    stop.tell(processes.current.name + " ".join(message.split()))
    return code


def _explain(error: BaseException) -> str | None:
    """One line for an error of the machine, or of a kernel that cannot run; None for a bug."""
    text = str(error)
    for number, line in _NO_SPACE.items():
        if getattr(error, "errno", None) == number or os.strerror(number) in text:
            return f"{line} (a run that had begun has whole checkpoints, and goes on with --resume)"
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        return where + error.strerror
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        from jaxkern.lm.memory import REMEDY

        return f"out of memory; {REMEDY}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        named = {"orbax": "orbax-checkpoint"}.get(package, package)
        return None if package == "jaxkern" else f"{named} is missing; run: pip install {named}"
    if isinstance(error, NotImplementedError):
        reason, asked, _ = text.partition(" Use implementation=")
        return f"{reason} Use --implementation auto, or xla." if asked else text
    return None


_NO_SPACE = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the quota is used up; free some space",
    errno.EFBIG: "a file is too large; raise its limit (ulimit -f) or name another file system",
}


def _train(flags: dict[str, Any]) -> None:
    from jaxkern.lm import processes

    names = "coordinator", "processes", "process"
    found = processes.find(*(flags.pop(name, None) for name in names))
    with processes.joined(found, flags):
        _start_jax()
        from jaxkern.lm.train import train

        train(flags)


def _sample(flags: dict[str, Any]) -> None:
    run, folder, file = (flags.pop(name) for name in ("run", "hf", "prompts"))
    prompts = [*flags.pop("prompt")]
    if file is not None:
        lines = file.read_bytes().decode("utf-8", "surrogateescape").split("\n")
        prompts += [line.removesuffix("\r") for line in lines if line.strip()]
        if not prompts:
            raise RunError(f"--prompts {file} has no line of text")
    _start_jax()
    from jaxkern.lm import sample

    warn = lambda note: stop.tell(f"warning: {note}")
    model = sample.load_run(run, warn) if folder is None else sample.load_hf(folder)
    timing = sample.Timing() if flags.pop("timing") else None
    model.write(prompts or [""], timing=timing, **flags)
    if timing is not None:
        stop.tell(str(timing))


def _export(flags: dict[str, Any]) -> None:
    _start_jax()
    from jaxkern.lm.hf import export

    export(flags.pop("run"), flags.pop("hf"), **flags)


def _warm(flags: dict[str, Any]) -> None:
    gpu, file = flags.pop("gpu"), flags.pop("config", None)
    config = TrainConfig.from_flags(flags, file)
    if (devices := config.device_count or 1) == 1 and config.parallel:
        raise RunError(f"--parallel {config.parallel} needs --devices with the number of GPUs")
    # The CPU stands for as many devices as there will be GPUs, so that XLA can split the program.
    os.environ["JAX_PLATFORMS"] = "cpu"
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    from jaxkern.lm.program import warm

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
        named, why = os.environ.get("JAX_PLATFORMS", ""), str(error) or "there is no such device"
        raise RunError(f"JAX cannot start with JAX_PLATFORMS={named}: {why}") from None


_COMMANDS: dict[str, tuple[Any, Callable[[dict[str, Any]], None]]] = {
    "train": (Train, _train),
    "sample": (Sample, _sample),
    "export": (Export, _export),
    "warm": (Warm, _warm),
    "doctor": (Doctor, _doctor),
}
