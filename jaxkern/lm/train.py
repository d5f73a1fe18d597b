"""The training loop: a run from its flags to its last checkpoint."""

import contextlib
import dataclasses
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxkern
from jaxkern.lm import checkpoint, data, sample
from jaxkern.lm.config import RunError, TrainConfig, resume_config
from jaxkern.lm.memory import check_memory
from jaxkern.lm.model import count_params
from jaxkern.lm.program import (
    Placement,
    Programs,
    abstract_state,
    compile_programs,
    keep_programs,
    precision_policy,
)
from jaxkern.lm.report import BITS, MetricsLog, Progress, plot_losses, read_metrics
from jaxkern.lm.step import TrainState


def train(flags: dict[str, Any], out: Path, *, resume: bool) -> None:
    """Train a model, or continue a run.

    Args:
        flags: the command line's flags that were given, by their names in TrainConfig.
        out: the run directory.
        resume: continue the run in `out` from its last checkpoint.

    Raises:
        RunError: whatever the user can put right.
    """
    if resume:
        stored = checkpoint.read_config(out)
        config = resume_config(stored["flags"], flags)
    else:
        stored = None
        config = TrainConfig.from_flags(flags)
        checkpoint.check_fresh(out)
    keep_programs()
    trainer = Trainer(config, out)
    created = not out.exists()
    with checkpoint.only_process(out):
        with _nothing_left_if_refused(out, fresh=not resume, created=created):
            corpus = _resumed_corpus(stored, out) if stored else _new_corpus(config, out)
            done = max(checkpoint.steps(out), default=0)
            print(f"data     {corpus.describe()}")
            print(f"run      {out}" + (f", continued from step {done}" if done else ""))
            if done >= config.steps:
                print(f"already trained for {done} steps; give a greater --steps to go on")
                if not (out / "loss.png").exists():  # killed just before drawing it
                    _plot(config, read_metrics(out / "metrics.jsonl"), out)
                return
            programs = trainer.compile(fresh=not done)
            state = trainer.restore(done) if done else programs.init()
            if stored is None or stored["flags"] != _flags(config):
                _write_config(trainer, corpus)
        trainer.run(programs, state, done, corpus)


@contextlib.contextmanager
def _nothing_left_if_refused(out: Path, *, fresh: bool, created: bool) -> Iterator[None]:
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


def _new_corpus(config: TrainConfig, out: Path) -> data.Corpus:
    corpus = data.build_corpus(config.data, out / "corpus")
    data.check_length(corpus, config.seq_len)
    return corpus


def _resumed_corpus(stored: dict[str, Any], out: Path) -> data.Corpus:
    checkpoint.clean(out)
    corpus = data.open_corpus(out / "corpus")
    if corpus.info["fingerprint"] != stored["data"]["fingerprint"]:
        raise RunError(f"{out / 'corpus'} is not the data that this run began with")
    return corpus


