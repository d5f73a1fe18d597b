"""A training run, from its configuration to its last checkpoint: `Trainer`."""

import contextlib
import dataclasses
import importlib
import math
import operator
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.lm import checkpoint, data, processes, sample, stop
from jaxkern.lm.config import PRESETS, FlagError, RunError, TrainConfig, settings
from jaxkern.lm.memory import REMEDY, check_memory, has_room
from jaxkern.lm.model import count_params
from jaxkern.lm.processes import Alone
from jaxkern.lm.program import Placement, Programs, abstract_state, compile_programs, keep_programs
from jaxkern.lm.report import (
    BITS,
    PACKAGES,
    PERPLEXITY,
    MetricsLog,
    Profile,
    Progress,
    Speed,
    plot_losses,
    read_metrics,
    validation_told,
)
from jaxkern.lm.step import TrainState, init_state, precision_policy, schedule_of
from jaxkern.lm.stop import say
from jaxkern.lm.tokenizer import size_of
from jaxkern.precision import DynamicLossScale


class Trained(NamedTuple):
    """Result of a run."""

    out: Path  # its folder, which :func:`jaxkern.lm.load` takes
    step: int  # how many steps it has
    state: TrainState  # parameters and the rest, on the devices
    records: Sequence[dict[str, Any]]  # of metrics.jsonl; of several processes, in the first alone
    tokens_per_second: float  # of the steps alone; 0 if there were none to do
    tokenizer: Any


