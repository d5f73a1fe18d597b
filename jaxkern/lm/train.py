"""The training loop: a run from its flags to its last checkpoint."""

import contextlib
import math
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkern.lm import checkpoint, data, run, sample, stop
from jaxkern.lm.config import RunError, TrainConfig, resume_config
from jaxkern.lm.memory import REMEDY, check_least_memory, check_memory
from jaxkern.lm.model import count_params
from jaxkern.lm.program import (
    Placement,
    Programs,
    abstract_state,
    compile_programs,
    keep_programs,
    precision_policy,
)
from jaxkern.lm.report import BITS, MetricsLog, Progress, Speed, plot_losses, read_metrics
from jaxkern.lm.step import TrainState
from jaxkern.lm.stop import say


def train(flags: dict[str, Any], out: Path, *, resume: bool) -> None:
    """Train a model, or continue a run.

    Args:
        flags: the command line's flags that were given, by their names in TrainConfig.
        out: the run directory.
        resume: continue the run in `out` from its last checkpoint.

    Raises:
        RunError: whatever the user can put right.
        Stopped: a signal came; its message names the folder and the step that is saved.
    """
    try:
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
            with run.nothing_left_if_refused(out, fresh=not resume, created=created):
                begun = _begin(trainer, stored)
            if begun is not None:
                trainer.run(*begun)
    except stop.Stopped as stopped:
        stopped.message = stopped.message or run.where_it_stands(out)
        raise


def _begin(
    trainer: "Trainer", stored: dict[str, Any] | None
) -> tuple[Programs, TrainState, int, data.Corpus] | None:
    """What the steps start from: all that may be refused, what costs little before the rest.

    ``None`` for a run that has all its steps.
    """
    config, out, done = trainer.config, trainer.out, 0
    if stored is None:
        say("data     reading …")
        corpus = data.build_corpus(config.data, out / "corpus")
        data.check_length(corpus, config.seq_len)
    else:
        corpus, done = run.resumed(out, config, trainer.policy, stored)
    say(f"data     {corpus.describe()}")
    say(f"run      {out}" + (f", continued from step {done}" if done else ""))
    if done >= config.steps:
        say(f"already trained for {done} steps; give a greater --steps to go on")
        if not (out / "loss.png").exists():  # killed just before drawing it
            _plot(config, read_metrics(out / "metrics.jsonl"), out)
        return None
    programs = trainer.compile(fresh=not done)
    with stop.deferred():
        state = trainer.restore(done) if done else programs.init()
    if stored is None or stored["flags"] != run.flags_of(config):
        run.write_config(out, config, trainer.policy, trainer.devices, corpus)
    return programs, state, done, corpus


_AHEAD = 32  # steps, at most, that the host is ahead of the device


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
        say(f"model    {self.config.preset}, {count_params(state.params):,} parameters")
        say(f"device   {len(self.devices)} × {kinds}, {self.config.mixed_precision}")
        with stop.deferred():
            path = self.out / "metrics.jsonl"
            with contextlib.closing(MetricsLog(path, resume_at=done)) as log:
                state, speed = self._loop(programs, state, done, corpus, log)
            _plot(self.config, log.records, self.out)
        try:
            self._finish(state, log, speed)
        except stop.Stopped as stopped:
            stopped.message = (
                f"training is finished, and step {self.config.steps} is saved in {self.out}; "
                f"sample with: jaxkern sample --run {shlex.quote(str(self.out))}"
            )
            raise

    def _loop(
        self,
        programs: Programs,
        state: TrainState,
        done: int,
        corpus: data.Corpus,
        log: MetricsLog,
    ) -> tuple[TrainState, float]:
        """Returns the final state and the tokens per second of the steps alone.

        A request to stop ends it after a step, which is saved.
        """
        config = self.config
        evaluate = self._evaluation(programs, corpus.validation)
        if not done:
            first = {"step": 0} | evaluate(state.params)
            log.write([first])
            say(f"untrained: validation {first['validation_bits_per_byte']:.3f} bits/byte")
        speed = Speed(config.batch_size * config.seq_len)
        pending: list[tuple[int, dict[str, jax.Array]]] = []
        with contextlib.closing(Progress(start=done, steps=config.steps)) as progress:
            while done < config.steps:
                state, metrics = programs.step(state, self._windows(corpus.train, done))
                done += 1
                pending.append((done, metrics))
                if len(pending) > _AHEAD:  # so that a signal need not wait for many steps
                    jax.block_until_ready(pending[-_AHEAD][1])
                evaluating = done == config.steps or done % config.eval_every == 0
                saving = done == config.steps or done % config.checkpoint_every == 0
                asked = stop.requested() is not None
                if not (evaluating or saving or asked or done % config.log_every == 0):
                    continue  # the host runs ahead of the device
                records = self._fetch(pending, speed)
                pending = []
                if evaluating:
                    records[-1] |= evaluate(state.params)
                log.write(records)
                progress.update(records)
                if saving or stop.requested() is not None:
                    log.sync()
                    with progress.during(done, "saving"):
                        self._save(done, state)
                    if (signum := stop.requested()) is not None:
                        saved = f"step {done} of {config.steps} is saved in {self.out}"
                        raise stop.Stopped(signum, f"{saved}; {run.how_to_continue(self.out)}")
                speed.start()
        return state, speed.steady()

    def _windows(self, text: np.ndarray, step: int) -> jax.Array:
        """The batch of a step, in its parts."""
        config = self.config
        windows = data.train_batch(
            text,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            seed=config.seed,
            step=step,
        ).reshape(config.grad_accum, -1, config.seq_len + 1)
        return jax.device_put(windows, self.placement.second_split)

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
        check_least_memory(self.config, self.devices)
        say("compiling …")
        began = time.perf_counter()
        try:
            programs = compile_programs(self.config, self.placement, fresh=fresh)
        except OverflowError as error:  # a size beyond what JAX or the kernels count with
            raise RunError(f"the arrays of a step are too large ({error}); {REMEDY}") from None
        check_memory(programs.step, self.devices[0])
        say(f"compiled the step in {time.perf_counter() - began:.1f} s")
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
        """The state of a checkpoint that `checkpoint.newest` has passed."""
        like = abstract_state(self.config, self.placement)._asdict()
        params = checkpoint.restore(self.out, step, "params", like.pop("params"))
        rest = checkpoint.restore(self.out, step, "optimizer", like)
        return TrainState(params=params, **rest)

    def _finish(self, state: TrainState, log: MetricsLog, speed: float) -> None:
        config = self.config
        bits = log.records[-1]["validation_bits_per_byte"]
        say(f"\nvalidation {bits:.3f} bits/byte after {config.steps} steps")
        say(f"{speed:,.0f} tokens/s (steps alone, without compilation and validation)")
        say(f"{self.out}: config.json, metrics.jsonl, loss.png, checkpoints/{config.steps}")
        prompt = "" if config.data else "def "
        say("a sample:\n")
        graphdef = sample.decoder(config.model)
        params = jax.device_put(state.params, self.devices[0])
        sample.stream(graphdef, params, prompt, length=300, seed=config.seed)
        folder = shlex.quote(str(self.out))
        say(f"\n\nmore:  jaxkern sample --run {folder} --prompt {shlex.quote(prompt)}")


def _plot(config: TrainConfig, records: list[dict[str, Any]], out: Path) -> None:
    plot_losses(records, out / "loss.png", title=f"Preset {config.preset} on bytes")


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
    config.check_split(count)
    return available[:count]
