"""A report of this machine, and of what every op would run on it and why.

Nothing here is decided a second time: each op is lowered for the default device, and the program
says whether it holds kernels. The reasons are the words with which the op itself refuses.
"""

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxkern
from jaxkern.core import cache, target
from jaxkern.lm.memory import available_memory
from jaxkern.precision import NoOpLossScale

_NEEDED = ("jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "matplotlib", "tqdm")
_OTHERS = ("numpy", "ml_dtypes", "equinox", "pyarrow", "safetensors", "tokenizers", "torch")
_CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_VARIABLES = ("JAX", "XLA_", "CUDA_", "NVIDIA_VISIBLE", "NCCL_", "TF_GPU", "LD_LIBRARY_PATH")
_CONFIG = {  # what changes what ops compute or refuse, as JAX has it by default
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_debug_nans": False,
    "jax_disable_jit": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
}


def _step(optimizer: str) -> Callable[..., Any]:
    def step(params: Any, **options: Any) -> Any:
        tx = getattr(jaxkern, optimizer)(1e-3, **options)
        return jaxkern.apply(tx, params, tx.init(params), params)

    return step


_SHAPES = """
rms_norm: 8.2048.768 768
layer_norm: 8.2048.768 768 768
linear: 8.2048.768 768.3072
gated_linear_unit: 8.2048.768 768.3072 768.3072
rms_norm_linear: 8.2048.768 768 768.3072
layer_norm_linear: 8.2048.768 768 768 768.3072
accumulate_weight_grad: 768.3072.float32 8.2048.768 8.2048.3072
cross_entropy: 8.2048.50280 8.2048.int32
linear_cross_entropy: 8.2048.768 768.50280 8.2048.int32
relu relu_squared silu gelu quick_gelu sigmoid tanh: 8.2048.1536
swiglu geglu reglu glu: 8.2048.1536 8.2048.1536
silu_and_mul gelu_and_mul: 8.2048.3072
dropout: 8.2048.768
dropout_add: 8.2048.768 8.2048.768
causal_conv1d: 8.2048.1536 1536.4 1536
causal_conv1d_step: 8.3.1536 8.1536 1536.4
linear_scan: 8.2048.1536 8.2048.1536
selective_scan: 8.2048.1536 8.2048.1536 1536.16.float32 8.2048.16 8.2048.16
selective_scan_step: 8.1536.16.float32 8.1536 8.1536 1536.16.float32 8.16 8.16
ssd: 8.2048.24.64 8.2048.24 24.float32 8.2048.1.128 8.2048.1.128
ssd_step: 8.24.64.128.float32 8.24.64 8.24 24.float32 8.1.128 8.1.128
gated_delta_rule: 8.2048.6.128 8.2048.6.128 8.2048.6.128 8.2048.6.float32 8.2048.6
gated_delta_rule_step: 8.6.128.128.float32 8.6.128 8.6.128 8.6.128 8.6.float32 8.6
fused_adamw fused_adam fused_sgd scale_gradients: 768.3072
"""
_ROWS = (line.split(":") for line in _SHAPES.split("\n") if line)
CALLS = {name: shapes.split() for names, shapes in _ROWS for name in names.split()}
"""The arrays of each op in a layer of Mamba, Mamba-2 or Gated DeltaNet 130m: sizes, and dtype if it
is not bfloat16."""

_RUNS: dict[str, Callable[..., Any]] = {
    **{name: _step(name) for name in ("fused_adamw", "fused_adam", "fused_sgd")},
    "scale_gradients": lambda grads, **options: jaxkern.scale_gradients(
        grads, NoOpLossScale(), **options
    ),
    "dropout": lambda x, **options: jaxkern.dropout(x, 0.1, jax.random.key(0), **options),
    "dropout_add": lambda x, residual, **options: jaxkern.dropout_add(
        x, residual, 0.1, jax.random.key(0), **options
    ),
}
"""Calls of ops that take more than arrays."""


def doctor() -> None:
    """Print the report: what to paste into a report of a bug."""
    needed, others, plugins = map(_versions, (_NEEDED, _OTHERS, _CUDA))
    missing = [name for name in _NEEDED if name not in needed]
    shown = lambda versions: ", ".join(f"{name} {version}" for name, version in versions.items())
    environ = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)]
    config = {name: getattr(jax.config, name, default) for name, default in _CONFIG.items()}
    changed = [f"{name}={value}" for name, value in config.items() if value != _CONFIG[name]]
    root = Path(jaxkern.__file__).parents[1]
    describe = "git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"
    commit = _output(*describe) if (root / ".git").exists() else ""
    gpus = _output("nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv")
    driver = "; ".join(gpus.splitlines()[1:])
    print(f"jaxkern  {jaxkern.__version__}{commit and f', commit {commit}'}", end="")
    print(f", Python {platform.python_version()}")
    print(f"system   {platform.platform()}, {os.cpu_count()} CPU cores{_memory()}")
    print(f"packages {shown(needed)}" + "".join(f", {name} missing" for name in missing))
    print(f"besides  {shown(others)}")
    print("environ  " + (" ".join(environ) or "nothing set"))
    print("config   " + (", ".join(changed) or "JAX's defaults"))
    print("CUDA     " + (shown(plugins) or "JAX's CUDA build is not installed"))
    print(f"driver   {driver or 'none (nvidia-smi does not answer)'}")
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        print(f"devices  JAX cannot start: {_line(error) or 'there is no device of JAX_PLATFORMS'}")
        print("advice   unset JAX_PLATFORMS, or JAX_PLATFORMS=cpu has it start without a GPU")
        return
    for device in devices:
        of_gpu = getattr(device, "compute_capability", None)
        limit = (device.memory_stats() or {}).get("bytes_limit")
        text = f"{device.device_kind} ({device.platform})"
        text += f", compute capability {of_gpu}" if of_gpu else ""
        text += f", {limit / 2**30:.0f} GiB for JAX" if limit else ""
        print(f"device   {device.id}: {text}")
    dotted = lambda found: ", ".join(f"{major}.{minor}" for major, minor in found)
    compiled = [found for found in target.COMPILED if found not in target.RUN]
    print(f"kernels  {_cache()}")
    print(f"tested   kernels were run on GPUs of compute capability {dotted(target.RUN)} ", end="")
    print(f"(H100, H200); for {dotted(compiled)} they were compiled and never run")
    if driver and devices[0].platform == "cpu":
        print(
            'advice   there is a GPU, and JAX does not use it: pip install "jax[cuda12]" '
            "(or jax[cuda13] for a driver from 580 on)"
        )
    if missing:
        print(f"advice   jaxkern train and sample need: pip install {' '.join(missing)}")
    print("\nEach op on bfloat16 arrays of a layer of Mamba or Mamba-2 130m, implementation=None:")
    width = max(map(len, CALLS), default=0)
    for name in CALLS:
        chosen, why = _choice(name)
        print(f"  {name:{width}}  {chosen:6}  {why}")


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _output(*command: str) -> str:
    """The output of a program; "" if it is not there or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return run.stdout.strip()
    return ""


def _memory() -> str:
    text = f", {shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GiB of disk here"
    with contextlib.suppress(RuntimeError, AssertionError):  # of a JAX that has no CPU
        if available := available_memory(jax.local_devices(backend="cpu")[0]):
            return f", {available / 2**30:.0f} GiB of memory available{text}"
    return text


def _choice(name: str) -> tuple[str, str]:
    """Returns what an op runs on the default device, and why not another implementation."""
    run = _RUNS.get(name) or getattr(jaxkern, name)
    types = [_type(text) for text in CALLS[name]]
    if "mosaic_gpu" in jax.jit(lambda *args: run(*args)).lower(*types).as_text():
        return "mosaic", 'kernels; "xla" is there too, and slower'
    try:
        jax.jit(lambda *args: run(*args, implementation="mosaic")).lower(*types)
    except NotImplementedError as error:
        return "xla", f"not mosaic: {_line(error).partition(' Use implementation=')[0]}"
    return "xla", "mosaic would run too; by the measurements XLA is the better choice here"


def _type(text: str) -> jax.ShapeDtypeStruct:
    """The array that "8.2048.int32" describes."""
    sizes = [int(word) for word in text.split(".") if word.isdigit()]
    dtype = next((word for word in text.split(".") if not word.isdigit()), "bfloat16")
    return jax.ShapeDtypeStruct(tuple(sizes), dtype)


def _cache() -> str:
    """Says where the cache is, how large it is, and how often a kernel was found in it."""
    held = cache.summary()
    if held.folder is None:
        return "lowered anew in each process: the cache is switched off by JAXKERN_CACHE"
    programs = f"; {held.programs / 2**20:.1f} MiB of XLA's programs" if held.programs else ""
    return (
        f"{held.entries} kept in {held.folder}, {held.size / 2**20:.1f} MiB, "
        f"{held.hits} hits, {held.misses} misses{programs} (doctor --empty-cache removes them)"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
