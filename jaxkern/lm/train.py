"""The training loop: a run from its configuration to its last checkpoint."""

import contextlib
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.lm import checkpoint, data, processes, run, sample, stop, trackers
from jaxkern.lm.config import RunError, SplitError, TrainConfig, axes_of, settings
from jaxkern.lm.evaluate import evaluation
from jaxkern.lm.memory import REMEDY, check_least_memory, check_memory, has_room
from jaxkern.lm.model import count_params
from jaxkern.lm.processes import ALONE, Alone
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
    plot_losses,
    read_metrics,
    validation_told,
)
from jaxkern.lm.step import TrainState, init_state, schedule_of
from jaxkern.lm.stop import say
from jaxkern.precision import DynamicLossScale


class Trained(NamedTuple):
    """What a run has come to.

    Attributes:
      out: its folder, which :func:`jaxkern.lm.load` takes.
      step: how many steps it has.
      state: parameters and the rest, on the devices.
      records: what metrics.jsonl has of each step; of several processes, in the first alone.
      tokens_per_second: of the steps alone; 0 if there were none to do.
      tokenizer: of its tokens.
    """

    out: Path
    step: int
    state: TrainState
    records: Sequence[dict[str, Any]]
    tokens_per_second: float
    tokenizer: Any


class _Begun(NamedTuple):
    """What the steps start from; a run that has them all has no programs."""

    state: Any
    done: int
    corpus: data.Corpus
    batches: Any
    programs: Programs | None = None
    profile: Any = None


def train(
    flags: dict[str, Any],
    out: Path,
    *,
    file: Path | None = None,
    resume: bool = False,
    profile: str | None = None,
) -> None:
    """Run ``jaxkern train``: train, and show what was learned.

    Args:
        flags: the command line's that were given, by their names in TrainConfig.
        out: the run's folder.
        file: with settings that flags override.
        resume: continue the run in `out` from its last checkpoint.
        profile: the steps to trace, as STEP:COUNT or STEP; "auto" for some soon after the first.

    Raises:
        RunError: whatever the user can put right.
        Stopped: a signal came; its message names the folder and the step that is saved.
    """
    if resume:
        trainer = Trainer.resume(out, flags, profile=profile)
    else:
        given = settings(flags, file)
        if given.get("init_hf"):
            flags, file = run.begun_with(given), None
        trainer = Trainer(TrainConfig.from_flags(flags, file), out, profile=profile)
    trained = trainer.fit()
    if not (trainer.peers.main and trained.tokens_per_second):
        return
    try:
        trainer.show(trained)
    except stop.Stopped as stopped:
        folder = shlex.quote(str(out))
        stopped.message = (
            f"training is finished, and step {trained.step} is saved in {out}; sample with: "
            f"jaxkern sample --run {folder}"
        )
        raise


_AHEAD = 32  # steps, at most, that the host is ahead of the device


