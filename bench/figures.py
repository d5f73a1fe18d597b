"""Reads bench/results: timings of ops, training steps, and the fastest competitor of each.

It imports no JAX, so that a command may set up its process before it does.
"""

import csv
import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.program import RESULTS

WITHOUT_TMA = "without-tma"
"""The kernels of GPUs that have neither TMA nor wgmma, on one that has them."""

OURS, CHOSEN = "mosaic", "auto"
NAMES = {
    CHOSEN: "jaxkern's choice",
    OURS: "jaxkern",
    "jaxkern-remat": "jaxkern, layers computed again",
    "jaxkern-cheap": "jaxkern, remat.CHEAP",
    "jaxkern-scan": "jaxkern, remat.SCAN",
    "jaxkern-loop": "jaxkern, layers in a loop",
    "xla": "plain JAX",
    "xla-loop": "plain JAX, layers in a loop",
    "optax": "optax",
    "update": "jaxkern's update",
    "tokamax": "tokamax",
    "jla": "jax-linear-attention",
    "jla-loop": "jax-linear-attention, layers in a loop",
    "jax": "JAX by hand",
    "compile": "torch.compile",
    "torch": "PyTorch",
    "liger": "Liger",
    "fla": "fla",
    "quack": "quack",
    "mamba_ssm": "mamba_ssm",
    "flash_qla": "FlashQLA",
    "triton": "Triton",
}
"""Implementations and contenders, in the order of tables and pictures."""

OWN = (OURS, CHOSEN, "update", "jaxkern")
"""Ours, which are no competitors of one another; nor are variants, ``"jaxkern-loop"``."""

PLAIN = ("xla", "jax", "xla-loop")
"""Plain JAX, which is beside the other libraries."""

STEADY = 0.1
"""A training step whose times differ by more than this part from their middle is left out."""

EVEN = 0.01
"""Times that differ by less than this part are even."""

MODEL = ("130m, vocabulary 50,280", 2048)
"""The preset and length that README shows of training."""

Row = dict[str, Any]
Key = tuple[str, str, str, str]
"""Op, shape, dtype and pass."""

COLUMNS = (
    *("gpu", "file", "date", "jax", "commit", "op", "shape", "dtype", "implementation"),
    *("direction", "us", "us_low", "us_high", "calls", "gb_s", "percent", "tflop_s"),
    *("percent_products", "compile_s", "first_call_s", "temp_bytes", "tokens_per_second"),
    *("peak_gib", "kept_mib", "kernels"),
)
"""Columns of timings as comma-separated values."""


def _cost(row: Row) -> float:
    """The time by which rows compare: of models, whose batches differ, that of a token."""
    rate = row.get("tokens_per_second")
    return 1e6 / rate if rate else row["us"]


@dataclasses.dataclass(frozen=True)
class Line:
    """An op's pass at a shape on one kind of GPU, or a model's step: a row by contender."""

    op: str
    shape: str
    dtype: str
    direction: str
    figures: dict[str, Row]

    @property
    def own(self) -> Row | None:
        """The choice of ``None`` where it was timed, else the kernels."""
        return next((self.figures[n] for n in (CHOSEN, OURS, "jaxkern") if n in self.figures), None)

    @property
    def others(self) -> dict[str, Row]:
        own = lambda name: name in OWN or name.startswith("jaxkern-")
        return {name: row for name, row in self.figures.items() if not own(name)}

    @property
    def fastest(self) -> str | None:
        """The fastest other implementation, plain JAX included."""
        return min(self.others, key=lambda name: _cost(self.others[name]), default=None)

    @property
    def rival(self) -> str | None:
        """The fastest other library."""
        rivals = self.others.keys() - set(PLAIN)
        return min(rivals, key=lambda name: _cost(self.others[name]), default=None)

    @property
    def speedup(self) -> float | None:
        """The fastest other's time over ours."""
        if self.own is None or self.fastest is None:
            return None
        return _cost(self.others[self.fastest]) / _cost(self.own)


