"""Renews all that is made from bench/results: ``python -m bench report``.

That is bench/report.csv, the pictures, and the figures of README, the guides and bench/*.md. A
generated part of a document begins with ``<!-- figures: NAME -->``, where :data:`FIGURES` has the
function of that name, and ends with ``<!-- end -->``. Cells of a table, :func:`in_line`, begin with
``<!-- row: OP SHAPE PASS -->`` or ``<!-- ours: OP SHAPE PASS -->``. All else is written by hand.
"""

import functools
import itertools
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jaxkern
from bench import accuracy, collectives, program
from bench.cases import TABLE, optim
from bench.compilers import COLLECTIVES
from bench.figures import (
    EVEN,
    MODEL,
    OURS,
    STEADY,
    Line,
    Results,
    Row,
    duration,
    in_order,
    name_of,
    pivot,
    plain_shape,
    steady,
    table,
    write_csv,
)
from bench.measured import Case, cases, named
from bench.program import FOLDER, RESULTS

ROOT, PICTURES = FOLDER.parent, FOLDER / "pictures"
REPORT, CSV = FOLDER / "report.md", FOLDER / "report.csv"
DOCUMENTS = [ROOT / "README.md", REPORT, FOLDER / "accuracy.md"]
DOCUMENTS += sorted((ROOT / ".site" / "guide").glob("*.md"))
_IN_LINE = re.compile(r"(<!-- (ours|row): (.*?) -->)(.*?)(<!-- end -->)")
SPEED = ROOT / ".site" / "guide" / "speed.md"
_MARKED = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

SLOW_EXPONENTIALS = {of.op for of in TABLE if of.forward and of.forward.exponentials}
"""Ops whose limit is their exponentials, and not a copy's bandwidth."""


def cell(op: str, row: Row | None) -> str:
    """A time, and its part of the limit: of products their rate, else of a copy's bandwidth."""
    if row is None:
        return ""
    if row.get("tflop_s"):
        return f"{duration(row['us'])}, {row['tflop_s']:.0f} TFLOP/s"
    limited = op not in SLOW_EXPONENTIALS and row.get("percent")
    return duration(row["us"]) + (f", {row['percent']:.0f}%" if limited else "")


def in_line(results: Results, kind: str, op: str, shape: str, direction: str) -> str:
    """The cells of a pass of an op: the kernels' alone, or ours, plain JAX's and a library's."""
    line = results.line(op, shape, direction)
    assert line is not None, f"{op} {shape} {direction} was not timed"
    if kind == "ours":
        return cell(op, line.figures[OURS])
    plainly = line.figures.get("xla") or line.figures.get("jax")  # ours, or as a user writes it
    rows = (line.own, plainly, line.figures.get(line.rival or ""))
    own, plain, other = (cell(op, row) for row in rows)
    return f"{own} | {plain} | " + (f"{name_of(line.rival)} {other}" if line.rival else "")


HEAD = ["", "pass", "jaxkern", "plain JAX", "fastest other library"]


def _trained(row: Row | None, name: str = "") -> str:
    """The speed of a training step and its memory."""
    if row is None:
        return ""
    return f"{name}{row['tokens_per_second']:,} tokens/s, {row['peak_gib']:.1f} GiB"


REMAT = {"cheap": "jaxkern-cheap", "scan": "jaxkern-scan", "layer": "jaxkern-remat"}
"""The contenders that compute something again, by their choice of `--remat`."""


def training_rows(
    results: Results, presets: Iterable[tuple[str, int]], remat: bool = True
) -> Iterator[list[str]]:
    """Training steps of `presets` and lengths, with ours by `remat` below."""
    for preset, length in presets:
        line = results.trainings()[preset, length]
        by, rival = line.figures, line.rival or ""
        name, _, vocabulary = preset.partition(", vocabulary ")
        label = "Mamba-2" if name.startswith("mamba2") else "Mamba"
        label += f", {by['jaxkern']['parameters'] / 1e6:,.0f} M parameters"
        label += f", vocabulary {vocabulary or 256}, B {by['jaxkern']['batch']}, L {length}"
        other = _trained(by.get(rival), f"{name_of(rival)} ")
        yield [label, "step", _trained(by["jaxkern"]), _trained(by.get("xla-loop")), other]
        for how, name in REMAT.items():
            if remat and name in by:
                yield [f"the same with `--remat {how}`", "step", _trained(by[name]), "", ""]


