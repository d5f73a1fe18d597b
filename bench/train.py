"""Training the language model, end to end, beside PyTorch: ``python -m bench train``.

A step is forward, backward and AdamW of a preset of :mod:`jaxkern.lm.config` on random tokens.
Products are in bf16; parameters, gradients, the optimizer's state and the residual stream in fp32.
Gradients are not clipped, and activations not checkpointed, but for ``jaxkern-remat`` and what a
contender's own kernels compute again in the backward.

    jaxkern       the model of ``jaxkern train`` and fused_adamw, on kernels where they are fastest
    jaxkern-remat the same with ``--remat``, each layer computed again in the backward
    jaxkern-cheap, jaxkern-scan
                  the same with ``--remat cheap`` and ``--remat scan``, parts of each layer
    jaxkern-loop  the same as jaxkern with ``--scan-layers``
    xla           the same as jaxkern with every op in plain JAX
    xla-loop      the same with ``--scan-layers``
    mamba_ssm     its MambaLMHeadModel under torch.autocast, with its fused add and norm, and
                  torch.optim.AdamW(fused=True)

Each trains in a process of its own, one after the other; with ``--jobs`` several compile at the
same time, which takes each of them longer. The host is a step ahead of the device, as
in training, and a step takes from the end of the one before to its own end. The tokens have a
skewed distribution, token i with probability ~ 1/(i + 1), so that a loss that does not fall shows a
contender that does not learn. A batch that does not fit in memory is halved, in JAX.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkern
from bench import program, timing
from bench.processes import SPAWN
from jaxkern.lm.config import PRESETS, ModelConfig, RunError
from jaxkern.lm.memory import check_memory
from jaxkern.lm.model import MambaLM, Options, count_params, decayed
from jaxkern.lm.step import compiler_options, loss_fn, make_model
from jaxkern.precision import Policy

OTHERS = ("jaxkern-remat", "jaxkern-loop", "xla", "xla-loop", "mamba_ssm")

_RATE, _BETAS, _DECAY = 1e-3, (0.9, 0.95), 0.1
_BATCHES = 4
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, and by whom.

    Attributes:
      contender: who trains it.
      preset: the model's shape.
      length: tokens a sequence.
      tokens: a step, at most; at least one sequence.
      steps: to time.
      warmup: steps before them.
    """

    contender: str
    preset: str
    length: int
    tokens: int
    steps: int
    warmup: int

    def __str__(self) -> str:
        return f"{self.contender}, {self.preset}, length {self.length}"

    @property
    def model(self) -> ModelConfig:
        return PRESETS[self.preset].model

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model that is ready to train.

    Attributes:
      batch: sequences a step.
      parameters: how many.
      step: starts step i, and returns what to `wait` for.
      wait: until a step has ended.
      loss: of a step that has ended.
      told: after all steps, what else belongs in the row.
    """

    batch: int
    parameters: int
    step: Callable[[int], Any]
    wait: Callable[[Any], Any]
    loss: Callable[[Any], float]
    told: Callable[[], dict[str, Any]]


def draw(job: Job, batch: int) -> list[np.ndarray]:
    """Batches of windows (batch, length + 1), int32."""
    weights = 1 / np.arange(1, job.model.vocab_size + 1)
    rng = np.random.default_rng(0)
    shape = (batch, job.length + 1)
    p = weights / weights.sum()
    return [rng.choice(len(p), shape, p=p).astype(np.int32) for _ in range(_BATCHES)]


def product_operations(model: ModelConfig) -> int:
    """Operations of the matrix products a token: two a weight, forward, and four, backward."""
    shapes = {name: shape for name, (_, shape) in model.block.initializers(model.sizes).items()}
    layer = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("_proj"))
    return 6 * (model.n_layers * layer + model.vocab_size * model.d_model)


def of_jax(job: Job, wait: Callable[[], None]) -> Trainer:
    """The library's own model and optimizer."""
    name, _, how = job.contender.partition("-")
    implementation = "xla" if name == "xla" else None
    remat = {"cheap": "cheap", "scan": "scan", "remat": "layer"}.get(how, "none")
    options = Options(Policy.parse("bf16"), implementation, remat, how == "loop")
    graphdef = make_model(job.model, options)
    tx = jaxkern.fused_adamw(
        _RATE,
        *_BETAS,
        weight_decay=_DECAY,
        mask=decayed,
        implementation=implementation,
    )

    def init() -> Any:
        params = nnx.to_pure_dict(nnx.state(MambaLM(job.model, rngs=nnx.Rngs(0))))
        return params, tx.init(params)

    def step(params: Any, state: Any, windows: Any) -> Any:
        loss, grads = jax.value_and_grad(functools.partial(loss_fn, graphdef))(params, windows)
        return *jaxkern.apply(tx, grads, state, params), loss

    device = jax.local_devices()[0]
    how_compiled = compiler_options(device.platform)
    program = jax.jit(step, donate_argnums=(0, 1), compiler_options=how_compiled)
    shapes = jax.eval_shape(init)
    compiled: Any = None
    batch, seconds = 2 * job.batch, 0.0
    while compiled is None:
        batch //= 2
        windows = jax.ShapeDtypeStruct((batch, job.length + 1), jnp.int32)
        start = time.perf_counter()
        lowered = program.lower(*shapes, windows)
        if implementation == "xla" and "mosaic_gpu" in lowered.as_text():
            raise RuntimeError("there is a kernel in the program of plain JAX")
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        try:
            check_memory(compiled, device)
        except RunError:
            if batch == 1:
                raise
            compiled = None
    wait()
    held = list(jax.jit(init)())
    parameters = count_params(held[0])
    batches = [jax.device_put(windows, device) for windows in draw(job, batch)]

    def advance(i: int) -> Any:
        *held[:], loss = compiled(*held, batches[i % _BATCHES])
        return loss

    def told() -> dict[str, Any]:
        m = compiled.memory_analysis()
        needed = m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        return {
            "peak_gib": peak and round(peak / _GIB, 2),
            "program_gib": round((needed - m.alias_size_in_bytes) / _GIB, 2),
            "compile_s": round(seconds, 1),
            "versions": _versions("jax"),
        }

    return Trainer(batch, parameters, advance, jax.block_until_ready, float, told)


