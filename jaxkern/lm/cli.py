"""The command line: jaxkern train, sample, warm, doctor.

Whatever a user can put right ends as one line on stderr and exit code 1 (2 for a wrong flag), never
as a stack trace. jax and flax are imported only by the command that needs them.
"""

import argparse
import contextlib
import errno
import importlib.util
import io
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jaxkern
from jaxkern.lm import stop
from jaxkern.lm.config import (
    DEFAULTS,
    IMPLEMENTATIONS,
    LIMITS,
    PRESET_FLAGS,
    PRESETS,
    REMATS,
    Limits,
    RunError,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jaxkern: error: {message} (see {self.prog} --help)\n")


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
    args = vars(_parser().parse_args(argv))
    # Text of any language is sampled, and not every terminal can show it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    command: Callable[[dict[str, Any]], None] = args.pop("command")
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
        print(f"jaxkern: {' '.join(message.split())}", file=sys.stderr, flush=True)
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
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        from jaxkern.lm.memory import REMEDY

        return f"out of memory; {REMEDY}"
    if isinstance(error, NotImplementedError):
        reason, asked, _ = text.partition(" Use implementation=")
        return f"{reason} Use --implementation auto, or xla." if asked else text
    return None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxkern",
        description="Train and sample language models of Mamba and Mamba-2 blocks.",
    )
    parser.add_argument("--version", action="version", version=f"jaxkern {jaxkern.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands.add_parser("train", help="train a language model on text"))
    _add_sample(commands.add_parser("sample", help="write text with a trained model"))
    _add_warm(commands.add_parser("warm", help="lower the kernels of a training run beforehand"))
    _add_doctor(commands.add_parser("doctor", help="show what would run on this machine, and why"))
    return parser


def _adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """Make a function that adds a flag whose value is left out when the flag is not given.

    Flags that have limits take numbers within them, and those that are off take no value; by
    default the default is that of the run.
    """

    def add(name: str, help: str, default: str | None = None, **options: Any) -> None:
        key = name.lstrip("-").replace("-", "_")
        if key in LIMITS:
            options = {"type": _within(LIMITS[key]), "metavar": "N"} | options
        if default == "off":
            options["action"] = "store_true"
        if default is None:
            default = _by_preset(key) if key in PRESET_FLAGS else str(DEFAULTS[key])
        parser.add_argument(
            name,
            help=f"{help}\n{_lines(f'(default: {default})')}",
            default=argparse.SUPPRESS,
            **options,
        )

    return add


def _by_preset(field: str) -> str:
    """The defaults of a flag, each behind the presets that have it."""
    presets: dict[float, list[str]] = {}
    for name, preset in PRESETS.items():
        presets.setdefault(getattr(preset, field), []).append(name)
    most = max(presets, key=lambda value: len(presets[value]))
    if len(presets[most]) > 2:
        presets[most] = ["others"]
    last = lambda value: presets[value] == ["others"]
    told = (f"{' and '.join(presets[v])} {v:g}" for v in sorted(presets, key=last))
    return ", ".join(told)


def _lines(text: str) -> str:
    """Breaks a text where the lines of a flag's help end."""
    return textwrap.fill(text, 54, break_on_hyphens=False)


def _add_model(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """Add the flags that decide what the training step computes; what it returns adds others."""
    parser.formatter_class = argparse.RawTextHelpFormatter
    add = _adder(parser)
    named = _lines(f"kind of block and size of the model: {', '.join(PRESETS)}")
    add("--preset", named, choices=PRESETS, metavar="NAME")
    add("--batch-size", "sequences per step")
    add("--seq-len", "bytes per sequence")
    add("--grad-accum", "parts that a batch is computed in, one after another", metavar="K")
    add(
        "--mixed-precision",
        "fp32, bf16, fp16 (with loss scaling), or for example\n"
        "params=float32,compute=bfloat16,output=float32",
        metavar="POLICY",
    )
    add(
        "--remat",
        "what the backward computes again to save memory: none;\n"
        "cheap, the convolution and step sizes of each block;\n"
        "scan, these and its scan; or, which --remat alone\n"
        "means, the whole layer",
        nargs="?",
        const="layer",
        choices=REMATS,
        metavar="WHAT",
    )
    add("--scan-layers", "run the layers in a loop: a smaller program, slower steps", "off")
    add(
        "--implementation",
        "of the ops: auto (the fastest), mosaic (GPU kernels), xla",
        choices=IMPLEMENTATIONS,
        metavar="NAME",
    )
    return add


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a byte-level language model of Mamba or Mamba-2 blocks. Without flags: a tiny one, "
        "on the sources of Python's standard library, in some minutes on a CPU."
    )
    add = _add_model(parser)
    add(
        "--data",
        'text files or folders of them; of a .jsonl file, the\n"text" of each line',
        "Python's standard library",
        nargs="+",
        type=_named,
        metavar="PATH",
    )
    add("--out", "new folder for the run", "runs/PRESET-DATE-TIME", type=_path, metavar="DIR")
    add(
        "--resume",
        "continue the run in --out from its last checkpoint;\nof the other flags, --steps may "
        "grow, and\n--devices, --implementation, --log-every and\n--checkpoint-every may change",
        "off",
    )
    add("--steps", "optimizer steps")
    add(
        "--lr",
        "peak learning rate, after a linear warm-up and before\na cosine to a tenth of it",
        metavar="X",
    )
    add(
        "--devices",
        "how many devices share each batch, or all",
        "all GPUs, or one CPU",
        type=_devices,
        metavar="N",
    )
    add("--seed", "of the parameters and of the order of the data")
    add("--log-every", "steps between two reports")
    add("--eval-every", "steps between two validations")
    add("--eval-batches", "batches per validation")
    add("--checkpoint-every", "steps between two checkpoints")
    parser.set_defaults(command=_train)


def _add_warm(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lower the kernels that jaxkern train needs with the same flags, for a GPU that need not "
        "be here, and keep them in the cache: in a container's image, or on a login node."
    )
    add = _add_model(parser)
    add("--devices", "how many GPUs share each batch", "1", type=_positive, metavar="N")
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="NAME",
        help="that is trained on: a100, h100, h200, b200, l40s, rtx-pro-6000",
    )
    parser.set_defaults(command=_warm)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what this machine has, what would run on it and why, and the cache."
    parser.add_argument(
        "--empty-cache",
        action="store_true",
        help="remove the kernels and programs that are kept on disk, and do nothing else",
    )
    parser.set_defaults(command=_doctor)


