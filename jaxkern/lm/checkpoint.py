"""What a run directory holds, and saving and restoring it.

    config.json      the configuration, written first: its presence makes the directory a run
    corpus/          the packed text, or its tokens
    tokenizer.json   what made the tokens, where they are not bytes
    metrics.jsonl    one line per step
    checkpoints/N/   the state after N steps: params/ and optimizer/ by orbax, manifest.json
    loss.png

A checkpoint is written, while steps go on, under another name and renamed when it is whole and on
disk, so one that has its name is whole, whenever the process was killed. Its manifest lists the
SHA-256 of every file, so that damage done later is told from a good file before anything is read
into the model. Nothing is pickled: orbax stores arrays and JSON.
"""

import contextlib
import errno
import gc
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.lm.config import DEFAULTS, PRESETS, ModelConfig, RunError
from jaxkern.lm.data.files import sync_folder, write_atomically
from jaxkern.lm.processes import ALONE, Alone

if TYPE_CHECKING:  # orbax takes a second to import, which the first step need not wait for
    import orbax.checkpoint as ocp

FORMAT = "jaxkern-lm-1"
_LOCK = ".lock"


class DamagedError(RunError):
    """A checkpoint whose files are not those that were written: `what`, and what is before it."""

    def __init__(self, what: str, before: str):
        super().__init__(f"{what}; {before}")
        self.what = what


def check_fresh(out: Path) -> None:
    """Refuse a directory that already holds a run or anything else, or is no directory."""
    if out.exists() and not out.is_dir():
        raise RunError(f"--out {out} is a file; name a new folder")
    if (out / "config.json").exists():
        raise RunError(
            f"--out {out} already holds a run; add --resume to continue it, or name a new folder"
        )
    # A run that was stopped before it began leaves these.
    left = {"corpus", "tokenizer.json", _LOCK}
    if out.exists() and {path.name for path in out.iterdir()} - left:
        raise RunError(f"--out {out} is not empty; name a new folder")


