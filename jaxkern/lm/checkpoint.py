"""A run's folder: its contents, and saving and restoring them.

    config.yaml      the configuration
    run.json         what else the run began with; written last: its presence makes a folder a run
    corpus/          the tokens
    tokenizer.json   what made them, where they are not bytes
    metrics.jsonl    one line per step
    checkpoints/N/   orbax's, after N steps: `state`, the arrays; `data`, the state of the iterator
    loss.png

orbax writes a checkpoint under another name and renames it when it is whole and on disk, so one
that has its name is whole, whenever the process was killed.
"""

import contextlib
import json
import os
import platform
import shutil
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxkern
from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.data import locked, write_atomically
from jaxkern.lm.processes import ALONE, Alone

if TYPE_CHECKING:  # orbax takes a second to import, which the first step need not wait for
    import orbax.checkpoint as ocp

FORMAT = "jaxkern-lm-2"  # raised where older folders cannot be read
LOCK, _RECORD, _CONFIG, _CHECKPOINTS = ".lock", "run.json", "config.yaml", "checkpoints"
BEFORE = (LOCK, _CONFIG, "tokenizer.json")
"""Files that may lie, beside tokens, in a folder where a run has not begun."""


def is_run(out: Path) -> bool:
    """Whether a run has begun in a folder."""
    return (out / _RECORD).exists()


def check_fresh(out: Path) -> None:
    """Refuse a folder that already holds a run or anything else, or is no folder."""
    if is_run(out):
        raise RunError(f"--out {out} already holds a run; add --resume, or name a new folder")
    if out.exists() and {path.name for path in out.iterdir()} - {"corpus", *BEFORE}:
        raise RunError(f"--out {out} is not empty; name a new folder")


@contextlib.contextmanager
def only_process(out: Path) -> Iterator[str]:
    """Hold the run's folder; a second process that trains in it is refused.

    Inside, `.lock` there has the text that is yielded, by which others tell that they see it.
    """

    def refuse() -> None:
        raise RunError(f"another process is training in {out}; stop it first or name another --out")

    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK, refuse) as file:
        print(token := uuid.uuid4().hex, end="", file=file, flush=True)
        yield token


