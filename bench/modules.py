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

from bench import program, steps
from bench.cases.optim import Step
from bench.measured import Case, cases
from bench.processes import Failed, each
from jaxkern.core import kernel_call, target


def kernel_modules(f: Callable[..., Any], *args: Any) -> list[Any]:
    """The Mosaic modules of the kernels that `f` calls, as lowered for CUDA."""
    from jax._src.interpreters import mlir
    from jax._src.lib import mosaic_gpu_dialect  # pyright: ignore[reportPrivateImportUsage]
    from jaxlib.mlir import ir

    # In place: exported, they are written for older readers, and JAX 0.11's does not parse that.
    in_place = lambda name, kernel, types, gpu, precision: kernel.full
    with (
        mock.patch.object(kernel_call, "lowered", in_place),
        target.fitting_to(target.of_program(None)),
    ):
        traced = jax.jit(lambda *args: f(*args)).trace(*args)
        lowered: Any = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    texts = []

    def visit(op: Any) -> Any:
        if "mosaic_gpu" in str(op.attributes.get("call_target_name")):
            texts.append(op.attributes["mhlo.backend_config"]["module"].value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.operation.walk(visit)
    context = mlir.make_ir_context()
    mosaic_gpu_dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    return [ir.Module.parse(text, context) for text in texts]


def digests(name: str) -> list[str]:
    """A digest of each kernel of a case, which tells of its code alone, not of its source lines."""
    case = _by_name()[name]
    arrays = jax.eval_shape(case.arrays, jax.random.key(0))
    modules = kernel_modules(passes(case), *arrays)
    return sorted(hashlib.sha256(str(module).encode()).hexdigest()[:16] for module in modules)


def _by_name() -> dict[str, Case | Step]:
    return {f"{case.op} {case.shape} {case.dtype}": case for case in cases(small=False)}


def passes(case: Case | Step) -> Callable[..., Any]:
    """The kernels' program of a case: forward and backward, or an optimizer's step.

    The kernel of a forward that nobody differentiates may be another one, and is there too.
    """
    if isinstance(case, Step):
        init, run = steps.program(case, "mosaic")
        return lambda *params: run(params, init(params), params)
    forward = lambda *arrays: case.call(*arrays, implementation="mosaic")
    if not case.differentiated:
        return forward

    def both(*arrays: Any) -> Any:
        out, backward = jax.vjp(forward, *arrays)
        return forward(*arrays), out, backward(out)

    return both


def main(argv: list[str] | None = None) -> int:
    p = program.parser("modules")
    p.add_argument("--op", action="append", help="only this op; repeat for more")
    p.add_argument("--jobs", type=int, default=1, help="processes")
    group = p.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, help="keep the digests in this file")
    group.add_argument("--against", type=Path, help="compare with the digests in this file")
    args = p.parse_args(argv)
    names = [n for n in _by_name() if not args.op or n.split()[0] in args.op]
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
