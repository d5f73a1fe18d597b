"""Renews all that is made from bench/results: ``python -m bench report``.

That is bench/report.md and its full table bench/report.csv, the pictures, the figures of README and
of the guides, README's table of the ops, and the reference. A generated part of a document begins
with ``<!-- figures: NAME -->``, where :data:`FIGURES` has the function of that name, and ends with
``<!-- end -->``. The ops are from ``jaxkern.__all__``, whose comments name their families.
"""

import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jaxkern
from bench import compiled, pictures, program
from bench.cases import TABLE, case, optim
from bench.figures import (
    EVEN,
    MODEL,
    OURS,
    STEADY,
    Line,
    Results,
    Row,
    duration,
    is_rival,
    name_of,
    plain_shape,
    steady,
    table,
    write_csv,
)
from bench.measured import Case, cases
from bench.program import FOLDER

ROOT = FOLDER.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / ".site" / "guide").glob("*.md"))]
REFERENCE = ROOT / ".site" / "reference"
_MARKED = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

SCAN = "8x2048x2048x16"
README = f"""
`rms_norm`, 16384 × 4096 | rms_norm 16384x4096 | forward backward
`selective_scan`, B 8, L 2048, D 2048, N 16 | selective_scan {SCAN} | forward backward
`swiglu`, 16384 × 14336 | swiglu 16384x14336 | forward backward
`fused_adamw`, 1.1 billion parameters in 300 arrays | fused_adamw 1.1B | step
"""
"""Rows of README: what they are called, and the op, shape and passes that they show."""

GUIDE = """
`layer_norm`, 16384 × 8192 | layer_norm 16384x8192 | forward backward
`layer_norm` and `silu`, 16384 × 4096 | layer_norm 16384x4096-silu | forward backward
`rms_norm` and gate, 16384 × 4096 | rms_norm 16384x4096-gate | forward backward
`selective_scan`, B 4, L 4096, D 5120, N 16 | selective_scan 4x4096x5120x16 | forward backward
`linear_scan`, B 8, L 2048, D 2048 | linear_scan 8x2048x2048 | forward backward
`causal_conv1d`, B 8, L 2048, D 2048, W 4 | causal_conv1d 8x2048x2048x4 | forward backward
`silu_and_mul`, 16384 × 13000 | silu_and_mul 16384x13000 | forward backward
`dropout`, 16384 × 8192 | dropout 16384x8192 | forward backward
`gelu(approximate=False)`, 16384 × 8192 | gelu 16384x8192-erf | forward backward
`silu`, 16384 × 8192; by default XLA's, which fuses it | silu 16384x8192 | forward backward
`cross_entropy`, 8192 × 128256 | cross_entropy 8192x128256-plain | forward backward
`linear_cross_entropy`, 8192 × 4096 → 128256 | linear_cross_entropy 8192x4096x128256-plain | both
`linear`, 8192 × 8192 × 8192; by default cuBLAS's | linear 8192x8192x8192 | both
`gated_linear_unit`, 8192 × 4096 → 14336 | gated_linear_unit 8192x4096x14336 | forward both
`layer_norm_linear`, 16384 × 4096 → 4096 | layer_norm_linear 16384x4096x4096 | both
`fused_adamw`, 1.1 billion, with unscaling, clipping, the check | fused_adamw 1.1B-folded | step
`fused_adamw`, 20 million parameters in 300 arrays | fused_adamw 20M-300-leaves | step
"""
"""Rows of the guide to speed, behind those of README."""

FAMILIES = {
    "Norms": (
        "normalisation of the last axis, with bias, residual, activation and gate in the same pass",
        "kernels",
    ),
    "Scans and convolutions": (
        "Mamba's recurrence, Mamba-2's by products of chunks, the recurrence "
        "h[t] = a[t] · h[t−1] + b[t] either way along the sequence, and a causal depthwise "
        "convolution; `_step` is one token of them, for decoding",
        "kernels; XLA for `causal_conv1d_step`",
    ),
    "Linear layers": (
        "x · w + b and an activation; f(x · w_gate + b_gate) · (x · w_up + b_up), of two weights "
        "or of one `[gate, up]`; a norm and the linear layer behind it; a micro-batch's weight "
        "gradient, added in place",
        "kernels where they measure faster than cuBLAS",
    ),
    "Losses": (
        "the cross-entropy of logits, or of a linear layer whose logits need not stand in memory "
        "whole, with smoothing, z-loss and a cap",
        "kernels for the rows of logits; XLA for the products",
    ),
    "Activations and gates": (
        "activations; an activation of `gate` times `up`, of two arrays or, in `_and_mul`, of one "
        "`[gate, up]`; `swiglu` also clamped, as in gpt-oss",
        "kernels for gated units and `gelu(approximate=False)`; XLA, which fuses them, for others",
    ),
    "Dropout": ("dropout, after an activation or before a residual; no mask is stored", "kernels"),
    "Optimizers": (
        "Optax transformations; `apply` does the step of one in place; unscaling and the check for "
        "finite gradients; the gradient of a batch in parts",
        "kernels; XLA for `accumulate_gradients`",
    ),
    "Kernels of your own": (
        "an op from a kernel of yours, in Pallas or Triton: derivatives, `vmap`, meshes, plain JAX "
        "where there is no GPU",
        "your kernels",
    ),
}
"""Description of the ops of a family in README, and of what runs on a GPU."""

