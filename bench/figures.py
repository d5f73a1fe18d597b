"""Reads bench/results: timings of ops, training steps, and the fastest competitor of each.

It imports no JAX, so that a command may set up its process before it does.
"""

import csv
import dataclasses
import functools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.program import RESULTS

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
    "triton": "Triton",
}
"""Implementations and contenders, in the order of tables and pictures."""

OWN = (OURS, CHOSEN, "update")
"""Ours, which are no competitors of one another."""

PLAIN = ("xla", "jax")
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


@dataclasses.dataclass(frozen=True)
class Line:
    """An op's pass at a shape on one kind of GPU: a row by implementation.

    The rows of `lent` implementations are from other files than ours.
    """

    op: str
    shape: str
    dtype: str
    direction: str
    figures: dict[str, Row]
    device: str
    lent: frozenset[str] = frozenset()

    @property
    def own(self) -> Row | None:
        """The choice of ``None`` where it was timed, else the kernels."""
        return self.figures.get(CHOSEN, self.figures.get(OURS))

    @property
    def others(self) -> dict[str, Row]:
        return {name: row for name, row in self.figures.items() if name not in OWN}

    @property
    def fastest(self) -> str | None:
        """The fastest other implementation, plain JAX included."""
        return min(self.others, key=lambda name: self.others[name]["us"], default=None)

    @property
    def rival(self) -> str | None:
        """The fastest other library."""
        rivals = self.others.keys() - set(PLAIN)
        return min(rivals, key=lambda name: self.others[name]["us"], default=None)

    @property
    def speedup(self) -> float | None:
        """The fastest other's time over ours."""
        if self.own is None or self.fastest is None:
            return None
        return self.others[self.fastest]["us"] / self.own["us"]


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

    @functools.cached_property
    def lines(self) -> list[Line]:
        """A line for each file that has ours, beside the others of any file of the same GPU.

        Of several figures of one implementation in a file the fastest counts. Wall-clock times of
        a CPU, where no kernel runs, are left out.
        """
        found: dict[Key, dict[int, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
        for number, (_, one) in enumerate(self.files):
            for row in timings(one) if one["device"] != "cpu" else ():
                figures = found[_key(row)][number]
                who = row["implementation"]
                figures[who] = min(row, figures.get(who, row), key=lambda row: row["us"])
        device = lambda number: self.files[number][1]["device"]
        lines = []
        for key, by_file in found.items():
            ours = {number: own for number, own in by_file.items() if OURS in own}
            for number, own in (ours or by_file).items():
                lent: dict[str, Row] = {}
                for other, more in by_file.items():
                    for who in more.keys() - own.keys() - {OURS, CHOSEN}:
                        if device(other) == device(number):
                            row = more[who]
                            lent[who] = min(lent.get(who, row), row, key=lambda row: row["us"])
                lines.append(Line(*key, own | lent, device(number), frozenset(lent)))
        return lines

    @functools.cached_property
    def best(self) -> dict[Key, Line]:
        """By op, shape, dtype and pass, a line of the GPU that most lines are of.

        Of several it is the one with the fastest competitor, and of these one whose file has ours
        and the competitor, with the most others.
        """
        most = Counter(line.device for line in self.lines).most_common(1)

        def order(line: Line) -> tuple[float, bool, int]:
            us = line.figures[line.rival]["us"] if line.rival else math.inf
            return -us, line.rival not in line.lent, len(line.figures)

        found: dict[Key, Line] = {}
        for line in self.lines:
            if line.device == most[0][0]:
                key = line.op, line.shape, line.dtype, line.direction
                found[key] = max(found.get(key, line), line, key=order)
        return found

    def line(self, op: str, shape: str, direction: str) -> Line | None:
        """The best line of an op's pass at a shape, in bf16 if any."""
        dtypes = ("bfloat16", "float32", "float16")
        return next(filter(None, (self.best.get((op, shape, d, direction)) for d in dtypes)), None)

    @functools.cached_property
    def trainings(self) -> dict[tuple[str, int], dict[str, Row]]:
        """Steady rows of training steps by preset and length, smallest first, and by contender.

        They are of the GPU that most rows are of. Ours is of the file that has the fastest rival.
        """
        every = [
            (number, one["device"], row)
            for number, (_, one) in enumerate(self.files)
            for row in one["rows"]
            if "contender" in row and steady(row)
        ]
        most = Counter(device for _, device, _ in every).most_common(1)
        files: dict[tuple[str, int], dict[int, dict[str, Row]]] = {}
        for number, device, row in every:
            if device == most[0][0]:
                of_model = files.setdefault((row["preset"], row["length"]), {})
                of_model.setdefault(number, {})[row["contender"]] = row
        found: dict[tuple[str, int], dict[str, Row]] = {}
        for key, by_file in files.items():
            rate = lambda rows: max(
                (r["tokens_per_second"] for who, r in rows.items() if is_rival(who)), default=0
            )
            for rows in sorted(by_file.values(), key=lambda rows: ("jaxkern" in rows, rate(rows))):
                found.setdefault(key, {}).update(rows)
        size = lambda at: ("mamba2" in at[0], found[at]["jaxkern"]["parameters"], at[1])
        return {at: found[at] for at in sorted(found, key=size)}

    @functools.cached_property
    def decodings(self) -> dict[tuple[str, int], dict[str, Row]]:
        """Rows of decoding by preset and batch, and then by contender."""
        found: dict[tuple[str, int], dict[str, Row]] = defaultdict(dict)
        for _, one in self.files:
            for row in one["rows"]:
                if "ms_first" in row:
                    found[row["preset"], row["batch"]][row["by"]] = row
        return found

    def newest(self) -> list[Row]:
        """The newest timing of each contender, by GPU, op, shape, dtype and pass, with its file."""
        found: dict[tuple[str, ...], Row] = {}
        for name, one in sorted(self.files, key=lambda file: file[1].get("date", "")):
            about = {"gpu": one["device"], "file": name}
            about |= {key: one.get(key, "") for key in ("date", "jax", "commit")}
            of_file: dict[tuple[str, ...], Row] = {}
            for row in _every_timing(one) if one["device"] != "cpu" else ():
                key = one["device"], *_key(row), row["implementation"]
                first = of_file.setdefault(key, row)
                of_file[key] = min(first, row, key=lambda row: row["us"])
            found |= {key: about | row for key, row in of_file.items()}
        return [found[key] for key in sorted(found)]


def _key(row: Row) -> Key:
    return row["op"], row["shape"], row["dtype"], row["direction"]


def timings(one: Row) -> Iterator[Row]:
    """The rows of a file that time an op."""
    return (row for row in one["rows"] if "op" in row and "us" in row)


def _every_timing(one: Row) -> Iterator[Row]:
    """Timings of ops, training steps, decoded tokens and layers, all as rows of ops."""
    for row in timings(one):
        yield {key: value for key, value in row.items() if key != "kernels"}
    for row in one["rows"]:
        told: Row = {"dtype": "bfloat16", "implementation": row.get("implementation")}
        if "contender" in row:
            shape = f"{row['preset']}, {row['batch']}x{row['length']}"
            told |= {"op": "training", "shape": shape, "implementation": row["contender"]}
            told |= {"direction": "step", "us": round(1e3 * row["ms"], 1)}
            told |= {key: row.get(key) for key in ("tokens_per_second", "tflop_s", "peak_gib")}
            yield told | {"us_low": 1e3 * row["ms_low"], "us_high": 1e3 * row["ms_high"]}
        elif "ms_first" in row:
            told |= {"op": "decoding", "shape": f"{row['preset']}, {row['batch']}"}
            told |= {"implementation": row["by"], "direction": "token"}
            told |= {"us": round(1e3 * row["ms_step"], 1)}
            yield told | {key: row[key] for key in ("tokens_per_second", "peak_gib")}
        elif "layer" in row:
            shape = f"{row['batch']}x{row['length']}x{row['d_model']}"
            told |= {"op": f"{row['layer']} layer", "shape": shape, "kept_mib": row["kept_mib"]}
            for direction in ("forward", "both"):
                yield told | {"direction": direction, "us": row[f"{direction}_us"]}


def steady(row: Row) -> bool:
    """Whether a training step's times differ from their middle by at most :data:`STEADY` of it."""
    return row["ms_high"] - row["ms_low"] <= 2 * STEADY * row["ms"]


def is_rival(contender: str) -> bool:
    """Whether another library trains, and not plain JAX."""
    return contender.partition("-")[0] not in ("jaxkern", "xla")


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


def write_csv(rows: Sequence[Row], out: Path) -> None:
    """Timings as comma-separated values; what a column lacks is left empty, `kernels` is JSON."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            flat = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()}
            writer.writerow(flat)