def _add_sample(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write text with a trained model."

    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--run", type=_path, metavar="DIR", help="the --out folder of jaxkern train")
    model.add_argument(
        "--hf",
        type=_path,
        metavar="DIR",
        help="a Mamba or Mamba-2 checkpoint in the layout of Hugging Face: config.json, "
        "model.safetensors and tokenizer.json",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what the text begins with (default: ''); given several times, several texts",
    )
    parser.add_argument(
        "--prompts", type=_path, metavar="FILE", help="a file of prompts, one in each line"
    )
    add = _adder(parser)
    add("--length", "bytes to write, tokens with --hf", "400")
    add("--temperature", "lower is less random, 0 is not at all", "0.8", metavar="X")
    add("--top-k", "draw from the K likeliest of them, 0 from all", "40", metavar="K")
    add("--top-p", "draw from the likeliest that together have this probability", "1", metavar="P")
    add("--seed", "of the draws of the first text; the next has the next", "0")
    parser.set_defaults(command=_sample)


def _train(flags: dict[str, Any]) -> None:
    _need_extra("train")
    resume = flags.pop("resume", False)
    out = flags.pop("out", None)
    if out is None:
        if resume:
            raise RunError("--resume needs --out, the folder of the run to continue")
        preset = flags.get("preset", DEFAULTS["preset"])
        out = Path("runs", f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}")
    if "data" in flags:
        flags["data"] = tuple(flags["data"])
    _start_jax()
    from jaxkern.lm.train import train

    train(flags, out, resume=resume)


def _sample(flags: dict[str, Any]) -> None:
    run, folder = flags.pop("run"), flags.pop("hf")
    prompts = _prompts(flags.pop("prompt"), flags.pop("prompts"))
    if folder is None:
        _need_extra("sample")
    else:
        _need_extra("sample --hf", "hf", safetensors="safetensors", tokenizers="tokenizers")
    _start_jax()
    from jaxkern.lm import loader

    if folder is None:
        model, notes = loader.load_run(run)
        for note in notes:
            print(f"jaxkern: warning: {note}", file=sys.stderr, flush=True)
    else:
        model = loader.load_hf(folder)
    loader.write(model, prompts, **flags)


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    prompts = given or []
    if file is not None:
        lines = file.read_bytes().decode("utf-8", "surrogateescape").split("\n")
        prompts = prompts + [line.removesuffix("\r") for line in lines if line.strip()]
        if not prompts:
            raise RunError(f"--prompts {file} has no line of text; write one prompt in each")
    return prompts or [""]


def _warm(flags: dict[str, Any]) -> None:
    _need_extra("warm")
    gpu, devices = flags.pop("gpu"), flags.pop("devices", 1)
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


def _need_extra(command: str, extra: str = "lm", **more: str) -> None:
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
            f'jaxkern {command} needs {", ".join(missing)}; run: pip install "jaxkern[{extra}]"'
        )


def _within(limits: Limits) -> Callable[[str], Any]:
    """Makes a flag's type: a number within the limits."""

    def value(text: str) -> Any:
        try:
            return limits.check(limits.kind(text))
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text!r}") from None

    return value


_positive = _within(Limits(int, 1))


def _devices(text: str) -> str:
    return text if text == "all" else str(_positive(text))


def _named(text: str) -> str:
    """Refuse an empty path, as of a variable that is not set: it would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got ''")
    return text


def _path(text: str) -> Path:
    return Path(_named(text))
