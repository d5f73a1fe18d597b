"""A run's folder before and around its steps: begun, resumed, left as it was, continued."""

import contextlib
import dataclasses
import json
import platform
import shlex
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxkern
from jaxkern.lm import checkpoint, data
from jaxkern.lm.config import ModelConfig, RunError, TrainConfig
from jaxkern.lm.report import read_metrics
from jaxkern.lm.stop import say
from jaxkern.precision import Policy


def resumed(
    out: Path, config: TrainConfig, policy: Policy, stored: dict[str, Any]
) -> tuple[data.Corpus, int]:
    """The data of a run and the step of its last whole checkpoint.

    Raises:
      RunError: the folder does not hold what config.json, `stored`, says.
    """
    _check_model(out, stored["model"], config)
    if stored.get("precision") != str(policy):
        raise RunError(
            f"{out / 'config.json'}: precision is {stored.get('precision')!r}, and by "
            f"flags.mixed_precision it is {str(policy)!r}; put it back, or start a new run"
        )
    checkpoint.clean(out)
    corpus = data.open_corpus(out / "corpus")
    if corpus.info["fingerprint"] != stored["data"].get("fingerprint"):
        raise RunError(f"{out / 'corpus'} is not the data that this run began with")
    read_metrics(out / "metrics.jsonl")
    done, damaged = checkpoint.newest(out, config.model)
    for line in damaged:
        say(f"{line}; it is renamed to .damaged, and the run goes back to step {done}")
    checkpoint.set_aside(out, done)
    return corpus, done


def _check_model(out: Path, stored: dict[str, Any], config: TrainConfig) -> None:
    """Refuse a config.json whose model was edited, which would change nothing."""
    try:
        differing = checkpoint.differences(ModelConfig.from_stored(stored), config.model)
    except (TypeError, ValueError) as error:
        differing = str(error)
    if differing:
        raise RunError(
            f"{out / 'config.json'}: model is not that of preset {config.preset}: {differing}. A "
            "run's model is its preset's and cannot be edited; put it back, or start a new run"
        )


def where_it_stands(out: Path) -> str:
    """How a run that was stopped outside its steps is continued."""
    if not (out / "config.json").exists():
        return f"training had not begun, and nothing is kept in {out}"
    last = max(checkpoint.steps(out), default=None)
    saved = "no step is saved yet" if last is None else f"step {last} is saved"
    return f"{saved} in {out}; {how_to_continue(out)}"


def how_to_continue(out: Path) -> str:
    """The command that goes on with a run."""
    return f"continue with: jaxkern train --resume --out {shlex.quote(str(out))}"


@contextlib.contextmanager
def nothing_left_if_refused(out: Path, *, fresh: bool, created: bool) -> Iterator[None]:
    """Leave a folder where a new run could not begin as it was, to be named again."""
    try:
        yield
    except BaseException:
        if fresh:
            shutil.rmtree(out / "corpus", ignore_errors=True)
            (out / ".lock").unlink(missing_ok=True)
        if fresh and created:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise


def flags_of(config: TrainConfig) -> dict[str, Any]:
    """A configuration as config.json holds it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def write_config(
    out: Path, config: TrainConfig, policy: Policy, devices: Sequence[Any], corpus: data.Corpus
) -> None:
    """Write config.json, which makes the folder a run."""
    content = {
        "format": checkpoint.FORMAT,
        "flags": flags_of(config),
        "model": config.model.stored(),
        "precision": str(policy),
        "data": corpus.info,
        "devices": [device.device_kind for device in devices],
        "versions": {"python": platform.python_version(), "jaxkern": jaxkern.__version__}
        | {
            name: metadata.version(name)
            for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
        },
    }
    data.write_atomically(out / "config.json", json.dumps(content, indent=2) + "\n")