def train(flags: dict[str, Any]) -> None:
    """Run ``jaxkern train`` by the flags that were given: train, and show what was learned."""
    profile, out, file = (flags.pop(name, None) for name in ("profile", "out", "config"))
    if flags.pop("resume", False):
        if out is None or file is not None:
            raise RunError("--resume needs --out, the folder of the run, and takes no --config")
        trainer = Trainer.resume(out, flags, profile=profile)
    else:
        given = settings(flags, file)
        if given.get("init_hf"):
            given = begun_with(given)
        trainer = Trainer(TrainConfig.from_flags(given), out, profile=profile)
    trained = trainer.fit()
    if trainer.peers.main and trained.tokens_per_second:
        try:
            trainer.show(trained)
        except stop.Stopped as stopped:
            done = f"training is finished, and step {trained.step} is saved in {trained.out}"
            run = shlex.quote(str(trained.out))
            stopped.message = f"{done}; sample with: jaxkern sample --run {run}"
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
        self, config: TrainConfig, out: str | PathLike[str] | None = None, *, profile: Any = None
    ):
        self.peers, self._asked = processes.current, profile
        begun = self.peers.share(lambda: time.strftime("%Y%m%d-%H%M%S"))
        name = Path(config.init_hf or config.preset).resolve().name
        self.out = Path(out or f"runs/{name}-{begun}")
        self._stored: dict[str, Any] | None = None  # of the corpus of a run that goes on
        self._set(config)

    @classmethod
    def resume(
        cls, out: str | PathLike[str], changes: Mapping[str, Any] | None = None, **options: Any
    ) -> "Trainer":
        """The trainer of the run in `out`, which goes on from its last checkpoint.

        Args:
          out: its folder.
          changes: what is to be otherwise, by name, such as ``{"steps": 2000}``.
          **options: as of the class.

        Raises:
          RunError: it is no run, or a change is none that a run may have.
        """
        config, stored = checkpoint.read(Path(out))
        trainer = cls(changed(config, changes or {}), out, **options)
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
                    for name in self.config.log_to:  # what is missing is told now
                        importlib.import_module(PACKAGES[name])
                keep_programs()
                created = not self.out.exists()
                with held(self.out, peers):
                    try:
                        state, done = self._begin()
                    except BaseException:
                        if fresh and peers.main and not checkpoint.is_run(self.out):
                            _leave_as_it_was(self.out, created)
                        raise
                    trained = self._train(state, done)
                peers.trained()
                return trained
            except stop.Stopped as stopped:
                stopped.message = stopped.message or self._where_it_stands()
                raise

    # Before the steps: all that may be refused, what costs little before the rest

    def _begin(self) -> tuple[TrainState, int]:
        """The state that the steps start from, and their number; the rest are attributes."""
        stored, done = self._stored, 0
        begins = lambda: weights(self.config) if self.config.init_hf and not done else None
        none: Any = None
        state = profile = params = none
        if stored is None:
            profile, params = self._traced(done), begins()
            say("data     reading …")
            corpus = self._new_corpus()
            self._set(self.config.for_tokens(corpus.tokenizer.size))
        else:
            corpus = data.reopen(self.config, self.out, stored)
        say(f"data     {corpus.describe()}")
        self._corpus, self._batches = corpus, corpus.batches(self.config)
        if stored is not None and checkpoint.steps(self.out):
            with stop.deferred():
                state, done = self._restore()
        say(f"run      {self.out}" + (f", continued from step {done}" if done else ""))
        if done >= self.config.steps:
            say(f"already trained for {done} steps; give a greater --steps to go on")
            return state, done
        if stored is not None:
            profile, params = self._traced(done), begins()
        self._profile, self._programs = profile, self._compile(fresh=not done and params is None)
        if state is None:
            with stop.deferred():
                if params is None:
                    state = self._programs.init(np.int32(self.config.seed))
                else:
                    state = self._begin_with(params)
        if self.peers.main:
            lost = not (self.out / "tokenizer.json").is_file()
            if self.config.tokenizer != "bytes" and lost:
                data.write_atomically(self.out / "tokenizer.json", corpus.tokenizer.stored())
            checkpoint.write(self.out, self.config, corpus.info)
        return state, done

    def _traced(self, done: int) -> Profile:
        folder = self.out / (f"profile-{self.peers.index}" if self.peers.index else "profile")
        return Profile(folder, self._asked, done=done, end=self.config.steps)

    def _new_corpus(self) -> data.Corpus:
        """The data, which process 0 makes and the others open."""
        config, out, peers = self.config, self.out, self.peers
        if not peers.main:
            return data.reopen(config, out, peers.share(dict))
        if config.vocab_size is not None:  # one that is too small is refused before any is read
            config.for_tokens(size_of(config.tokenizer))
        corpus = data.build(config, out)
        peers.share(lambda: corpus.info)
        return corpus

    def _restore(self) -> tuple[TrainState, int]:
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
        self._batches.set_state(found.data)
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
        say("compiling …")
        began = time.perf_counter()
        try:
            programs = compile_programs(self.config, self.placement, fresh=fresh)
        except OverflowError as error:  # a size beyond what JAX or the kernels count with
            raise RunError(f"the arrays of a step are too large ({error}); {REMEDY}") from None
        check_memory(programs.step, self.device)
        say(f"compiled the step in {time.perf_counter() - began:.1f} s")
        return programs

    # The steps

    def _train(self, state: TrainState, done: int) -> Trained:
        config, main, tokenizer = self.config, self.peers.main, self._corpus.tokenizer
        path = self.out / "metrics.jsonl"
        if done >= config.steps:
            records = read_metrics(path)
            if main and not (self.out / "loss.png").exists():  # killed just before drawing it
                self._plot(records)
            return Trained(self.out, done, state, records, 0.0, tokenizer)
        self._describe(state)
        with stop.deferred():
            opened = MetricsLog(path if main else None, resume_at=done)
            with contextlib.closing(opened) as log:
                if main:
                    log.follow(config.log_to, self.out, dataclasses.asdict(config))
                state, speed = self._loop(state, done, log)
            self.peers.trained()
            if main:
                self._plot(log.records)
                if log.records[-1]["validation_loss"] is None:  # as JSON has NaN
                    how = f"after {config.steps} steps the validation loss is not a number"
                    raise self._diverged(how)
        return Trained(self.out, config.steps, state, log.records, speed, tokenizer)

    def _describe(self, state: TrainState) -> None:
        config, split = self.config, self.placement.split
        kinds = ", ".join(sorted({device.device_kind for device in self.devices}))
        name = config.init_hf or config.preset
        say(f"model    {name}, {count_params(state.params):,} parameters")
        say(f"device   {len(self.devices)} × {kinds}, {config.mixed_precision}")
        if split.axes:
            say(f"mesh     {','.join(f'{axis}={split.sizes[axis]}' for axis in split.axes)}")

    def _loop(self, state: Any, done: int, log: MetricsLog) -> tuple[TrainState, float]:
        """Returns the final state, and the tokens per second of the steps alone."""
        config, per_byte, profile = self.config, self._corpus.tokens_per_byte, self._profile
        batches, evaluate = self._batches, self._evaluation()
        if not done:
            first = {"step": 0} | evaluate(state.params)
            log.write([first])
            say(f"untrained: {validation_told(first)}")
        speed = Speed(config.batch_size * config.seq_len)
        schedule = schedule_of(config)
        pending: list[tuple[int, dict[str, jax.Array]]] = []
        sizes = {"steps": config.steps, "tokens_per_byte": per_byte}
        with (
            contextlib.closing(self._saver()) as saver,
            contextlib.closing(Progress(start=done, shown=self.peers.main, **sizes)) as progress,
            contextlib.closing(profile),
        ):
            while done < config.steps:
                with profile.step(done + 1, state, speed):
                    windows = self._windows(next(batches))
                    state, metrics = self._programs.step(state, windows, schedule)
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
                        saver.start(done, self.placement.to_stored(state), batches.get_state())
                        if waits:
                            saver.wait()
                    if signum is not None:
                        saved = f"step {done} of {config.steps} is saved in {self.out}"
                        raise stop.Stopped(signum, f"{saved}; {self._how_to_continue()}")
                speed.start()
        return state, speed.steady()

    def _evaluation(self) -> Callable[[Any], dict[str, float]]:
        """A function of the parameters: what a record says of a fixed part of what is held out.

        The loss is that of all tokens; of several sources the mean by their shares, beside the loss
        and perplexity of each, whose names follow a slash.
        """
        split, sharding = self.placement.split, self.placement.windows()
        placed = lambda batch: data.put(jax.tree.map(split.windows, batch), sharding)
        held_out, loss_of = self._corpus.validation(self.config), self._programs.loss
        sources = [source for source, _ in held_out]
        counts = [[data.predicted(batch) for batch in batches] for _, batches in held_out]
        on_devices = [[placed(batch) for batch in batches] for _, batches in held_out]
        perplexity = lambda loss: math.exp(min(loss, 700.0))  # of what is larger there is no number

        def evaluate(params: Any) -> dict[str, float]:
            found = [[loss_of(params, batch) for batch in batches] for batches in on_devices]
            losses = [
                float(np.average(np.array(each, np.float64), weights=count))
                for each, count in zip(jax.device_get(found), counts, strict=True)
            ]
            mean = sum(source.share * loss for source, loss in zip(sources, losses, strict=True))
            bits = mean * BITS * data.tokens_per_byte(sources)
            record = {"validation_loss": mean, "validation_bits_per_byte": bits}
            if self.config.pack:
                record[PERPLEXITY] = perplexity(mean)
            if len(sources) > 1:
                for source, loss in zip(sources, losses, strict=True):
                    record[f"validation_loss/{source.name}"] = loss
                    record[f"{PERPLEXITY}/{source.name}"] = perplexity(loss)
            return record

        return evaluate

    def _saver(self) -> checkpoint.Saver:
        like = abstract_state(self.config, self.placement, stored=True)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
        room = self.peers.share(lambda: has_room(self._programs.step, self.device, size))
        like, keep = like if room else None, self.config.keep
        return checkpoint.Saver(self.out, keep=keep, like=like, peers=self.peers)

    def _windows(self, batch: data.Packed) -> Any:
        """A batch in its parts, on the devices."""
        config, split = self.config, self.placement.split
        shape = config.grad_accum, -1, config.seq_len + 1
        parts = jax.tree.map(lambda leaf: split.windows(leaf.reshape(shape)), batch)
        return data.put(parts, self.placement.windows(None))

    def _fetch(self, pending, speed: "Speed", tokens_per_byte: float) -> list[dict[str, Any]]:
        """Wait for the pending steps, and make records of their metrics."""
        fetched = jax.device_get([metrics for _, metrics in pending])
        tokens_per_second = speed.stop(len(pending))
        records = []
        for (step, _), metrics in zip(pending, fetched, strict=True):
            found = {name: value.item() for name, value in metrics.items()}
            loss, grad_norm = found["loss"], found["grad_norm"]
            # Until the least a lower scale may mend what overflowed, and the step is left out.
            lowest = found.get("loss_scale", 0) <= DynamicLossScale.min_scale
            if lowest and not (math.isfinite(loss) and math.isfinite(grad_norm)):
                how = f"at step {step} the loss is {loss} and the gradient norm {grad_norm}"
                raise self._diverged(how)
            bits = {"bits_per_byte": loss * BITS * tokens_per_byte}
            records.append({"step": step} | found | bits | {"tokens_per_second": tokens_per_second})
        return records

    def _diverged(self, how: str) -> RunError:
        wider = ", or with --mixed-precision bf16" if self.policy.compute == jnp.float16 else ""
        lower = f"start a new run with a lower --lr than {self.config.optimizer.lr}{wider}"
        return RunError(f"training diverged: {how}; {lower}")

    # Its results

    def _plot(self, records: Sequence[dict[str, Any]]) -> None:
        name = self.config.init_hf or f"Preset {self.config.preset}"
        tokens = self.config.tokenizer
        what = "bytes" if tokens == "bytes" else f"tokens of {tokens}"
        plot_losses(records, self.out / "loss.png", title=f"{name} on {what}")

    def show(self, trained: Trained) -> None:
        """Print how good the model is, and a sample of its text."""
        config, out = self.config, self.out
        say(f"\n{validation_told(trained.records[-1])} after {config.steps} steps")
        speed = f"{trained.tokens_per_second:,.0f} tokens/s"
        say(f"{speed} (steps alone, without compilation and validation)")
        say(f"{out}: config.yaml, metrics.jsonl, loss.png, checkpoints/{config.steps}")
        prompt = "" if config.data else "def "
        say("a sample:\n")
        model = sample.load_run(out, say, step=trained.step)  # of several processes, on one device
        model.write([prompt], length=300, seed=config.seed)
        folder = shlex.quote(str(out))
        say(f"\nmore:  jaxkern sample --run {folder} --prompt {shlex.quote(prompt)}")

    def _where_it_stands(self) -> str:
        """Says how a run that was stopped outside its steps is continued."""
        out = self.out
        if checkpoint.is_run(out):
            last = max(checkpoint.steps(out), default=None)
            saved = "no step is saved yet" if last is None else f"step {last} is saved"
            return f"{saved} in {out}; {self._how_to_continue()}"
        kept = "nothing is kept"
        if data.has_tokens(out):
            kept = f"{out / 'corpus'} keeps the tokens; the same command with that --out goes on"
        return f"training had not begun; {kept}"

    def _how_to_continue(self) -> str:
        flags = f"--resume --out {shlex.quote(str(self.out))}"
        if self.peers.count == 1:
            return f"continue with: jaxkern train {flags}"
        # Only that command tells each process which one it is, and may be that of a launcher.
        return f"continue with the same command for every process, and {flags}"


