"""What a run says while it trains and leaves behind: progress, metrics.jsonl, loss.png."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxkern.lm import stop
from jaxkern.lm.config import RunError
from jaxkern.lm.data import write_atomically

BITS = 1 / math.log(2)  # nats to bits
PERPLEXITY = "validation_perplexity"


class MetricsLog:
    """metrics.jsonl: one line per step, in order, no step twice.

    Of several processes one alone writes it; without a path nothing is written.
    """

    def __init__(self, path: Path | None, *, resume_at: int):
        """Open for appending, cut back to the records of steps 0…resume_at."""
        self.records = read_metrics(path) if path is not None else []
        self.records = [record for record in self.records if record["step"] <= resume_at]
        self._file, self._followers = None, []
        if path is not None:
            write_atomically(path, "".join(map(_line, self.records)))
            self._file = path.open("a", encoding="utf-8")

    def follow(self, trackers: Sequence[Any]) -> None:
        """Have these take all further records, too."""
        self._followers = trackers

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        if self._file is None:
            return
        # JSON has neither NaN nor infinity, and the loss of a step that fp16 skipped may be one.
        told = lambda value: value if math.isfinite(value) else None
        records = [{key: told(value) for key, value in record.items()} for record in records]
        self.records += records
        self._file.write("".join(map(_line, records)))
        self._file.flush()
        for tracker in self._followers:
            tracker.write(records)

    def sync(self) -> None:
        """Write all to disk: no checkpoint may be there before the records of its steps."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        for tracker in self._followers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line cut short by a kill is left out.

    Raises:
        RunError: if another line is no record, or the steps are not in order.
    """
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            continue
        try:
            record: Any = json.loads(line)
        except ValueError:
            record = None
        if not _is_record(record) or (records and record["step"] <= records[-1]["step"]):
            raise RunError(
                f"{path}, line {number} is not a record of jaxkern; mend it, or move the file away "
                "to go on without the earlier losses"
            )
        records.append(record)
    return records


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    return all(value is None or type(value) in (int, float) for value in record.values())


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


class Speed:
    """Tokens per second of the steps, evaluations and checkpoints left out."""

    def __init__(self, tokens_per_step: int):
        self._tokens = tokens_per_step
        self._measured: list[tuple[int, float]] = []
        self.start()

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self, steps: int) -> float:
        """Ends the measurement of `steps` finished steps, and returns their tokens per second."""
        seconds = time.perf_counter() - self._began
        self._measured.append((steps, seconds))
        return steps * self._tokens / seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside is work whose time is not that of the steps under way."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def steady(self) -> float:
        """Over all measurements but the first, if there are more: it may hold one-time work."""
        measured = self._measured[1:] or self._measured
        return self._tokens * sum(n for n, _ in measured) / sum(s for _, s in measured)


def validation_told(record: dict[str, Any]) -> str:
    """A validation in words: bits per byte, and perplexities where tokens are not bytes alone."""
    text = f"validation {record['validation_bits_per_byte']:.3f} bits/byte"
    if PERPLEXITY not in record:
        return text
    text += f" · perplexity {record[PERPLEXITY]:.4g}"
    of_each = [
        f"{key.partition('/')[2]} {value:.4g}"
        for key, value in record.items()
        if key.startswith(f"{PERPLEXITY}/")
    ]
    return f"{text} ({', '.join(of_each)})" if of_each else text


class Progress:
    """A bar of tqdm on a terminal and in a notebook; elsewhere a plain line now and then.

    What is not `shown` has no bar.
    """

    def __init__(self, *, start: int, steps: int, tokens_per_byte: float = 1.0, shown: bool = True):
        self._start, self._steps, self._bits = start, steps, BITS * tokens_per_byte
        self._began = time.perf_counter()
        self._bar, self._text = None, ""
        if shown and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            from tqdm.auto import tqdm

            form = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} · {desc}{remaining} left"
            options = {"unit": "step", "dynamic_ncols": True, "bar_format": form}
            self._bar = tqdm(initial=start, total=steps, **options)

    def update(self, records: Sequence[dict[str, Any]]) -> None:
        """Show the state after the last of the records, with the mean loss of them all."""
        step, speed = records[-1]["step"], records[-1]["tokens_per_second"]
        losses = [r["loss"] for r in records if math.isfinite(r["loss"])] or [math.nan]
        loss = sum(losses) / len(losses)
        text = f"loss {loss:.3f} · {loss * self._bits:.3f} bits/byte · {speed:,.0f} tokens/s"
        held_out = ""
        if records[-1].get("validation_bits_per_byte") is not None:
            held_out = validation_told(records[-1])
        self._text = text
        if self._bar is None:
            left = (time.perf_counter() - self._began) / (step - self._start) * (self._steps - step)
            line = f"{self._at(step)} · {text} · {_duration(left)} left"
            stop.say(f"{line} · {held_out}" if held_out else line)
            return
        with stop.output_may_close():
            self._bar.set_description_str(text + " · ", refresh=False)
            self._bar.update(step - self._bar.n)
            if held_out:
                self._bar.write(f"step {step} · {held_out}")

    def tell(self, text: str) -> None:
        """Print lines that stay."""
        with stop.output_may_close():
            (stop.say if self._bar is None else self._bar.write)(text)

    @contextlib.contextmanager
    def during(self, step: int, what: str) -> Iterator[None]:
        """Show on a terminal that steps wait for `what`; elsewhere, afterwards, for how long."""
        began = time.perf_counter()
        if self._bar is not None:
            with stop.output_may_close():
                self._bar.set_description_str(f"{what} at step {step} · ")
        yield
        if self._bar is not None:
            self._bar.set_description_str(self._text + " · ", refresh=False)
        else:
            stop.say(f"{self._at(step)} · {what} took {time.perf_counter() - began:.2f} s")

    def _at(self, step: int) -> str:
        return f"step {step:{len(str(self._steps))}}/{self._steps}"

    def close(self) -> None:
        if self._bar is not None:
            with stop.output_may_close():
                self._bar.close()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def plot_losses(records: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw training and validation bits per byte against the step."""
    from matplotlib.figure import Figure  # without pyplot, whose backend is the user's
    from matplotlib.ticker import MaxNLocator

    def points(name: str) -> list[tuple[int, float]]:
        return [(r["step"], r[name]) for r in records if r.get(name) is not None]

    train, validation = points("bits_per_byte"), points("validation_bits_per_byte")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    blue, red = "#1f5a94", "#d1495b"
    if train:
        smooth = len(train) >= 2 * _SMOOTHED
        color, width = ("#9bb8d3", 0.8) if smooth else (blue, 1.8)
        axes.plot(*zip(*train, strict=True), color=color, linewidth=width, label="training")
        if smooth:
            axes.plot(*_smooth(train), color=blue, linewidth=1.8, label="training, smoothed")
    if validation:
        of_line = {"color": red, "marker": "o", "markersize": 4, "linewidth": 1.8}
        curve = zip(*validation, strict=True)
        axes.plot(*curve, label="validation", clip_on=False, **of_line)
        last = validation[-1][1]
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        align = {"xytext": (8, 0), "va": "center", "color": red, "annotation_clip": False}
        axes.annotate(f"{last:.3f}", (1, last), **place, **align)  # where no curve passes
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_title(title, loc="left")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max([step for step, _ in train + validation], default=0) or 1)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if train or validation:  # beside the title, where no curve passes either
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        axes.legend(frameon=False, ncols=3, **place)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=150)
    os.replace(temporary, path)


_SMOOTHED = 50


def _smooth(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """A running mean over a fiftieth of the run."""
    window = len(points) // _SMOOTHED
    ends = range(window, len(points) + 1)
    values = [sum(value for _, value in points[end - window : end]) / window for end in ends]
    return [points[end - 1][0] for end in ends], values
