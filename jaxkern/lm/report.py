"""Output of a run: metrics.jsonl and programs that show it, a trace of steps, progress, loss.png.

The packages of TensorBoard and Weights & Biases are imported where they are asked for and nowhere
else. A resumed run continues its curves there: what TensorBoard has of later steps is dropped, and
Weights & Biases keeps it, as the steps give the same numbers again. One that is named on --resume
alone gets the earlier records, too.
"""

import contextlib
import json
import math
import os
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

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

    def follow(self, names: Sequence[str], out: Path, stored: dict[str, Any]) -> None:
        """Have trackers show all records, of a run whose configuration is `stored`."""
        self._followers = [_TRACKERS[name](out, stored, self.records) for name in names]

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        if self._file is None:
            return
        # JSON has neither NaN nor infinity, and the loss of a step that fp16 skipped may be one.
        records = [{k: v if math.isfinite(v) else None for k, v in r.items()} for r in records]
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
    """The records of a metrics.jsonl; a last line cut short by a kill is left out."""
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            continue
        try:
            record = json.loads(line)
            if record["step"] <= (records[-1]["step"] if records else -1):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            what = f"{path}, line {number} is not a record of jaxkern"
            raise RunError(f"{what}; mend it, or move the file away") from None
        records.append(record)
    return records


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "step" and value is not None}


