"""The flags of the command line: their names, limits, defaults and help.

Imports no optional package: --help needs none.
"""

import argparse
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jaxkern
from jaxkern.lm.config import (
    AXES,
    DEFAULTS,
    IMPLEMENTATIONS,
    LIMITS,
    PRESET_FLAGS,
    PRESETS,
    REMATS,
    TRACKERS,
    WARMED,
    Limits,
    axes_of,
    mesh_of,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jaxkern: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; `command` of what it parses is the name of one."""
    parser = _Parser(
        prog="jaxkern",
        description="Train and sample language models of Mamba and Mamba-2 blocks.",
    )
    parser.add_argument("--version", action="version", version=f"jaxkern {jaxkern.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands.add_parser("train", help="train a language model on text"))
    _add_sample(commands.add_parser("sample", help="write text with a trained model"))
    _add_export(commands.add_parser("export", help="write a run's model for Hugging Face's tools"))
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
        if default == "off" and not options:
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
    add("--seq-len", "tokens per sequence")
    _add_tokens(add)
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
    _add_mesh(add)
    return add


def _add_mesh(add: Callable[..., None]) -> None:
    """Add the flags that say how devices share the model and the batch."""
    add(
        "--parallel",
        "what devices share: data, the batch; sequence, each\nsequence; fsdp, the batch and the "
        "matrices; tensor, the\nchannels of each block",
        choices=AXES,
        metavar="WHAT",
    )
    add(
        "--mesh",
        "several of these, and how many devices each takes, for\nexample data=2,fsdp=4",
        "all devices for --parallel",
        type=_mesh,
        metavar="AXES",
    )


def _add_tokens(add: Callable[..., None]) -> None:
    """Add the flags that say what tokens are, and whether documents are packed."""
    add(
        "--tokenizer",
        "bytes; a tokenizer.json of Hugging Face or its folder;\nor bpe:32000, which trains a "
        "byte-level BPE of that\nmany tokens on --data",
        type=_named,
        metavar="NAME",
    )
    add("--vocab-size", "tokens of the model", "those of --tokenizer, rounded up to 64")
    add(
        "--pack",
        "keep documents apart that share a sequence, and see\neach once in an epoch; else "
        "sequences begin anywhere",
        "on for tokens, weights and --eval-data, off for bytes",
        action="store_true",
    )


def _add_data(add: Callable[..., None]) -> None:
    """Add the flags that say what a run learns from."""
    add(
        "--data",
        "files of text, JSON Lines or Parquet, also .gz or .zst;\nfolders and "
        "patterns of them. PATH:FIELD\nnames the field or column of the documents (text), and\n"
        "=WEIGHT behind it the share of what is drawn",
        "Python's standard library",
        nargs="+",
        type=_named,
        metavar="PATH",
    )
    add(
        "--eval-data",
        "files to validate with, as for --data",
        "a part of --data is held out",
        nargs="+",
        type=_named,
        metavar="PATH",
    )
    add(
        "--data-cache",
        "folder for the tokens, which runs may share",
        "that of the run",
        type=_named,
        metavar="DIR",
    )


def _add_start(add: Callable[..., None]) -> None:
    """Add the flags that say what a run begins with."""
    add(
        "--init-hf",
        "begin with a Mamba or Mamba-2 checkpoint in the layout\nof Hugging Face; the model has "
        "its sizes, and what is\nnot given the default of the preset most like it",
        "none",
        type=_named,
        metavar="DIR",
    )


def _add_looking(add: Callable[..., None]) -> None:
    """Add the flags that say how a run is looked at."""
    add(
        "--log-to",
        f"beside metrics.jsonl: {' or '.join(TRACKERS)}, or both; none\nends it on --resume",
        "none",
        nargs="+",
        choices=(*TRACKERS, "none"),
        metavar="NAME",
    )
    add(
        "--profile",
        "trace some steps, for TensorBoard and Perfetto, into\nthe run's folder; --profile alone "
        "takes 5, soon after\nthe first",
        "off",
        nargs="?",
        const="auto",
        type=_steps,
        metavar="STEP:COUNT",
    )


def _add_processes(add: Callable[..., None]) -> None:
    """Add the flags that say which process of a run this is."""
    found = "what Slurm, Open MPI or Kubernetes says"
    add(
        "--coordinator",
        "host and port that process 0 listens to, the same for\nevery process of the run",
        found,
        type=_address,
        metavar="HOST:PORT",
    )
    add("--processes", "how many there are; 1 asks nobody", found, type=_positive, metavar="N")
    add("--process", "which one this is, from 0", found, type=_whole, metavar="I")


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a language model of Mamba or Mamba-2 blocks. Without flags: a tiny one, of bytes, "
        "on the sources of Python's standard library, in some minutes on a CPU."
    )
    add = _add_model(parser)
    _add_data(add)
    _add_start(add)
    add("--out", "new folder for the run", "runs/PRESET-DATE-TIME", type=_path, metavar="DIR")
    add(
        "--resume",
        "continue the run in --out from its last checkpoint;\nof the other flags, --steps may "
        "grow, and\n--devices, --parallel, --mesh, --implementation,\n--remat, --log-every, "
        "--log-to, --checkpoint-every,\n--keep and --data-cache may change",
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
        "how many devices share each batch, or all; those of\nall processes count",
        "all GPUs, or one CPU; all with --parallel or of several processes",
        type=_devices,
        metavar="N",
    )
    _add_processes(add)
    add("--seed", "of the parameters and of the order of the data")
    add("--log-every", "steps between two reports")
    add("--eval-every", "steps between two validations")
    add("--eval-batches", "batches per validation")
    add("--checkpoint-every", "steps between two checkpoints; of these --keep stay")
    add(
        "--keep",
        "how many checkpoints stay, the newest; a new one that\nis whole removes the oldest",
    )
    _add_looking(add)
    parser.set_defaults(command="train")


def _add_warm(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lower the kernels that jaxkern train needs with the same flags, for a GPU that need not "
        "be here, and keep them in the cache: in a container's image, or on a login node."
    )
    add = _add_model(parser)
    add(
        "--devices",
        "how many GPUs share each batch",
        "those of --mesh, or 1",
        type=_positive,
        metavar="N",
    )
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="NAME",
        help=_lines(f"that is trained on: {', '.join(WARMED)}"),
    )
    parser.set_defaults(command="warm")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what this machine has, what would run on it and why, and the cache."
    parser.add_argument(
        "--empty-cache",
        action="store_true",
        help="remove the kernels and programs that are kept on disk, and do nothing else",
    )
    parser.set_defaults(command="doctor")


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
    add("--length", "tokens to write", "400")
    add("--temperature", "lower is less random, 0 is not at all", "0.8", metavar="X")
    add("--top-k", "draw from the K likeliest of them, 0 from all", "40", metavar="K")
    add("--top-p", "draw from the likeliest that together have this probability", "1", metavar="P")
    add("--seed", "of the draws of the first text; the next has the next", "0")
    add(
        "--stop",
        "end a text before this one; may be given several times",
        "none",
        action="append",
        type=_text,
        metavar="TEXT",
    )
    parser.add_argument(
        "--timing", action="store_true", help="say on stderr how many tokens a second were decoded"
    )
    parser.set_defaults(command="sample")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a run's model in the layout of Hugging Face, which transformers and jaxkern sample "
        "--hf read: config.json, model.safetensors, and the tokenizer if the run has one."
    )
    parser.add_argument(
        "--run", required=True, type=_path, metavar="DIR", help="the --out folder of jaxkern train"
    )
    parser.add_argument(
        "--hf", required=True, type=_path, metavar="DIR", help="the folder that is written"
    )
    parser.add_argument(
        "--step",
        type=_positive,
        metavar="N",
        help="which checkpoint of the run (default: the newest)",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of the weights (default: fp32, as they were trained)",
    )
    parser.set_defaults(command="export")


def _within(limits: Limits) -> Callable[[str], Any]:
    """Makes a flag's type: a number within the limits."""

    def value(text: str) -> Any:
        try:
            return limits.check(limits.kind(text))
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text!r}") from None

    return value


_positive = _within(Limits(int, 1))
_whole = _within(Limits(int, 0))


def _steps(text: str) -> str:
    if text != "auto" and not re.fullmatch("[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?", text):
        raise argparse.ArgumentTypeError(f"must be STEP:COUNT, such as 100:5, got {text!r}")
    return text


def _mesh(text: str) -> str:
    try:
        return mesh_of(axes_of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be axes and their sizes such as data=2,fsdp=4, got {text!r}: {error}"
        ) from None


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, such as node1:62100, got {text!r}")
    return text


def _devices(text: str) -> str:
    return text if text == "all" else str(_positive(text))


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must be a text, got ''")
    return text


def _named(text: str) -> str:
    """Refuse an empty path, as of a variable that is not set: it would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got ''")
    return text


def _path(text: str) -> Path:
    return Path(_named(text))
