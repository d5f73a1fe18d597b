"""Draws bench/pictures: the overview, a picture for each family, and memory.

No axis with bars is logarithmic, no line joins measurements.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import (
    MODEL,
    OURS,
    Line,
    Results,
    in_order,
    is_rival,
    name_of,
    plain_shape,
    timings,
)
from bench.program import FOLDER

PICTURES = FOLDER / "pictures"
MARKERS = "osD^vPX*h<>"

OVERVIEW = (
    ("selective_scan", "8x2048x2048x16", "both"),
    ("rms_norm", "16384x4096", "backward"),
    ("dropout", "16384x8192", "forward"),
    ("fused_adamw", "1.1B", "step"),
)
"""The ops of README's picture, beside the fastest other library and plain JAX."""

OF_JAX = (OURS, "xla", "tokamax")
"""Implementations whose memory JAX's compiler tells."""

Passes = Mapping[str, Line]
"""The lines of an op at a shape, by pass."""


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


def plain(axis: Any) -> None:
    """Ticks of a logarithmic `axis` written as numbers: 1, 10, 100, and of a short one 1, 2, 5."""
    from matplotlib import ticker

    low, high = sorted(axis.get_view_interval())
    subs = (1,) if high > 50 * low else (1, 2, 5)
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def marks(axis: Any, order: Sequence[str], at: Mapping[str, Sequence[tuple[float, int]]]) -> None:
    """Draws the points of each implementation; color and marker are by its place in `order`."""
    for i, name in enumerate(order):
        xs, ys = zip(*at.get(name, ()), strict=True) if at.get(name) else ((), ())
        style = {"color": f"C{i}", "marker": MARKERS[i % len(MARKERS)]}
        axis.scatter(xs, ys, s=26, alpha=0.8, label=name_of(name), **style)


def rows_of(axis: Any, labels: Sequence[str]) -> None:
    """Has the vertical axis name rows, the first one at the top."""
    axis.set_yticks(range(len(labels)), [label.replace("`", "") for label in labels])
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(alpha=0.3)


def legend(axis: Any, *entries: Any) -> None:
    """Puts the legend beside the data."""
    axis.legend(*entries, loc="center left", bbox_to_anchor=(1.02, 0.5))


def family(rows: Mapping[str, Passes], out: Path) -> None:
    """Writes others' times over ours: a row for each shape, a panel for each pass."""
    passes = ("forward", "backward", "both", "step")
    drawn = [d for d in passes if any(d in of and of[d].others for of in rows.values())]
    figure, axes = pyplot().subplots(
        1,
        len(drawn),
        figsize=(5 + 2.3 * len(drawn), 0.9 + 0.27 * max(4, len(rows))),
        sharey=True,
        squeeze=False,
    )
    order = in_order({name for of in rows.values() for line in of.values() for name in line.others})
    for axis, direction in zip(axes[0], drawn, strict=True):
        at = defaultdict(list)
        for row, of in enumerate(rows.values()):
            if direction in of and (own := of[direction].own):
                for name, other in of[direction].others.items():
                    at[name].append((other["us"] / own["us"], row))
        axis.axvline(1, color="black", lw=1)
        marks(axis, order, at)
        axis.set(title=direction, xlabel="their time / jaxkern's")
        ratios = [x for points in at.values() for x, _ in points]
        if max(ratios) > 5 * min(ratios):
            axis.set_xscale("log")
            plain(axis.xaxis)
    rows_of(axes[0, 0], list(rows))
    for axis in axes[0, 1:]:
        axis.grid(alpha=0.3)
    legend(axes[0, -1])
    save(figure, out)


def memory(results: Results, out: Path) -> None:
    """Writes the temporary memory of forward and backward in one program.

    Of each op it is the shape that was timed in most variants; cases in which nobody needs as much
    as a megabyte are left out.
    """
    groups: dict[tuple[str, str, str], dict[str, dict[str, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for _, one in results.files:
        for row in timings(one):
            of_both = row["direction"] == "both" and "temp_bytes" in row
            if of_both and row["implementation"] in OF_JAX:
                base = re.split("[-/]", row["shape"])[0]
                label = f"{row['op']}, {plain_shape(row['shape'])}"
                label += "" if row["dtype"] == "bfloat16" else f", {row['dtype']}"
                group = groups[row["op"], base, row["dtype"]]
                group[label][row["implementation"]] = row["temp_bytes"] / 1e6
    most: dict[str, dict[str, dict[str, float]]] = {}
    for (op, _, _), group in groups.items():
        most[op] = max(most.get(op, {}), group, key=lambda g: sum(map(len, g.values())))
    held = {label: by for op in sorted(most) for label, by in sorted(most[op].items())}
    held = {label: by for label, by in held.items() if max(by.values()) >= 1}
    at = defaultdict(list)
    for row, by in enumerate(held.values()):
        for name, mb in by.items():
            at[name].append((max(mb, 1), row))
    figure, axis = pyplot().subplots(figsize=(9, 0.9 + 0.2 * len(held)))
    marks(axis, [name for name in OF_JAX if name in at], at)
    rows_of(axis, list(held))
    axis.set(xscale="log", xlabel="MB beside arguments and results; at 1 also less")
    plain(axis.xaxis)
    legend(axis)
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
    trained = results.trainings[MODEL]
    own, rates = trained["jaxkern"], {n: row["tokens_per_second"] for n, row in trained.items()}
    fastest = max(filter(is_rival, rates), key=lambda name: rates[name])
    label = f"Mamba of {own['parameters'] / 1e6:.0f} million, training"
    by = {OURS: 1.0, fastest: rates[fastest] / rates["jaxkern"]}
    return found | {f"{label}\n{own['batch']} × {MODEL[1]}": by}


def overview(results: Results, out: Path) -> None:
    """Writes the speeds as bars."""
    held = speeds(results)
    figure, axis = pyplot().subplots(figsize=(7.5, 0.6 + 0.62 * len(held)))
    for i, name in enumerate(in_order({name for by in held.values() for name in by})):
        label = name_of(name)
        for row, by in enumerate(held.values()):
            if name in (names := in_order(by)):
                at = row + (names.index(name) - (len(names) - 1) / 2) * 0.8 / len(names)
                axis.barh(at, by[name], 0.72 / len(names), color=f"C{i}", label=label)
                axis.annotate(f" {by[name]:.2g}", (by[name], at), va="center")
                label = None
    rows_of(axis, list(held))
    axis.grid(visible=False)
    axis.set(xlim=(0, 1.12), xlabel="speed, jaxkern's being 1; one H200")
    legend(axis)
    save(figure, out)
