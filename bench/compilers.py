"""Compilers of programs for NVIDIA GPUs that are not there, and what these tell of a program.

    devices = compilers.described(jaxkern.core.target.GPUS["h200"], count=8)
    x = jax.ShapeDtypeStruct((8192, 4096), "bfloat16", sharding=SingleDeviceSharding(devices[0]))
    compiled = jax.jit(f).lower(x).compile()    # as_text(), memory_analysis(); it cannot be run

Mosaic and ptxas run as they do for a GPU that is there. It takes JAX's CUDA plugin and ptxas (the
extra ``aot``), and JAX_PLATFORMS=cpu, as JAX's own devices are the machine's: `for_gpus` sets it.

With MOSAIC_GPU_DUMP_PTXAS=1 Mosaic prints what ptxas tells of each kernel that it compiles: to the
process's standard output from C++, once a process, in the order of the program's final text. That
text holds the kernels' modules, and in them stands the shared memory that a launch asks for.
"""

import collections
import contextlib
import ctypes
import itertools
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

from jax.experimental.mosaic.gpu import dialect  # pyright: ignore[reportPrivateImportUsage]
from jaxlib.mlir import ir

from jaxkern.core.target import Gpu

PER_HOST = 8
"""GPUs of one host; more than these are several hosts of as many."""

# By capability: bytes of shared memory and threads of a multiprocessor, from the CUDA Programming
# Guide, "Compute Capabilities".
_MULTIPROCESSORS = {(7, 5): (65536, 1024), (8, 0): (167936, 2048)}
_MULTIPROCESSORS |= dict.fromkeys([(8, 6), (8, 9), (12, 0)], (102400, 1536))
_MULTIPROCESSORS |= dict.fromkeys([(9, 0), (10, 0), (10, 3)], (233472, 2048))


@contextlib.contextmanager
def for_gpus() -> Iterator[None]:
    """Processes that start inside compile for described GPUs, whatever GPU the machine has.

    A kernel that one of them lowers serves the others, and none is left from before.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {"JAX_PLATFORMS": "cpu", "JAXKERN_CACHE_DIR": folder, "TF_CPP_MIN_LOG_LEVEL": "1"}
        with mock.patch.dict(os.environ, told, MOSAIC_GPU_DUMP_PTXAS="1"):
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


# Kernels, by what ptxas prints


class Kernel(NamedTuple):
    """Resources of a compiled kernel."""

    registers: int  # of a thread
    spills: int  # bytes that a thread stores and loads again, where it runs each instruction once
    shared_memory: int  # bytes


Kernels = dict[str, list[Kernel]]
"""The kernels of a program by name; those of one name in order of what they take."""


class Compiler:
    """Compiles programs and tells what their kernels take."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Kernel]] = {}

    def __call__(self, lowered: Any) -> tuple[Any, str, Kernels]:
        """The program compiled, its final text without the kernels' modules, and its kernels."""
        with standard_output() as printed:
            compiled = lowered.compile()
        told = parsed(printed())
        if slow := serialized(printed()):
            raise RuntimeError(f"ptxas serializes the products of {', '.join(slow)}")
        text, modules = without_modules(compiled.as_text())
        if lost := out_of_place(text):
            raise RuntimeError(f"XLA forgets what is in place in {', '.join(lost)}")
        new = {
            digest: _launch(lowered.compiler_ir(), module)
            for digest, module in modules.items()
            if digest not in self._known
        }
        known, printed_of = ([name for name, _ in of] for of in (new.values(), told))
        if sorted(known) != sorted(printed_of):
            raise RuntimeError(f"the program's new kernels are {known}, ptxas told of {printed_of}")
        for digest, (name, dynamic) in new.items():
            entry = next(entry for entry in told if entry[0] == name)
            told.remove(entry)
            total = entry[1]._replace(shared_memory=entry[1].shared_memory + dynamic)
            self._known[digest] = name, total
        kernels: Kernels = {}
        for name, kernel in sorted(self._known[digest] for digest in modules):
            kernels.setdefault(name, []).append(kernel)
        return compiled, text, kernels


