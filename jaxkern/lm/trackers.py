"""Programs that show a run beside metrics.jsonl: ``--log-to`` and ``--profile``.

A resumed run continues its curves: what TensorBoard has of later steps is dropped, and Weights &
Biases keeps it, as the steps give the same numbers again. One that is named on --resume alone gets
the earlier records, too. Their packages are imported where they are asked for and nowhere else.
"""

import contextlib
import importlib.util
import os
import shlex
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxkern.lm.config import RunError
from jaxkern.lm.data import write_atomically
from jaxkern.lm.report import Progress, Speed

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check(names: Sequence[str]) -> None:
    """Raise RunError if a package is missing."""
    missing = [_PACKAGES[name] for name in names if not importlib.util.find_spec(_PACKAGES[name])]
    if missing:
        raise RunError(
            f"--log-to {' '.join(names)} needs {', '.join(missing)}; run: pip install "
            f"{' '.join(missing)}"
        )


def opened(
    names: Sequence[str], out: Path, stored: dict[str, Any], records: Sequence[dict[str, Any]]
) -> list[Any]:
    """The trackers of a run in `out`, which have its records so far; `stored` is shown with them.

    Each takes further records by `write`, and ends by `close`.
    """
    makers = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [makers[name](out, stored, records) for name in names]


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "step" and value is not None}


class TensorBoard:
    """Event files in the run's folder ``tensorboard``, by tensorboardX.

    It is numpy and protobuf alone, where TensorBoard's own writer brings the whole of it.
    """

    def __init__(self, out: Path, stored: dict[str, Any], records: Sequence[dict[str, Any]]):
        from tensorboardX import SummaryWriter

        del stored
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
            raise RunError(
                f"--log-to wandb: {error}; run wandb login, or set WANDB_MODE=offline"
            ) from None
        self.write(records)

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            if record["step"] >= self._run.step:  # it takes steps in order alone
                self._run.log(_scalars(record), step=record["step"])

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the run itself is whole
            self._run.finish()


_COUNT = 5  # steps that are traced: enough to tell what repeats, and few enough to look at
_LATER = 10  # steps before them, which hold one-time work


class Profile:
    """Traces steps `first` to `last` of a run into a folder, by JAX's profiler.

    Args:
      folder: where the trace lies.
      steps: the first step and how many, as STEP:COUNT or STEP; "auto" for some soon after the
        run's first ones, ``None`` for none.
      done: the steps that the run has.
      end: the last step of the run.

    Raises:
      RunError: the run does not have these steps any more, or ends before them.
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
            raise RunError(
                f"--profile {steps} are steps {self.first} to {self.last}, and those to come are "
                f"{done + 1} to {end}; name steps among them, as STEP:COUNT"
            )

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
        trace = max(self._folder.rglob("*.trace.json.gz"))
        progress.tell(
            f"profile  steps {self.first} to {self.last}: {trace.parent}\n"
            f"         tensorboard --logdir {shlex.quote(str(self._folder))} shows it, after "
            "pip install tensorboard xprof,\n"
            f"         and https://ui.perfetto.dev opens {trace.name}"
        )

    def close(self) -> None:
        """Write the trace, if there is one under way."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