CLASSES = {
    "Optimizers": (
        "jaxkern.optim.transforms.FusedAdamState",
        "jaxkern.optim.transforms.FusedSgdState",
        "jaxkern.optim.transforms.Quantised",
    )
}
"""Classes that the reference describes behind a family, and are no public names."""

CHECKPOINTS = """
`1` | all states | 4·N | 64 | /1
`8`, the default | every 8th | 4·N / 8 | 8 |
`64` | every 64th | 4·N / 64 | 1 | /64
`None` | none; the backward runs the forward again | 0 | 0 | /None
"""
"""Values of ``checkpoint_every``, what they save, and the word behind the shape."""

STATES = """
AdamW, all in fp32 | 28 | 100M
bf16 parameters and gradients; fp32 `mu`, `nu` and master | 28 | 100M-master
fp32 with bf16 `mu` and `nu` | 20 | 100M-bf16-state
fp32 with 8-bit `mu` and `nu` | 16 | 100M-8-bit-state
all in bf16 | 14 | 100M-bf16-all
bf16 parameters and gradients, 8-bit `mu` and `nu` | 10 | 100M-bf16-8-bit-state
"""
"""Precisions of an optimizer, bytes per parameter, and the shape that was timed."""


def _rows(listed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in listed.split("\n") if line]


def families() -> dict[str, list[str]]:
    """The public names by family."""
    listed = Path(jaxkern.__file__).read_text().partition("__all__ = [")[2].partition("\n]")[0]
    found: dict[str, list[str]] = {}
    for family, name in re.findall(r"^    (?:# (.*)|\"(\w+)\",)$", listed, re.MULTILINE):
        if family:
            found[family] = []
        else:
            [*found.values()][-1].append(name)
    return found


def reference() -> dict[Path, str]:
    """The pages of all public names, one a family; ``precision`` has a page of its own."""
    pages = {}
    for family, names in families().items():
        parts = [f"{family}\n{'=' * len(family)}", ".. currentmodule:: jaxkern"]
        for name in names:
            if inspect.isclass(getattr(jaxkern, name)):
                parts.append(f".. autoclass:: {name}\n   :members:")
            elif name != "precision":
                parts.append(f".. autofunction:: {name}")
        parts += [f".. autoclass:: {name}" for name in CLASSES.get(family, ())]
        page = family.replace(",", "").split()[0].lower()
        pages[REFERENCE / f"{page}.rst"] = "\n\n".join(parts) + "\n"
    return pages


def _ops(_: Results) -> str:
    names = families()
    rows = [
        [f"**{family}**", ", ".join(f"`{name}`" for name in names[family]), *told]
        for family, told in FAMILIES.items()
    ]
    return table(["", "ops", "what they compute", "on a GPU"], rows)


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


def listed(text: str) -> list[tuple[str, str, str, list[str]]]:
    """Label, op, shape and passes of each row of :data:`README` or :data:`GUIDE`."""
    found = ((name, of.split(), passes.split()) for name, of, passes in _rows(text))
    return [(name, op, shape, passes) for name, (op, shape), passes in found]


def _op_rows(results: Results, text: str) -> Iterator[list[str]]:
    for label, op, shape, passes in listed(text):
        for i, direction in enumerate(passes):
            line = results.line(op, shape, direction)
            assert line is not None, f"{op} {shape} {direction} was not timed"
            rival = f"{name_of(line.rival)} " if line.rival else ""
            told = [cell(op, row) for row in (line.own, line.figures.get("xla"))]
            rival += cell(op, line.figures.get(line.rival or ""))
            yield ["" if i else label, direction, *told, rival]


def model_name(preset: str, parameters: int) -> str:
    """A preset as a reader names it, with the parameters that it has."""
    name, _, vocabulary = preset.partition(", vocabulary ")
    kind = "Mamba-2" if name.startswith("mamba2") else "Mamba"
    return f"{kind}, {parameters / 1e6:,.0f} M parameters, vocabulary {vocabulary or 256}"


