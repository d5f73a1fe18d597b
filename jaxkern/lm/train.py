"""The training loop: a run from its flags to its last checkpoint."""

import contextlib
import dataclasses
import functools
import math
import shlex
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.lm import checkpoint, data, run, sample, stop, trackers
from jaxkern.lm.config import DEFAULTS, RunError, SplitError, TrainConfig, axes_of
from jaxkern.lm.evaluate import evaluation
from jaxkern.lm.memory import REMEDY, check_least_memory, check_memory, has_room
from jaxkern.lm.model import count_params
from jaxkern.lm.processes import ALONE, Alone
from jaxkern.lm.profiling import Profile
from jaxkern.lm.program import (
    Placement,
    Programs,
    abstract_state,
    compile_programs,
    keep_programs,
    precision_policy,
)
from jaxkern.lm.report import (
    BITS,
    MetricsLog,
    Progress,
    Speed,
    UnwrittenLog,
    plot_losses,
    read_metrics,
    validation_told,
)
from jaxkern.lm.resume import resume_config, with_stored_axes
from jaxkern.lm.step import TrainState, init_state
from jaxkern.lm.stop import say
from jaxkern.precision import DynamicLossScale


def train(
    flags: dict[str, Any],
    out: Path,
    *,
    resume: bool,
    profile: str | None = None,
    peers: Alone = ALONE,
) -> None:
    """Train a model, or continue a run.

    Args:
        flags: the command line's flags that were given, by their names in TrainConfig.
        out: the run directory.
        resume: continue the run in `out` from its last checkpoint.
        profile: the steps to trace, as STEP:COUNT or STEP; "auto" for some soon after the first.
        peers: the processes of the run, as this one sees them; without them it is alone.

    Raises:
        RunError: whatever the user can put right.
        Stopped: a signal came; its message names the folder and the step that is saved.
    """
    try:
        if resume:
            stored = peers.share(lambda: checkpoint.read_config(out))
            config = resume_config(stored["flags"], flags)
            if config.init_hf:
                config = dataclasses.replace(config, shape=run.stored_shape(out, stored))
        else:
            stored = None
            given = run.begun_with(flags) if flags.get("init_hf") else flags
            config = TrainConfig.from_flags(given)
            peers.share(lambda: checkpoint.check_fresh(out))
        if peers.main:
            trackers.check(config.log_to)
        keep_programs()
        with with_stored_axes(flags) if resume else contextlib.nullcontext():
            trainer = Trainer(config, out, peers)
        created = not out.exists()
        with run.held(out, peers):
            fresh = not resume and peers.main
            with run.nothing_left_if_refused(out, fresh=fresh, created=created):
                begun = _begin(trainer, stored, profile)
            if begun is not None:
                trainer.run(*begun)
        peers.trained()
    except stop.Stopped as stopped:
        stopped.message = stopped.message or run.where_it_stands(out, peers)
        raise


def _begin(
    trainer: "Trainer", stored: dict[str, Any] | None, profile: str | None
) -> tuple[Programs, TrainState, int, Any, Profile] | None:
    """What the steps start from: all that may be refused, what costs little before the rest.

    ``None`` for a run that has all its steps.
    """
    config, out, peers, done = trainer.config, trainer.out, trainer.peers, 0
    folder = out / (f"profile-{peers.index}" if peers.index else "profile")
    profiled = functools.partial(Profile, folder, profile, end=config.steps)
    traced = weights = None
    if stored is None:
        traced = profiled(done=0)
        if peers.main:
            run.check_tokens(config)
        weights = run.weights(config) if config.init_hf else None
        say("data     reading …")
        corpus = run.read(out, config, peers)
        config = trainer.take(config.for_tokens(corpus.tokenizer.size))
    else:
        corpus, done = run.resumed(out, config, trainer.policy, stored, peers)
    say(f"data     {corpus.describe()}")
    say(f"run      {out}" + (f", continued from step {done}" if done else ""))
    if done >= config.steps:
        say(f"already trained for {done} steps; give a greater --steps to go on")
        if peers.main and not (out / "loss.png").exists():  # killed just before drawing it
            _plot(config, read_metrics(out / "metrics.jsonl"), out)
        return None
    traced = traced or profiled(done=done)
    if stored is not None and config.init_hf and not done:
        weights = run.weights(config)
    programs = trainer.compile(fresh=not done and weights is None)
    with stop.deferred():
        if done:
            state = trainer.restore(done)
        else:
            state = programs.init() if weights is None else trainer.begin_with(weights)
    if peers.main and (stored is None or stored["flags"] != run.flags_of(config)):
        run.write_config(out, config, trainer.policy, trainer.devices, corpus)
    return programs, state, done, corpus, traced


