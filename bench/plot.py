"""Pictures of reports: percent of the copy bandwidth over the length of a row.

``python -m bench.plot bench/results/nvidia-h200-layer_norm-rms_norm.json`` writes an SVG beside it.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

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
    """Writes and closes `figure`."""
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot().close(figure)


def draw(report: dict[str, Any], out: Path) -> bool:
    """Writes a picture of `report` to `out`; False if there are no three lengths to draw."""
    lines = points(report["rows"])
    lines = {op: by for op, by in lines.items() if any(len(p) > 2 for p in _all(by))}
    if not lines:
        return False
    figure, axes = pyplot().subplots(
        2, len(lines), figsize=(5.2 * len(lines), 6.4), sharex=True, sharey=True, squeeze=False
    )
    implementations = sorted({name for by in lines.values() for d in by.values() for name in d})
    implementations.sort(key=lambda name: name != "mosaic")
    for column, (op, by) in enumerate(lines.items()):
        for axis, direction in zip(axes[:, column], DIRECTIONS, strict=True):
            for i, name in enumerate(implementations):
                if by[direction].get(name):
                    n, percent = zip(*by[direction][name], strict=True)
                    label = "jaxkern" if name == "mosaic" else name
                    width = 2.2 if name == "mosaic" else 1.2
                    marker = MARKERS[i % len(MARKERS)]
                    axis.plot(n, percent, marker=marker, ms=4, lw=width, label=label)
            axis.set(ylim=(0, 105), title=f"{op}, {direction}")
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
            axis.set_ylabel("% of copy bandwidth")
        axes[1, column].set_xlabel("N, elements of a row")
    axes[0, 0].legend(loc="lower right", fontsize=8)
    title = f"{report['device']}, JAX {report['jax']}, bf16, commit {report['commit']}"
    figure.suptitle(title, fontsize=10)
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