def training_rows(
    results: Results, presets: Iterable[tuple[str, int]], remat: bool = True
) -> Iterator[list[str]]:
    """Training steps of `presets` and lengths, with ours by `remat` below."""

    def told(row: Row | None, name: str = "") -> str:
        if row is None:
            return ""
        return f"{name}{row['tokens_per_second']:,} tokens/s, {row['peak_gib']:.1f} GiB"

    for at in presets:
        by = results.trainings[at]
        own = by["jaxkern"]
        label = f"{model_name(at[0], own['parameters'])}, B {own['batch']}, L {at[1]}"
        others = filter(is_rival, by)
        fastest = max(others, key=lambda name: by[name]["tokens_per_second"], default="")
        other = told(by.get(fastest), f"{name_of(fastest)} ")
        yield [label, "step", told(own), told(by.get("xla-loop")), other]
        for how, name in REMAT.items():
            if remat and name in by:
                yield [f"the same with `--remat {how}`", "step", told(by[name]), "", ""]


REMAT = {"cheap": "jaxkern-cheap", "scan": "jaxkern-scan", "layer": "jaxkern-remat"}
"""The contenders that compute something again, by their choice of `--remat`."""

HEAD = ["", "pass", "jaxkern", "plain JAX", "fastest other library"]


def _readme(results: Results) -> str:
    (training, *_) = training_rows(results, [MODEL])
    return table(HEAD, [*_op_rows(results, README), training])


def _speed(results: Results) -> str:
    trained = training_rows(results, results.trainings)
    return table(HEAD, [*_op_rows(results, README + GUIDE), *trained])


def _headline(results: Results) -> str:
    own, theirs = (results.trainings[MODEL][name] for name in ("jaxkern", "mamba_ssm"))
    rate = "tokens_per_second"
    tokens = MODEL[0].partition("vocabulary ")[2]
    is_model = lambda row: (row.get("preset"), row.get("length")) == MODEL and "contender" in row
    gpu, at = next(
        (one["device"].split()[1], by)
        for _, one in results.files
        if "jla" in (by := {r["contender"]: r for r in one["rows"] if is_model(r)})
    )
    text = (
        f"A Mamba of {own['parameters'] / 1e6:.0f} million parameters (vocabulary of {tokens}) "
        f"trains at {own[rate]:,} tokens a second in {own['peak_gib']:.1f} GiB on one H200 "
        f"(mamba_ssm: {theirs[rate]:,} in {theirs['peak_gib']:.1f}), at {at['jaxkern'][rate]:,} on "
        f"one {gpu} (jax-linear-attention: {at['jla'][rate]:,} in {at['jla']['peak_gib']:.1f} GiB; "
        "[bench/report.md](bench/report.md#training-end-to-end))."
    )
    return textwrap.fill(text, 100, break_on_hyphens=False)


SLOWER = 0.97
"""README names ops that are slower than this part of the fastest other implementation."""


def _slower_ops(results: Results) -> str:
    """Each op at the bf16 measurement where it is slowest beside others, and decoding."""
    worst: dict[str, Line] = {}
    for line in results.best.values():
        if line.dtype == "bfloat16" and (line.speedup or 1) < SLOWER:
            worst[line.op] = min(worst.get(line.op, line), line, key=lambda x: x.speedup or 1)
    told: dict[str, list[str]] = defaultdict(list)
    for line in sorted(worst.values(), key=lambda line: line.speedup or 1):
        way = "both ways in one program" if line.direction == "both" else line.direction
        by = name_of(line.fastest or "")
        told[f"{way} beside {by}"].append(f"`{line.op}` {line.speedup:.2f}×")
    rate = "tokens_per_second"
    of_both = [by for by in results.decodings.values() if {"jaxkern", "mamba_ssm"} <= by.keys()]
    ratios = sorted(by["jaxkern"][rate] / by["mamba_ssm"][rate] for by in of_both)
    text = (
        f"Slower, each op at its worst shape: decoding {ratios[0]:.2f}–{ratios[-1]:.2f}× "
        f"mamba_ssm; {'; '.join(f'{how} {", ".join(ops)}' for how, ops in told.items())} "
        "([all](bench/report.md#where-we-are-slower))."
    )
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _ours(results: Results, op: str, shape: str, direction: str) -> Row:
    line = results.line(op, shape, direction)
    assert line is not None, f"{op} {shape} {direction} was not timed"
    return line.figures[OURS]