@contextlib.contextmanager
def only_process(out: Path) -> Iterator[str]:
    """Hold the run directory; a second process that trains in it is refused.

    Inside, a file there has the text that is yielded, by which others tell that they see it.

    The lock belongs to the process, so a killed one leaves none behind. A file system without locks
    cannot tell of a second process.
    """
    import fcntl

    out.mkdir(parents=True, exist_ok=True)
    with open(out / _LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another process is training in {out}; stop it first or name another --out"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
        token = uuid.uuid4().hex
        file.write(token)
        file.flush()
        yield token


def is_held(out: Path, token: str) -> bool:
    """Whether this is the folder that the process which was given `token` holds."""
    try:
        return (out / _LOCK).read_text(encoding="utf-8") == token
    except OSError:
        return False


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Inside, an error that says only that a file is too large names this one, which is written.

    Those of orbax and safetensors become one of the system.
    """
    try:
        yield
    except Exception as error:
        large = os.strerror(errno.EFBIG)
        if large not in str(error) or getattr(error, "filename", None) is not None:
            raise
        raise OSError(errno.EFBIG, large, str(path)) from error


def read_config(run: Path) -> dict[str, Any]:
    """Reads config.json of a run directory.

    Raises:
        RunError: if it is missing, damaged or of another version.
    """
    path = run / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{run} holds no run (no config.json); give the --out folder of a jaxkern train"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged ({error}); restore it, or start a new run with another --out"
        ) from None
    written = config.get("format") if isinstance(config, dict) else None
    if written != FORMAT:
        raise RunError(
            f"{path} was not written by this version of jaxkern: its format is {written!r}, "
            f"not {FORMAT!r}; start a new run with another --out"
        )
    for name in ("flags", "model", "data"):
        if not isinstance(config.get(name), dict):
            raise RunError(f'{path} is damaged: it has no "{name}"; start a new run')
    return config


def save(
    run: Path,
    step: int,
    *,
    params: Any,
    optimizer: Any,
    model: ModelConfig,
    keep: int = DEFAULTS["keep"],
    peers: Alone = ALONE,
) -> None:
    """Write the checkpoint of a step, then remove all but the last ones.

    Args:
        run: the run directory.
        step: steps done.
        params: pytree of arrays; read alone for sampling.
        optimizer: pytree of arrays; whatever else a resumed run needs.
        model: the model's shape, to be compared when the checkpoint is read.
        keep: how many checkpoints stay.
        peers: the processes of the run, each of which writes its parts of the arrays.
    """
    folder = run / "checkpoints"
    partial = folder / f"{step}.partial"
    if peers.main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        with written(partial), _told_by_exceptions(), _checkpointer(peers) as checkpointer:
            checkpointer.save(partial.resolve() / "params", params)
            checkpointer.save(partial.resolve() / "optimizer", optimizer)
        if not peers.main:  # process 0 goes on when all have written
            return
        manifest = {
            "format": FORMAT,
            "step": step,
            "model": model.stored(),
            "files": _digests(partial),
        }
        write_atomically(partial / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    except BaseException:
        if peers.main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    os.rename(partial, folder / str(step))
    sync_folder(folder)
    for old in steps(run)[:-keep]:
        _remove(folder / str(old))


class Saver:
    """Writes the checkpoints of a run while its steps go on, one at a time.

    The arrays are copied on their devices, so that the next step may overwrite them, and a thread
    writes the copies. Where there is no room for these, the host takes them, and the caller waits
    until it has; of several processes it waits until all is written.

    Args:
        run: the run directory.
        like: pytree of jax.ShapeDtypeStruct with shardings, as the parameters and the rest are that
            are saved; ``None`` where the devices cannot hold a second state beside a step.
        peers: the processes of the run.
        **options: the others of :func:`save`.
    """

    def __init__(self, run: Path, *, like: tuple[Any, Any] | None, peers: Alone, **options: Any):
        self._run, self._options = run, {"peers": peers, **options}
        self._waits = like is None and peers.count > 1  # a host has a part of the arrays alone
        if like is not None:
            self._copy = _copy_on_devices(like)
        else:
            self._copy = (lambda tree: tree) if self._waits else _copy_to_host
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def start(self, step: int, params: Any, optimizer: Any, *, before: Callable[[], None]) -> None:
        """Begin the checkpoint of a step, when the one before is whole.

        The thread runs `before` first: what it waits for, such as a disk, no step waits for.
        """
        self.wait()
        params, optimizer = self._copy((params, optimizer))

        def write() -> None:
            before()
            save(self._run, step, params=params, optimizer=optimizer, **self._options)

        self._writing = self._thread.submit(write)
        if self._waits:
            self.wait()

    def check(self) -> None:
        """Raise what went wrong with the checkpoint that was begun; wait for nothing."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is whole and on disk; raise what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _copy_on_devices(like: Any) -> Callable[[Any], Any]:
    """A program that copies arrays like these where they are."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    copy = lambda tree: jax.tree.map(jnp.copy, tree)
    return jax.jit(copy, out_shardings=shardings).lower(like).compile()


def _copy_to_host(tree: Any) -> Any:
    return jax.tree.map(np.array, jax.device_get(tree))


def newest(run: Path, model: ModelConfig) -> tuple[int, list[str]]:
    """The step of the last checkpoint that is whole, and what is wrong with those after it.

    The step is 0 where there is no checkpoint.

    Raises:
        RunError: if the run has checkpoints and none is whole, or if one is of another model.
    """
    wrong = []
    for step in reversed(steps(run)):
        try:
            check(run, step, model)
        except DamagedError as error:
            wrong.append(error)
        else:
            return step, [*map(str, wrong)]
    if wrong:
        raise RunError(
            f"{wrong[0].what}, and none in {run / 'checkpoints'} is whole (steps "
            f"{', '.join(map(str, steps(run)))}); put one back from a copy, or train again with "
            "another --out"
        )
    return 0, []


def check(run: Path, step: int, model: ModelConfig) -> None:
    """Refuse a checkpoint that is damaged, of another version, or of another model.

    Raises:
        DamagedError: its files are not those that were written.
        RunError: it is of another version or of another model.
    """
    path = run / "checkpoints" / str(step)
    before = [other for other in steps(run) if other < step]
    other = f"the one before is of step {before[-1]}" if before else "there is none before it"

    def damaged(what: str) -> DamagedError:
        return DamagedError(f"checkpoint {path} is damaged: {what}", other)

    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        written, at = manifest["format"], manifest["step"]
        stored, files = manifest["model"], manifest["files"]
    except FileNotFoundError:
        raise damaged("it has no manifest.json") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged("its manifest.json is no manifest") from None
    try:
        stored = ModelConfig.from_stored(stored) if written == FORMAT else None
    except (TypeError, ValueError):
        stored = None
    if stored is None:
        raise RunError(
            f"checkpoint {path} was not written by this version of jaxkern, or its manifest.json "
            f"was edited; move that folder away, and then {other}"
        )
    if stored != model:
        raise RunError(
            f"checkpoint {path} is of {_preset(stored)}, and the run is of {_preset(model)}: "
            f"{differences(stored, model)}; move that folder away, and then {other}"
        )
    if at != step:
        raise damaged(f"by its manifest.json it is of step {at}")
    if _digests(path) != files:
        raise damaged("its files are not those that were written")


def set_aside(run: Path, newest: int) -> None:
    """Rename the damaged checkpoints after step `newest`, so that their steps can be saved."""
    for step in steps(run):
        if step > newest:
            path = run / "checkpoints" / str(step)
            aside = path.with_name(f"{step}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)


def differences(stored: ModelConfig, model: ModelConfig) -> str:
    """Says which fields of a stored model differ from `model`."""
    found, own = stored.stored(), model.stored()
    return ", ".join(
        f"{name} is {found[name]}, not {value}"
        for name, value in own.items()
        if name in found and found[name] != value
    )


def _preset(model: ModelConfig) -> str:
    names = (name for name, preset in PRESETS.items() if preset.model == model)
    return next((f"preset {name}" for name in names), "another model")


def restore(run: Path, step: int, name: str, like: Any, *, peers: Alone = ALONE) -> Any:
    """Read a part of a checkpoint that `check` has passed.

    Args:
        run: the run directory.
        step: which checkpoint.
        name: "params" or "optimizer".
        like: pytree of jax.ShapeDtypeStruct with shardings, as `abstract` makes it.
        peers: the processes that read it at the same time, each its parts.
    """
    path = (run / "checkpoints" / str(step) / name).resolve()
    with warnings.catch_warnings(), _told_by_exceptions(), _checkpointer(peers) as checkpointer:
        warnings.simplefilter("ignore")
        return checkpointer.restore(path, like)


def steps(run: Path) -> list[int]:
    """The steps of the finished checkpoints of a run, ascending."""
    names = (path.name for path in (run / "checkpoints").glob("*") if path.is_dir())
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def clean(run: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for suffix in ("partial", "removed"):
        for path in (run / "checkpoints").glob(f"*.{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


def abstract(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Shapes, dtypes and one sharding for all, as `restore` wants them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def _checkpointer(peers: Alone) -> "ocp.StandardCheckpointer":
    """A checkpointer that has written everything when its block ends.

    Its processes are named, so that they wait for each other over JAX's coordination service: by
    default their devices do, to whom steps give collectives at the same time.
    """
    import orbax.checkpoint as ocp

    processes = {peers.index} if peers.count == 1 else set(range(peers.count))
    options = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=processes)
    return ocp.StandardCheckpointer(multiprocessing_options=options)


@contextlib.contextmanager
def _told_by_exceptions() -> Iterator[None]:
    """Inside, an error of orbax reaches the caller as an exception alone.

    Its threads would also print it, with its stack trace, through the log and through the hooks of
    threads and of collected coroutines.
    """
    hooks = threading.excepthook, sys.unraisablehook
    log = logging.getLogger("absl")
    disabled = log.disabled
    try:
        threading.excepthook = sys.unraisablehook = lambda _: None
        log.disabled = True
        yield
    except Exception:
        gc.collect()  # the coroutines left behind complain when they are collected
        raise
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        log.disabled = disabled


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.parent / path.name != folder / "manifest.json":
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(folder).as_posix()] = digest
    return digests


def _remove(folder: Path) -> None:
    # Renamed first: a half-removed checkpoint must not keep a finished one's name.
    removed = folder.with_name(folder.name + ".removed")
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)
