"""The target of a program: the GPU that it is lowered for, or Pallas's interpreter.

Kernels are fitted to a GPU when a program is lowered: their tiles, their grid, whether they run at
all. :func:`of_program` finds that GPU, and launchers read it by :func:`current`.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh


class UnfitError(Exception):
    """A kernel needs what the GPU does not have, e.g. more shared memory; the text says what."""


_KERNELS_NEED = (8, 0)

RUN = ((9, 0),)
"""Capabilities on which kernels were run and timed: H100s and H200s."""

COMPILED = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
"""Capabilities for which kernels were compiled, down to machine code."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
      name: the driver's, e.g. ``"NVIDIA H200"``.
      capability: the CUDA compute capability, e.g. ``(9, 0)``.
      multiprocessors: their number.
      shared_memory: bytes that one block may have at most.
      tma: whether it has a Tensor Memory Accelerator, which copies tiles to shared memory; by
        default what its capability says.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    tma: bool = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        if self.tma is None:
            object.__setattr__(self, "tma", self.capability >= (9, 0))

    @property
    def unsupported(self) -> str | None:
        """Why the kernels do not run on this GPU; ``None`` if they do."""
        if self.capability >= _KERNELS_NEED:
            return None
        return (
            f"{self.name} has compute capability {_dotted(self.capability)}, and the kernels need "
            f"{_dotted(_KERNELS_NEED)} (Ampere) or newer"
        )

    @property
    def untried(self) -> str | None:
        """Why the kernels run on this GPU only when asked for; ``None`` if they do by default."""
        if self.unsupported or self.capability in COMPILED:
            return None
        return (
            f"{self.name} has compute capability {_dotted(self.capability)}, for which no kernel "
            "was ever compiled"
        )

    def __str__(self) -> str:
        return (
            f"{self.name} (compute capability {_dotted(self.capability)}, "
            f"{self.multiprocessors} multiprocessors)"
        )


_SHARED_MEMORY = {
    (7, 0): 98304,
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (11, 0): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
"""Bytes of a block at most, by capability: CUDA Programming Guide, "Compute Capabilities"."""


def _gpu(name: str, major: int, minor: int, multiprocessors: int) -> Gpu:
    return Gpu(name, (major, minor), multiprocessors, _SHARED_MEMORY[major, minor])


GPUS: dict[str, Gpu] = {
    "t4": _gpu("Tesla T4", 7, 5, 40),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 8, 0, 108),
    "a10g": _gpu("NVIDIA A10G", 8, 6, 80),
    "l40s": _gpu("NVIDIA L40S", 8, 9, 142),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 9, 0, 132),
    "h200": _gpu("NVIDIA H200", 9, 0, 132),
    "b200": _gpu("NVIDIA B200", 10, 0, 148),
    "b300": _gpu("NVIDIA B300 SXM6 AC", 10, 3, 148),
    "rtx-pro-6000": _gpu("NVIDIA RTX PRO 6000 Blackwell", 12, 0, 188),
}
"""GPUs that a program can be lowered for by name, where there is none to ask."""

DEFAULT = GPUS["h200"]
"""Default GPU of a lowering that names none."""


@dataclasses.dataclass(frozen=True)
class _Described(AbstractDevice):
    """The device of an abstract mesh, from which Mosaic reads the compute capability."""

    compute_capability: str


def _device(gpu: Gpu) -> _Described:
    return _Described(gpu.name, gpu.multiprocessors, "cuda", _dotted(gpu.capability))


