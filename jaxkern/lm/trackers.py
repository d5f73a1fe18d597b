"""What ``--log-to`` names: programs that show a run's metrics, beside metrics.jsonl.

A resumed run continues its curves: what TensorBoard has of later steps is dropped, and Weights &
Biases keeps it, as the steps give the same numbers again. One that is named on --resume alone gets
the earlier records, too. Their packages are imported where they are asked for and nowhere else.
"""

import contextlib
import importlib.util
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.data import write_atomically

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Tracker(Protocol):
    """Takes records of metrics, each with its step."""

    def write(self, records: Sequence[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


def check(names: Sequence[str]) -> None:
    """Raise RunError if a package is missing."""
    missing = [_PACKAGES[name] for name in names if not importlib.util.find_spec(_PACKAGES[name])]
    if missing:
        raise RunError(
            f"--log-to {' '.join(names)} needs {', '.join(missing)}; run: pip install "
            f"{' '.join(missing)}"
        )


def opened(
    config: TrainConfig, out: Path, stored: dict[str, Any], records: Sequence[dict[str, Any]]
) -> list[Tracker]:
    """The trackers of a run, which have its records so far.

    Args:
      config: names them.
      out: the run's folder, where each keeps what it has.
      stored: config.json, to be shown.
      records: of the steps that the run has.
    """
    makers = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [makers[name](out, stored, records) for name in config.log_to]


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "step" and value is not None}


class TensorBoard:
    """Event files in the run's folder ``tensorboard``, by tensorboardX.

    It is numpy and protobuf alone, where TensorBoard's own writer brings the whole of it.
    """

    def __init__(self, out: Path, stored: dict[str, Any], records: Sequence[dict[str, Any]]):
        from tensorboardX import SummaryWriter

        del stored
        folder = out / "tensorboard"
        begun = folder.exists()
        first = records[-1]["step"] + 1 if begun and records else 0
        # A file is named by the second, and two of the same name would be one.
        suffix = f".{first:010}"
        self._writer = SummaryWriter(str(folder), purge_step=first, filename_suffix=suffix)
        if not begun:
            self.write(records)

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
