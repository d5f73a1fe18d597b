"""NVIDIA GPUs that are not there, described to XLA so that programs can be compiled for them.

    devices = gpus.described(jaxkern.core.target.GPUS["h200"], count=8)
    x = jax.ShapeDtypeStruct((8192, 4096), "bfloat16", sharding=SingleDeviceSharding(devices[0]))
    compiled = jax.jit(f).lower(x).compile()    # as_text(), memory_analysis(); it cannot be run

Mosaic and ptxas run as they do for a GPU that is there. It takes JAX's CUDA plugin and ptxas (the
extra ``aot``), and JAX_PLATFORMS=cpu, as JAX's own devices are the machine's: `compilers` sets it.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from jaxkern.core.target import Gpu

PER_HOST = 8
"""GPUs of one host; more than these are several hosts of as many."""

# By capability: bytes of shared memory and threads of a multiprocessor, from the CUDA Programming
# Guide, "Compute Capabilities".
_MULTIPROCESSORS = {
    (7, 5): (65536, 1024),
    (8, 0): (167936, 2048),
    (8, 6): (102400, 1536),
    (8, 9): (102400, 1536),
    (9, 0): (233472, 2048),
    (10, 0): (233472, 2048),
    (10, 3): (233472, 2048),
    (12, 0): (102400, 1536),
}


@contextlib.contextmanager
def compilers() -> Iterator[None]:
    """Processes that start inside compile for described GPUs, whatever GPU the machine has.

    A kernel that one of them lowers serves the others, and none is left from before.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {
            "JAX_PLATFORMS": "cpu",
            "JAXKERN_CACHE_DIR": folder,
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
        with mock.patch.dict(os.environ, told):
            yield


def described(gpu: Gpu, count: int) -> Sequence[Any]:
    """`count` JAX devices of the kind of `gpu`, for programs that are compiled and not run."""
    from jax.experimental import topologies  # it loads JAX's plugins

    hosts, rest = divmod(count, PER_HOST)
    if hosts and rest:
        raise ValueError(f"count must be below {PER_HOST} or a multiple of it, got {count}")
    shape = f"1x{hosts}x{PER_HOST}" if hosts else f"1x1x{count}"
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology=shape
    )
    return topology.devices


def target_config(gpu: Gpu) -> str:
    """XLA's description of a GPU, as the text of its protocol buffer.

    Bandwidth, cache and clock are those of an H200 whatever the GPU: XLA's estimates of how long
    its own fusions take depend on them, the kernels do not.
    """
    major, minor = gpu.capability
    shared_memory, threads = _MULTIPROCESSORS[gpu.capability]
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  shared_memory_per_block_optin: {gpu.shared_memory}
  threads_per_core_limit: {threads}
  core_count: {gpu.multiprocessors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
