"""What this machine has, and for every op what would run on it and why nothing else.

Nothing here is decided a second time: each op is lowered for the default device, and the program
says whether it holds kernels. The reasons are the words with which the op itself refuses.
"""

import contextlib
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import jax

import jaxkern
from jaxkern.cases import TABLE
from jaxkern.cases.case import Case, dtypes
from jaxkern.lm.memory import available_memory
from jaxkern.lowering import cache, target

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
CALLS = {case.op: case for case in TABLE if case.layer}


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
    for name, case in CALLS.items():
        chosen, why = _choice(case)
        print(f"  {name:{width}}  {chosen:6}  {why}")


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _output(*command: str) -> str:
    """What a program prints; "" if it is not there or fails."""
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


def _choice(case: Case) -> tuple[str, str]:
    """Says what the op of `case` runs on the default device, and why not another implementation."""
    if not case.has_kernels:
        return "xla", "it has no kernel: XLA fuses it"
    assert case.layer is not None
    types = case.types(case.sizes(case.layer), dtypes("bfloat16"))
    if "mosaic_gpu" in jax.jit(lambda *args: case.call(*args)).lower(*types).as_text():
        return "mosaic", 'kernels; "xla" is there too, and slower'
    try:
        jax.jit(lambda *args: case.call(*args, implementation="mosaic")).lower(*types)
    except NotImplementedError as error:
        return "xla", f"not mosaic: {_line(error).partition(' Use implementation=')[0]}"
    return "xla", "mosaic would run too; by the measurements XLA is the better choice here"


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