def _flags(config: TrainConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _write_config(trainer: "Trainer", corpus: data.Corpus) -> None:
    content = {
        "format": checkpoint.FORMAT,
        "flags": _flags(trainer.config),
        "model": dataclasses.asdict(trainer.config.model),
        "precision": str(trainer.policy),
        "data": corpus.info,
        "devices": [device.device_kind for device in trainer.devices],
        "versions": {"python": platform.python_version(), "jaxkern": jaxkern.__version__}
        | {
            name: metadata.version(name)
            for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
        },
    }
    text = json.dumps(content, indent=2) + "\n"
    data.write_atomically(trainer.out / "config.json", text)


class Trainer:
    """A run's model, devices and compiled programs."""

    def __init__(self, config: TrainConfig, out: Path):
        self.config = config
        self.out = out
        self.policy = precision_policy(config)
        self.devices = _devices(config)
        self.placement = Placement.on(self.devices)

    def run(self, programs: Programs, state: TrainState, done: int, corpus: data.Corpus) -> None:
        """Train from step `done` to the last, and leave the results in the run directory."""
        kinds = ", ".join(sorted({device.device_kind for device in self.devices}))
        print(f"model    {self.config.preset}, {count_params(state.params):,} parameters")
        print(f"device   {len(self.devices)} × {kinds}, {self.config.mixed_precision}", flush=True)
        with contextlib.closing(MetricsLog(self.out / "metrics.jsonl", resume_at=done)) as log:
            state, speed = self._loop(programs, state, done, corpus, log)
            self._finish(state, log, speed)

    def _loop(
        self,
        programs: Programs,
        state: TrainState,
        done: int,
        corpus: data.Corpus,
        log: MetricsLog,
    ) -> tuple[TrainState, float]:
        """Returns the final state and the tokens per second of the steps alone."""
        config = self.config
        evaluate = self._evaluation(programs, corpus.validation)
        if not done:
            first = {"step": 0} | evaluate(state.params)
            log.write([first])
            bits = first["validation_bits_per_byte"]
            print(f"untrained: validation {bits:.3f} bits/byte", flush=True)
        speed = Speed(config.batch_size * config.seq_len)
        pending: list[tuple[int, dict[str, jax.Array]]] = []
        with contextlib.closing(Progress(start=done, steps=config.steps)) as progress:
            while done < config.steps:
                windows = data.train_batch(
                    corpus.train,
                    batch_size=config.batch_size,
                    seq_len=config.seq_len,
                    seed=config.seed,
                    step=done,
                ).reshape(config.grad_accum, -1, config.seq_len + 1)
                windows = jax.device_put(windows, self.placement.second_split)
                state, metrics = programs.step(state, windows)
                done += 1
                pending.append((done, metrics))
                evaluating = done == config.steps or done % config.eval_every == 0
                saving = done == config.steps or done % config.checkpoint_every == 0
                if not (evaluating or saving or done % config.log_every == 0):
                    continue  # the host runs ahead of the device
                records = self._fetch(pending, speed)
                pending = []
                if evaluating:
                    records[-1] |= evaluate(state.params)
                log.write(records)
                progress.update(records)
                if saving:
                    log.sync()
                    self._save(done, state)
                speed.start()
        return state, speed.steady()

    def _fetch(self, pending, speed: "Speed") -> list[dict[str, Any]]:
        """Wait for the pending steps and turn their metrics into records."""
        fetched = jax.device_get([metrics for _, metrics in pending])
        tokens_per_second = speed.stop(len(pending))
        records = []
        for (step, _), metrics in zip(pending, fetched, strict=True):
            loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
            record = {
                "step": step,
                "loss": loss,
                "bits_per_byte": loss * BITS,
                "grad_norm": grad_norm,
                "learning_rate": float(metrics["learning_rate"]),
                "tokens_per_second": tokens_per_second,
            }
            if "skipped" in metrics:
                record["skipped"] = int(metrics["skipped"])
                record["loss_scale"] = float(metrics["loss_scale"])
            elif not math.isfinite(loss) or not math.isfinite(grad_norm):
                raise RunError(
                    f"training diverged: at step {step} the loss is {loss} and the gradient norm "
                    f"{grad_norm}; start a new run with a lower --lr than {self.config.lr}"
                )
            records.append(record)
        return records

    def compile(self, *, fresh: bool) -> Programs:
        """Compile what the run executes, and refuse a step that memory cannot hold."""
        began = time.perf_counter()
        programs = compile_programs(self.config, self.placement, fresh=fresh)
        check_memory(programs.step, self.devices[0])
        print(f"compiled the step in {time.perf_counter() - began:.1f} s", flush=True)
        return programs

    def _evaluation(
        self, programs: Programs, text: np.ndarray
    ) -> Callable[[Any], dict[str, float]]:
        """A function of the parameters: loss on a fixed part of the validation data."""
        config = self.config
        batches = [
            jax.device_put(batch, self.placement.first_split)
            for batch in data.validation_batches(
                text,
                batch_size=config.batch_size // config.grad_accum,
                seq_len=config.seq_len,
                batches=config.eval_batches * config.grad_accum,
            )
        ]

        def evaluate(params: Any) -> dict[str, float]:
            losses = jax.device_get([programs.loss(params, batch) for batch in batches])
            mean = float(np.mean(losses, dtype=np.float64))
            return {"validation_loss": mean, "validation_bits_per_byte": mean * BITS}

        return evaluate

    def _save(self, step: int, state: TrainState) -> None:
        rest = {key: value for key, value in state._asdict().items() if key != "params"}
        checkpoint.save(
            self.out, step, params=state.params, optimizer=rest, model=self.config.model
        )

    def restore(self, step: int) -> TrainState:
        """The state of a checkpoint."""
        checkpoint.check(self.out, step, self.config.model)
        like = abstract_state(self.config, self.placement)._asdict()
        params = checkpoint.restore(self.out, step, "params", like.pop("params"))
        rest = checkpoint.restore(self.out, step, "optimizer", like)
        return TrainState(params=params, **rest)

    def _finish(self, state: TrainState, log: MetricsLog, speed: float) -> None:
        config = self.config
        _plot(config, log.records, self.out)
        bits = log.records[-1]["validation_bits_per_byte"]
        print(f"\nvalidation {bits:.3f} bits/byte after {config.steps} steps")
        print(f"{speed:,.0f} tokens/s (steps alone, without compilation and validation)")
        print(f"{self.out}: config.json, metrics.jsonl, loss.png, checkpoints/{config.steps}")
        prompt = "" if config.data else "def "
        print("a sample:\n")
        graphdef = sample.decoder(config.model)
        params = jax.device_put(state.params, self.devices[0])
        sample.stream(graphdef, params, prompt, length=300, seed=config.seed)
        print(f"\n\nmore:  jaxkern sample --run {self.out} --prompt {prompt!r}")


class Speed:
    """Tokens per second of the steps, evaluations and checkpoints left out."""

    def __init__(self, tokens_per_step: int):
        self._tokens = tokens_per_step
        self._segments: list[tuple[int, float]] = []
        self.start()

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self, steps: int) -> float:
        """Close the segment of so many finished steps; its tokens per second."""
        seconds = time.perf_counter() - self._began
        self._segments.append((steps, seconds))
        return steps * self._tokens / seconds

    def steady(self) -> float:
        """Over all segments but the first, which may hold one-time work, if there are others."""
        segments = self._segments[1:] or self._segments
        return self._tokens * sum(n for n, _ in segments) / sum(s for _, s in segments)


def _plot(config: TrainConfig, records: list[dict[str, Any]], out: Path) -> None:
    plot_losses(records, out / "loss.png", title=f"Mamba {config.preset} on bytes")


def _devices(config: TrainConfig) -> list[Any]:
    """The devices to train on."""
    available = jax.local_devices()
    if config.devices == "auto":
        count = len(available) if available[0].platform != "cpu" else 1
    elif config.devices == "all":
        count = len(available)
    else:
        count = int(config.devices)
    if count > len(available):
        raise RunError(
            f"--devices {count} is more than this machine's {len(available)} "
            f"({available[0].device_kind}); choose at most that, or all"
        )
    if config.batch_size % (config.grad_accum * count):
        raise RunError(
            f"--batch-size {config.batch_size} cannot be split over --grad-accum "
            f"{config.grad_accum} × {count} devices; choose a multiple of "
            f"{config.grad_accum * count}, or fewer --devices"
        )
    return available[:count]