class Results:
    """The files of results, each a name and its content."""

    def __init__(self, files: Sequence[tuple[str, Row]]):
        self.files = files

    @classmethod
    def load(cls, folder: Path = RESULTS) -> "Results":
        """The files of `folder`, but for those of :mod:`bench.aot`, whose programs did not run."""
        paths = (p for p in sorted(folder.glob("*.json")) if not p.name.startswith("aot-"))
        return cls([(path.name, json.loads(path.read_text())) for path in paths])

    def of(self, command: str) -> list[Row]:
        """The files of a command, by the end of their names."""
        return [one for name, one in self.files if name.endswith(f"-{command}.json")]

    def rows_of(self, command: str) -> list[Row]:
        """The rows of these files."""
        return [row | {"GPU": one["device"]} for one in self.of(command) for row in one["rows"]]

    @functools.cached_property
    def rows(self) -> list[Row]:
        """Every timing on a GPU as a row of an op, with its origin."""
        found = []
        for name, one in self.files:
            about = {"gpu": one["device"], "file": name}
            about |= {key: one.get(key, "") for key in ("date", "jax", "commit")}
            if one["device"] != "cpu":  # where no kernel runs
                found += [about | told for row in one["rows"] for told in _as_ops(row)]
        return found

    @functools.cached_property
    def lines(self) -> dict[tuple[str, Key], Line]:
        """Lines by GPU and key, with the fastest row of each contender in all files.

        Ours is of the newest file that also has the fastest other library, or else of the newest;
        and so are other ways of ours to train, and what was timed beside them.
        """
        found: dict[tuple[str, Key], dict[str, dict[str, Row]]] = {}
        for row in filter(steady, self.rows):
            if row["implementation"] == WITHOUT_TMA:  # of other GPUs, and no rival
                continue
            key = row["op"], row["shape"], row["dtype"], row["direction"]
            if "contender" in row:
                key = *key[:1], f"{row['preset']}, {row['length']}", *key[2:]
            of_file = found.setdefault((row["gpu"], key), {}).setdefault(row["file"], {})
            _keep_fastest(of_file, [row])
        lines = {}
        for (gpu, key), by_file in found.items():
            date = lambda of_file: next(iter(of_file.values()))["date"]
            newest_first = sorted(by_file.values(), key=date, reverse=True)
            fastest: dict[str, Row] = {}
            for of_file in newest_first:
                _keep_fastest(fastest, of_file.values())
            with_rival_first = sorted(
                newest_first, key=lambda of, r=Line(*key, fastest).rival: r not in of
            )
            own = next((of for of in with_rival_first if of.keys() & set(OWN)), {})
            figures = {n: row for n, row in (fastest | own).items() if n not in OWN or n in own}
            for of_file in reversed(with_rival_first):
                if any(name.startswith("jaxkern-") for name in of_file):
                    figures |= {n: row for n, row in of_file.items() if n not in OWN}
            lines[gpu, key] = Line(*key, figures)
        return lines

    @functools.cached_property
    def best(self) -> dict[Key, Line]:
        """The lines of the GPU that has most of them, by op, shape, dtype and pass."""
        most = Counter(gpu for gpu, _ in self.lines).most_common(1)
        of_no_op = re.compile("training|decoding|.* layer")
        lines = ((key, line) for (gpu, key), line in self.lines.items() if gpu == most[0][0])
        return {key: line for key, line in lines if not of_no_op.fullmatch(line.op)}

    def line(self, op: str, shape: str, direction: str) -> Line | None:
        """The best line of an op's pass at a shape, in bf16 if any."""
        dtypes = ("bfloat16", "float32", "float16")
        return next(filter(None, (self.best.get((op, shape, d, direction)) for d in dtypes)), None)

    def trainings(self, gpu: str = "H200") -> dict[tuple[str, int], Line]:
        """Training steps by preset and length, smallest first."""
        found = {
            (row["preset"], row["length"]): line
            for (on, _), line in self.lines.items()
            if gpu in on and line.op == "training" and (row := line.own)
        }
        parameters = lambda at: found[at].figures["jaxkern"]["parameters"]
        size = lambda at: ("mamba2" in at[0], parameters(at), at[1])
        return {at: found[at] for at in sorted(found, key=size)}

    def newest(self) -> list[Row]:
        """The newest timing of each contender, by GPU, op, shape, dtype and pass, with its file."""
        keys = ("gpu", "op", "shape", "dtype", "direction", "implementation")
        found: dict[tuple[str, ...], Row] = {}
        for row in self.rows:
            at = tuple(row[key] for key in keys)
            was = found.get(at, row)
            if was["file"] == row["file"]:
                row = min(was, row, key=_cost)
            found[at] = row if row["date"] >= was["date"] else was
        return [found[key] for key in sorted(found)]


