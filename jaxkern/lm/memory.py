"""Whether a step fits, before it runs: on a CPU the system kills what does not."""

import re
from pathlib import Path
from typing import Any

import jax

from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.parallel import Split

REMEDY = "lower --batch-size or --seq-len, raise --grad-accum, or add --remat"


def check_least_memory(config: TrainConfig, split: Split, device: Any) -> None:
    """Raise RunError, before anything is compiled, if no program for this batch could fit.

    A step holds at least the logits of one part of the batch, in two bytes or more each, and the
    stream of one layer in four.
    """
    tokens = config.batch_size * config.seq_len // (config.grad_accum * split.of_tokens)
    model = config.model
    logits, stream = 2 * model.vocab_size // split.tensor, 4 * model.d_model
    _check(tokens * (logits + stream), device)


def check_memory(compiled: jax.stages.Compiled, device: Any) -> None:
    """Raise RunError if the program needs more memory than `device` has left."""
    _check(_needed(compiled), device)


def has_room(compiled: jax.stages.Compiled, device: Any, size: int) -> bool:
    """Whether `device` can hold `size` bytes more than the program needs, as far as can be told."""
    available = available_memory(device)
    return available is None or _needed(compiled) + size <= available


def _needed(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    return (
        analysis.temp_size_in_bytes
        + analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def _check(needed: int, device: Any) -> None:
    available = available_memory(device)
    if available is not None and needed > available:
        gib = lambda size: f"{size / 2**30:,.1f} GiB"
        raise RunError(
            f"a step needs {gib(needed)} of memory and {device.device_kind} has {gib(available)}; "
            f"{REMEDY}"
        )


def available_memory(device: Any) -> int | None:
    """Bytes that a program may use on `device`, or None if it cannot be told."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    limits = [
        1024 * int(size) for size in re.findall(r"MemAvailable: +(\d+)", _text("/proc/meminfo"))
    ]
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        limits.append(int(limit) - int(used))
    return min(limits, default=None)


def _text(path: str) -> str:
    """The content of a file; "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