def _headline(results: Results) -> str:
    h200, h100 = (results.trainings(gpu)[MODEL].figures for gpu in ("H200", "H100"))
    rate = lambda row: f"{row['tokens_per_second']:,}"
    own, theirs, jla = h200["jaxkern-cheap"], h200["mamba_ssm"], h100["jla"]
    text = (
        f"A Mamba of {own['parameters'] / 1e6:.0f} million parameters (vocabulary of "
        f"{MODEL[0].partition('vocabulary ')[2]}) trains at {rate(own)} tokens a second in "
        f"{own['peak_gib']:.1f} GiB on one H200 (mamba_ssm: {rate(theirs)} in "
        f"{theirs['peak_gib']:.1f}), and at {rate(h100['jaxkern'])} on one H100 with "
        f"`--remat none` in {h100['jaxkern']['peak_gib']:.1f} GiB (jax-linear-attention: "
        f"{rate(jla)} in {jla['peak_gib']:.1f} GiB; "
        "[bench/report.md](bench/report.md#training-end-to-end))."
    )
    return textwrap.fill(text, 100, break_on_hyphens=False)


SLOWER = 0.97
"""README names ops that are slower than this part of the fastest other implementation."""


def _slower_ops(results: Results) -> str:
    """Each op at the bf16 measurement where it is slowest beside others, and decoding if it is."""
    worst: dict[str, Line] = {}
    for line in sorted(results.best.values(), key=lambda line: line.speedup or 1):
        if line.dtype == "bfloat16" and (line.speedup or 1) < SLOWER:
            worst.setdefault(line.op, line)
    told: dict[str, list[str]] = defaultdict(list)
    for line in worst.values():
        way = "both ways in one program" if line.direction == "both" else line.direction
        by = name_of(line.fastest or "")
        told[f"{way} beside {by}"].append(f"`{line.op}` {line.speedup:.2f}×")
    rate = lambda line, name: line.figures[name]["tokens_per_second"]
    decoded = [line for line in results.lines.values() if line.op == "decoding"]
    decoded = [line for line in decoded if {"jaxkern-bf16", "mamba_ssm"} <= line.figures.keys()]
    ratio = min(rate(line, "jaxkern-bf16") / rate(line, "mamba_ssm") for line in decoded)
    if ratio < SLOWER:
        told["decoding beside mamba_ssm"] = [f"{ratio:.2f}×"]
    text = (
        "Slower, each op at its worst shape: "
        f"{'; '.join(f'{how} {", ".join(ops)}' for how, ops in told.items())} "
        "([all](bench/report.md#where-we-are-slower))."
    )
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _layers(results: Results) -> str:
    """Forward and backward of the layers, and the memory kept in between."""
    at = "`d_model`, batch × tokens"
    names = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "KDA"}
    size = "{d_model:,}, {batch} × {length:,}".format_map
    rows = (
        row | {at: size(row), "GPU": row["GPU"].split()[1], "layer": names[row["layer"]]}
        for row in results.rows_of("layers")
        if row["implementation"] != "xla"
    )
    by = {"auto": "jaxkern", "jaxkern-cheap": "`remat.CHEAP`", "jaxkern-scan": "`remat.SCAN`"}
    by |= {name: name_of(name) for name in ("jla", "mamba_ssm")}
    told = lambda row: f"{duration(row['both_us'])}, {row['kept_mib']:,.0f} MiB"
    return pivot(rows, ["layer", "GPU", at], "implementation", told, by)