class TensorBoard:
    """Event files in the run's folder ``tensorboard``, by tensorboardX, a small package."""

    def __init__(self, out: Path, _: dict[str, Any], records: Sequence[dict[str, Any]]):
        from tensorboardX import SummaryWriter

        folder, begun = str(out / "tensorboard"), (out / "tensorboard").exists()
        first = records[-1]["step"] + 1 if begun and records else 0
        # A file is named by the second, and two of the same name would be one.
        self._writer = SummaryWriter(folder, purge_step=first, filename_suffix=f".{first:010}")
        self.write([] if begun else records)

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            for name, value in _scalars(record).items():
                self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, whose name is kept in ``wandb-id`` in the run's folder.

    Its environment variables say what it does: WANDB_PROJECT, WANDB_MODE=offline and so on.
    """

    def __init__(self, out: Path, stored: dict[str, Any], records: Sequence[dict[str, Any]]):
        import wandb  # pyright: ignore[reportMissingImports]

        path = out / "wandb-id"
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex[:12])
        try:
            self._run = wandb.init(
                id=path.read_text(encoding="utf-8"),
                resume="allow",
                name=out.name,
                dir=out,
                config=stored,
                project=os.environ.get("WANDB_PROJECT", "jaxkern"),
                settings=wandb.Settings(console="off"),
            )
        except Exception as error:  # of wandb's own classes, which differ between its versions
            remedy = "run wandb login, or set WANDB_MODE=offline"
            raise RunError(f"--log-to wandb: {error}; {remedy}") from None
        self.write(records)

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            if record["step"] >= self._run.step:  # it takes steps in order alone
                self._run.log(_scalars(record), step=record["step"])

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the run itself is whole
            self._run.finish()


_TRACKERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


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
    prefix = f"{PERPLEXITY}/"
    each = [f"{k.removeprefix(prefix)} {v:.4g}" for k, v in record.items() if k.startswith(prefix)]
    return f"{text} ({', '.join(each)})" if each else text


class Progress:
    """A bar of tqdm on a terminal and in a notebook; elsewhere a plain line now and then.

    What is not `shown` has no bar.
    """

    def __init__(self, *, start: int, steps: int, tokens_per_byte: float = 1.0, shown: bool = True):
        self._start, self._steps, self._bits = start, steps, BITS * tokens_per_byte
        self._began = time.perf_counter()
        self._bar = None
        if shown and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            form = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} · {desc}{remaining} left"
            options = {"unit": "step", "dynamic_ncols": True, "bar_format": form}
            self._bar = tqdm(initial=start, total=steps, **options)

    def update(self, records: Sequence[dict[str, Any]]) -> None:
        """Show the state after the last of the records, with the mean loss of them all."""
        step, speed = records[-1]["step"], records[-1]["tokens_per_second"]
        losses = [r["loss"] for r in records if math.isfinite(r["loss"])] or [math.nan]
        loss = sum(losses) / len(losses)
        text = f"loss {loss:.3f} · {loss * self._bits:.3f} bits/byte · {speed:,.0f} tokens/s"
        known = records[-1].get("validation_bits_per_byte") is not None
        held_out = f" · {validation_told(records[-1])}" if known else ""
        if self._bar is None:
            left = (time.perf_counter() - self._began) / (step - self._start) * (self._steps - step)
            left = tqdm.format_interval(left)
            stop.say(f"step {step}/{self._steps} · {text} · {left} left{held_out}")
            return
        with stop.output_may_close():
            self._bar.set_description_str(f"{text} · ", refresh=False)
            self._bar.update(step - self._bar.n)
            if held_out:
                self._bar.write(f"step {step}{held_out}")

    def tell(self, text: str) -> None:
        """Print lines that stay."""
        with stop.output_may_close():
            (stop.say if self._bar is None else self._bar.write)(text)

    @contextlib.contextmanager
    def during(self, step: int, what: str) -> Iterator[None]:
        """Say afterwards, where there is no bar, for how long steps waited for `what`."""
        began = time.perf_counter()
        yield
        if self._bar is None:
            seconds = time.perf_counter() - began
            stop.say(f"step {step}/{self._steps} · {what} took {seconds:.2f} s")

    def close(self) -> None:
        if self._bar is not None:
            with stop.output_may_close():
                self._bar.close()


_COUNT = 5  # steps that are traced: enough to tell what repeats, and few enough to look at
_LATER = 10  # steps before them, which hold one-time work


class Profile:
    """Traces steps `first` to `last` of a run into a folder, by JAX's profiler.

    They are said by STEP:COUNT or STEP; "auto" stands for some soon after those that are `done`,
    and ``None`` for none. The run ends with step `end`.
    """

    def __init__(self, folder: Path, steps: str | None, *, done: int, end: int):
        self._folder, self._tracing = folder, False
        self.first = self.last = 0
        if steps is None:
            return
        if steps == "auto":
            self.first = max(done + 1, min(done + 1 + _LATER, end - _COUNT + 1))
            self.last = min(self.first + _COUNT - 1, end)
        else:
            first, _, count = steps.partition(":")
            self.first = int(first)
            self.last = self.first + int(count or _COUNT) - 1
        if self.first <= done or self.last > end:
            what = f"--profile {steps} are steps {self.first} to {self.last}"
            raise RunError(f"{what}, and those to come are {done + 1} to {end}")

    @contextlib.contextmanager
    def step(self, number: int, state: Any, speed: Speed) -> Iterator[None]:
        """Inside is a step of the run, which starts from `state`."""
        if number == self.first:
            jax.block_until_ready(state)
            with speed.paused():
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # the device is to be seen, and JAX's own events
                jax.profiler.start_trace(self._folder, profiler_options=options)
            self._tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield

    def after(self, number: int, state: Any, speed: Speed, progress: Progress) -> None:
        """Write the trace, and say where it is, after its last step, which gave `state`."""
        if not self._tracing or number < self.last:
            return
        jax.block_until_ready(state)
        with speed.paused():
            self.close()
        trace, folder = max(self._folder.rglob("*.trace.json.gz")), shlex.quote(str(self._folder))
        progress.tell(
            f"profile  steps {self.first} to {self.last}: {trace.parent}\n"
            f"         https://ui.perfetto.dev opens {trace.name}, and, after\n"
            f"         pip install tensorboard xprof, tensorboard --logdir {folder} shows it"
        )

    def close(self) -> None:
        """Write the trace, if there is one under way."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()


def plot_losses(records: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw training and validation bits per byte against the step.

    A long training curve is drawn pale, beside its running mean over a fiftieth of the run.
    """
    from matplotlib.figure import Figure  # without pyplot, whose backend is the user's

    def curve(name: str) -> np.ndarray:
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        return np.array(points or [(0, np.nan)]).T

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps, losses = curve("bits_per_byte")
    window = len(steps) // 50
    pale: Any = {"alpha": 0.4, "linewidth": 0.8} if window > 1 else {"linewidth": 1.8}
    axes.plot(steps, losses, color="#1f5a94", label="training", **pale)
    if window > 1:
        mean = np.convolve(losses, np.ones(window) / window, "valid")
        axes.plot(steps[window - 1 :], mean, color="#1f5a94", label="training, smoothed")
    held_out = curve("validation_bits_per_byte")
    label = f"validation, at last {held_out[1, -1]:.3f}"
    axes.plot(*held_out, color="#d1495b", marker="o", markersize=4, label=label, clip_on=False)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.set_xlim(0, max(steps[-1], held_out[0, -1]) or 1)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(frameon=False, ncols=3, **place)  # beside the title, where no curve passes
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=150)
    os.replace(temporary, path)
