"""Draws bench/pictures: the overview, and a picture for each family of ops.

No axis with bars is logarithmic, no line joins measurements.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import MODEL, OURS, Line, Results, in_order, name_of, plain_shape
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

REMEMBERED = (
    ("H200", "jaxkern"),
    ("H200", "jaxkern-scan"),
    ("H200", "mamba_ssm"),
    ("H100", "jaxkern"),
    ("H100", "jla"),
)
"""The training steps whose memory README's picture shows."""

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


def rows_of(axis: Any, labels: Sequence[str]) -> None:
    """Has the vertical axis name rows, the first one at the top."""
    axis.set_yticks(range(len(labels)), [label.replace("`", "") for label in labels])
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(alpha=0.3)


def family(rows: Mapping[str, Passes], out: Path) -> None:
    """Writes others' times over ours: a row for each shape, a panel for each pass."""
    plt, passes = pyplot(), ("forward", "backward", "both", "step")
    from matplotlib import ticker

    drawn = [d for d in passes if any(d in of and of[d].others for of in rows.values())]
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
    trained = results.trainings()[MODEL]
    fastest, own = Line("training", "", "", "step", trained).rival or "", trained["jaxkern"]
    label = f"Mamba of {own['parameters'] / 1e6:.0f} million, training"
    rate = "tokens_per_second"
    by = {OURS: 1.0, fastest: trained[fastest][rate] / own[rate]}
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
        of = results.trainings(gpu)[MODEL][name]
        labels.append(f"{name_of(name)}\n{of['tokens_per_second']:,} tokens/s, {gpu}")
        colour = colours.get(name, colours[OURS])
        memory.barh(row, of["peak_gib"], 0.6, color=colour)
        memory.annotate(f" {of['peak_gib']:.1f}", (of["peak_gib"], row), va="center")
    rows_of(memory, labels)
    parameters = results.trainings()[MODEL]["jaxkern"]["parameters"] / 1e6
    memory.set(xlabel=f"GiB of a training step, Mamba of {parameters:.0f} million")
    memory.margins(x=0.15)
    for each in (axis, memory):
        each.grid(visible=False)
    save(figure, out)