def _delta_rule(results: Results) -> str:
    """Times and memory of the gated delta rule, on the GPU whose figures are newest."""
    op = "gated_delta_rule"
    latest = max((r for r in results.newest() if r["op"] == op), key=lambda row: row["date"])
    rows = []
    for shape in (one.shape for one in cases(small=False) if one.op == op):
        at = ((latest["gpu"], (op, shape, "bfloat16", d)) for d in ("forward", "both"))
        lines = [results.lines[key] for key in at if key in results.lines]
        if lines:
            both = lines[-1].figures
            memory = (
                f"{name_of(name)} {both[name]['temp_bytes'] / 1e9:.2f} GB"
                for name in (OURS, lines[-1].rival)
                if name in both
            )
            rows.append([plain_shape(shape), *map(_told, lines), "; ".join(memory)])
    head = ["batch × L × heads × V × K × key heads", "forward", "forward and backward", "memory"]
    return f"On one {latest['gpu']}, JAX {latest['jax']}:\n\n{table(head, rows)}"


def _devices(results: Results, files: str = "devices") -> str:
    heads = {"devices": "GPUs", "tokens_per_second": "tokens/s", "peak_gib": "peak, GiB"}
    keys = ("what", "sizes", "mesh", "devices", "ms", "tokens_per_second", "efficiency", "peak_gib")
    shown = lambda value: f"{value:,}" if isinstance(value, int) else str(value)
    cells = ([shown(row[key]) for key in keys] for row in results.rows_of(files))
    return table([heads.get(key, key) for key in keys], cells)


# The report

MOST = 12
"""Rows of a family's table."""

PASSES = ("forward", "backward", "both", "step")


def family_rows(results: Results, ops: Sequence[str]) -> dict[str, dict[str, Line]]:
    """The lines of at most :data:`MOST` shapes by label and pass.

    They are the guide's, then one of each op that has none there, then shapes of models and others.
    """
    every = [one for one in cases(small=False) if one.op in ops]
    models = {(one.op, one.shape): one.models for one in every if isinstance(one, Case)}
    guide: dict[tuple[str, str], str] = {}
    rows_of = re.findall(r"^\| (.*?) \| \w+ \| <!-- row: (\S+) (\S+)", SPEED.read_text(), re.M)
    for label, *at in rows_of:
        guide.setdefault(tuple(at), label.partition(";")[0])
    half = lambda dtype, direction: dtype == "bfloat16" or direction == "step"
    timed = {(op, s): None for op, s, dtype, d in results.best if op in ops and half(dtype, d)}
    wanted = [at for at in guide if at[0] in ops]
    for op in ops:
        if not any(at[0] == op for at in wanted):
            of_op = [at for at in timed if at[0] == op]
            wanted += sorted(of_op, key=lambda at: not models.get(at))[:1]
    wanted += sorted(timed, key=lambda at: not models.get(at))
    rows = {}
    for op, shape in sorted([*dict.fromkeys(wanted)][:MOST], key=lambda at: ops.index(at[0])):
        named = ", ".join(models.get((op, shape), ()))
        label = guide.get((op, shape), f"`{op}`, {plain_shape(shape)}")
        label += f" ({named})" if named else ""
        found = {d: results.line(op, shape, d) for d in PASSES}
        rows[label] = {d: line for d, line in found.items() if line}
    return rows


def is_slower(line: Line) -> bool:
    return line.speedup is not None and line.speedup <= 1 - EVEN


def _told(line: Line | None) -> str:
    """Our time, and how many times faster that is than the fastest other."""
    if line is None:
        return ""
    beside = f"; {line.speedup:.2f}× {name_of(line.fastest or '')}" if line.speedup else ""
    return cell(line.op, line.own) + beside + (" ▼" if is_slower(line) else "")


def _family(results: Results, ops: Sequence[str]) -> str:
    rows = family_rows(results, ops)
    passes = [d for d in PASSES if any(d in of for of in rows.values())]
    cells = ([label, *(_told(of.get(d)) for d in passes)] for label, of in rows.items())
    return table(["", *passes], cells)


def _slower(results: Results) -> str:
    lost = sorted(filter(is_slower, results.best.values()), key=lambda line: line.speedup or 0)
    told = f"{len(lost)} of {len(results.best)} measurements, by 1% or more, the worst first:"
    rows = []
    for line in lost:
        by = line.fastest or ""
        where = [f"`{line.op}`, {plain_shape(line.shape)}", line.dtype, line.direction]
        other = f"{name_of(by)} {cell(line.op, line.figures[by])}"
        rows.append([*where, cell(line.op, line.own), other, f"{line.speedup:.2f}×"])
    head = ["", "dtype", "pass", "jaxkern", "fastest other", "speed-up"]
    return f"{told}\n\n{table(head, rows)}"


