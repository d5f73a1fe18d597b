"""Shared code of the commands of ``python -m bench``: options, jobs, origin of figures, files.

It does not import JAX by itself, so that a command may set up its process before it does.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.processes import Failed, each

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"

COMMANDS = {
    "run": "time the ops, forward and backward; this is the default command",
    "layers": "time the Mamba-2, Gated DeltaNet and KDA layers beside other libraries'",
    "train": "time training steps of the language model",
    "decode": "time decoding with the language model",
    "devices": "time training steps and sequences that several GPUs share",
    "accuracy": "measure errors against float64",
    "first_step": "time a training run to its first step",
    "checkpoints": "time training steps with and without checkpoints",
    "aot": "compile ops and training steps for GPUs that are not there, beside committed figures",
    "collectives": "compile ops split between GPUs that are not there: what devices exchange",
    "modules": "compare the kernels before and after a change of the source",
    "report": "renew bench/report.md, pictures, and the figures of README and of the guides",
}
"""The commands and what they do."""

ELSEWHERE = {"decode": "train", "checkpoints": "train", "first_step": "devices"}
"""The modules of commands that are functions of their names; others are a module's ``main``."""

Row = dict[str, Any]

ALONE: Row = {"apart": True, "most": 1}
"""Options of :func:`measured` that give each job a process of its own, one after the other."""


def command(result: str = "", /, **options: Any) -> Callable[[Callable[[Any], int]], Any]:
    """Makes a function of options by name a command of :data:`COMMANDS`, which takes its words.

    An option is its default, or its type where there is none, in a list where it can be repeated;
    help; and perhaps the words to choose from. `result` ends the name of the file that is written,
    and ``error(why)`` of the options refuses them.
    """

    def decorated(run: Callable[[Any], int]) -> Callable[..., int]:
        name = run.__module__.rpartition(".")[2] if run.__name__ == "main" else run.__name__
        return lambda argv=None: run(_parsed(name, argv, result, options))

    return decorated


def _parsed(command: str, argv: Sequence[str] | None, result: str, of: Row) -> argparse.Namespace:
    told, options = COMMANDS[command], dict(of)
    p = argparse.ArgumentParser(
        prog=f"python -m bench {command}",
        description=f"{told[0].upper()}{told[1:]}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if command == "run":
        p.epilog = f"Other commands: {', '.join([*COMMANDS][1:])}; python -m bench COMMAND --help."
    if result:
        file = f"JSON file (bench/results/<device>-{result}.json)"
        options["commit"] = "", "what to call this tree, where git cannot tell"
        options["out"] = Path, file
    for name, (given, told, *choices) in options.items():
        how: Row = {"choices": choices} if choices else {}
        if isinstance(given, list):
            how |= {"action": "append", "type": given[0]}
            told += "; repeat for more"
        elif isinstance(given, bool):
            how["action"] = "store_true"
        else:
            how |= {"type": given} if isinstance(given, type) else {"default": given}
            how.setdefault("type", type(given))
        p.add_argument(f"--{name.replace('_', '-')}", help=told, **how)
    p.set_defaults(error=p.error, result=result)
    return p.parse_args(argv)


def _numbers(job: Any, row: Row) -> str:
    told = (f"{key} {value:,}" for key, value in row.items() if isinstance(value, (int, float)))
    return f"{job}: {', '.join(told)}"


def measured(
    args: argparse.Namespace,
    measure: Callable[[Any], Row | list[Row]],
    work: Sequence[Any],
    about: Row,
    tell: Callable[[Any, Row], str] = _numbers,
    finish: Callable[[list[Row]], Row] = lambda rows: {"rows": rows},
    end: Callable[[Row], Sequence[str]] = lambda report: (),
    **how: Any,
) -> int:
    """Measures jobs, prints each, and writes the report whenever one is done.

    A run that is stopped keeps its rows. The status is 1 where a job failed.

    Args:
      args: of :func:`command`, with the end of the file's name.
      measure: gives the row of a job, or its rows; a function of a module.
      work: what to measure, no two alike; ``str`` names one.
      about: what the report has besides: the clock, settings.
      tell: the line for a row of a job; by default all numbers of it.
      finish: what becomes of all rows in the report, which are in the order of `work`.
      end: the lines for the report.
      how: options of :func:`bench.processes.each`.
    """
    report = machine(args.commit) | about | {"failed": [], "rows": []}
    device = str(report["device"]).lower().replace(" ", "-")
    out = args.out or RESULTS / f"{device}-{args.result}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[Any, Any] = dict.fromkeys(work, Failed("the run was stopped"))
    for (job,), rows in each(measure, [(job,) for job in work], **how):
        found[job] = [rows] if isinstance(rows, dict) else rows
        failed = isinstance(rows, Failed)
        lines = [f"{job}: {rows}"] if failed else [tell(job, row) for row in found[job]]
        print(*lines, sep="\n", flush=True)
        report["failed"] = [f"{job}: {v}" for job, v in found.items() if isinstance(v, Failed)]
        done = [row for rows in found.values() if not isinstance(rows, Failed) for row in rows]
        report |= finish(done) if done else {}
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(*end(report), f"wrote {out}", sep="\n")
    return 1 if report["failed"] else 0


def share_device(jobs: int, one: bool = True) -> None:
    """Says how much of the devices this process and those that it starts take; before JAX does.

    Args:
      jobs: how many of these there are; several share the device's memory.
      one: whether they see one GPU alone, the first. PyTorch and JAX hand arrays on by a process's
        current device, which JAX leaves at the last one that it sees.
    """
    if jobs > 1:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if one:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]


def machine(commit: str) -> Row:
    """The origin of the figures: without it they mean nothing."""
    import jax

    import jaxkern

    return {
        "device": jax.devices()[0].device_kind,
        "driver": _output("nvidia-smi --query-gpu=driver_version --format=csv,noheader"),
        "jax": jax.__version__,
        "jaxkern": jaxkern.__version__,
        "commit": commit or tree(),
        "date": time.strftime("%Y-%m-%d"),
    }


def tree() -> str:
    """The commit of this tree, with a word where files differ from it."""
    changes = "+changes" if _output("git status --porcelain") else ""
    return (_output("git rev-parse --short=12 HEAD") or "unknown") + changes


def _output(command: str) -> str:
    """The first line of what a command prints; nothing where it fails or is not there."""
    run = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=FOLDER)
    return "" if run.returncode else run.stdout.partition("\n")[0]


def with_lines(report: Row) -> str:
    """JSON of `report`, with a line for each entry of its dictionaries."""
    lines = []
    for key, value in report.items():
        text = json.dumps(value)
        if isinstance(value, dict) and value:
            entries = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = f"{{\n{entries}\n }}"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def clock(gpu: bool, told: str) -> Row:
    """The report's entry of the figures' clock: `told`, or that they are of no kernels."""
    return {"clock": told if gpu else "WALL-CLOCK TIME ON A CPU: no kernel runs here"}
