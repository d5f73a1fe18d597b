"""What a run says while it trains and leaves behind: progress, metrics.jsonl, loss.png."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from jaxkern.lm.config import RunError
from jaxkern.lm.data import write_atomically

BITS = 1 / math.log(2)  # nats to bits


class MetricsLog:
    """metrics.jsonl: one line per step, in order, no step twice."""

    def __init__(self, path: Path, *, resume_at: int):
        """Open for appending, cut back to the records of steps 0…resume_at."""
        self.records = read_metrics(path)
        self.records = [record for record in self.records if record["step"] <= resume_at]
        write_atomically(path, "".join(map(_line, self.records)))
        self._file = path.open("a", encoding="utf-8")

    def write(self, records: list[dict[str, Any]]) -> None:
        records = [_without_infinities(record) for record in records]
        self.records += records
        self._file.write("".join(map(_line, records)))
        self._file.flush()

    def sync(self) -> None:
        """Have it on disk: a checkpoint must not be there before its steps' records."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        for record in records:
            record["step"]
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path} is not a metrics file of jaxkern; move it away") from None
    return records


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _without_infinities(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has neither NaN nor infinity, and the loss of a step that fp16 skipped may be one."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


class Progress:
    """A bar on a terminal; elsewhere a plain line now and then."""

    def __init__(self, *, start: int, steps: int):
        self._steps = steps
        self._start = start
        self._began = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                initial=start,
                total=steps,
                unit="step",
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} · {desc}{remaining} left",
            )

    def update(self, records: list[dict[str, Any]]) -> None:
        """Show the state after the last of the records, with the mean loss of them all."""
        step = records[-1]["step"]
        losses = [r["loss"] for r in records if math.isfinite(r["loss"])] or [math.nan]
        loss = sum(losses) / len(losses)
        text = (
            f"loss {loss:.3f} · {loss * BITS:.3f} bits/byte · "
            f"{records[-1]['tokens_per_second']:,.0f} tokens/s"
        )
        validation = records[-1].get("validation_bits_per_byte")
        held_out = "" if validation is None else f"validation {validation:.3f} bits/byte"
        if self._bar is not None:
            self._bar.set_description_str(text + " · ", refresh=False)
            self._bar.update(step - self._bar.n)
            if held_out:
                self._bar.write(f"step {step} · {held_out}")
        else:
            done = step - self._start
            left = (time.perf_counter() - self._began) / done * (self._steps - step)
            width = len(str(self._steps))
            line = f"step {step:{width}}/{self._steps} · {text} · {_duration(left)} left"
            print(f"{line} · {held_out}" if held_out else line, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def plot_losses(records: list[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw training and validation bits per byte against the step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    train = [(r["step"], r["bits_per_byte"]) for r in records if r.get("bits_per_byte")]
    name = "validation_bits_per_byte"
    validation = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), color="#9bb8d3", linewidth=0.8, label="training")
        axes.plot(*_smooth(train), color="#1f5a94", linewidth=1.8, label="training, smoothed")
    if validation:
        axes.plot(
            *zip(*validation, strict=True),
            color="#d1495b",
            marker="o",
            markersize=4,
            linewidth=1.8,
            label="validation",
        )
        step, best = validation[-1]
        axes.annotate(
            f"{best:.3f}",
            (step, best),
            xytext=(0, 8),
            textcoords="offset points",
            ha="right",
            color="#d1495b",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_title(title, loc="left")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=150)
    plt.close(figure)
    os.replace(temporary, path)


def _smooth(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """A running mean over a fiftieth of the run."""
    window = max(1, len(points) // 50)
    steps, values = [], []
    for end in range(window, len(points) + 1):
        part = points[end - window : end]
        steps.append(part[-1][0])
        values.append(sum(value for _, value in part) / window)
    return steps, values