def write(run: Path, config: TrainConfig, data: dict[str, Any]) -> None:
    """Write config.yaml and run.json, which make the folder a run; `data` is its corpus's info."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {name: metadata.version(name) for name in packages}
    versions |= {"python": platform.python_version(), "jaxkern": jaxkern.__version__}
    config.save(run / f"{_CONFIG}.tmp")
    os.replace(run / f"{_CONFIG}.tmp", run / _CONFIG)  # whole, whenever the process is killed
    record = {"format": FORMAT, "data": data, "versions": versions}
    write_atomically(run / _RECORD, json.dumps(record, indent=2) + "\n")


def read(run: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration of a run, and its corpus's info."""
    if not is_run(run):
        raise RunError(f"{run} holds no run (no {_RECORD}); give the --out of a jaxkern train")
    try:
        record = json.loads((run / _RECORD).read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{run / _RECORD} is damaged ({error}); restore it") from None
    if (found := record["format"]) != FORMAT:
        what = f"{run} was not written by this version of jaxkern"
        raise RunError(f"{what}: its format is {found!r}, not {FORMAT!r}; train again")
    return TrainConfig.load(run / _CONFIG), record["data"]


def steps(run: Path) -> list[int]:
    """The steps of the finished checkpoints of a run, ascending."""
    names = (path.name for path in (run / _CHECKPOINTS).glob("*") if path.is_dir())
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


class Restored(NamedTuple):
    """Contents of a checkpoint."""

    step: int  # that it is after
    state: Any  # the arrays that were asked for, in their tree
    data: Any  # the state of the iterator over the batches
    damaged: list[str]  # of each newer checkpoint that cannot be read, a sentence


def restore(run: Path, like: Any, step: int | None = None, *, peers: Alone = ALONE) -> Restored:
    """Read the newest checkpoint of a run that can be read, or that of a step.

    `like` is a pytree of jax.ShapeDtypeStruct with shardings: the state, or a dict of some of its
    fields, such as ``{"params": …}``. Each of several processes, `peers`, reads its parts.
    """
    there, damaged = steps(run), list[str]()
    if step is not None and step not in there:
        known = ", ".join(map(str, there)) or "none"
        raise RunError(f"{run} has no checkpoint of step {step}; it has {known}")
    if not there:
        raise RunError(f"{run} has no checkpoint yet; train it for longer")
    with contextlib.closing(_manager(run, peers)) as manager:
        for at in [step] if step is not None else reversed(there):
            try:
                return Restored(at, *_read(manager, at, like), damaged)
            except Exception as error:  # whatever orbax, JSON and the system say of such files
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                path = run / _CHECKPOINTS / str(at)
                damaged.append(f"checkpoint {path} cannot be read ({reason})")
    rest = f", nor any other of {', '.join(map(str, there))}" if len(damaged) > 1 else ""
    remedy = f"put it back from a copy, or {_CONFIG} if its model was changed"
    raise RunError(f"{damaged[0]}{rest}; {remedy}")


def _read(manager: "ocp.CheckpointManager", step: int, like: Any) -> tuple[Any, Any]:
    import orbax.checkpoint as ocp

    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    held = jax.tree.leaves_with_path(manager.item_metadata(step)["state"])
    shapes = {name(path): leaf.shape for path, leaf in held}
    for path, leaf in jax.tree.leaves_with_path(like):  # orbax's own refusal ends in traces
        if (shape := shapes.get(name(path), leaf.shape)) != leaf.shape:
            raise ValueError(f"{name(path)} has the shape {shape}, and by {_CONFIG} {leaf.shape}")
    given = ocp.checkpoint_utils.construct_restore_args(like)
    part = isinstance(like, dict)
    state = ocp.args.PyTreeRestore(like, restore_args=given, partial_restore=part)
    found = manager.restore(step, args=ocp.args.Composite(state=state, data=ocp.args.JsonRestore()))
    for path, leaf in jax.tree.leaves_with_path(found["state"]):
        if isinstance(leaf, jax.ShapeDtypeStruct):  # left as it was asked for
            raise ValueError(f"it has no {name(path)}")
    return found["state"], found["data"]


def set_aside(run: Path, newest: int) -> None:
    """Rename the checkpoints after step `newest`, which cannot be read."""
    for step in steps(run):
        if step > newest:
            path = run / _CHECKPOINTS / str(step)
            aside = path.with_name(f"{step}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)


class Saver:
    """Writes the checkpoints of a run while its steps go on.

    Where devices have room for a copy of the arrays beside a step, the step after overwrites them
    at once and orbax reads the copy, which takes the host some tenths of a second: `write` does it
    when the devices have steps to compute. Else, without `like`, shapes and shardings of the state,
    the step after waits until orbax has the arrays. The newest checkpoints stay, `keep` of them.
    """

    def __init__(self, run: Path, *, keep: int, like: Any = None, peers: Alone = ALONE):
        self._copy: Any = None
        if like is not None:  # compiled now, so that no step waits for it
            shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
            copy = lambda tree: jax.tree.map(jnp.copy, tree)
            self._copy = jax.jit(copy, out_shardings=shardings).lower(like).compile()
        if peers.main:
            (run / _CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        peers.share(lambda: None)  # all see it
        options = {"max_to_keep": keep, "cleanup_tmp_directories": True}
        self._manager = _manager(run, peers, beside=like is not None, **options)
        self._begun: tuple[int, Any, dict[str, Any]] | None = None

    def start(self, step: int, state: Any, data: dict[str, Any]) -> None:
        """Begin the checkpoint of a step, when the one before is whole."""
        self.write()
        self._begun = step, self._copy(state) if self._copy else state, data
        if not self._copy:
            self.write()

    def write(self) -> None:
        """Hand what was begun to orbax, which goes on by itself."""
        import orbax.checkpoint as ocp

        if self._begun is None:
            return
        (step, state, data), self._begun = self._begun, None
        arrays, data_of = ocp.args.PyTreeSave(state), ocp.args.JsonSave(data)
        args = ocp.args.Composite(state=arrays, data=data_of)
        self._manager.save(step, args=args, force=True)

    def check(self) -> None:
        """Raise what went wrong with the checkpoint that was begun; wait for nothing."""
        self._manager.check_for_errors()

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is whole and on disk; raise what went wrong."""
        self.write()
        self._manager.wait_until_finished()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()


def _manager(
    run: Path, peers: Alone, *, beside: bool = False, **options: Any
) -> "ocp.CheckpointManager":
    """orbax's manager of a run's checkpoints.

    Its processes are named, so that they wait for each other over JAX's coordination service: by
    default their devices do, to whom steps give collectives at the same time. What is `beside` the
    state of the steps it brings to the host while these go on.
    """
    import orbax.checkpoint as ocp

    who = {peers.index} if peers.count == 1 else set(range(peers.count))
    several = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=who, barrier_sync_key_prefix="jaxkern"
    )
    first: Any = lambda path: not beside
    arrays = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=several, is_prioritized_key_fn=first
    )
    data = ocp.JsonCheckpointHandler(multiprocessing_options=several)
    options |= {"create": False, "multiprocessing_options": several}
    manager = ocp.CheckpointManager(
        (run / _CHECKPOINTS).resolve(),
        item_handlers={"state": arrays, "data": data},
        options=ocp.CheckpointManagerOptions(**options),
    )
    # Processes stop after the latest step that one of them asks JAX about. orbax would ask about
    # those it saves, which are over, and the run would never come to the step that is agreed on.
    manager.reached_preemption = lambda step: False
    return manager


def abstract(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Shapes, dtypes and one sharding for all, as `restore` wants them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )
