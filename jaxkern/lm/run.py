"""A run's folder before and around its steps: begun, resumed, left as it was, continued."""

import contextlib
import dataclasses
import json
import math
import platform
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxkern
from jaxkern.lm import checkpoint, data
from jaxkern.lm.config import PRESETS, ModelConfig, RunError, TrainConfig
from jaxkern.lm.loader import check_has_tokenizer
from jaxkern.lm.processes import Alone
from jaxkern.lm.report import read_metrics
from jaxkern.lm.stop import say
from jaxkern.precision import Policy


def begun_with(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of a run that begins with a checkpoint of Hugging Face, and its model's shape.

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
    if given["tokenizer"] != "bytes":
        given.setdefault("vocab_size", shape.vocab_size)
    if given.get("vocab_size", shape.vocab_size) != shape.vocab_size:
        raise RunError(
            f"--vocab-size {given['vocab_size']} is not that of --init-hf {folder}, "
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

    return {"preset": min(PRESETS, key=unlike)} | given | {"shape": shape}


def weights(config: TrainConfig) -> Any:
    """The parameters of the checkpoint that a run begins with.

    Raises:
      RunError: it cannot be read, or is not the one that config.json describes.
    """
    from jaxkern.lm import hf

    shape, params = hf.load(config.init_hf)
    if shape != config.model:
        raise RunError(
            f"--init-hf {config.init_hf} is not the checkpoint that this run was begun with: "
            f"{checkpoint.differences(shape, config.model)}; put it back, or start a new run"
        )
    return params


def check_tokens(config: TrainConfig) -> None:
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
    while not checkpoint.is_held(out, token):
        if time.monotonic() - began > _SEEING:
            raise RunError(
                f"--out {out} is not the folder that process 0 has; name one on a file system "
                "that all hosts share, by the same path"
            )
        time.sleep(0.2)
    yield


def read(out: Path, config: TrainConfig, peers: Alone) -> Any:
    """The data of a new run, which process 0 makes and the others open."""
    if peers.main:
        with checkpoint.written(Path(config.data_cache or out / "corpus")):
            corpus = data.build(config, out)
        peers.share(lambda: corpus.info)
        return corpus
    return data.reopen(config, out, peers.share(dict))


def resumed(
    out: Path, config: TrainConfig, policy: Policy, stored: dict[str, Any], peers: Alone
) -> tuple[Any, int]:
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
    if peers.main:
        checkpoint.clean(out)
    if config.tokenizer != "bytes":
        check_has_tokenizer(out, config.tokenizer)
    corpus = data.reopen(config, out, stored["data"])
    return corpus, peers.share(lambda: _last_whole(out, config))


def _last_whole(out: Path, config: TrainConfig) -> int:
    """The step of the last whole checkpoint; those after it are set aside."""
    read_metrics(out / "metrics.jsonl")
    done, damaged = checkpoint.newest(out, config.model)
    for line in damaged:
        say(f"{line}; it is renamed to .damaged, and the run goes back to step {done}")
    checkpoint.set_aside(out, done)
    return done


def stored_shape(out: Path, stored: dict[str, Any]) -> ModelConfig:
    """The shape of the model by config.json, `stored`."""
    try:
        return ModelConfig.from_stored(stored["model"])
    except (TypeError, ValueError) as error:
        raise RunError(
            f"{out / 'config.json'}: model cannot be read ({error}); put it back, or start a new "
            "run"
        ) from None


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


def where_it_stands(out: Path, peers: Alone) -> str:
    """How a run that was stopped outside its steps is continued."""
    if not (out / "config.json").exists():
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


@contextlib.contextmanager
def nothing_left_if_refused(out: Path, *, fresh: bool, created: bool) -> Iterator[None]:
    """Leave a folder where a new run could not begin as it was, to be named again.

    But for tokens, which the run that names it again need not make again.
    """
    try:
        yield
    except BaseException:
        if fresh:
            if not data.has_tokens(out):
                shutil.rmtree(out / "corpus", ignore_errors=True)
            (out / ".lock").unlink(missing_ok=True)
        if fresh and created:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise


def flags_of(config: TrainConfig) -> dict[str, Any]:
    """A configuration as config.json holds it."""
    flags = dataclasses.asdict(config)
    del flags["shape"]
    return json.loads(json.dumps(flags))


def write_config(
    out: Path, config: TrainConfig, policy: Policy, devices: Sequence[Any], corpus: Any
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
    if config.tokenizer != "bytes":
        data.write_atomically(out / "tokenizer.json", corpus.tokenizer.stored())
    data.write_atomically(out / "config.json", json.dumps(content, indent=2) + "\n")
