"""Renews all that is made from bench/results: ``python -m bench report``.

That is bench/report.md and its full table bench/report.csv, the pictures, and the figures and lists
of README and of the guides.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench import documents, pictures, program
from bench.cases import TABLE, case, optim
from bench.documents import GUIDE, HEAD, README, cell, families, listed, training_rows
from bench.figures import (
    EVEN,
    STEADY,
    Line,
    Results,
    Row,
    name_of,
    plain_shape,
    steady,
    table,
    write_csv,
)
from bench.measured import Case, cases
from bench.program import FOLDER

REPORT, BACKBONES = FOLDER / "report.md", FOLDER / "backbones.md"
CSV = FOLDER / "report.csv"

MOST = 12
"""Rows of a family's table."""

PASSES = ("forward", "backward", "both", "step")


def family_rows(results: Results, ops: Sequence[str]) -> dict[str, dict[str, Line]]:
    """The lines of at most :data:`MOST` shapes by label and pass.

    They are the guide's, then one of each op that has none there, then shapes of models and others.
    """
    every = [one for one in cases(small=False) if one.op in ops]
    models = {(one.op, one.shape): one.models for one in every if isinstance(one, Case)}
    wanted = {(op, shape): label for label, op, shape, _ in listed(README + GUIDE) if op in ops}
    half = lambda dtype, direction: dtype == "bfloat16" or direction == "step"
    timed = {(op, s): None for op, s, dtype, d in results.best if op in ops and half(dtype, d)}
    for op in ops:
        if not any(of == op for of, _ in wanted):
            of_op = [at for at in timed if at[0] == op]
            wanted |= dict.fromkeys(sorted(of_op, key=lambda at: not models.get(at))[:1], "")
    for more in ([at for at in timed if models.get(at)], timed):
        wanted |= {at: wanted.get(at, "") for at in more}
    rows = {}
    for op, shape in sorted([*wanted][:MOST], key=lambda at: ops.index(at[0])):
        named = ", ".join(models.get((op, shape), ()))
        label = wanted[op, shape].partition(";")[0] or f"`{op}`, {plain_shape(shape)}"
        label += f" ({named})" if named else ""
        found = {d: results.line(op, shape, d) for d in PASSES}
        rows[label] = {d: line for d, line in found.items() if line}
    return rows


def _told(op: str, line: Line | None) -> str:
    """Our time, and how many times faster that is than the fastest other."""
    if line is None:
        return ""
    told = cell(op, line.own)
    if line.speedup is None or line.fastest is None:
        return told
    return f"{told}; {line.speedup:.2f}× {name_of(line.fastest)}" + (
        " ▼" if is_slower(line) else ""
    )


def is_slower(line: Line) -> bool:
    return line.speedup is not None and line.speedup <= 1 - EVEN


def _family(name: str, rows: dict[str, dict[str, Line]]) -> Iterator[str]:
    yield f"## {name}"
    yield f"![{name}: times of others over jaxkern's]({_picture(name)})"
    axes: dict[str, list[str]] = defaultdict(list)
    for op in dict.fromkeys(line.op for of in rows.values() for line in of.values()):
        timed = next(of for of in TABLE if of.op == op)
        words = " × ".join(case.AXES[axis] for axis in timed.axes.split())
        axes["parameters" if timed in optim.CASES else words].append(f"`{op}`")
    if told := "; ".join(f"{', '.join(of)}: {sizes}" for sizes, of in axes.items() if sizes):
        yield f"Shapes of {told}."
    passes = [d for d in PASSES if any(d in of for of in rows.values())]
    op = lambda of: next(iter(of.values())).op
    cells = [[label, *(_told(op(of), of.get(d)) for d in passes)] for label, of in rows.items()]
    yield table(["", *passes], cells)


def _picture(name: str) -> str:
    return f"pictures/{name.lower().replace(' ', '_')}.svg"