def _checkpoints(results: Results) -> str:
    ours = lambda word: _ours(results, "selective_scan", SCAN + word, "both")
    rows = [[*saved, duration(ours(word)["us"])] for *saved, word in _rows(CHECKPOINTS)]
    return table(["`checkpoint_every`", "saved", "bytes", "at N = 16", "time"], rows)


def _states(results: Results) -> str:
    ours = lambda shape: cell("fused_adamw", _ours(results, "fused_adamw", shape, "step"))
    rows = [[*told, ours(shape)] for *told, shape in _rows(STATES)]
    rows.append(["with `clip_norm` or `skip_nonfinite`", "the gradients once more", ""])
    head = ["", "bytes per parameter, read and written"]
    return table([*head, "100 million on an H200, percent of a copy's bandwidth"], rows)


def _precisions(results: Results) -> str:
    (one,) = results.of("precision")
    rows = [
        [
            row["precision"],
            f"{row['mean']:.3f} ± {row['spread']:.3f}",
            f"{row['to_fp32']:+.3f}".replace("-", "−") if row["precision"] != "fp32" else "",
        ]
        for row in one["summary"]
    ]
    size = f"{one['steps']} steps of {one['batch_size']} × {one['seq_len']} bytes"
    told = "validation loss, nats", "difference from fp32, same seed"
    return table([f"`{one['preset']}`, {size}", *told], rows)


def _copies(results: Results) -> str:
    """The cost of copies by lanes and of 99 KiB of shared memory, in percent of the time."""
    (one,) = results.of("copies")
    times: dict[str, dict[Any, Row]] = defaultdict(dict)
    for row in one["rows"]:
        case = f"`{row['op']}`, {row['shape'].replace('x', ' × ')}"
        times[case][row["copies"], row["shared_memory"] > 2**17] = row
    passes, rows = ("forward_us", "both_us"), []
    for case, found in times.items():
        base = found["tma", True]
        told = [duration(base[key]) for key in passes]
        for other in ("lanes", True), ("tma", False), ("lanes", False):
            more = [found[other][key] / base[key] - 1 for key in passes]
            told.append(", ".join(f"{round(100 * m):+d}%".replace("-", "−") for m in more))
        rows.append([case, *told])
    others = "lanes copy", "99 KiB", "lanes copy, 99 KiB"
    return table(["", "forward", "forward and backward", *others], rows)


def _layers(results: Results) -> str:
    """Forward and backward of the Mamba-2 layer, and the memory kept in between."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in results.of("layers")[0]["rows"]:
        sizes = f"{row['d_model']:,}, {row['batch']} × {row['length']:,}"
        told = f"{duration(row['both_us'])}, {row['kept_mib']:,.0f} MiB"
        found[sizes][row["implementation"]] = told
    by = {"auto": "jaxkern", "jaxkern-cheap": "`remat.CHEAP`", "jaxkern-scan": "`remat.SCAN`"}
    by |= {name: name_of(name) for name in ("jla", "mamba_ssm")}
    rows = [[sizes, *(told.get(name, "") for name in by)] for sizes, told in found.items()]
    return table(["`d_model`, batch × tokens", *by.values()], rows)


def _devices(results: Results, files: str = "devices") -> str:
    rows = [row for one in results.of(files) for row in one["rows"]]
    head = ["what", "sizes", "mesh", "GPUs", "ms", "tokens/s", "efficiency", "peak, GiB"]
    keys = ["what", "sizes", "mesh", "devices", "ms", "tokens_per_second"]
    keys += ["efficiency", "peak_gib"]
    shown = lambda value: f"{value:,}" if isinstance(value, int) else str(value)
    return table(head, [[shown(row[key]) for key in keys] for row in rows])


FIGURES: dict[str, Callable[[Results], str]] = {
    "headline": _headline,
    "ops": _ops,
    "readme": _readme,
    "slower": _slower_ops,
    "speed": _speed,
    "checkpoints": _checkpoints,
    "states": _states,
    "precisions": _precisions,
    "copies": _copies,
    "layers": _layers,
    "devices": _devices,
    "four": lambda results: _devices(results, "devices-4"),
    "generations": lambda _: compiled.generations(),
    "meshes": lambda _: compiled.meshes(),
    "collectives": lambda _: compiled.collectives(),
}
"""The tables and sentences that can stand between markers."""


# The report

REPORT, CSV = FOLDER / "report.md", FOLDER / "report.csv"

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
    fill = lambda m: m[1] + FIGURES[m[2]](results) + "\n" + m[4]
    texts = {path: path.read_text() for path in DOCUMENTS}
    having = {path: _MARKED.sub(fill, was) for path, was in texts.items() if _MARKED.search(was)}
    return {REPORT: text(results), **reference(), **having}


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
