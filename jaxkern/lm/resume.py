"""The configuration of a resumed run: what its config.json holds, and what may change."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from jaxkern.lm.config import (
    AXES,
    DEFAULTS,
    IMPLEMENTATIONS,
    LIMITS,
    PRESETS,
    REMATS,
    TRACKERS,
    RunError,
    SplitError,
    TrainConfig,
    axes_of,
    check_axes,
    with_devices,
)

# What a resumed run may do otherwise: its arithmetic is the same, but for the order of sums.
CHANGEABLE = (
    "devices",
    "parallel",
    "mesh",
    "implementation",
    "remat",
    "log_every",
    "log_to",
    "checkpoint_every",
    "keep",
    "data_cache",
)

# Flags that a run of an earlier version does not know: it has their defaults.
_LATER = (
    "init_hf",
    "log_to",
    "eval_data",
    "data_cache",
    "tokenizer",
    "vocab_size",
    "pack",
    "parallel",
    "mesh",
    "keep",
)


def resume_config(stored: Any, flags: dict[str, Any]) -> TrainConfig:
    """The configuration of a resumed run.

    Args:
        stored: "flags" of the run's config.json.
        flags: those given with --resume.

    Raises:
        RunError: if `stored` is no configuration, or a flag differs from the run's that must not.
    """
    check_axes(flags)
    flags = with_devices(flags)
    config = _stored_config(stored)
    if flags.keys() & {"parallel", "mesh"}:  # one of them says how devices are used anew
        config = dataclasses.replace(config, mesh="", devices="auto")
    elif "devices" in flags and config.mesh:
        config = _on_devices(config, flags["devices"])
    for name, value in flags.items():
        old = getattr(config, name)
        if value == old:
            continue
        if name not in CHANGEABLE and not (name == "steps" and value > old):
            flag = "--" + name.replace("_", "-")
            rule = "can only grow" if name == "steps" else "cannot change"
            raise RunError(
                f"{flag} {_show(value)} differs from the run's {_show(old)} and {rule} on "
                f"--resume; leave it out, or start a new run with another --out"
            )
        config = dataclasses.replace(config, **{name: value})
    return config


@contextlib.contextmanager
def with_stored_axes(flags: dict[str, Any]) -> Iterator[None]:
    """Inside, an error about devices says that config.json names them where no flag does.

    Raises:
      RunError: that one.
    """
    try:
        yield
    except SplitError as error:
        if flags.keys() & {"devices", "parallel", "mesh"}:
            raise
        raise RunError(
            f"the run's {error.what}; choose another for --resume by --mesh, --parallel or "
            "--devices"
        ) from None


def _on_devices(config: TrainConfig, devices: str) -> TrainConfig:
    """The configuration of a run that has a mesh, on what --devices alone asks for.

    A mesh of one axis has its other size. Of several it cannot be told which one changes, and a
    model may be too large to be split otherwise.

    Raises:
      RunError: the mesh has several axes, and another number of devices.
    """
    axes = axes_of(config.mesh)
    shared = [axis for axis, size in axes.items() if size > 1]
    count = math.prod(axes.values())
    if devices == str(count):
        return config
    if len(shared) > 1 and devices != "1":
        raise RunError(
            f"--devices {devices} does not say how they share the model, which --mesh "
            f"{config.mesh} of the run splits between {count}; add --mesh or --parallel"
        )
    parallel = shared[0] if len(shared) == 1 else config.parallel
    return dataclasses.replace(config, mesh="", parallel=parallel)


def _stored_config(stored: Any) -> TrainConfig:
    """The configuration that config.json holds, every value of it checked."""
    remedy = "put back what jaxkern wrote, or start a new run with another --out"
    if not isinstance(stored, dict):
        raise RunError(f'config.json: "flags" is {stored!r}, no table of flags; {remedy}')
    if isinstance(stored.get("remat"), bool):  # of an earlier version
        stored = stored | {"remat": "layer" if stored["remat"] else "none"}
    stored = {name: DEFAULTS[name] for name in _LATER if stored} | stored
    stored.pop("shape", None)
    names = {field.name for field in dataclasses.fields(TrainConfig)} - {"shape"}
    if odd := stored.keys() ^ names:
        name = min(odd)
        what = "is missing" if name in names else "is no flag of this version of jaxkern"
        raise RunError(f"config.json: flags.{name} {what}; {remedy}")
    for name, value in stored.items():
        if not _valid(name, value):
            raise RunError(f"config.json: flags.{name} cannot be {value!r}; {remedy}")
    tuples = {name: tuple(stored[name]) for name in ("data", "eval_data", "log_to")}
    values: dict[str, Any] = stored | tuples
    return TrainConfig(**values)


def _valid(name: str, value: Any) -> bool:
    if name in ("vocab_size", "data_cache") and value is None:
        return True
    if name in LIMITS:
        try:
            LIMITS[name].check(value)
        except ValueError:
            return False
        return True
    match name:
        case "preset":
            return isinstance(value, str) and value in PRESETS
        case "implementation":
            return value in IMPLEMENTATIONS
        case "parallel":
            return value in AXES
        case "mesh":
            return isinstance(value, str) and (not value or _is_mesh(value))
        case "devices":
            return isinstance(value, str) and bool(re.fullmatch("auto|all|[1-9][0-9]{0,8}", value))
        case "data" | "eval_data":
            return isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        case "log_to":
            return isinstance(value, list | tuple) and all(v in TRACKERS for v in value)
        case "remat":
            return value in REMATS
        case "scan_layers" | "pack":
            return isinstance(value, bool)
    return isinstance(value, str)


def _is_mesh(value: str) -> bool:
    try:
        return bool(axes_of(value))
    except ValueError:
        return False


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