def of_torch(job: Job, wait: Callable[[], None]) -> Trainer:
    """The model of mamba_ssm, which compiles its kernels in its first step."""
    wait()
    import torch  # pyright: ignore[reportMissingImports]

    models = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    torch.manual_seed(0)
    m, sizes = job.model, job.model.sizes
    mixer: dict[str, Any] = {"layer": {"mamba": "Mamba1", "mamba2": "Mamba2"}[m.block.name]}
    mixer |= {"d_state": sizes.d_state, "d_conv": sizes.d_conv, "expand": sizes.expand}
    config = models.MambaConfig(
        d_model=m.d_model,
        n_layer=m.n_layers,
        vocab_size=m.vocab_size,
        ssm_cfg=mixer,
        rms_norm=True,
        residual_in_fp32=True,
        fused_add_norm=True,
    )
    model = models.MambaLMHeadModel(config, device="cuda")
    matrices = lambda name, p: p.ndim > 1 and not name.endswith("A_log")
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if matrices(name, p) == decayed],
            "weight_decay": _DECAY if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=_RATE, betas=_BETAS, fused=True)
    batches = [torch.from_numpy(windows).cuda().long() for windows in draw(job, job.batch)]
    first_step: list[float] = []

    def advance(i: int) -> Any:
        start = time.perf_counter()
        windows = batches[i % _BATCHES]
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(windows[:, :-1]).logits
        targets = windows[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end = torch.cuda.Event()
        end.record()
        if not first_step:
            end.synchronize()
            first_step.append(time.perf_counter() - start)
        return end, loss.detach()

    def told() -> dict[str, Any]:
        return {
            "peak_gib": round(torch.cuda.max_memory_allocated() / _GIB, 2),
            "compile_s": round(first_step[0], 1),
            "versions": _versions("torch", "triton", "mamba_ssm", "causal_conv1d"),
        }

    parameters = sum(p.numel() for p in model.parameters())
    return Trainer(
        batch=job.batch,
        parameters=parameters,
        step=advance,
        wait=lambda handle: handle[0].synchronize(),
        loss=lambda handle: float(handle[1]),
        told=told,
    )


def _versions(*names: str) -> str:
    return ", ".join(f"{name} {_version(name)}" for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # built in a folder, without metadata
        return getattr(importlib.import_module(name), "__version__", "")


def measure(job: Job, wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Trains, and returns the row; waits when it has compiled, before it allocates anything."""
    trainer = (of_torch if job.contender == "mamba_ssm" else of_jax)(job, wait)
    started, ends = [], []
    for i in range(job.warmup + job.steps):
        started.append(trainer.step(i))
        if i:
            trainer.wait(started[i - 1])
            ends.append(time.perf_counter())
    trainer.wait(started[-1])
    ends.append(time.perf_counter())
    times = [1e3 * (after - before) for before, after in itertools.pairwise(ends)]
    ms = timing.Timing.of(times[-job.steps :])
    per_second = 1e3 * trainer.batch * job.length / ms.median
    return {
        "preset": job.preset,
        "length": job.length,
        "batch": trainer.batch,
        "contender": job.contender,
        "tokens_per_second": round(per_second),
        "ms": round(ms.median, 2),
        "ms_low": round(ms.low, 2),
        "ms_high": round(ms.high, 2),
        "steps": ms.calls,
        "tflop_s": round(per_second * product_operations(job.model) * 1e-12, 1),
        "parameters": trainer.parameters,
        "first_loss": round(trainer.loss(started[0]), 3),
        "last_loss": round(statistics.mean(map(trainer.loss, started[-_BATCHES:])), 3),
        **trainer.told(),
    }


def attempt(jobs: Sequence[Job], limit: float) -> Iterator[tuple[Job, dict[str, Any] | str]]:
    """:func:`measure`, each in a process of its own, or why there is no row.

    The processes compile at the same time; when all have, one after the other trains.
    """
    running: list[tuple[Job, Any, Any]] = []
    try:
        for job in jobs:
            print(f"{job}: compiling", file=sys.stderr, flush=True)
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_work, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            running.append((job, process, ours))
        compiled = [_told(process, pipe, limit) for _, process, pipe in running]
        for (job, process, pipe), reason in zip(running, compiled, strict=True):
            if reason is None:
                pipe.send("go")
                yield job, _told(process, pipe, limit)
            else:
                yield job, reason
            process.kill()
            process.join()
    finally:
        for _, process, _ in running:
            process.kill()


def _work(job: Job, pipe: Any) -> None:
    """What a process does: tells None when it has compiled, waits for its turn, tells the row."""

    def wait() -> None:
        pipe.send(None)
        pipe.recv()

    try:
        if job.contender == "mamba_ssm" and importlib.util.find_spec("mamba_ssm") is None:
            pipe.send("not installed")
        else:
            pipe.send(measure(job, wait))
    except Exception as e:  # the others go on
        pipe.send(f"{type(e).__name__}: {program.first_line(e)}"[:300])


def _told(process: Any, pipe: Any, limit: float) -> Any:
    if not pipe.poll(limit):
        process.kill()
        return f"not done within {limit:.0f} s"
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        return f"ended with status {process.exitcode}"


def _parser() -> argparse.ArgumentParser:
    p = program.parser("train", "lm")
    p.add_argument("--preset", action="append", help="repeat for more (130m; without a GPU tiny)")
    p.add_argument(
        "--length", action="append", type=int, help="repeat for more (2048; without a GPU 64)"
    )
    found = [n for n in OTHERS if n != "mamba_ssm" or importlib.util.find_spec(n)]
    p.add_argument("--vs", default=",".join(found), help="whom to train beside, comma-separated")
    p.add_argument("--only", help="contenders, comma-separated, where not jaxkern and --vs")
    p.add_argument("--tokens", type=int, help="a step (16384; without a GPU 512)")
    p.add_argument("--steps", type=int, default=20, help="to time")
    p.add_argument("--steps-xla", type=int, default=10, help="to time on plain JAX")
    p.add_argument("--warmup", type=int, default=3, help="steps before them, at least one")
    p.add_argument(
        "--limit", type=float, default=240, help="seconds to compile in, and again to train in"
    )
    p.add_argument(
        "--jobs", type=int, default=1, help="processes that compile together; they train in turn"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    program.share_device(2)  # this process trains nothing, and of the others one at a time
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"
    gpu = timing.on_gpu()
    names = args.only.split(",") if args.only else ["jaxkern", *filter(None, args.vs.split(","))]
    jobs = [
        Job(
            contender=name,
            preset=preset,
            length=length,
            tokens=args.tokens or (16384 if gpu else 512),
            steps=args.steps_xla if name.startswith("xla") else args.steps,
            warmup=max(1, args.warmup),
        )
        for preset in args.preset or ["130m" if gpu else "tiny"]
        for length in args.length or [2048 if gpu else 64]
        for name in names
    ]
    clock = program.clock(gpu, "wall-clock time of steps")
    report = program.machine(args.commit) | {"clock": clock, "failed": [], "rows": []}
    print(f"{report['device']}, JAX {report['jax']}, {clock}", flush=True)
    out = args.out
    waves = itertools.batched(jobs, max(1, args.jobs))
    for job, row in itertools.chain.from_iterable(attempt(wave, args.limit) for wave in waves):
        if isinstance(row, str):
            line = f"{job}: {row}"
            report["failed"].append(line)
            print(line, flush=True)
        else:
            report["rows"].append(row)
            print(
                f"{job.contender:10} {job.preset:6}{row['batch']:4} × {job.length:<6}"
                f"{row['tokens_per_second']:10,} tokens/s {row['ms']:9.1f} ms"
                f" {row['peak_gib'] or 0:7.2f} GiB  compiled in {row['compile_s']:.1f} s"
                f"  loss {row['first_loss']:.2f} → {row['last_loss']:.2f}",
                flush=True,
            )
        out = program.write(report, args.out, "lm")  # a run that is stopped keeps its rows
    print(f"wrote {out}")
    return 1 if report["failed"] else 0
