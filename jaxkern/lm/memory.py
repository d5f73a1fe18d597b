"""Whether a step fits, before it runs: on a CPU the system kills what does not."""

import re
from pathlib import Path
from typing import Any

import jax

from jaxkern.lm.config import RunError

REMEDY = "lower --batch-size or --seq-len, raise --grad-accum, or add --remat"


def check_memory(compiled: jax.stages.Compiled, device: Any) -> None:
    """Raise RunError if the program needs more memory than `device` has left."""
    available, needed = available_memory(device), needed_memory(compiled)
    if available is not None and needed > available:
        gib, kind = (lambda size: f"{size / 2**30:,.1f} GiB"), device.device_kind
        what = f"a step needs {gib(needed)} of memory and {kind} has {gib(available)}"
        raise RunError(f"{what}; {REMEDY}")


def has_room(compiled: jax.stages.Compiled, device: Any, size: int) -> bool:
    """Whether `device` can hold `size` bytes more than the program needs, as far as can be told."""
    available = available_memory(device)
    return available is None or needed_memory(compiled) + size <= available


def needed_memory(compiled: jax.stages.Compiled) -> int:
    """Bytes that a program takes with its arguments and results; 0 if XLA does not tell."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    return (
        analysis.temp_size_in_bytes
        + analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def available_memory(device: Any) -> int | None:
    """Bytes that a program may use on `device`, or None if it cannot be told."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    there = re.findall(r"MemAvailable: +(\d+)", _text("/proc/meminfo"))
    limits = [1024 * int(size) for size in there]
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