@contextlib.contextmanager
def _within[T](variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_stated: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("stated", default=None)
_current: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("current", default=None)


@contextlib.contextmanager
def lowering_for(gpu: str | Gpu) -> Iterator[Gpu]:
    """Lower programs for a GPU that need not be there, e.g. to export them on another machine.

    What is lowered inside runs on GPUs of this kind alone, whatever devices the process has.
    Without it a program is lowered for the devices that it is placed on, else for the process's
    own GPU, else for an H200.

    Args:
      gpu: ``"a100"``, ``"a10g"``, ``"l40s"``, ``"h100"``, ``"h200"``, ``"b200"``, ``"b300"``,
        ``"rtx-pro-6000"``, ``"t4"`` (which has no kernels), or a description, :class:`Gpu`.

    Yields:
      The description.

    Raises:
      ValueError: no GPU of this name is known.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> from jax import export
      >>> mosaic = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
      >>> x, weight = jnp.ones((1024, 4096), jnp.bfloat16), jnp.ones(4096)
      >>> with jaxkern.lowering_for("h200"):
      ...     exported = export.export(
      ...         jax.jit(jaxkern.rms_norm), platforms=["cuda"], disabled_checks=[mosaic]
      ...     )(x, weight)
      >>> exported.platforms
      ('cuda',)
    """
    if not isinstance(gpu, Gpu):
        if not isinstance(gpu, str) or gpu not in GPUS:
            raise ValueError(
                f"gpu must be one of {', '.join(GPUS)}, or a jaxkern.Gpu that describes another; "
                f"got {gpu!r}"
            )
        gpu = GPUS[gpu]
    # The mesh is part of the keys of JAX's caches, which would else return what was traced and
    # lowered for another GPU.
    mesh = jax.sharding.get_abstract_mesh().update(abstract_device=_device(gpu))
    with _within(_stated, gpu), jax.sharding.use_abstract_mesh(mesh):
        yield gpu


def of_program(axis_context: Any) -> Gpu:
    """The GPU that a program is lowered for.

    Args:
      axis_context: ``ctx.module_context.axis_context`` of a lowering rule.
    """
    stated = _stated.get()
    if stated is not None:
        return stated
    mesh = getattr(axis_context, "mesh", None)
    placed = getattr(axis_context, "device_assignment", None) or ()
    devices = (*placed, *getattr(mesh, "_flat_devices_tuple", ()))
    kind = getattr(getattr(mesh, "abstract_device", None), "device_kind", None)
    known = (*map(describe, devices), *(gpu for gpu in GPUS.values() if gpu.name == kind))
    return next(filter(None, known), None) or of_process() or DEFAULT


def of_process() -> Gpu | None:
    """The first GPU of this process."""
    return next(filter(None, map(describe, jax.local_devices())), None)


@functools.cache
def describe(device: Any) -> Gpu | None:
    """An NVIDIA GPU of JAX's as a :class:`Gpu`; ``None`` for other devices."""
    if device.platform != "gpu":
        return None
    try:
        major, minor = map(int, device.compute_capability.split("."))
    except (AttributeError, ValueError):  # ROCm says "gfx90a"
        return None
    # Capabilities newer than this table have at least what the smallest of their major one has.
    same = [size for (m, _), size in _SHARED_MEMORY.items() if m == major]
    size = _SHARED_MEMORY.get((major, minor), min(same, default=min(_SHARED_MEMORY.values())))
    return Gpu(device.device_kind, (major, minor), device.core_count, size)


def current() -> Gpu | None:
    """The GPU whose kernels are being lowered; ``None`` while none is."""
    return _current.get()


@contextlib.contextmanager
def fitting_to(gpu: Gpu) -> Iterator[None]:
    """Has launchers inside fit kernels to `gpu`, and Mosaic lower them for it."""
    mesh = AbstractMesh((), (), abstract_device=_device(gpu))
    with _within(_current, gpu), jax.sharding.use_abstract_mesh(mesh):
        yield


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


_interpreting = contextvars.ContextVar("interpreting", default=False)


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """Has kernels launched inside run in Pallas's interpreter."""
    with _within(_interpreting, True), plgpu.force_gpu_interpret_mode():
        yield


def interpreted() -> bool:
    """Whether the kernel that is being traced will run in Pallas's interpreter.

    Instructions and barriers that the interpreter does not know stand beside the same in JAX's
    terms, and this decides between them.
    """
    return _interpreting.get()
