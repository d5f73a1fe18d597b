"""The training loop: a run from its flags to its last checkpoint."""

import contextlib
import dataclasses
import functools
import json
import math
import platform
import shutil
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxkern
from jaxkern.lm import checkpoint, data, sample
from jaxkern.lm.config import RunError, TrainConfig, resume_config
from jaxkern.lm.memory import check_memory
from jaxkern.lm.model import Options, count_params
from jaxkern.lm.report import BITS, MetricsLog, Progress, plot_losses
from jaxkern.lm.step import TrainState, init_state, loss_fn, make_model, make_train_step
from jaxkern.precision import Policy


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
    trainer = Trainer(config, out)
    with checkpoint.only_process(out):
        corpus = _resumed_corpus(stored, out) if stored else _new_corpus(config, out)
        if stored is None or stored["flags"] != _flags(config):
            _write_config(trainer, corpus)
        trainer.run(corpus)


def _new_corpus(config: TrainConfig, out: Path) -> data.Corpus:
    try:
        corpus = data.build_corpus(config.data, out / "corpus")
        data.check_length(corpus, config.seq_len)
    except BaseException:
        shutil.rmtree(out / "corpus", ignore_errors=True)
        raise
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
        try:
            self.policy = Policy.parse(config.mixed_precision)
        except ValueError as error:
            raise RunError(f"--mixed-precision {config.mixed_precision}: {error}") from None
        self.devices = _devices(config)
        if len(self.devices) > 1:
            mesh = jax.make_mesh(
                (len(self.devices),),
                ("batch",),
                axis_types=(jax.sharding.AxisType.Auto,),
                devices=self.devices,
            )
            self.replicated = NamedSharding(mesh, PartitionSpec())
            self.first_split = NamedSharding(mesh, PartitionSpec("batch"))
            self.second_split = NamedSharding(mesh, PartitionSpec(None, "batch"))
        else:
            one = SingleDeviceSharding(self.devices[0])
            self.replicated = self.first_split = self.second_split = one
        implementation: Any = None if config.implementation == "auto" else config.implementation
        self.graphdef = make_model(config.model, Options(self.policy, implementation, config.remat))

    def run(self, corpus: data.Corpus) -> None:
        """Train from the last checkpoint, if there is one, to the last step."""
        config = self.config
        done = max(checkpoint.steps(self.out), default=0)
        print(f"data     {corpus.describe()}")
        print(f"run      {self.out}" + (f", continued from step {done}" if done else ""))
        if done >= config.steps:
            print(f"already trained for {done} steps; give a greater --steps to go on")
            return
        state = self._restore(done) if done else self._initial_state()
        kinds = ", ".join(sorted({device.device_kind for device in self.devices}))
        print(f"model    {config.preset}, {count_params(state.params):,} parameters")
        print(f"device   {len(self.devices)} × {kinds}, {config.mixed_precision}", flush=True)
        with contextlib.closing(MetricsLog(self.out / "metrics.jsonl", resume_at=done)) as log:
            state, speed = self._loop(state, done, corpus, log)
            self._finish(state, log, speed)

    def _loop(
        self, state: TrainState, done: int, corpus: data.Corpus, log: MetricsLog
    ) -> tuple[TrainState, float]:
        """Returns the final state and the tokens per second of the steps alone."""
        config = self.config
        began = time.perf_counter()
        train_step = self._compiled_step(state)
        evaluate = self._evaluation(corpus.validation)
        if not done:
            first = {"step": 0} | evaluate(state.params)
            log.write([first])
            print(f"untrained: validation {first['validation_bits_per_byte']:.3f} bits/byte")
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)

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
                state, metrics = train_step(state, jax.device_put(windows, self.second_split))
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

    def _initial_state(self) -> TrainState:
        init = jax.jit(self._init, out_shardings=self.replicated)
        return init()

    def _init(self) -> TrainState:
        return init_state(self.config, self.policy)

    def _compiled_step(self, state: TrainState) -> jax.stages.Compiled:
        config = self.config
        shape = (
            config.grad_accum,
            config.batch_size // config.grad_accum,
            config.seq_len + 1,
        )
        windows = jax.ShapeDtypeStruct(shape, np.uint8, sharding=self.second_split)
        step = jax.jit(
            make_train_step(config, self.graphdef),
            donate_argnums=0,
            out_shardings=self.replicated,
        )
        compiled = step.lower(checkpoint.abstract(state, self.replicated), windows).compile()
        check_memory(compiled, self.devices[0])
        return compiled

    def _evaluation(self, text: np.ndarray) -> Callable[[Any], dict[str, float]]:
        """A function of the parameters: loss on a fixed part of the validation data."""
        config = self.config
        batches = [
            jax.device_put(batch, self.first_split)
            for batch in data.validation_batches(
                text,
                batch_size=config.batch_size // config.grad_accum,
                seq_len=config.seq_len,
                batches=config.eval_batches * config.grad_accum,
            )
        ]
        loss = jax.jit(functools.partial(loss_fn, self.graphdef), out_shardings=self.replicated)

        def evaluate(params: Any) -> dict[str, float]:
            losses = jax.device_get([loss(params, batch) for batch in batches])
            mean = float(np.mean(losses, dtype=np.float64))
            return {"validation_loss": mean, "validation_bits_per_byte": mean * BITS}

        return evaluate

    def _save(self, step: int, state: TrainState) -> None:
        rest = {key: value for key, value in state._asdict().items() if key != "params"}
        checkpoint.save(
            self.out, step, params=state.params, optimizer=rest, model=self.config.model
        )

    def _restore(self, step: int) -> TrainState:
        like = checkpoint.abstract(jax.eval_shape(self._init), self.replicated)
        rest = {key: value for key, value in like._asdict().items() if key != "params"}
        checkpoint.check(self.out, step, self.config.model)
        params = checkpoint.restore(self.out, step, "params", like.params)
        rest = checkpoint.restore(self.out, step, "optimizer", rest)
        return TrainState(params=params, **rest)

    def _finish(self, state: TrainState, log: MetricsLog, speed: float) -> None:
        config = self.config
        title = f"Mamba {config.preset} on bytes"
        plot_losses(log.records, self.out / "loss.png", title=title)
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
            f"--devices {count}: there are {len(available)} ({available[0].device_kind}); "
            f"choose at most that, or all"
        )
    if config.batch_size % (config.grad_accum * count):
        raise RunError(
            f"--batch-size {config.batch_size} cannot be split over --grad-accum "
            f"{config.grad_accum} × {count} devices; choose a multiple of "
            f"{config.grad_accum * count}, or fewer --devices"
        )
    return available[:count]