class Trainer:
    """Trains a language model, as ``jaxkern train`` does.

    Args:
      config: of the run.
      out: its folder, which is new; by default below ``runs``.
      profile: the steps to trace, as STEP:COUNT or STEP; "auto" for some soon after the first.

    Raises:
      RunError: whatever the user can put right.

    Attributes:
      config, out: as given.
      peers: the processes of the run.
      devices: of all of them.

    Example:
      >>> import jaxkern.lm
      >>> from jaxkern.lm.config import TrainConfig
      >>> config = TrainConfig.from_flags({"preset": "micro", "steps": 100})
      >>> trained = jaxkern.lm.Trainer(config, "runs/first").fit()  # doctest: +SKIP
      >>> [record["loss"] for record in trained.records[1:]]  # doctest: +SKIP
      >>> jaxkern.lm.load(trained.out).generate("def ")  # doctest: +SKIP
    """

    def __init__(
        self,
        config: TrainConfig,
        out: "str | PathLike[str] | None" = None,
        *,
        profile: str | None = None,
    ):
        self.peers = processes.current
        begun = self.peers.share(lambda: time.strftime("%Y%m%d-%H%M%S"))
        self.out, self._profile = Path(out or f"runs/{config.preset}-{begun}"), profile
        self._stored: dict[str, Any] | None = None
        self._set(config)

    @classmethod
    def resume(
        cls,
        out: "str | PathLike[str]",
        changes: Mapping[str, Any] | None = None,
        *,
        profile: str | None = None,
    ) -> "Trainer":
        """The trainer of the run in `out`, which goes on from its last checkpoint.

        Args:
          out: its folder.
          changes: what is to be otherwise, by name, such as ``{"steps": 2000}``.
          profile: the steps to trace.

        Raises:
          RunError: it is no run, or a change is none that a run may have.
        """
        folder, changes = Path(out), dict(changes or {})
        stored = processes.current.share(lambda: checkpoint.read_config(folder))
        config = run.changed(checkpoint.config_of(folder, stored), changes)
        with run.with_stored_axes(changes):
            trainer = cls(config, folder, profile=profile)
        trainer._stored = stored
        return trainer

    def _set(self, config: TrainConfig) -> None:
        self.config, self.policy = config, precision_policy(config)
        self.devices = _devices(config, self.peers)
        self.device = self.devices[0] if self.peers.count == 1 else jax.local_devices()[0]
        self.placement = Placement.of(config, self.devices)

    def fit(self) -> Trained:
        """Train to the last step.

        Ctrl-C and SIGTERM end it after the step at hand, which is saved. In a thread that is not
        the main one no signal is handled.

        Raises:
          RunError: whatever the user can put right.
          Stopped: a signal came; a KeyboardInterrupt whose message says how to continue.
        """
        peers, fresh = self.peers, self._stored is None
        with stop.handled():
            try:
                if fresh:
                    peers.share(lambda: checkpoint.check_fresh(self.out))
                if peers.main:
                    trackers.check(self.config.log_to)
                keep_programs()
                created = not self.out.exists()
                with run.held(self.out, peers):
                    left = fresh and peers.main
                    with run.nothing_left_if_refused(self.out, fresh=left, created=created):
                        begun = self._begin()
                    trained = self._train(begun)
                peers.trained()
                return trained
            except stop.Stopped as stopped:
                stopped.message = stopped.message or run.where_it_stands(self.out, peers)
                raise

    def _begin(self) -> _Begun:
        """All that may be refused, what costs little before the rest."""
        stored, done, weights, profile = self._stored, 0, None, None
        if stored is None:
            profile = self._traced(0)
            weights = run.weights(self.config) if self.config.init_hf else None
            say("data     reading …")
            corpus = run.corpus_of(self.out, self.config, self.peers)
            self._set(self.config.for_tokens(corpus.tokenizer.size))
        else:
            corpus = data.reopen(self.config, self.out, stored["data"])
        say(f"data     {corpus.describe()}")
        batches, state = corpus.batches(self.config), None
        if stored is not None and checkpoint.steps(self.out):
            with stop.deferred():
                state, done = self._restore(batches)
        say(f"run      {self.out}" + (f", continued from step {done}" if done else ""))
        if done >= self.config.steps:
            say(f"already trained for {done} steps; give a greater --steps to go on")
            return _Begun(state, done, corpus, batches)
        profile = profile or self._traced(done)
        if stored is not None and self.config.init_hf and not done:
            weights = run.weights(self.config)
        programs = self._compile(fresh=not done and weights is None)
        if state is None:
            with stop.deferred():
                state = (
                    programs.init(np.int32(self.config.seed))
                    if weights is None
                    else self._begin_with(weights)
                )
        if self.peers.main:
            lost = not (self.out / "tokenizer.json").is_file()
            if self.config.tokenizer != "bytes" and lost:
                data.write_atomically(self.out / "tokenizer.json", corpus.tokenizer.stored())
            checkpoint.write_config(self.out, self.config, corpus.info)
        return _Begun(state, done, corpus, batches, programs, profile)

    def _traced(self, done: int) -> trackers.Profile:
        folder = self.out / (f"profile-{self.peers.index}" if self.peers.index else "profile")
        return trackers.Profile(folder, self._profile, done=done, end=self.config.steps)

    def _restore(self, batches: Any) -> tuple[TrainState, int]:
        """The state of the newest checkpoint that can be read, to which the batches are set."""
        read_metrics(self.out / "metrics.jsonl")  # a damaged one is told of before all else
        like = abstract_state(self.config, self.placement, stored=True)
        found = checkpoint.restore(self.out, like, peers=self.peers)
        step = self.peers.share(lambda: found.step)
        if step != found.step:
            raise RunError(f"{found.damaged[0]}, and process 0 goes on from it; start all again")
        for what in found.damaged:
            say(f"warning: {what}; it is renamed to .damaged, and the run goes back to step {step}")
        if self.peers.main:
            checkpoint.set_aside(self.out, step)
        batches.set_state(found.data)
        return self.placement.to_devices(found.state), step

    def _begin_with(self, params: Any) -> TrainState:
        """The state before the first step of a run that begins with these parameters."""
        placement = self.placement
        given = jax.tree.map(data.put, params, placement.shardings(params, stored=True))
        like = abstract_state(self.config, placement, stored=True)
        state = placement.shardings(like, stored=True)
        init = placement.jit(lambda params: init_state(self.config, self.policy, params), state)
        return placement.to_devices(init(given))

    def _compile(self, *, fresh: bool) -> Programs:
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

    def _train(self, begun: _Begun) -> Trained:
        """Train from the step at hand to the last, and leave the results in the run's folder."""
        config, main, done = self.config, self.peers.main, begun.done
        path = self.out / "metrics.jsonl"
        if begun.programs is None:
            records = read_metrics(path)
            if main and not (self.out / "loss.png").exists():  # killed just before drawing it
                self._plot(records)
            return Trained(self.out, done, begun.state, records, 0.0, begun.corpus.tokenizer)
        self._describe(begun.state)
        with stop.deferred():
            opened = MetricsLog(path if main else None, resume_at=done)
            with contextlib.closing(opened) as log:
                if main:
                    stored, seen = checkpoint.read_config(self.out), log.records
                    log.follow(trackers.opened(config.log_to, self.out, stored, seen))
                state, speed = self._loop(begun, begun.programs, log)
            self.peers.trained()
            if main:
                self._plot(log.records)
                if log.records[-1]["validation_loss"] is None:  # as JSON has NaN
                    raise self._diverged(
                        f"after {config.steps} steps the validation loss is not a number"
                    )
        return Trained(self.out, config.steps, state, log.records, speed, begun.corpus.tokenizer)

    def _describe(self, state: TrainState) -> None:
        kinds = ", ".join(sorted({device.device_kind for device in self.devices}))
        name = self.config.init_hf or self.config.preset
        say(f"model    {name}, {count_params(state.params):,} parameters")
        say(f"device   {len(self.devices)} × {kinds}, {self.config.mixed_precision}")
        if self.placement.split.axes:
            say(f"mesh     {self.placement.split.mesh}")
        elif self.config.parallel != TrainConfig.parallel:
            say(f"mesh     none: one device has what --parallel {self.config.parallel} would share")

    def _loop(self, begun: _Begun, programs: Programs, log: MetricsLog) -> tuple[TrainState, float]:
        """Returns the final state and the tokens per second of the steps alone.

        A request to stop ends it after a step, which is saved.
        """
        config, per_byte = self.config, begun.corpus.tokens_per_byte
        state, done, corpus, batches, _, profile = begun
        evaluate = evaluation(config, corpus, self.placement, programs)
        if not done:
            first = {"step": 0} | evaluate(state.params)
            log.write([first])
            say(f"untrained: {validation_told(first)}")
        speed = Speed(config.batch_size * config.seq_len)
        schedule = schedule_of(config)
        pending: list[tuple[int, dict[str, jax.Array]]] = []
        sizes = {"steps": config.steps, "tokens_per_byte": per_byte}
        with (
            contextlib.closing(self._saver(programs)) as saver,
            contextlib.closing(Progress(start=done, shown=self.peers.main, **sizes)) as progress,
            contextlib.closing(profile),
        ):
            while done < config.steps:
                with profile.step(done + 1, state, speed):
                    state, metrics = programs.step(state, self._windows(next(batches)), schedule)
                done += 1
                profile.after(done, state, speed, progress)
                pending.append((done, metrics))
                if len(pending) > _AHEAD:  # so that a signal need not wait for many steps
                    jax.block_until_ready(pending[-_AHEAD][1])
                if len(pending) == _AHEAD // 2:  # enough for the devices to compute meanwhile
                    saver.write()
                evaluating = done == config.steps or done % config.eval_every == 0
                saving = done == config.steps or done % config.checkpoint_every == 0
                signum = self.peers.stop_after(done)
                asked = signum is not None
                if not (evaluating or saving or asked or done % config.log_every == 0):
                    continue  # the host runs ahead of the device
                saver.write()
                records, pending = self._fetch(pending, speed, per_byte), []
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
                        log.sync()
                        stored = self.placement.to_stored(state)
                        saver.start(done, stored, batches.get_state())
                        if waits:
                            saver.wait()
                    if signum is not None:
                        saved = f"step {done} of {config.steps} is saved in {self.out}"
                        how = run.how_to_continue(self.out, self.peers)
                        raise stop.Stopped(signum, f"{saved}; {how}")
                speed.start()
        return state, speed.steady()

    def _saver(self, programs: Programs) -> checkpoint.Saver:
        """What writes the checkpoints, beside the steps."""
        like = abstract_state(self.config, self.placement, stored=True)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
        room = self.peers.share(lambda: has_room(programs.step, self.device, size))
        options = {"keep": self.config.keep, "peers": self.peers}
        return checkpoint.Saver(self.out, like=like if room else None, **options)

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
        wider = ", or with --mixed-precision bf16" if self.policy.compute == jnp.float16 else ""
        lower = f"start a new run with a lower --lr than {self.config.optimizer.lr}{wider}"
        return RunError(f"training diverged: {how}; {lower}")

    def _plot(self, records: Sequence[dict[str, Any]]) -> None:
        name = self.config.init_hf or f"Preset {self.config.preset}"
        tokens = self.config.tokenizer
        what = "bytes" if tokens == "bytes" else f"tokens of {tokens}"
        plot_losses(records, self.out / "loss.png", title=f"{name} on {what}")

    def show(self, trained: Trained) -> None:
        """Print how good the model is, and a sample of what it writes."""
        config, out = self.config, self.out
        say(f"\n{validation_told(trained.records[-1])} after {config.steps} steps")
        speed = f"{trained.tokens_per_second:,.0f} tokens/s"
        say(f"{speed} (steps alone, without compilation and validation)")
        say(f"{out}: config.yaml, metrics.jsonl, loss.png, checkpoints/{config.steps}")
        prompt = "" if config.data else "def "
        say("a sample:\n")
        params, codec = self._on_one_device(trained.state), sample.codec_of(trained.tokenizer)
        model = sample.LanguageModel(config.model, params, config.steps, codec)
        model.write([prompt], length=300, seed=config.seed)
        folder = shlex.quote(str(out))
        say(f"\nmore:  jaxkern sample --run {folder} --prompt {shlex.quote(prompt)}")

    def _on_one_device(self, state: TrainState) -> Any:
        """The parameters after the last step, for process 0 to sample with."""
        if self.peers.count == 1:
            return jax.device_put(self.placement.to_stored(state.params), self.device)
        params = abstract_state(self.config, self.placement, stored=True).params
        like = checkpoint.abstract(params, jax.sharding.SingleDeviceSharding(self.device))
        found = checkpoint.restore(self.out, {"params": like}, self.config.steps, peers=ALONE)
        return found.state["params"]


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
