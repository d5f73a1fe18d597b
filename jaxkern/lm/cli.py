"""The command line: jaxkern train, sample, export, warm, doctor.

Whatever a user can put right ends as one line on stderr and exit code 1 (2 for a wrong flag), never
as a stack trace. jax and flax are imported only by the command that needs them.
"""

import contextlib
import errno
import importlib.util
import io
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxkern.lm import processes, stop
from jaxkern.lm.config import DEFAULTS, RunError, axes_of
from jaxkern.lm.flags import parser


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
    args = vars(parser().parse_args(argv))
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
    command = commands[args.pop("command")]
    try:
        code = _run(command, args)
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
    stop.tell(processes.current.name + " ".join(message.split()))
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
    if "init_hf" in flags:
        _need_packages("train --init-hf", safetensors="safetensors")
    else:
        _need_packages("train")
    names = "coordinator", "processes", "process"
    found = processes.find(*(flags.pop(name, None) for name in names))
    with processes.joined(found, flags) as peers:
        _train_as(peers, flags)


def _train_as(peers: processes.Alone, flags: dict[str, Any]) -> None:
    """Train as one of the processes of a run."""
    resume = flags.pop("resume", False)
    out = flags.pop("out", None)
    if out is None:
        if resume:
            raise RunError("--resume needs --out, the folder of the run to continue")
        name = flags.get("preset") or Path(flags.get("init_hf", DEFAULTS["preset"])).resolve().name
        begun = peers.share(lambda: time.strftime("%Y%m%d-%H%M%S"))
        out = Path("runs", f"{name}-{begun}")
    for name in flags.keys() & {"data", "eval_data"}:
        flags[name] = tuple(flags[name])
    if "log_to" in flags:
        if "none" in flags["log_to"] and set(flags["log_to"]) != {"none"}:
            raise RunError(
                f"--log-to {' '.join(flags['log_to'])} names none and another; give none alone, or "
                "leave it out"
            )
        flags["log_to"] = tuple(name for name in flags["log_to"] if name != "none")
    _start_jax()
    from jaxkern.lm.train import train

    train(flags, out, resume=resume, profile=flags.pop("profile", None))


def _sample(flags: dict[str, Any]) -> None:
    run, folder = flags.pop("run"), flags.pop("hf")
    prompts = _prompts(flags.pop("prompt"), flags.pop("prompts"))
    if folder is None:
        _need_packages("sample")
    else:
        _need_packages("sample --hf", safetensors="safetensors", tokenizers="tokenizers")
    _start_jax()
    from jaxkern.lm import loader, sample

    if folder is None:
        model, notes = loader.load_run(run)
        for note in notes:
            stop.tell(f"warning: {note}")
    else:
        model = loader.load_hf(folder)
    timing = sample.Timing() if flags.pop("timing") else None
    loader.write(model, prompts, timing=timing, **flags)
    if timing is not None:
        stop.tell(str(timing))


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    prompts = given or []
    if file is not None:
        lines = file.read_bytes().decode("utf-8", "surrogateescape").split("\n")
        prompts = prompts + [line.removesuffix("\r") for line in lines if line.strip()]
        if not prompts:
            raise RunError(f"--prompts {file} has no line of text; write one prompt in each")
    return prompts or [""]


def _export(flags: dict[str, Any]) -> None:
    _need_packages("export", safetensors="safetensors")
    _start_jax()
    from jaxkern.lm.export import export

    export(flags.pop("run"), flags.pop("hf"), **flags)


def _warm(flags: dict[str, Any]) -> None:
    _need_packages("warm")
    gpu, devices = flags.pop("gpu"), flags.pop("devices", None)
    if devices is None and "parallel" in flags and "mesh" not in flags:
        raise RunError(
            f"--parallel {flags['parallel']} does not say how many GPUs share that; add --devices "
            "with their number"
        )
    if devices is None:
        devices = math.prod(axes_of(flags["mesh"]).values()) if "mesh" in flags else 1
    # The CPU stands for as many devices as there will be GPUs, so that XLA can split the program.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    )
    from jaxkern.lm.warm import warm

    warm(flags, gpu, devices)


def _doctor(flags: dict[str, Any]) -> None:
    if flags["empty_cache"]:
        from jaxkern.lowering import cache

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