def _devices(config: TrainConfig, peers: Alone) -> list[Any]:
    """The devices to train on: of several processes, those of all."""
    available = jax.devices() if peers.count > 1 else jax.local_devices()
    count = config.device_count or len(available)
    if config.device_count is None and config.devices == "auto" and not config.parallel:
        count = 1 if available[0].platform == "cpu" and peers.count == 1 else count
    few = count < len(available) and peers.count > 1  # some would have no work
    if count > len(available) or few:
        asked = f"--mesh {config.mesh}" if config.devices == "auto" else f"--devices {count}"
        rule = "must be all" if peers.count > 1 else "is more than this machine's"
        raise RunError(f"{asked} {rule} {len(available)} devices ({available[0].device_kind})")
    return available[:count]


def begun_with(flags: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that begins with a checkpoint of Hugging Face, and its model's shape.

    What is not given has the default of the preset whose model is most like the checkpoint's.
    """
    from jaxkern.lm import hf

    folder = Path(flags["init_hf"])
    shape = hf.model_config(hf.read_config(folder))
    size, has_tokenizer = shape.vocab_size, (folder / "tokenizer.json").exists()
    if "tokenizer" not in flags and not has_tokenizer and size > 256:
        what = f"--init-hf {folder} holds no tokenizer.json of its {size} tokens"
        raise RunError(f"{what}; add --tokenizer with its path, or --tokenizer bytes")
    given = {"tokenizer": str(folder) if has_tokenizer else "bytes"} | flags

    def unlike(name: str) -> tuple[float, ...]:
        model = PRESETS[name].model
        width = abs(math.log(model.d_model / shape.d_model))
        return model.block is not shape.block, width, abs(model.n_layers - shape.n_layers)

    shape = dataclasses.replace(shape, dropout=given.pop("model.dropout", 0.0))
    if given.get("vocab_size") in (None, size):
        given.pop("vocab_size", None)
    if own := [name for name in given if name.startswith("model.") or name == "vocab_size"]:
        raise FlagError(own[0], f"is what the checkpoint of --init-hf {folder} has; leave it out")
    return {"preset": min(PRESETS, key=unlike)} | given | {"model": shape}


def weights(config: TrainConfig) -> Any:
    """The parameters of the checkpoint that a run begins with, if it is that still."""
    from jaxkern.lm import hf

    shape, params = hf.load(config.init_hf)
    shape = dataclasses.replace(shape, dropout=config.model.dropout)
    for name, own in dataclasses.asdict(config.model).items():
        if (found := getattr(shape, name)) != own:
            what = f"--init-hf {config.init_hf} is not the checkpoint that this run was begun with"
            raise RunError(f"{what}: {name} is {found}, not {own}")
    return params


# What a resumed run may do otherwise: its arithmetic is the same, but for the order of sums.
CHANGEABLE = (
    *("devices", "parallel", "mesh", "implementation", "remat"),
    *("log_every", "log_to", "checkpoint_every", "keep", "data_cache"),
)


def changed(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a resumed run; RunError where one of the changes is none it may have."""
    changes = settings(changes)
    if changes.keys() & {"parallel", "mesh"}:  # one of them says how devices are used anew
        changes = {"parallel": None, "mesh": "", "devices": "auto"} | changes
    after = config.with_values(changes)
    show = lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    for name in changes:
        old, new = (operator.attrgetter(name)(each) for each in (config, after))
        grown = name == "steps" and new > old
        if new != old and name not in CHANGEABLE and not grown:
            rule = "can only grow" if name == "steps" else "cannot change"
            what = f"{show(new)} differs from the run's {show(old)} and {rule} on --resume"
            raise FlagError(name, what)
    return after


_SEEING = 20.0  # seconds in which a shared file system shows what another host has written


@contextlib.contextmanager
def held(out: Path, peers: Alone) -> Iterator[None]:
    """Inside, the folder is that of these processes alone, and all of them see it."""
    if peers.main:
        with checkpoint.only_process(out) as token:
            peers.share(lambda: token)
            yield
        return
    token, began, path = peers.share(lambda: ""), time.monotonic(), out / checkpoint.LOCK
    while not (path.exists() and path.read_text(errors="replace") == token):
        if time.monotonic() - began > _SEEING:
            remedy = "name one that all hosts share, by the same path"
            raise RunError(f"--out {out} is not the folder that process 0 has; {remedy}")
        time.sleep(0.2)
    yield


def _leave_as_it_was(out: Path, created: bool) -> None:
    """Empty the folder of a run that could not begin but for its tokens, to be named again."""
    if not data.has_tokens(out):
        shutil.rmtree(out / "corpus", ignore_errors=True)
    for name in checkpoint.BEFORE:
        (out / name).unlink(missing_ok=True)
    if created:
        with contextlib.suppress(OSError):
            out.rmdir()