def _keep_fastest(found: dict[str, Row], rows: Iterable[Row]) -> None:
    for row in rows:
        who = row["implementation"]
        found[who] = min(found.get(who, row), row, key=_cost)


def _as_ops(row: Row) -> Iterator[Row]:
    """A timing of an op, a training step, a decoded token or a layer, all as rows of ops."""
    told: Row = {"dtype": "bfloat16"} | {k: v for k, v in row.items() if k != "kernels"}
    if "us" in row and "op" in row:
        yield told
    elif "contender" in row:
        shape = f"{row['preset']}, {row['batch']}x{row['length']}"
        told |= {"op": "training", "shape": shape, "implementation": row["contender"]}
        told |= {"direction": "step", "us": round(1e3 * row["ms"], 1)}
        yield told | {"us_low": 1e3 * row["ms_low"], "us_high": 1e3 * row["ms_high"]}
    elif "ms_first" in row:
        told |= {"op": "decoding", "shape": f"{row['preset']}, {row['batch']}"}
        told |= {"implementation": row["by"], "direction": "token"}
        yield told | {"us": round(1e3 * row["ms_step"], 1)}
    elif "layer" in row:
        shape = f"{row['batch']}x{row['length']}x{row['d_model']}"
        told |= {"op": f"{row['layer']} layer", "shape": shape}
        for direction in ("forward", "both"):
            yield told | {"direction": direction, "us": row[f"{direction}_us"]}


def steady(row: Row) -> bool:
    """Whether a training step's times differ from their middle by at most :data:`STEADY` of it."""
    return "contender" not in row or row["ms_high"] - row["ms_low"] <= 2 * STEADY * row["ms"]


def name_of(implementation: str) -> str:
    """An implementation or contender as a reader knows it."""
    return NAMES.get(implementation, implementation)


def in_order(names: Iterable[str]) -> list[str]:
    """The implementations in the order of :data:`NAMES`, and then by name."""
    place = {name: i for i, name in enumerate(NAMES)}
    return sorted(names, key=lambda name: (place.get(name, len(place)), name))


def duration(us: float) -> str:
    """Three digits of it."""
    value, unit = (us, "µs") if us < 999.5 else (us / 1000, "ms")
    return f"{value:#.3g}".rstrip(".") + f" {unit}"


_WORDS = {
    "-plain": "",
    "-300-leaves": " in 300 arrays",
    "-folded": ", with unscaling, clipping, the check",
    "-bf16-8-bit-state": ", bf16, state in 8 bits",
    "-8-bit-state": ", state in 8 bits",
    "-bf16-state": ", state in bf16",
    "-bf16-all": ", all in bf16",
    "-160MiB": ", 160 MiB for logits",
    "-336MiB": ", 336 MiB for logits",
    "/None": ", no checkpoints",
    "/": ", a checkpoint every ",
    "-": ", ",
}
"""Parts of a shape's name, and the words that a reader is given for them."""


def plain_shape(shape: str) -> str:
    """A shape of the results in plain words: ``8x64-plain`` is 8 × 64."""
    for part, words in _WORDS.items():
        shape = shape.replace(part, words)
    return re.sub(r"(?<=\d)x(?=\d)", " × ", shape)


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    table = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in table)


def pivot(
    rows: Iterable[Row],
    index: Sequence[str],
    column: str,
    value: str | Callable[[Row], str],
    names: dict[str, str] | None = None,
) -> str:
    """A table of a value, a key of `rows` or what tells it; of several rows the last counts.

    The keys `index` have the first cells of a line, `column` the other columns, of which `names`
    may name some and their headings.
    """
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        told = value(row) if callable(value) else row[value]
        told = f"{told:,.4g}" if isinstance(told, float) else told
        of_line = found.setdefault(tuple(str(row[key]) for key in index), {})
        of_line[str(row[column])] = f"{told:,}" if isinstance(told, int) else told
    every = dict.fromkeys(name for by in found.values() for name in by)
    names = names or {name: name_of(name) for name in every}
    cells = [[*key, *(by.get(name, "") for name in names)] for key, by in found.items()]
    return table([*index, *names.values()], cells)


def write_csv(rows: Sequence[Row], out: Path) -> None:
    """Timings as comma-separated values; what a column lacks is left empty, `kernels` is JSON."""
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            flat = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()}
            writer.writerow(flat)
