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
    jla           the model of jax-linear-attention without its checkpointing, whose residual stream
                  is in bf16, and its loss, on its kernels where it has any, with fused_adamw
    jla-loop      the same with its layers in a loop
    mamba_ssm     its MambaLMHeadModel under torch.autocast, with its fused add and norm, and
                  torch.optim.AdamW(fused=True)

Each trains in a process of its own, one after the other; with ``--jobs`` several in JAX compile at
the same time, which takes each of them longer. PyTorch comes last, alone. The host is a step ahead
of the device, as in training, and a step takes from the end of the one before to its own end. The
tokens have a skewed distribution, token i with probability ~ 1/(i + 1), so that a loss that does
not fall shows a contender that does not learn. ``--vocab`` says how many there are, 50280 in the
papers, and ``--documents`` packs documents of that mean length, which only jaxkern's model keeps
apart. A batch that does not fit in memory is halved, in JAX.
"""

import argparse
import importlib.util
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench import program, timing
from bench.processes import SPAWN
from bench.trainers import BATCHES, Job, of_jax, of_torch
from jaxkern.lm.config import ModelConfig

OTHERS = ("jaxkern-remat", "jaxkern-loop", "xla", "xla-loop", "jla", "mamba_ssm")
TORCH = ("mamba_ssm",)
"""The contenders in PyTorch: the host starts their kernels one by one, so they train alone."""

_PEERS = ("jla", "mamba_ssm", "transformers")


def product_operations(model: ModelConfig) -> int:
    """Operations of the matrix products a token: two a weight, forward, and four, backward."""
    shapes = {name: shape for name, (_, shape) in model.block.initializers(model.sizes).items()}
    layer = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("_proj"))
    return 6 * (model.n_layers * layer + model.vocab_size * model.d_model)


def measure(job: Job, wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Trains, and returns the row; waits when it has compiled, before it allocates anything."""
    if job.document is not None and job.contender.startswith(_PEERS):
        raise ValueError(f"the model of {job.contender} does not keep documents apart")
    trainer = (of_torch if job.contender in TORCH else of_jax)(job, wait)
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
        "preset": job.name,
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
        "last_loss": round(statistics.mean(map(trainer.loss, started[-BATCHES:])), 3),
        **trainer.told(),
    }


def found_peers(names: Sequence[str]) -> list[str]:
    """Returns the contenders that can run here."""
    return [n for n in names if n not in _PEERS or importlib.util.find_spec(n)]


def attempt(
    jobs: Sequence[Any], limit: float, measure: Callable[..., Any] = measure
) -> Iterator[tuple[Any, Any]]:
    """`measure` of each job in a process of its own, or why there is none: a text.

    The processes compile at the same time; when all have, one after the other trains.
    """
    running: list[tuple[Job, Any, Any]] = []
    try:
        for job in jobs:
            print(f"{job}: compiling", file=sys.stderr, flush=True)
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_work, args=(job, theirs, measure), daemon=True)
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


def _work(job: Any, pipe: Any, measure: Callable[..., Any]) -> None:
    """What a process does: tells None when it has compiled, waits until it may go on, measures."""

    def wait() -> None:
        pipe.send(None)
        pipe.recv()

    try:
        name = job.contender.removesuffix("-loop")
        if name in _PEERS and importlib.util.find_spec(name) is None:
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
    p.add_argument(
        "--vs", default=",".join(found_peers(OTHERS)), help="whom to train beside, comma-separated"
    )
    p.add_argument("--only", help="contenders, comma-separated, where not jaxkern and --vs")
    p.add_argument("--tokens", type=int, help="a step (16384; without a GPU 512)")
    p.add_argument("--vocab", type=int, help="tokens that there are, where not the preset's")
    p.add_argument(
        "--documents", type=int, help="mean length of documents that are packed and kept apart"
    )
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
            vocab_size=args.vocab,
            document=args.documents,
        )
        for preset in args.preset or ["130m" if gpu else "tiny"]
        for length in args.length or [2048 if gpu else 64]
        for name in names
    ]
    clock = program.clock(gpu, "wall-clock time of steps")
    report = program.machine(args.commit) | {"clock": clock, "failed": [], "rows": []}
    print(f"{report['device']}, JAX {report['jax']}, {clock}", flush=True)
    out, found = args.out, dict[Job, Any].fromkeys(jobs, "the run was stopped")
    together = [job for job in jobs if job.contender not in TORCH]
    waves = [*itertools.batched(together, max(1, args.jobs))]
    waves += [(job,) for job in jobs if job.contender in TORCH]
    for job, row in itertools.chain.from_iterable(attempt(wave, args.limit) for wave in waves):
        found[job] = row
        if isinstance(row, str):
            print(f"{job}: {row}", flush=True)
        else:
            print(
                f"{job.contender:10} {job.name:6}{row['batch']:4} × {job.length:<6}"
                f"{row['tokens_per_second']:10,} tokens/s {row['ms']:9.1f} ms"
                f" {row['peak_gib'] or 0:7.2f} GiB  compiled in {row['compile_s']:.1f} s"
                f"  loss {row['first_loss']:.2f} → {row['last_loss']:.2f}",
                flush=True,
            )
        report["rows"] = [row for row in found.values() if isinstance(row, dict)]
        report["failed"] = [f"{job}: {row}" for job, row in found.items() if isinstance(row, str)]
        out = program.write(report, args.out, "lm")  # a run that is stopped keeps its rows
    print(f"wrote {out}")
    return 1 if report["failed"] else 0