def _slower(results: Results) -> Iterator[str]:
    lost = sorted(filter(is_slower, results.best.values()), key=lambda line: line.speedup or 0)
    yield "## Where we are slower"
    yield f"{len(lost)} of {len(results.best)} measurements, by 1% or more, the worst first:"
    rows = []
    for line in lost:
        by = line.fastest or ""
        where = [f"`{line.op}`, {plain_shape(line.shape)}", line.dtype, line.direction]
        other = f"{name_of(by)} {cell(line.op, line.figures[by])}"
        rows.append([*where, cell(line.op, line.own), other, f"{line.speedup:.2f}×"])
    yield table(["", "dtype", "pass", "jaxkern", "fastest other", "speed-up"], rows)


def _training(results: Results) -> Iterator[str]:
    yield "## Training, end to end"
    yield (
        "Steps of the language model on random tokens, by `python -m bench train`: forward, "
        "backward and AdamW, products in bf16, parameters and state in fp32, every contender in a "
        "process of its own. The [guide to speed](../.site/guide/speed.md) has also longer "
        "sequences and `--remat`."
    )
    presets = [at for at in results.trainings if at[1] == 2048]
    yield table(HEAD, training_rows(results, presets, remat=False))
    rows = [row for _, one in results.files for row in one["rows"] if "contender" in row]
    for row in rows:
        if not steady(row):
            what = f"{row['preset']}, {name_of(row['contender'])}, length {row['length']}"
            yield f"Left out: {what}: its times differ by more than {STEADY:.0%}."
    for _, one in results.files:
        if any("contender" in row for row in one["rows"]):
            yield from (f"Not run, or left out: {line}." for line in one["failed"])


def pivot(rows: Iterable[Row], index: Sequence[str], column: str, value: str) -> str:
    """A table of a value by some keys and a column; of several rows the last counts."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        told = row[value]
        shown = f"{told:,.4g}" if isinstance(told, float) else f"{told:,}"
        name = str(row[column])
        found.setdefault(tuple(str(row[key]) for key in index), {})[name] = shown
    names = list(dict.fromkeys(name for by in found.values() for name in by))
    cells = [[*key, *(by.get(name, "") for name in names)] for key, by in found.items()]
    return table([*index, *map(name_of, names)], cells)


def _others(results: Results) -> Iterator[str]:
    rows = lambda command: [row for one in results.of(command) for row in one["rows"]]
    yield "## Decoding"
    yield (
        "Tokens a second of all sequences together, by `python -m bench decode`, after prompts of "
        "128 tokens. jaxkern is what `jaxkern sample` runs, in fp32, jaxkern-bf16 the same in "
        "bf16, as the others are; mamba_ssm decodes by CUDA graphs."
    )
    decoded = (row for by in results.decodings.values() for row in by.values())
    yield pivot(decoded, ("preset", "batch"), "by", "tokens_per_second")
    yield "## The first training step"
    yield (
        "Seconds from the start of `jaxkern train`'s process to the end of its first step, by "
        "`python -m bench first_step`, with jaxkern's and XLA's caches empty, and filled by an "
        "earlier process."
    )
    yield pivot(rows("first-step"), ("preset", "devices"), "cache", "first_step_s")
    yield "## What checkpoints cost"
    yield (
        "Milliseconds a step of `jaxkern train`, with checkpoints and with none, by `python -m "
        "bench checkpoints`."
    )
    (one,) = results.of("checkpoints")
    words = {True: f"every {one['every']} steps", False: "none"}
    kinds = [row | {"checkpoints": words[row["checkpoints"]]} for row in one["rows"]]
    yield pivot(kinds, ("preset",), "checkpoints", "ms")
    yield "## Loss curves"
    yield (
        "The loss in nats of `jaxkern train` by the kernels in bf16 and by plain JAX in fp32 with "
        "the same seed, by `python -m bench curves`. Of the means over 20 steps each: the first, "
        "the last, its difference from plain JAX's, and the largest difference."
    )
    keys = ("run", "first", "last", "difference", "largest")
    yield table(keys, [[row[key] for key in keys] for row in rows("curves")])


def _files(results: Results) -> Iterator[str]:
    yield "## Files and versions"
    keys = ("device", "driver", "jax", "commit", "date")
    rows = [
        [f"[{name}](results/{name})", *(one.get(key, "") for key in keys)]
        for name, one in results.files
    ]
    yield table(["file", "GPU", "driver", "JAX", "commit", "date"], rows)


def rows_of_families(results: Results) -> dict[str, dict[str, dict[str, Line]]]:
    """The rows of each family's table and picture."""
    found = {}
    for name, ops in families().items():
        ops = [*ops, "mlp"] if name == "Linear layers" else ops
        if rows := family_rows(results, ops):
            found[name] = rows
    return found


