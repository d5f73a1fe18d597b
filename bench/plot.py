"""Pictures of reports: percent of the copy bandwidth over the length of a row.

``python -m bench.plot bench/results/nvidia-h200-layer_norm-rms_norm.json`` writes an SVG beside it.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.report import NAMES, OURS

DIRECTIONS = ("forward", "backward")
MARKERS = "osD^vPX*h<>"


def points(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, list[tuple[int, float]]]]]:
    """(N, percent) by op, direction and implementation, of M×N in bf16 with the most rows each."""
    found: dict[tuple[str, str, str, int], tuple[int, float]] = {}
    for row in rows:
        size = re.fullmatch(r"(\d+)x(\d+)", row["shape"])
        if not size or row["dtype"] != "bfloat16" or row["direction"] not in DIRECTIONS:
            continue
        m, n = int(size[1]), int(size[2])
        key = (row["op"], row["direction"], row["implementation"], n)
        found[key] = max(found.get(key, (0, 0.0)), (m, row["percent"]))
    lines: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for (op, direction, implementation, n), (_, percent) in sorted(found.items()):
        lines[op][direction][implementation].append((n, percent))
    return lines


def pyplot() -> Any:
    """matplotlib for small SVGs, the same bytes on every run."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "jaxkern", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, out: Path) -> None:
    """Writes and closes `figure`, with nothing cut off."""
    figure.tight_layout()
    metadata = {"Date": None} if out.suffix == ".svg" else None
    figure.savefig(out, metadata=metadata, bbox_inches="tight")
    pyplot().close(figure)


def in_order(names: set[str]) -> list[str]:
    """The implementations in the order of the tables."""
    return [name for name in NAMES if name in names] + sorted(names - set(NAMES))


def plain(axis: Any) -> None:
    """Ticks of a logarithmic `axis` written as numbers: 1, 10, 100, and of a short one 1, 2, 5."""
    from matplotlib import ticker

    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(ticker.LogLocator(subs=(1,) if high > 300 * low else (1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def draw(report: dict[str, Any], out: Path) -> bool:
    """Writes a picture of `report` to `out`; False if there are no three lengths to draw."""
    title = f"{report['device']}, JAX {report['jax']}, bf16, commit {report['commit']}"
    return draw_lengths(points(report["rows"]), title, out)


def draw_lengths(lines: dict[str, Any], title: str, out: Path) -> bool:
    """Writes :func:`points`, a row of panels for each op; False if there are no three lengths."""
    lines = {op: by for op, by in lines.items() if any(len(p) > 2 for p in _all(by))}
    if not lines:
        return False
    figure, axes = pyplot().subplots(
        len(lines), 2, figsize=(7.2, 2.9 * len(lines)), sharex=True, sharey=True, squeeze=False
    )
    found = {name for by in lines.values() for d in by.values() for name in d}
    implementations = in_order(found)
    for row, (op, by) in zip(axes, lines.items(), strict=True):
        for axis, direction in zip(row, DIRECTIONS, strict=True):
            for i, name in enumerate(implementations):
                if by[direction].get(name):
                    n, percent = zip(*by[direction][name], strict=True)
                    width = 2.2 if name == OURS else 1.2
                    marker, label = MARKERS[i % len(MARKERS)], NAMES.get(name, name)
                    axis.plot(n, percent, marker=marker, ms=4, lw=width, label=label)
            axis.set(ylim=(0, 105), title=f"{op}, {direction}", xscale="log")
            axis.set_xlabel("N, elements of a row")
            axis.grid(alpha=0.3)
            plain(axis.xaxis)
        row[0].set_ylabel("% of copy bandwidth")
    axes[0, 0].legend(fontsize=6)
    figure.suptitle(title, fontsize=9)
    save(figure, out)
    return True


def _all(by: dict[str, dict[str, list[tuple[int, float]]]]) -> list[list[tuple[int, float]]]:
    return [line for lines in by.values() for line in lines.values()]


def main(argv: list[str]) -> int:
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    for name in argv:
        path = Path(name)
        out = path.with_suffix(".svg")
        drawn = draw(json.loads(path.read_text()), out)
        print(f"wrote {out}" if drawn else f"{path}: no three lengths of rows to draw")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