def _training(results: Results) -> str:
    presets = [at for at in results.trainings() if at[1] == 2048]
    parts = [table(HEAD, training_rows(results, presets, remat=False))]
    for _, one in results.files:
        trained = [row for row in one["rows"] if "contender" in row]
        for row in itertools.filterfalse(steady, trained):
            what = f"{row['preset']}, {name_of(row['contender'])}, length {row['length']}"
            parts.append(f"Left out: {what}: its times differ by more than {STEADY:.0%}.")
        left_out = one["failed"] if trained else ()
        parts += (f"Not run, or left out: {line}." for line in left_out)
    return "\n\n".join(parts)


def _files(results: Results) -> str:
    keys = ("device", "driver", "jax", "commit", "date")
    link = lambda name: f"[{name}](results/{name})"
    rows = ([link(name), *(one.get(key, "") for key in keys)] for name, one in results.files)
    return table(["file", "GPU", "driver", "JAX", "commit", "date"], rows)


def families() -> dict[str, list[str]]:
    """The ops of each family by what its section and its picture are called, ``"linear_layers"``.

    They are the public names, and a block of several ops among the linear layers.
    """
    listed = Path(jaxkern.__file__).read_text().partition("__all__ = [")[2].partition("\n]")[0]
    found: dict[str, list[str]] = {}
    for family, name in re.findall(r"^    (?:# (.*)|\"(\w+)\",)$", listed, re.MULTILINE):
        if family:
            ops = found.setdefault(family.lower().replace(" ", "_"), [])
        else:
            ops.append(name)
    found["linear_layers"].append("mlp")
    timed = {case.op for case in TABLE}
    return {name: ops for name, ops in found.items() if timed & {*ops}}


def _saved(results: Results) -> str:
    """The best time of a step of each machine, with checkpoints and without."""
    slowest_first = sorted(results.rows_of("checkpoints"), key=lambda r: (r["GPU"], -r["ms"]))
    names = {"True": "every 100 steps", "False": "none"}
    return pivot(slowest_first, ("GPU", "preset"), "checkpoints", "ms", names)


def _pivot(command: str, *of: Any) -> Callable[[Results], str]:
    return lambda results: pivot(results.rows_of(command), *of)


# Tables of programs compiled for GPUs that were not there, by ``bench aot`` and ``collectives``

Held = dict[str, Any]
"""A file of :mod:`bench.aot`."""

COMPOSED = ("mlp", "layer_norm_linear", "rms_norm_linear")
"""Cases of several ops, each of which has rows of its own."""


def compiled(folder: Path = RESULTS) -> dict[str, Held]:
    """The committed figures of each generation, as ``"sm_90"``, from the oldest on."""
    found = {path.stem.removeprefix("aot-"): path for path in folder.glob("aot-sm_*.json")}
    order = sorted(found, key=lambda name: int(name.removeprefix("sm_")))
    return {name: json.loads(found[name].read_text()) for name in order}


def _generations(_results: Results) -> str:
    """Counts the cases of each op that are kernels alone, on each generation; the compilers."""
    held_of = compiled()
    ops = [op for op in dict.fromkeys(case.op for case in named().values()) if op not in COMPOSED]
    name_of = lambda held: re.sub("NVIDIA |-SXM.*| SXM.*| Blackwell", "", held["gpu"])
    rows = [[f"`{op}`", *(in_kernels(op, held) for held in held_of.values())] for op in ops]
    cells = table(["", *(f"{name}, {name_of(held)}" for name, held in held_of.items())], rows)
    newest = next(iter(held_of.values()))
    return f"{cells}\n\nCompiled by JAX {newest['jax']} and ptxas {newest['ptxas']}."


def in_kernels(op: str, held: Held) -> str:
    of_op = {name: kernels for name, kernels in held["kernels"].items() if name.split()[0] == op}
    if not of_op:
        return "not compiled"
    if not any(of_op.values()):
        return "plain JAX"
    without = sum(name in held["plain"] for name in of_op)
    spilling = sum(any(k[1] for of in kernels.values() for k in of) for kernels in of_op.values())
    told = f"{len(of_op) - without} of {len(of_op)}" if without else f"{len(of_op)}"
    return told + (f", spills at {spilling}" if spilling else "")


