"""Lowers a training run's kernels beforehand, on a machine that need not have a GPU."""

import time

import jax

from jaxkern.core import cache, kernel_call
from jaxkern.core.target import GPUS, lowering_for
from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.data import size_of
from jaxkern.lm.program import Placement, lowered_step


def warm(config: TrainConfig, gpu: str, devices: int) -> None:
    """Keep the kernels of a training step in the cache.

    Args:
        config: of a run.
        gpu: a name in ``jaxkern.core.target.GPUS``.
        devices: how many GPUs share each batch.

    Raises:
        RunError: whatever the user can put right.
    """
    there = ", ".join(name for name, each in GPUS.items() if each.unsupported is None)
    if gpu not in GPUS:
        raise RunError(f"--gpu {gpu} is not known; choose one of {there}")
    if (reason := GPUS[gpu].unsupported) is not None:
        raise RunError(f"--gpu {gpu} has no kernels: {reason}; choose one of {there}")
    folder = cache.folder()
    if folder is None:
        raise RunError("the cache is switched off by JAXKERN_CACHE; unset it to keep kernels")
    config = config.for_tokens(size_of(config.tokenizer))
    placement = Placement.of(config, jax.devices()[:devices])
    shared = f", split over {devices}" if devices > 1 else ""
    print(f"lowering the training step of {config.preset}{shared} …", flush=True)
    began = time.perf_counter()
    with lowering_for(gpu):
        step = lowered_step(config, placement, platform="cuda")
        if devices > 1:
            _partition(step)
    made, found = sum(kernel_call.lowerings.values()), kernel_call.found_on_disk
    seconds = time.perf_counter() - began
    print(f"{made} kernels lowered for {GPUS[gpu]}, {found} were there, in {seconds:.0f} s")
    print(f"they are in {folder}; {cache.summary().entries} kernels in all")


def _partition(step: jax.stages.Lowered) -> None:
    """Split the program between devices, which lowers the kernels of one device's part.

    XLA does this first when it compiles, for whatever machine; then it finds that this one cannot
    run the kernels.
    """
    try:
        step.compile()
    except jax.errors.JaxRuntimeError as error:
        if "mosaic_gpu" not in str(error):
            raise