_AHEAD = 32  # steps, at most, that the host is ahead of the device


class Trainer:
    """A run's model, devices and compiled programs.

    Attributes:
      peers: the processes of the run.
      devices: of all of them.
      device: the first of this one.
    """

    def __init__(self, config: TrainConfig, out: Path, peers: Alone):
        self.out, self.peers = out, peers
        self.policy = precision_policy(config)
        self.devices = _devices(config, peers)
        self.device = self.devices[0] if peers.count == 1 else jax.local_devices()[0]
        self.take(config)

    def take(self, config: TrainConfig) -> TrainConfig:
        """Train by `config`; returns it."""
        self.config, self.placement = config, Placement.of(config, self.devices)
        return config

    def run(
        self,
        programs: Programs,
        state: TrainState,
        done: int,
        corpus: Any,
        profile: Profile,
    ) -> None:
        """Train from step `done` to the last, and leave the results in the run directory."""
        kinds = ", ".join(sorted({device.device_kind for device in self.devices}))
        name = self.config.init_hf or self.config.preset
        say(f"model    {name}, {count_params(state.params):,} parameters")
        say(f"device   {len(self.devices)} × {kinds}, {self.config.mixed_precision}")
        if self.placement.split.axes:
            say(f"mesh     {self.placement.split.mesh}")
        elif self.config.parallel != DEFAULTS["parallel"]:
            say(f"mesh     none: one device has what --parallel {self.config.parallel} would share")
        with stop.deferred():
            path = self.out / "metrics.jsonl"
            opened = MetricsLog(path, resume_at=done) if self.peers.main else UnwrittenLog()
            with contextlib.closing(opened) as log:
                if self.peers.main:
                    stored = checkpoint.read_config(self.out)
                    log.follow(trackers.opened(self.config, self.out, stored, log.records))
                state, speed = self._loop(programs, state, done, corpus, log, profile)
            self.peers.trained()
            if not self.peers.main:
                return
            _plot(self.config, log.records, self.out)
        try:
            self._finish(state, corpus, log, speed)
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
        corpus: Any,
        log: MetricsLog,
        profile: Profile,
    ) -> tuple[TrainState, float]:
        """Returns the final state and the tokens per second of the steps alone.

        A request to stop ends it after a step, which is saved.
        """
        config = self.config
        evaluate = evaluation(config, corpus, self.placement, programs)
        batches = corpus.batches(config)
        batches.set_state({"next_index": done})
        per_byte = corpus.tokens_per_byte
        if not done:
            first = {"step": 0} | evaluate(state.params)
            log.write([first])
            say(f"untrained: {validation_told(first)}")
        speed = Speed(config.batch_size * config.seq_len)
        pending: list[tuple[int, dict[str, jax.Array]]] = []
        saver = self._saver(programs)
        sizes = {"steps": config.steps, "tokens_per_byte": per_byte}
        progress = Progress(start=done, shown=self.peers.main, **sizes)
        with (
            contextlib.closing(progress),
            contextlib.closing(saver),
            contextlib.closing(profile),
        ):
            while done < config.steps:
                with profile.step(done + 1, state, speed):
                    state, metrics = programs.step(state, self._windows(next(batches)))
                done += 1
                profile.after(done, state, speed, progress)
                pending.append((done, metrics))
                if len(pending) > _AHEAD:  # so that a signal need not wait for many steps
                    jax.block_until_ready(pending[-_AHEAD][1])
                evaluating = done == config.steps or done % config.eval_every == 0
                saving = done == config.steps or done % config.checkpoint_every == 0
                signum = self.peers.stop_after(done)
                asked = signum is not None
                if not (evaluating or saving or asked or done % config.log_every == 0):
                    continue  # the host runs ahead of the device
                records = self._fetch(pending, speed, per_byte)
                pending = []
                if evaluating:
                    records[-1] |= evaluate(state.params)
                log.write(records)
                progress.update(records)
                saver.check()
                if signum is None and self.peers.count == 1:
                    signum = stop.requested()  # one that came since
                if saving or signum is not None:
                    waits = signum is not None or done == config.steps
                    with progress.during(done, "saving" if waits else "the pause to save"):
                        stored = _parts(self.placement.to_stored(state))
                        saver.start(done, *stored, before=log.sync)
                        if waits:
                            saver.wait()
                    if signum is not None:
                        saved = f"step {done} of {config.steps} is saved in {self.out}"
                        raise stop.Stopped(
                            signum, f"{saved}; {run.how_to_continue(self.out, self.peers)}"
                        )
                speed.start()
        return state, speed.steady()

    def _windows(self, batch: data.Packed) -> Any:
        """A batch in its parts, on the devices."""
        config, split = self.config, self.placement.split
        shape = config.grad_accum, -1, config.seq_len + 1
        parts = jax.tree.map(lambda leaf: split.windows(leaf.reshape(shape)), batch)
        return data.put(parts, self.placement.second_split)

    def _fetch(self, pending, speed: "Speed", tokens_per_byte: float) -> list[dict[str, Any]]:
        """Wait for the pending steps and turn their metrics into records."""
        fetched = jax.device_get([metrics for _, metrics in pending])
        tokens_per_second = speed.stop(len(pending))
        records = []
        for (step, _), metrics in zip(pending, fetched, strict=True):
            loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
            record = {
                "step": step,
                "loss": loss,
                "bits_per_byte": loss * BITS * tokens_per_byte,
                "grad_norm": grad_norm,
                "learning_rate": float(metrics["learning_rate"]),
                "tokens_per_second": tokens_per_second,
            }
            lowest = True
            if "skipped" in metrics:
                record["skipped"] = int(metrics["skipped"])
                record["loss_scale"] = float(metrics["loss_scale"])
                # Until then a lower scale may mend what overflowed, and the step is left out.
                lowest = record["loss_scale"] <= DynamicLossScale.min_scale
            if lowest and not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise self._diverged(
                    f"at step {step} the loss is {loss} and the gradient norm {grad_norm}"
                )
            records.append(record)
        return records

    def _diverged(self, how: str) -> RunError:
        config = self.config
        wider = ", or with --mixed-precision bf16" if self.policy.compute == jnp.float16 else ""
        return RunError(
            f"training diverged: {how}; start a new run with a lower --lr than {config.lr}{wider}"
        )

    def compile(self, *, fresh: bool) -> Programs:
        """Compile what the run executes, and refuse a step that memory cannot hold."""
        check_least_memory(self.config, self.placement.split, self.device)
        say("compiling …")
        began = time.perf_counter()
        try:
            programs = compile_programs(self.config, self.placement, fresh=fresh)
        except OverflowError as error:  # a size beyond what JAX or the kernels count with
            raise RunError(f"the arrays of a step are too large ({error}); {REMEDY}") from None
        check_memory(programs.step, self.device)
        say(f"compiled the step in {time.perf_counter() - began:.1f} s")
        return programs

    def _saver(self, programs: Programs) -> checkpoint.Saver:
        """What writes the checkpoints, beside the steps."""
        like = _parts(abstract_state(self.config, self.placement, stored=True))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
        room = self.peers.share(lambda: has_room(programs.step, self.device, size))
        like = like if room else None
        options = {"model": self.config.model, "keep": self.config.keep}
        return checkpoint.Saver(self.out, like=like, peers=self.peers, **options)

    def begin_with(self, params: Any) -> TrainState:
        """The state before the first step of a run that begins with these parameters."""
        placement = self.placement
        given = jax.tree.map(data.put, params, placement.shardings(params, stored=True))
        like = abstract_state(self.config, placement, stored=True)
        state = placement.shardings(like, stored=True)
        init = placement.jit(lambda params: init_state(self.config, self.policy, params), state)
        return placement.to_devices(init(given))

    def restore(self, step: int) -> TrainState:
        """The state of a checkpoint that `checkpoint.newest` has passed."""
        params, rest = _parts(abstract_state(self.config, self.placement, stored=True))
        params = checkpoint.restore(self.out, step, "params", params, peers=self.peers)
        rest = checkpoint.restore(self.out, step, "optimizer", rest, peers=self.peers)
        return self.placement.to_devices(TrainState(params=params, **rest))

    def _finish(self, state: TrainState, corpus: Any, log: MetricsLog, speed: float) -> None:
        config, last = self.config, log.records[-1]
        if last["validation_loss"] is None:  # as JSON has NaN
            raise self._diverged(f"after {config.steps} steps the validation loss is not a number")
        say(f"\n{validation_told(last)} after {config.steps} steps")
        say(f"{speed:,.0f} tokens/s (steps alone, without compilation and validation)")
        say(f"{self.out}: config.json, metrics.jsonl, loss.png, checkpoints/{config.steps}")
        prompt = "" if config.data else "def "
        say("a sample:\n")
        graphdef = sample.decoder(config.model)
        params = self._on_one_device(state)
        codec = sample.codec_of(corpus.tokenizer)
        sample.stream(graphdef, params, prompt, codec=codec, length=300, seed=config.seed)
        folder = shlex.quote(str(self.out))
        say(f"\n\nmore:  jaxkern sample --run {folder} --prompt {shlex.quote(prompt)}")

    def _on_one_device(self, state: TrainState) -> Any:
        """The parameters after the last step, for process 0 to sample with."""
        if self.peers.count == 1:
            return jax.device_put(self.placement.to_stored(state.params), self.device)
        params, _ = _parts(abstract_state(self.config, self.placement, stored=True))
        like = checkpoint.abstract(params, jax.sharding.SingleDeviceSharding(self.device))
        return checkpoint.restore(self.out, self.config.steps, "params", like, peers=ALONE)