def _plain(_results: Results) -> str:
    """Passes that are plain JAX: the kernels, at what shapes, on which generations, why."""
    shapes, kernels, generations = (defaultdict[Any, list[str]](list) for _ in range(3))
    for generation, held in compiled().items():
        for name, passes in held["plain"].items():
            op, _, shape = name.removesuffix(" bfloat16").partition(" ")
            for kernel, reason in passes.items() if op not in COMPOSED else ():
                why = re.sub(r", and (?:this is for|NVIDIA).*", "", reason)
                why = re.sub(r"rows of \d+ elements", "such rows", why)
                shapes[kernel, why, generation].append(shape)
    for (kernel, why, generation), of_kernel in shapes.items():
        told = "all" if "wgmma" in why else ", ".join(of_kernel)
        kernels[told, why, generation].append(f"`{kernel}`")
    for (told, why, generation), of_shapes in kernels.items():
        generations[", ".join(of_shapes), told, why].append(generation)
    rows = ([names, told, ", ".join(of), why] for (names, told, why), of in generations.items())
    return table(["kernels", "shapes", "generations", "why"], rows)


def _versions(_results: Results) -> str:
    """Other versions of JAX: the programs that one compiled, and where they differ."""
    found: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for generation, held in compiled().items():
        for key in (key for key in held if key.startswith("jax ")):
            told = (f"{generation}: {each}" for of in held[key].values() for each in of)
            found[key][0].append(f"{len(held[key])} for {generation}")
            found[key][1].extend(told)
    rows = ([key[4:], ", ".join(of), "; ".join(told)] for key, (of, told) in found.items())
    return table(["JAX", "programs", "more passes in plain JAX, and more kernels that spill"], rows)


def _meshes(_results: Results) -> str:
    """Training steps of one layer on meshes: what devices exchange, and their memory."""
    held, rows = compiled()["sm_90"], []
    for name, told in held["training"].items():
        preset, _, mesh = name.partition(" x ")
        if "=" not in mesh:
            continue
        counts, bytes_of = told["collectives"], told["exchanged"]
        cells = (
            f"{counts[kind]}, {bytes_of[kind] / 1e6:,.2f} MB" if kind in counts else ""
            for kind in COLLECTIVES
        )
        memory = f"{told['memory'] / 2**30:.2f} GiB"
        rows.append([f"`{preset}`", f"`{mesh}`", *cells, memory])
    head = ["a layer of", "`--mesh`", *COLLECTIVES, "memory of a device"]
    return f"{table(head, rows)}\n\nCompiled by JAX {held['jax']}."


SPLIT = {
    "m": "rows",
    "b": "batch",
    "d": "channels; features of a norm",
    "heads": "heads",
    "h": "outputs (N), or channels",
    "k": "inputs (K)",
    "parameters": "parameters, with their state",
    "v": "vocabulary",
    "l": "sequence",
}
"""Names of axes in the table, in its order."""


def _collectives(_results: Results) -> str:
    """The exchanges of ops whose axes are split, in the guide to many GPUs."""
    held = json.loads(collectives.PATH.read_text())
    programs: dict[str, Held] = held["programs"]
    optimizers = {case.op for case in optim.CASES}
    grouped: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for name, of_passes in programs.items():
        of_case, axis, count = re.split(" x |=", name)
        told = collectives.exchanged(of_passes)
        if count == "64" and told == collectives.exchanged(programs[f"{of_case} x {axis}=8"]):
            continue
        op, _, variant = of_case.partition(", ")
        words = ", ".join(filter(None, (variant, "on 64" if count == "64" else "")))
        axis = "parameters" if op in optimizers else axis
        label = f"`{op}`" + (f" ({words})" if words else "")
        grouped[axis, *told][label] = None  # once, as parameters are split either way
    order = sorted(grouped, key=lambda key: [*SPLIT].index(key[0]))
    rows = [[SPLIT[key[0]], ", ".join(grouped[key]), *key[1:]] for key in order]
    count = sum(name.endswith("=64") for name in programs)
    cells = table(["split", "ops", "forward", "forward and backward"], rows)
    return f"{cells}\n\nCompiled by JAX {held['jax']} for 8 H200s, and {count} of them for 64."


