"""A run's folder before and around its steps: begun, resumed, left as it was, continued."""

import contextlib
import dataclasses
import math
import operator
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxkern.lm import checkpoint, data
from jaxkern.lm.config import (
    ALIASES,
    PRESETS,
    RunError,
    SplitError,
    TrainConfig,
    axes_of,
    check_axes,
    with_devices,
)
from jaxkern.lm.processes import Alone


def begun_with(flags: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that begins with a checkpoint of Hugging Face, and its model's shape.

    What is not given has the default of the preset whose model is most like the checkpoint's.

    Raises:
      RunError: the folder holds no such checkpoint, or does not say what its tokens are.
    """
    from jaxkern.lm import hf

    folder = flags["init_hf"]
    shape = hf.model_config(hf.read_config(Path(folder)))
    tokenizer = folder if (Path(folder) / "tokenizer.json").exists() else "bytes"
    if tokenizer == "bytes" and "tokenizer" not in flags and shape.vocab_size > 256:
        raise RunError(
            f"--init-hf {folder} holds no tokenizer.json, which says what its {shape.vocab_size} "
            "tokens are; put it there, or add --tokenizer with its path, or --tokenizer bytes to "
            "train on bytes all the same"
        )
    given = {"tokenizer": tokenizer} | flags
    if given.get("mesh"):
        given.pop("parallel", None)  # of a run's file, whose mesh counts
    own = flags.get("model", {})
    vocab_size = given.get("vocab_size", own.get("vocab_size", shape.vocab_size))
    if vocab_size != shape.vocab_size:
        raise RunError(
            f"--vocab-size {vocab_size} is not that of --init-hf {folder}, "
            f"{shape.vocab_size}; leave it out"
        )
    if given["tokenizer"] == "bytes" and shape.vocab_size < 256:
        raise RunError(
            f"--init-hf {folder} has a vocabulary of {shape.vocab_size} tokens, and bytes are 256; "
            "name a checkpoint of at least as many"
        )

    def unlike(name: str) -> tuple[float, ...]:
        model = PRESETS[name].model
        width = abs(math.log(model.d_model / shape.d_model))
        return model.block is not shape.block, width, abs(model.n_layers - shape.n_layers)

    if other := own.keys() - {"dropout", "vocab_size"}:
        raise RunError(
            f"--model.{min(other)} is what the checkpoint of --init-hf {folder} has; leave it out"
        )
    shape = dataclasses.replace(shape, dropout=own.get("dropout", 0.0))
    return {"preset": min(PRESETS, key=unlike)} | given | {"model": shape}


def weights(config: TrainConfig) -> Any:
    """The parameters of the checkpoint that a run begins with.

    Raises:
      RunError: it cannot be read, or is not the one that the run was begun with.
    """
    from jaxkern.lm import hf

    shape, params = hf.load(config.init_hf)
    shape = dataclasses.replace(shape, dropout=config.model.dropout)
    if differing := checkpoint.differences(shape.stored(), config.model.stored()):
        raise RunError(
            f"--init-hf {config.init_hf} is not the checkpoint that this run was begun with: "
            f"{differing}; put it back, or start a new run"
        )
    return params


def _check_tokens(config: TrainConfig) -> None:
    """Refuse what documents could not be tokenised for or written to, before any is read.

    Raises:
      RunError: the model has too few tokens, or --data-cache cannot be written to.
    """
    if config.vocab_size is not None:
        config.for_tokens(data.size_of(config.tokenizer))
    if config.data_cache is not None:
        folder = Path(config.data_cache)
        try:
            there = next(path for path in (folder, *folder.parents) if path.exists())
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            raise RunError(
                f"--data-cache {folder} cannot be written to ({error.strerror}); name another "
                "folder, or leave it out"
            ) from None


def changed(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """The configuration of a resumed run.

    Args:
        config: that of its folder.
        changes: flags that are given with --resume, by their names in the configuration.

    Raises:
        RunError: a flag differs that must not.
    """
    check_axes(changes)
    changes = with_devices({ALIASES.get(name, name): value for name, value in changes.items()})
    if changes.keys() & {"parallel", "mesh"}:  # one of them says how devices are used anew
        config = dataclasses.replace(config, mesh="", devices="auto")
    elif "devices" in changes and config.mesh:
        config = _on_devices(config, changes["devices"])
    for name, value in changes.items():
        if value == (old := operator.attrgetter(name)(config)):
            continue
        if name not in CHANGEABLE and not (name == "steps" and value > old):
            rule = "can only grow" if name == "steps" else "cannot change"
            raise RunError(
                f"--{name.replace('_', '-')} {_show(value)} differs from the run's {_show(old)} "
                f"and {rule} on --resume; leave it out, or start a new run with another --out"
            )
        config = dataclasses.replace(config, **{name: value})
    return config


# What a resumed run may do otherwise: its arithmetic is the same, but for the order of sums.
CHANGEABLE = (
    *("devices", "parallel", "mesh", "implementation", "remat"),
    *("log_every", "log_to", "checkpoint_every", "keep", "data_cache"),
)


def _on_devices(config: TrainConfig, devices: str) -> TrainConfig:
    """The configuration of a run that has a mesh, on what --devices alone asks for.

    A mesh of one axis has its other size. Of several it cannot be told which one changes, and a
    model may be too large to be split otherwise.

    Raises:
      RunError: the mesh has several axes, and another number of devices.
    """
    axes = axes_of(config.mesh)
    shared = [axis for axis, size in axes.items() if size > 1]
    if devices == str(math.prod(axes.values())):
        return config
    if len(shared) > 1 and devices != "1":
        raise RunError(
            f"--devices {devices} does not say how they share the model, which --mesh "
            f"{config.mesh} of the run splits between {math.prod(axes.values())}; add --mesh or "
            "--parallel"
        )
    parallel = shared[0] if len(shared) == 1 else config.parallel
    return dataclasses.replace(config, mesh="", parallel=parallel)


@contextlib.contextmanager
def with_stored_axes(changes: dict[str, Any]) -> Iterator[None]:
    """Inside, an error about devices says that the run names them where no flag does.

    Raises:
      RunError: that one.
    """
    try:
        yield
    except SplitError as error:
        if changes.keys() & {"devices", "parallel", "mesh"}:
            raise
        raise RunError(
            f"the run's {error.what}; choose another for --resume by --mesh, --parallel or "
            "--devices"
        ) from None


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# The folder


_SEEING = 20.0  # seconds in which a shared file system shows what another host has written


@contextlib.contextmanager
def held(out: Path, peers: Alone) -> Iterator[None]:
    """Inside, the folder is that of these processes alone, and all of them see it.

    Raises:
      RunError: another run holds it, or this process does not see the folder of process 0.
    """
    if peers.main:
        with checkpoint.only_process(out) as token:
            peers.share(lambda: token)
            yield
        return
    token, began = peers.share(lambda: ""), time.monotonic()
    while checkpoint.text_of(out / checkpoint.LOCK) != token:
        if time.monotonic() - began > _SEEING:
            raise RunError(
                f"--out {out} is not the folder that process 0 has; name one on a file system "
                "that all hosts share, by the same path"
            )
        time.sleep(0.2)
    yield


@contextlib.contextmanager
def nothing_left_if_refused(out: Path, *, fresh: bool, created: bool) -> Iterator[None]:
    """Leave a folder where a new run could not begin as it was, to be named again.

    But for tokens, which the run that names it again need not make again.
    """
    try:
        yield
    except BaseException:
        if fresh and not checkpoint.is_run(out):
            if not data.has_tokens(out):
                shutil.rmtree(out / "corpus", ignore_errors=True)
            for name in checkpoint.BEFORE:
                (out / name).unlink(missing_ok=True)
            if created:
                with contextlib.suppress(OSError):
                    out.rmdir()
        raise


def where_it_stands(out: Path, peers: Alone) -> str:
    """How a run that was stopped outside its steps is continued."""
    if not checkpoint.is_run(out):
        if data.has_tokens(out):
            return (
                f"training had not begun; {out / 'corpus'} keeps the tokens that are made, and the "
                "same command with that --out goes on"
            )
        return f"training had not begun, and nothing is kept in {out}"
    last = max(checkpoint.steps(out), default=None)
    saved = "no step is saved yet" if last is None else f"step {last} is saved"
    return f"{saved} in {out}; {how_to_continue(out, peers)}"


def how_to_continue(out: Path, peers: Alone) -> str:
    """How the processes of a run go on with it."""
    flags = f"--resume --out {shlex.quote(str(out))}"
    if peers.count == 1:
        return f"continue with: jaxkern train {flags}"
    # Only that command tells each process which one it is, and may be that of a launcher.
    return f"continue with the same command for every process, and {flags}"


def corpus_of(out: Path, config: TrainConfig, peers: Alone) -> Any:
    """The data of a new run, which process 0 makes and the others open."""
    if not peers.main:
        return data.reopen(config, out, peers.share(dict))
    _check_tokens(config)
    with checkpoint.written(Path(config.data_cache or out / "corpus")):
        corpus = data.build(config, out)
    peers.share(lambda: corpus.info)
    return corpus
