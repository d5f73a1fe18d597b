"""Figures of README and of the guides, README's table of the ops, and the reference.

A generated part of a document begins with ``<!-- figures: NAME -->``, where :data:`FIGURES` has the
function of that name, and ends with ``<!-- end -->``. Figures are from bench/results, the ops from
``jaxkern.__all__``, whose comments name their families. ``python -m bench report`` renews them all.
"""

import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jaxkern
from bench import compiled
from bench.cases import TABLE
from bench.figures import OURS, Line, Results, Row, duration, is_rival, name_of, table
from bench.program import FOLDER

ROOT = FOLDER.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / ".site" / "guide").glob("*.md"))]
REFERENCE = ROOT / ".site" / "reference"
_MARKED = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

SCAN = "8x2048x2048x16"
MODEL = ("130m, vocabulary 50,280", 2048)
"""The preset and length that README shows of training."""


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
}
"""What README says of the ops of a family, and what runs on a GPU."""

CLASSES = {
    "Optimizers": (
        "jaxkern.optim.transforms.FusedAdamState",
        "jaxkern.optim.transforms.FusedSgdState",
        "jaxkern.optim.transforms.Quantised",
    )
}
"""What the reference describes behind a family, and is no public name."""

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


def renewed(text: str, results: Results) -> str:
    """The document `text` with the figures of `results`."""
    return _MARKED.sub(lambda m: m[1] + FIGURES[m[2]](results) + "\n" + m[4], text)


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


def _slower(results: Results) -> str:
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
    "slower": _slower,
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


def written(results: Results) -> dict[Path, str]:
    """The text of every generated document but the report."""
    texts = {path: path.read_text() for path in DOCUMENTS}
    having = {path: text for path, text in texts.items() if _MARKED.search(text)}
    return {path: renewed(text, results) for path, text in having.items()} | reference()
