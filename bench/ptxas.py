"""Registers, spills and shared memory of the kernels of programs that are compiled here.

With MOSAIC_GPU_DUMP_PTXAS=1 Mosaic prints what ptxas tells of each kernel that it compiles: to the
process's standard output from C++, once a process, in the order of the program's final text. That
text holds the kernels' modules, and in them stands the shared memory that a launch asks for.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import dialect  # pyright: ignore[reportPrivateImportUsage]
from jaxlib.mlir import ir


class Kernel(NamedTuple):
    """What a compiled kernel takes: registers a thread, bytes of spills and of shared memory.

    Spills are the bytes that a thread stores and those that it loads again, where it runs each
    instruction once.
    """

    registers: int
    spills: int
    shared_memory: int


Kernels = dict[str, list[Kernel]]
"""The kernels of a program by name; those of one name in order of what they take."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its final text without the kernels' modules, and its kernels."""

    compiled: Any
    text: str
    kernels: Kernels


class Compiler:
    """Compiles programs and tells what their kernels take."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Kernel]] = {}

    def __call__(self, lowered: Any) -> Program:
        """The program compiled.

        Raises:
          RuntimeError: ptxas did not tell once of each kernel, or serializes the products of one,
            or a kernel that works in place would not.
        """
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
        names = [name for name, _ in new.values()], [name for name, _ in told]
        if sorted(names[0]) != sorted(names[1]):
            raise RuntimeError(
                f"the program's new kernels are {names[0]}, ptxas told of {names[1]}"
            )
        for digest, (name, dynamic) in new.items():
            entry = next(entry for entry in told if entry[0] == name)
            told.remove(entry)
            taken = entry[1]
            total = taken._replace(shared_memory=taken.shared_memory + dynamic)
            self._known[digest] = name, total
        kernels: Kernels = {}
        for name, kernel in sorted(self._known[digest] for digest in modules):
            kernels.setdefault(name, []).append(kernel)
        return Program(compiled, text, kernels)


_ENTRY = re.compile(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parsed(text: str) -> list[tuple[str, Kernel]]:
    """Each kernel that ptxas tells of, without the shared memory that its launch asks for."""
    found = []
    starts = [*(m.start() for m in _ENTRY.finditer(text)), len(text)]
    for start, end in itertools.pairwise(starts):
        of_entry = text[start:end]
        entry, spills, used = (p.search(of_entry) for p in (_ENTRY, _SPILLS, _USED))
        if not (entry and spills and used):
            raise RuntimeError(f"this is not what ptxas tells of a kernel:\n{of_entry}")
        kernel = Kernel(int(used[1]), sum(map(int, spills.groups())), int(used[2] or 0))
        found.append((entry[1], kernel))
    return found


_SERIALIZED = re.compile(r"instructions are serialized .*function '(\w+?)(?:_mosaic_gpu_kernel)?'")


def serialized(text: str) -> list[str]:
    """The kernels in which each instruction of wgmma waits for the one before, by ptxas's words.

    It does that, and spills little or nothing, where registers are too few for accumulators and
    operands of products that run at once (C7512), or where the code touches an accumulator then.
    """
    return sorted({match[1] for match in _SERIALIZED.finditer(text)})


_COMPUTATION = re.compile(r"^%([\w.-]+) \(.*?^}", re.DOTALL | re.MULTILINE)


_IN_PLACE = re.compile(r"mosaic_gpu_v2.*output_to_operand_aliasing")


def out_of_place(text: str) -> list[str]:
    """Names the fusions with kernels that work in place: of a fusion's results none does."""
    return [
        found[1]
        for found in _COMPUTATION.finditer(text)
        if "dynamic-slice-fusion" in found[1] and _IN_PLACE.search(found[0])
    ]


_MODULE = re.compile(r'kernel_hash = "([^"]*)", module = "([^"]*)"')


def without_modules(text: str) -> tuple[str, dict[str, bytes]]:
    """A program's final text without the modules of its kernels, and these by their digests."""
    escaped: dict[str, str] = {}
    for match in _MODULE.finditer(text):
        escaped.setdefault(match[1], match[2])
    return _MODULE.sub("", text), {digest: unescaped(m) for digest, m in escaped.items()}


def unescaped(text: str) -> bytes:
    """The bytes that MLIR writes as `text`: a backslash twice, others by two hexadecimal digits."""

    def byte(match: re.Match[bytes]) -> bytes:
        return b"\\" if match[1] == b"\\" else bytes.fromhex(match[1].decode())

    return re.sub(rb"\\(\\|[0-9A-F]{2})", byte, text.encode())


_SYMBOL = re.compile(rb"(\w+?)_mosaic_gpu\b")


def _launch(program: Any, module: bytes) -> tuple[str, int]:
    """Name of a kernel, and bytes of shared memory that its launch asks for; 0 on JAX 0.11.

    Args:
      program: a module of MLIR, in whose context the kernel's is read.
      module: as Mosaic writes it.
    """
    program.context.allow_unregistered_dialects = True  # Mosaic's stable form of MLIR's own
    dialect.register_dialect(program.context)
    try:
        kernel = type(program).parse(module, program.context)
    except ir.MLIRError:  # JAX 0.11 exports modules that it does not parse
        (name,) = set(_SYMBOL.findall(module)) - {b"stable"}
        return name.decode(), 0
    for function in kernel.body:
        for block in (block for region in function.regions for block in region):
            for operation in block:
                if operation.name.endswith("gpu.launch"):
                    name = function.attributes["sym_name"].value.removesuffix("_mosaic_gpu")
                    # Its other arguments, the sizes of grid and block, are of another type.
                    (size,) = (v for v in operation.operands if str(v.type) == "i32")
                    return name, size.owner.attributes["value"].value
    raise RuntimeError("a kernel's module holds no launch")


@contextlib.contextmanager
def standard_output() -> Iterator[Callable[[], str]]:
    """What the process prints inside the block, C++ included; to be asked for after it."""
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
