"""The compiled programs of a run: where their arrays lie, and the training step before it is run.

They are made from a configuration and devices alone, so that ``jaxkern warm``, and whoever compiles
ahead of time, lowers the very programs that ``jaxkern train`` does.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkern.lm import checkpoint
from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.model import Options
from jaxkern.lm.step import compiler_options, init_state, loss_fn, make_model, make_train_step
from jaxkern.lowering import cache
from jaxkern.precision import Policy

_BATCH = "batch"
"""The mesh axis between whose devices the batch is split."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the arrays of a run lie.

    Attributes:
      platform: of the devices.
      replicated: parameters and all else that every device has whole.
      first_split, second_split: arrays whose first or second axis is the batch.
      mesh: of the devices between which the batch is split; ``None`` for one device.
    """

    platform: str
    replicated: Any
    first_split: Any
    second_split: Any
    mesh: Mesh | None = None

    @staticmethod
    def on(devices: Sequence[Any]) -> "Placement":
        """Puts a run on one device, or splits its batch between several."""
        platform = devices[0].platform
        if len(devices) == 1:
            one = SingleDeviceSharding(devices[0])
            return Placement(platform, one, one, one)
        mesh = Mesh(np.array(devices), (_BATCH,), axis_types=(AxisType.Auto,))
        specs = PartitionSpec(), PartitionSpec(_BATCH), PartitionSpec(None, _BATCH)
        replicated, first, second = (NamedSharding(mesh, spec) for spec in specs)
        return Placement(platform, replicated, first, second, mesh)

    def jit(self, f: Callable[..., Any], **options: Any) -> Any:
        """Compiles `f` by ``jax.jit``, its results replicated."""
        compiler = compiler_options(self.platform)
        return jax.jit(f, out_shardings=self.replicated, compiler_options=compiler, **options)

    @property
    def axis_name(self) -> str | None:
        """The mesh axis between whose devices the batch is split."""
        return None if self.mesh is None else _BATCH

    def on_each(self, f: Callable[..., Any], windows: Any) -> Callable[..., Any]:
        """Makes `f` of (state, windows) the program of each device, with its part of the windows.

        A device so runs the program that a single one would, and sums of gradients over devices.

        Args:
          f: gives arrays that are the same on every device.
          windows: where they lie, `first_split` or `second_split`.
        """
        if self.mesh is None:
            return f
        specs = PartitionSpec(), windows.spec
        # Without check_vma JAX adds no sums over devices to those that `f` asks for.
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
        )


def precision_policy(config: TrainConfig) -> Policy:
    """The dtypes of a run."""
    try:
        return Policy.parse(config.mixed_precision)
    except ValueError as error:
        raise RunError(f"--mixed-precision {config.mixed_precision}: {error}") from None


def model_structure(config: TrainConfig) -> Any:
    """The model of a run, to be merged with parameters."""
    implementation: Any = None if config.implementation == "auto" else config.implementation
    options = Options(precision_policy(config), implementation, config.remat, config.scan_layers)
    return make_model(config.model, options)


def abstract_state(config: TrainConfig, placement: Placement) -> Any:
    """Shapes, dtypes and shardings of the training state."""
    state = jax.eval_shape(lambda: init_state(config, precision_policy(config)))
    return checkpoint.abstract(state, placement.replicated)


def lowered_step(
    config: TrainConfig, placement: Placement, platform: str | None = None
) -> jax.stages.Lowered:
    """The training step, (state, windows) -> (state, metrics), lowered and not yet compiled.

    `platform` is that of the placement's devices unless it is given.
    """
    per_part = config.batch_size // config.grad_accum
    windows = jax.ShapeDtypeStruct(
        (config.grad_accum, per_part, config.seq_len + 1),
        np.uint8,
        sharding=placement.second_split,
    )
    step = make_train_step(config, model_structure(config), placement.axis_name)
    step = placement.on_each(step, placement.second_split)
    traced = placement.jit(step, donate_argnums=0).trace(abstract_state(config, placement), windows)
    return traced.lower(lowering_platforms=None if platform is None else (platform,))


class Programs(NamedTuple):
    """What a run executes, compiled.

    Attributes:
      init: () -> the state before the first step; ``None`` for a run that has one.
      step: (state, windows (K, B/K, L + 1)) -> (state, metrics).
      loss: (parameters, windows (B/K, L + 1)) -> the mean cross-entropy.
    """

    init: Any
    step: jax.stages.Compiled
    loss: jax.stages.Compiled


def compile_programs(config: TrainConfig, placement: Placement, *, fresh: bool) -> Programs:
    """The programs of a run, compiled at the same time: XLA uses few cores for each."""
    policy = precision_policy(config)

    def init() -> Any:
        if fresh:
            return placement.jit(lambda: init_state(config, policy)).lower().compile()

    def step() -> jax.stages.Compiled:
        return lowered_step(config, placement).compile()

    def loss() -> jax.stages.Compiled:
        windows = jax.ShapeDtypeStruct(
            (config.batch_size // config.grad_accum, config.seq_len + 1),
            np.uint8,
            sharding=placement.first_split,
        )
        params = abstract_state(config, placement).params
        structure = model_structure(config)

        def mean_loss(params: Any, windows: Any) -> jax.Array:
            loss = loss_fn(structure, params, windows)
            axis_name = placement.axis_name
            return loss if axis_name is None else lax.pmean(loss, axis_name)

        f = placement.on_each(mean_loss, placement.first_split)
        return placement.jit(f).lower(params, windows).compile()

    # Under JAX_CHECK_TRACER_LEAKS threads share a list of traces, which holds for one of them.
    pool = ThreadPoolExecutor(1 if jax.config.jax_check_tracer_leaks else None)
    try:
        return Programs(
            *(future.result() for future in [pool.submit(f) for f in (init, step, loss)])
        )
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