# Pictures: no axis with bars is logarithmic, no line joins measurements

MARKERS = "osD^vPX*h<>"

OVERVIEW = (
    ("selective_scan", "8x2048x2048x16", "both"),
    ("rms_norm", "16384x4096", "backward"),
    ("dropout", "16384x8192", "forward"),
    ("fused_adamw", "1.1B", "step"),
)
"""The ops of README's picture, beside the fastest other library and plain JAX."""

REMEMBERED = (
    ("H200", "jaxkern"),
    ("H200", "jaxkern-scan"),
    ("H200", "mamba_ssm"),
    ("H100", "jaxkern"),
    ("H100", "jla"),
)
"""The training steps whose memory README's picture shows."""


def pyplot() -> Any:
    """matplotlib for small SVGs, the same bytes on every run."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "jaxkern", "svg.fonttype": "none", "font.size": 9}
    matplotlib.rcParams |= {"axes.titlesize": 9, "legend.fontsize": 9}
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, out: Path) -> None:
    """Writes and closes `figure`, with nothing cut off."""
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None}, bbox_inches="tight")
    pyplot().close(figure)


def rows_of(axis: Any, labels: Sequence[str]) -> None:
    """Has the vertical axis name rows, the first one at the top."""
    axis.set_yticks(range(len(labels)), [label.replace("`", "") for label in labels])
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(alpha=0.3)


def family(rows: dict[str, dict[str, Line]], out: Path) -> None:
    """Writes others' times over ours: a row for each shape, a panel for each pass."""
    plt = pyplot()
    from matplotlib import ticker

    drawn = [d for d in PASSES if any(d in of and of[d].others for of in rows.values())]
    size = 5 + 2.3 * len(drawn), 0.9 + 0.27 * max(4, len(rows))
    figure, axes = plt.subplots(1, len(drawn), figsize=size, sharey=True, squeeze=False)
    order = in_order({name for of in rows.values() for line in of.values() for name in line.others})
    for axis, direction in zip(axes[0], drawn, strict=True):
        at: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for row, of in enumerate(rows.values()):
            if direction in of and (own := of[direction].own):
                for name, other in of[direction].others.items():
                    at[name].append((other["us"] / own["us"], row))
        axis.axvline(1, color="black", lw=1)
        for i, name in enumerate(order):  # color and marker are the same in every panel
            xs, ys = zip(*at[name], strict=True) if at[name] else ((), ())
            style = {"color": f"C{i}", "marker": MARKERS[i % len(MARKERS)]}
            axis.scatter(xs, ys, s=26, alpha=0.8, label=name_of(name), **style)
        axis.set(title=direction, xlabel="their time / jaxkern's")
        ratios = [x for points in at.values() for x, _ in points]
        if max(ratios) > 5 * min(ratios):
            axis.set_xscale("log")
            low, high = sorted(axis.get_xlim())
            subs = (1,) if high > 50 * low else (1, 2, 5)
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
            axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
            axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    rows_of(axes[0, 0], list(rows))
    for axis in axes[0, 1:]:
        axis.grid(alpha=0.3)
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))  # beside the data
    save(figure, out)


def speeds(results: Results) -> dict[str, dict[str, float]]:
    """Speeds as parts of jaxkern's, by a label and an implementation, of :data:`OVERVIEW`."""
    found: dict[str, dict[str, float]] = {}
    for op, shape, direction in OVERVIEW:
        line = results.line(op, shape, direction)
        assert line is not None, f"{op} {shape} {direction} was not timed"
        shown = {line.rival or "xla", "xla"} & line.others.keys()
        ours = (line.own or line.figures[OURS])["us"]
        by = {name: ours / line.others[name]["us"] for name in in_order(shown)}
        found[f"{op}, {direction}\n{plain_shape(shape)}"] = {OURS: 1.0} | by
    line, rate = results.trainings()[MODEL], "tokens_per_second"
    fastest, own = line.rival or "", line.figures["jaxkern"]
    label = f"Mamba of {own['parameters'] / 1e6:.0f} million, training"
    by = {OURS: 1.0, fastest: line.figures[fastest][rate] / own[rate]}
    return found | {f"{label}\n{own['batch']} × {MODEL[1]}": by}


