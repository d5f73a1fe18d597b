"""A trace of some of a run's steps, by JAX's profiler: ``jaxkern train --profile``."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxkern.lm.config import RunError
from jaxkern.lm.report import Progress, Speed

_COUNT = 5  # steps: enough to tell what repeats, and few enough to look at
_LATER = 10  # steps before them, which hold one-time work


class Profile:
    """Traces steps `first` to `last` of a run into a folder.

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
        self.folder = folder
        self.first = self.last = 0
        self._tracing = False
        if steps is None:
            return
        if steps != "auto":
            first, _, count = steps.partition(":")
            self.first = int(first)
            self.last = self.first + int(count or _COUNT) - 1
        else:
            self.first = max(done + 1, min(done + 1 + _LATER, end - _COUNT + 1))
            self.last = min(self.first + _COUNT - 1, end)
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
                jax.profiler.start_trace(self.folder, profiler_options=options)
            self._tracing = True
        if not self._tracing:
            yield
            return
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield

    def after(self, number: int, state: Any, speed: Speed, progress: Progress) -> None:
        """Write the trace, and say where it is, after its last step, which gave `state`."""
        if not self._tracing or number < self.last:
            return
        jax.block_until_ready(state)
        with speed.paused():
            self.close()
        trace = max(self.folder.rglob("*.trace.json.gz"))
        progress.tell(
            f"profile  steps {self.first} to {self.last}: {trace.parent}\n"
            f"         tensorboard --logdir {shlex.quote(str(self.folder))} shows it, after "
            "pip install tensorboard xprof,\n"
            f"         and https://ui.perfetto.dev opens {trace.name}"
        )

    def close(self) -> None:
        """Write the trace, if there is one under way."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
