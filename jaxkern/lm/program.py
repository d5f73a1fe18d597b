"""The compiled programs of a run: where their arrays lie, and the training step before it is run.

They are made from a configuration and devices alone, so that ``jaxkern warm``, and whoever compiles
ahead of time, lowers the very programs that ``jaxkern train`` does.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkern.core import cache, kernel_call
from jaxkern.core.target import GPUS, lowering_for
from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.data import Packed
from jaxkern.lm.model import Options, initial_params
from jaxkern.lm.parallel import BATCH, Split, split_of
from jaxkern.lm.step import (
    batch_loss,
    compiler_options,
    gathers_in_layers,
    init_state,
    make_model,
    make_train_step,
    precision_policy,
    schedule_of,
    token_weights,
)
from jaxkern.lm.tokenizer import dtype_of, size_of


@dataclasses.dataclass(frozen=True)
class Placement:
    """Placement of the arrays of a run."""

    devices: tuple[Any, ...]
    split: Split  # of the model and the batch between them
    mesh: Mesh | None  # of several devices

    @staticmethod
    def of(config: TrainConfig, devices: Sequence[Any]) -> "Placement":
        """Puts a run on one device, or splits it between several."""
        split = split_of(config, len(devices))
        if not (axes := split.axes):
            return Placement(tuple(devices), split, None)
        grid = np.array(devices).reshape([split.sizes[axis] for axis in axes])
        mesh = Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))
        return Placement(tuple(devices), split, mesh)

    def sharding(self, *spec: Any) -> Any:
        """The sharding of an array with these entries of a ``PartitionSpec``."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def windows(self, *before: None) -> Any:
        """The sharding of windows of tokens (B, L + 1), with an axis for each None before them."""
        batch = tuple(axis for axis in BATCH if self.split.axis(axis))
        return self.sharding(*before, batch, self.split.axis("sequence"))

    def shardings(self, tree: Any, *, stored: bool = False) -> Any:
        """The shardings of parameters or of a training state, as :meth:`Split.specs` has them."""
        specs = self.split.specs(tree, stored=stored)
        return jax.tree.map(lambda spec: self.sharding(*spec), specs)

    def jit(self, f: Callable[..., Any], out_shardings: Any = None, **options: Any) -> Any:
        """Compiles `f` by ``jax.jit``, its results by default the same on every device."""
        compiler = compiler_options(self.devices[0].platform)
        whole = self.sharding() if out_shardings is None else out_shardings
        return jax.jit(f, out_shardings=whole, compiler_options=compiler, **options)

    def on_each(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Makes `f` the program of each device, with its parts of the arguments.

        A device so runs the program that a single one would, and what `f` itself says is exchanged.
        """
        if self.mesh is None:
            return f
        # Without check_vma JAX adds no sums over devices to those that `f` asks for.
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(f, mesh=self.mesh, check_vma=False, **specs)

    def to_stored(self, state: Any) -> Any:
        """The state with its columns in the order of checkpoints."""
        return self._moved(state, self.split.to_stored, stored=True)

    def to_devices(self, state: Any) -> Any:
        """The state of a checkpoint with its columns in the order of the devices."""
        return self._moved(state, self.split.to_devices)

    def _moved(self, state: Any, move: Callable[[Any], Any], **order: bool) -> Any:
        if self.split.tensor == 1:
            return state
        return self.jit(move, self.shardings(state, **order))(state)


def model_structure(config: TrainConfig, split: Split, *, gathers: bool = True) -> Any:
    """The model of a run, to be merged with parameters; it `gathers` what ``split.fsdp`` splits."""
    implementation: Any = None if config.implementation == "auto" else config.implementation
    remat: Any = config.remat
    if remat == "auto":
        remat = "cheap" if {*config.model.kinds} <= {"mamba", "mamba2"} else "none"
    options = Options(
        precision_policy(config), implementation, remat, config.scan_layers, split, gathers
    )
    return make_model(config.model, options)


def abstract_state(config: TrainConfig, placement: Placement, *, stored: bool = False) -> Any:
    """Shapes, dtypes and shardings of the training state, or of that which checkpoints have."""
    split = placement.split
    init = lambda: init_state(config, precision_policy(config))
    state = jax.eval_shape(init if stored else lambda: split.to_devices(init()))
    typed = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(typed, state, placement.shardings(state, stored=stored))


def lowered_init(config: TrainConfig, placement: Placement) -> jax.stages.Lowered:
    """Lowers seed -> the state before the first step, of which each device makes its part alone."""

    def init(seed: Any) -> Any:
        params = initial_params(config.model, seed)
        if placement.split.tensor > 1:  # no device is to hold the whole of what is reordered
            whole = placement.shardings(params, stored=True)
            params = jax.lax.with_sharding_constraint(params, whole)
        # Reordered parameters first: zeros of an optimizer XLA would reorder while it compiles.
        return init_state(config, precision_policy(config), placement.split.to_devices(params))

    shardings = placement.shardings(abstract_state(config, placement))
    return placement.jit(init, shardings).lower(np.int32(0))


def abstract_batch(config: TrainConfig, rows: tuple[int, ...], split: Split, sharding: Any) -> Any:
    """Shapes, dtypes and shardings of windows of tokens, and of their segments if they have any."""
    dtype, shape = dtype_of(config.model.vocab_size), (*rows, config.seq_len + split.sequence)
    tokens = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    if not config.pack:
        return Packed(tokens)
    return Packed(tokens, jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding))


def lowered_step(
    config: TrainConfig, placement: Placement, platform: str | None = None
) -> jax.stages.Lowered:
    """Lowers the training step, by default for the platform of the placement's devices."""
    split, by_parts = placement.split, placement.windows(None)
    rows = config.grad_accum, config.batch_size // config.grad_accum
    windows = abstract_batch(config, rows, split, by_parts)
    state = abstract_state(config, placement)
    structure = model_structure(config, split, gathers=gathers_in_layers(config, split))
    step = make_train_step(config, structure, split)
    if placement.mesh is not None:
        specs, whole = split.specs(state), PartitionSpec()
        step = placement.on_each(step, (specs, by_parts.spec, whole), (specs, whole))
    shardings = placement.shardings(state), placement.sharding()
    step = placement.jit(step, shardings, donate_argnums=0)
    traced = step.trace(state, windows, schedule_of(config))
    return traced.lower(lowering_platforms=None if platform is None else (platform,))


def lowered_loss(config: TrainConfig, placement: Placement) -> jax.stages.Lowered:
    """(parameters, windows (B/K, L + 1)) -> the mean cross-entropy, lowered."""
    split, by_rows = placement.split, placement.windows()
    rows = (config.batch_size // config.grad_accum,)
    windows = abstract_batch(config, rows, split, by_rows)
    params = abstract_state(config, placement).params
    structure = model_structure(config, split)

    def mean_loss(params: Any, windows: Any) -> jax.Array:
        weight = token_weights(windows, split.mean_of_batch)
        return split.mean_of_batch(batch_loss(structure, params, windows, weight))

    if placement.mesh is not None:
        in_specs = split.specs(params), by_rows.spec
        mean_loss = placement.on_each(mean_loss, in_specs, PartitionSpec())
    return placement.jit(mean_loss).lower(params, windows)


class Programs(NamedTuple):
    """Compiled programs of a run; windows are a `Packed`, as :meth:`Split.windows` gives it."""

    init: Any  # seed -> the state before the first step; ``None`` for a run that has one
    step: jax.stages.Compiled  # (state, windows (K, B/K, L + 1), schedule) -> (state, metrics)
    loss: jax.stages.Compiled  # (parameters, windows (B/K, L + 1)) -> the mean cross-entropy


def compile_programs(config: TrainConfig, placement: Placement, *, fresh: bool) -> Programs:
    """The programs of a run, compiled at the same time: XLA uses few cores for each."""
    init: Any = lambda: lowered_init(config, placement).compile() if fresh else None
    step: Any = lambda: lowered_step(config, placement).compile()
    loss: Any = lambda: lowered_loss(config, placement).compile()
    # Under JAX_CHECK_TRACER_LEAKS threads share a list of traces, which holds for one of them.
    pool = ThreadPoolExecutor(1 if jax.config.jax_check_tracer_leaks else None)
    try:
        return Programs(*pool.map(lambda compiled: compiled(), (init, step, loss)))
    finally:  # a signal does not wait for what compiles
        pool.shutdown(wait=False, cancel_futures=True)


def keep_programs() -> None:
    """Have XLA keep its compiled programs beside the kernels, unless JAX is told another folder."""
    folder = cache.programs()
    if folder is None or jax.config.jax_compilation_cache_dir is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    # A program for several devices holds pointers to how kernels are partitioned. The names of the
    # functions that they stand in tell the kernels apart (KernelPass).
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)


def warm(config: TrainConfig, gpu: str, devices: int) -> None:
    """Keep the kernels of a training step for some GPUs in the cache, on any machine."""
    there = [name for name, each in GPUS.items() if each.unsupported is None]
    if gpu not in there:
        what = f"has no kernels: {GPUS[gpu].unsupported}" if gpu in GPUS else "is not known"
        raise RunError(f"--gpu {gpu} {what}; choose one of {', '.join(there)}")
    if (folder := cache.folder()) is None:
        raise RunError("the cache is switched off by JAXKERN_CACHE; unset it to keep kernels")
    config = config.for_tokens(size_of(config.tokenizer))
    placement = Placement.of(config, jax.devices()[:devices])
    shared = f", split over {devices}" if devices > 1 else ""
    print(f"lowering the training step of {config.preset}{shared} …", flush=True)
    began = time.perf_counter()
    with lowering_for(gpu):
        step = lowered_step(config, placement, platform="cuda")
        if devices > 1:
            # To compile XLA first splits the program, which lowers the kernels of one device's
            # part; then it finds that this machine cannot run them.
            try:
                step.compile()
            except jax.errors.JaxRuntimeError as error:
                if "mosaic_gpu" not in str(error):
                    raise
    made, found = sum(kernel_call.lowerings.values()), kernel_call.found_on_disk
    seconds = time.perf_counter() - began
    print(f"{made} kernels lowered for {GPUS[gpu]}, {found} were there, in {seconds:.0f} s")
    print(f"they are in {folder}; {cache.summary().entries} kernels in all")