_ENTRY = re.compile(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_SERIALIZED = re.compile(r"instructions are serialized .*function '(\w+?)(?:_mosaic_gpu_kernel)?'")


def parsed(text: str) -> list[tuple[str, Kernel]]:
    """Each kernel that ptxas tells of, without the shared memory that its launch asks for."""
    found = []
    starts = [*(m.start() for m in _ENTRY.finditer(text)), len(text)]
    for start, end in itertools.pairwise(starts):
        entry, spills, used = (p.search(text[start:end]) for p in (_ENTRY, _SPILLS, _USED))
        if not (entry and spills and used):
            raise RuntimeError(f"this is not what ptxas tells of a kernel:\n{text[start:end]}")
        kernel = Kernel(int(used[1]), sum(map(int, spills.groups())), int(used[2] or 0))
        found.append((entry[1], kernel))
    return found


def serialized(text: str) -> list[str]:
    """The kernels in which each instruction of wgmma waits for the one before, by ptxas's words.

    It does that, and spills little or nothing, where registers are too few for accumulators and
    operands of products that run at once (C7512), or where the code touches an accumulator then.
    """
    return sorted({match[1] for match in _SERIALIZED.finditer(text)})


_SYMBOL = re.compile(rb"(\w+?)_mosaic_gpu\b")


def module_of(program: Any, text: bytes) -> Any:
    """A kernel's module as Mosaic writes it, read in the context of a `program` of MLIR."""
    program.context.allow_unregistered_dialects = True  # Mosaic's stable form of MLIR's own
    dialect.register_dialect(program.context)
    return type(program).parse(text, program.context)


def _launch(program: Any, module: bytes) -> tuple[str, int]:
    """Name of a kernel, and bytes of shared memory that its launch asks for; 0 on JAX 0.11."""
    try:
        kernel = module_of(program, module)
    except ir.MLIRError:  # JAX 0.11 exports modules that it does not parse
        (name,) = set(_SYMBOL.findall(module)) - {b"stable"}
        return name.decode(), 0
    for function in kernel.body:
        for operation in (o for region in function.regions for block in region for o in block):
            if operation.name.endswith("gpu.launch"):
                name = function.attributes["sym_name"].value.removesuffix("_mosaic_gpu")
                # Its other arguments, the sizes of grid and block, are of another type.
                (size,) = (v for v in operation.operands if str(v.type) == "i32")
                return name, size.owner.attributes["value"].value
    raise RuntimeError("a kernel's module holds no launch")


@contextlib.contextmanager
def standard_output() -> Iterator[Callable[[], str]]:
    """Captures what the process prints inside the block, C++ included; it is read after it."""
    flush_c = ctypes.CDLL(None).fflush
    printed = ""
    with tempfile.TemporaryFile("w+") as file:
        sys.stdout.flush()
        flush_c(None)
        terminal = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: printed
        finally:
            sys.stdout.flush()
            flush_c(None)
            os.dup2(terminal, 1)
            os.close(terminal)
            file.seek(0)
            printed = file.read()


# A program's final text

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_MODULE = re.compile(r'kernel_hash = "([^"]*)", module = "([^"]*)"')
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)$", re.MULTILINE)
_IN_PLACE = re.compile(r"mosaic_gpu_v2.*output_to_operand_aliasing")
_MOVING = {"copy", "slice", "dynamic-slice", "concatenate", "transpose", "pad"}
_FREE = {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element"}
_COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = (?P<types>[^\"\n]*?) "
    rf"(?P<kind>{'|'.join(COLLECTIVES)})(?P<start>-start)?\((?P<rest>.*)",
    re.MULTILINE,
)


def without_modules(text: str) -> tuple[str, dict[str, bytes]]:
    """A program's final text without the modules of its kernels, and these by their digests.

    MLIR writes a backslash twice, and other bytes by two hexadecimal digits behind one.
    """
    byte = lambda m: b"\\" if m[1] == b"\\" else bytes.fromhex(m[1].decode())
    unescaped = lambda module: re.sub(rb"\\(\\|[0-9A-F]{2})", byte, module.encode())
    escaped: dict[str, str] = {}
    for match in _MODULE.finditer(text):
        escaped.setdefault(match[1], match[2])
    return _MODULE.sub("", text), {digest: unescaped(m) for digest, m in escaped.items()}


def out_of_place(text: str) -> list[str]:
    """Names the fusions with kernels that work in place: of a fusion's results none does."""
    lost = lambda name, body: "dynamic-slice-fusion" in name and _IN_PLACE.search(body)
    return [name for name, body in _COMPUTATION.findall(text) if lost(name, body)]


def copied_in(text: str) -> int:
    """Bytes that a program writes by instructions that only move data; of a loop's, once.

    A slice of a product's result, or a concatenation of gradients, is a pass over memory that
    another way to write the same program may not need.
    """
    of_each = {name: _INSTRUCTION.findall(body) for name, body in _COMPUTATION.findall(text)}
    fused = set(re.findall(r"calls=%?([\w.-]+)", text))
    copied = 0
    every = (each for name, body in of_each.items() if name not in fused for each in body)
    for types, operation, rest in every:
        operations = {operation}
        if operation == "fusion" and (called := re.search(r"calls=%?([\w.-]+)", rest)):
            operations = {of for _, of, _ in of_each[called[1]]}
        if operations & _MOVING and operations <= _MOVING | _FREE:
            copied += sum(_sizes(types))
    return copied


def _sizes(types: str) -> list[int]:
    """Bytes of each array of a result's type, one or a tuple."""
    return [
        math.prod(int(size) for size in shape.split(",") if size) * int(bits) // 8
        for bits, shape in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", types)
    ]


def exchanged_in(text: str) -> dict[str, list[int]]:
    """Number and bytes of each kind of collective, after a gather or before a scatter."""
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for match in _COLLECTIVE.finditer(text):
        sizes = _sizes(match["types"])
        size = sum(sizes) * (_group_size(match["rest"]) if match["kind"] == "reduce-scatter" else 1)
        if match["start"]:  # arguments and results
            half = len(sizes) // 2
            size = max(sum(sizes[:half]), sum(sizes[half:]))
        found[match["kind"]][0] += 1
        found[match["kind"]][1] += size
    return dict(found)


def _group_size(attributes: str) -> int:
    """Number of devices that exchange with one another, by an instruction's attributes."""
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^]]*)\] ?\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    groups = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return len(groups[1].split(",")) if groups else 1