def _parts(state: TrainState) -> tuple[Any, dict[str, Any]]:
    """The parameters, and whatever else a resumed run needs."""
    rest = state._asdict()
    return rest.pop("params"), rest


def _plot(config: TrainConfig, records: list[dict[str, Any]], out: Path) -> None:
    name = config.init_hf or f"Preset {config.preset}"
    what = "bytes" if config.tokenizer == "bytes" else f"tokens of {config.tokenizer}"
    plot_losses(records, out / "loss.png", title=f"{name} on {what}")


def _devices(config: TrainConfig, peers: Alone) -> list[Any]:
    """The devices to train on: of several processes, those of all."""
    available = jax.devices() if peers.count > 1 else jax.local_devices()
    if config.devices == "all":
        count = len(available)
    elif config.devices != "auto":
        count = int(config.devices)
    elif config.mesh:
        count = math.prod(axes_of(config.mesh).values())
    else:
        count = len(available) if available[0].platform != "cpu" or peers.count > 1 else 1
    asked, fewer = f"--devices {config.devices}", "at most that, or all"
    if config.devices == "auto":
        asked, fewer = f"--mesh {config.mesh}", "axes whose product is at most that"
    if count > len(available):
        whose = "this machine's" if peers.count == 1 else f"those of {peers.count} processes,"
        raise SplitError(
            f"{asked} is more than {whose} {len(available)} ({available[0].device_kind})",
            f"choose {fewer}",
        )
    if count < len(available) and peers.count > 1:
        raise SplitError(
            f"{asked} leaves some of the {len(available)} devices of {peers.count} processes "
            "without work",
            "start fewer processes, or choose as many devices",
        )
    return available[:count]
