"""Did a change of the source change a kernel? Digests of every kernel's module as it is lowered.

``python -m bench modules --write FILE`` keeps those of all bench cases, forward and backward, for
an H200; ``--against FILE`` lowers them again and names the cases whose kernels differ. No GPU is
needed, and nothing is compiled.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jaxlib.mlir import ir

from bench import compilers, program
from bench.measured import named, passes
from bench.processes import Failed, each
from jaxkern.core import kernel_call, target


def kernel_modules(f: Callable[..., Any], *args: Any) -> list[Any]:
    """The Mosaic modules of the kernels that `f` calls, as lowered for CUDA."""
    # In place: exported, they are written for older readers, and JAX 0.11's does not parse that.
    in_place = lambda name, kernel, types, gpu, precision: kernel.full
    patched = mock.patch.object(kernel_call, "lowered", in_place)
    with patched, target.fitting_to(target.of_program(None)):
        traced = jax.jit(lambda *args: f(*args)).trace(*args)
        lowered: Any = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    found = []

    def visit(op: Any) -> Any:
        if "mosaic_gpu" in str(op.attributes.get("call_target_name")):
            text = op.attributes["mhlo.backend_config"]["module"].value_bytes
            found.append(compilers.module_of(lowered, text))
        return ir.WalkResult.ADVANCE

    lowered.operation.walk(visit)
    return found


def digests(name: str) -> list[str]:
    """A digest of each kernel of a case, which tells of its code alone, not of its source lines."""
    case = named()[name]
    arrays = jax.eval_shape(case.arrays, jax.random.key(0))
    modules = kernel_modules(passes(case), *arrays)
    return sorted(hashlib.sha256(str(module).encode()).hexdigest()[:16] for module in modules)


@program.command(
    op=([str], "only this op"),
    jobs=(1, "processes"),
    write=(Path, "keep the digests in this file"),
    against=(Path, "compare with the digests in this file"),
)
def main(args: Any) -> int:
    if (args.write is None) == (args.against is None):
        args.error("give --write FILE or --against FILE")
    names = [name for name, case in named().items() if not args.op or case.op in args.op]
    found = {name: made for (name,), made in each(digests, [(n,) for n in names], args.jobs)}
    if failed := [f"{name}: {made}" for name, made in found.items() if isinstance(made, Failed)]:
        print(*failed, sep="\n")
        return 1
    if args.write:
        args.write.write_text(json.dumps({name: found[name] for name in names}, indent=1) + "\n")
        print(f"{len(found)} cases, {sum(map(len, found.values()))} kernels: wrote {args.write}")
        return 0
    kept = json.loads(args.against.read_text())
    differ = [n for n in names if kept.get(n) != found[n]]
    print(*(f"{n}: {'new' if n not in kept else 'another kernel'}" for n in differ), sep="\n")
    print(f"{len(names) - len(differ)} of {len(names)} cases have the same kernels")
    return 1 if differ else 0