def text(results: Results) -> str:
    """The report."""
    of_families = rows_of_families(results)
    parts = [
        "# Benchmarks",
        "Generated by `python -m bench report` from bench/results; do not edit.",
        "Device time of one call on one H200 with a cold L2 cache, in bf16, optimizers in fp32 "
        "where nothing else is said. Behind it is the percentage of the bandwidth of a copy in the "
        "same run, each array of the pass counted once, or for matrix products TFLOP/s. Behind the "
        "semicolon is the fastest other's time over ours: ▼ marks where we are slower by 1% or "
        "more. *Both* is forward and backward in one program, where a compiler may merge them and "
        "read once what each of them reads: that can be more than 100%. *jaxkern* is what a call "
        "runs by default where that was timed, else the kernels. Of several measurements a row is "
        "the one beside the fastest competitor. [report.csv](report.csv) has all timings: of each "
        "GPU, op, shape, dtype, pass and contender the newest. Errors are in "
        "[accuracy.md](accuracy.md); layers, several GPUs and optimizers' states are in the "
        "guides to [layers](../.site/guide/layers.md), [many GPUs](../.site/guide/many_gpus.md) "
        "and [optimizers](../.site/guide/optimizers.md).",
        "![Speed of four ops and of a training step beside others'](pictures/overview.svg)",
        *(part for name, rows in of_families.items() for part in _family(name, rows)),
        *_training(results),
        *_others(results),
        "## Memory",
        "Temporary memory of forward and backward in one program, as JAX's compiler tells it.",
        "![memory beside arguments and results](pictures/memory.svg)",
        *_slower(results),
        *_files(results),
    ]
    return "\n\n".join(parts) + "\n"


def backbones(results: Results) -> str:
    """The timings of policies with five kinds of layers, whose command is no more."""
    (one,) = results.of("backbones")
    about = ", ".join(f"{key} {one[key]}" for key in ("device", "jax", "commit", "date"))
    parts = [
        "# Backbones",
        "Generated by `python -m bench report`; do not edit.",
        "Microseconds of a training step of policies that have a layer of one kind each, for 32 "
        "sequences, with norm, gate and Mamba block by plain JAX and by jaxkern. They were "
        f"measured by a command that this commit still had: {about}.",
        pivot(one["rows"], ("backbone", "precision", "length"), "implementation", "step_us"),
    ]
    return "\n\n".join(parts) + "\n"


def draw(results: Results) -> None:
    """Draws all pictures into :data:`bench.pictures.PICTURES`."""
    folder = pictures.PICTURES
    folder.mkdir(exist_ok=True)
    for name, rows in rows_of_families(results).items():
        pictures.family(rows, folder / _picture(name).rpartition("/")[2])
    pictures.memory(results, folder / "memory.svg")
    pictures.overview(results, folder / "overview.svg")


def written(results: Results) -> dict[Path, str]:
    """The text of every generated document."""
    own = {REPORT: text(results), BACKBONES: backbones(results)}
    return own | documents.written(results)


def main(argv: list[str] | None = None) -> int:
    program.parser("report").parse_args(argv)
    results = Results.load()
    for path, told in written(results).items():
        path.write_text(told)
        print(f"wrote {path}")
    write_csv(results.newest(), CSV)
    draw(results)
    print(f"wrote {CSV} and {pictures.PICTURES}/*.svg")
    return 0