def overview(results: Results, out: Path) -> None:
    """Writes the speeds as bars, and beside them the memory of the training step."""
    held = speeds(results)
    size = 10.5, 1.2 + 0.62 * len(held)
    figure, (axis, memory) = pyplot().subplots(1, 2, figsize=size, width_ratios=(3, 2))
    colours = {}
    for i, name in enumerate(in_order({name for by in held.values() for name in by})):
        label, colours[name] = name_of(name), f"C{i}"
        for row, by in enumerate(held.values()):
            if name in (names := in_order(by)):
                at = row + (names.index(name) - (len(names) - 1) / 2) * 0.8 / len(names)
                axis.barh(at, by[name], 0.72 / len(names), color=colours[name], label=label)
                axis.annotate(f" {by[name]:.2g}", (by[name], at), va="center")
                label = None
    rows_of(axis, list(held))
    axis.set(xlim=(0, 1.12), xlabel="speed, jaxkern's being 1; one H200")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4)
    labels = []
    for row, (gpu, name) in enumerate(REMEMBERED):
        of = results.trainings(gpu)[MODEL].figures[name]
        labels.append(f"{name_of(name)}\n{of['tokens_per_second']:,} tokens/s, {gpu}")
        colour = colours.get(name, colours[OURS])
        memory.barh(row, of["peak_gib"], 0.6, color=colour)
        memory.annotate(f" {of['peak_gib']:.1f}", (of["peak_gib"], row), va="center")
    rows_of(memory, labels)
    parameters = results.trainings()[MODEL].figures["jaxkern"]["parameters"] / 1e6
    memory.set(xlabel=f"GiB of a training step, Mamba of {parameters:.0f} million")
    memory.margins(x=0.15)
    for each in (axis, memory):
        each.grid(visible=False)
    save(figure, out)


# All of it

FIGURES: dict[str, Callable[[Results], str]] = {
    "headline": _headline,
    "slower": _slower_ops,
    "trained": lambda results: table(HEAD, training_rows(results, results.trainings())),
    "layers": _layers,
    "delta_rule": _delta_rule,
    "devices": _devices,
    "four": lambda results: _devices(results, "devices-4"),
    "generations": _generations,
    "versions": _versions,
    "plain": _plain,
    "meshes": _meshes,
    "collectives": _collectives,
    "training": _training,
    "decoding": _pivot("decode", ("preset", "batch"), "by", "tokens_per_second"),
    "first": _pivot("first-step", ("preset", "devices"), "cache", "first_step_s"),
    "saved": _saved,
    "lost": _slower,
    "files": _files,
    "errors": lambda results: "\n\n".join(map(accuracy.text, results.of("accuracy"))),
    **{name: functools.partial(_family, ops=ops) for name, ops in families().items()},
}
"""The tables and sentences that can stand between markers."""


def draw(results: Results) -> None:
    """Draws all pictures into :data:`PICTURES`."""
    PICTURES.mkdir(exist_ok=True)
    for name, ops in families().items():
        family(family_rows(results, ops), PICTURES / f"{name}.svg")
    overview(results, PICTURES / "overview.svg")


def written(results: Results) -> dict[Path, str]:
    """The text of every document with generated parts."""
    fill = lambda m: m[1] + FIGURES[m[2]](results) + "\n" + m[4]
    fill_in = lambda m: m[1] + in_line(results, m[2], *m[3].split()) + m[5]
    texts = {path: path.read_text() for path in DOCUMENTS}
    filled = {path: _IN_LINE.sub(fill_in, _MARKED.sub(fill, was)) for path, was in texts.items()}
    return {path: text for path, text in filled.items() if "<!-- end -->" in text}


@program.command()
def main(_: Any) -> int:
    results = Results.load()
    for path, told in written(results).items():
        path.write_text(told)
        print(f"wrote {path}")
    write_csv(results.newest(), CSV)
    draw(results)
    print(f"wrote {CSV} and {PICTURES}/*.svg")
    return 0
