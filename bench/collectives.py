"""Collectives of each op: ``python -m bench collectives`` compiles and compares.

Each op of the table of cases is compiled for 8 H200s that are not there, and some for 64, with one
axis split between them all and under plain ``jax.jit``: forward, and value with gradient. The
collectives of the final text are held against ``bench/results/aot-collectives.json``; another
number of one is wrong, and ``--write`` renews the file. Nothing runs.
"""

import json
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from bench import aot, program
from bench.cases import TABLE, case, optim
from bench.compilers import described, exchanged_in, without_modules
from bench.processes import Failed
from bench.program import RESULTS
from jaxkern.core.target import GPUS

PATH = RESULTS / "aot-collectives.json"

SIZES = {"m": (8, 2048), "b": 8, "l": 2048, "d": 1536, "k": 1024, "h": 4096, "v": 50304}
SIZES |= {"n": 16, "w": 4, "heads": 24, "p": 64, "g": 1}
"""The sizes of the axes on 8 devices."""

MORE = {"m": (64, 2048), "b": 64, "l": 16384, "d": 4096, "heads": 192}
"""The size of the axis that is split between 64, where it is another."""

WHOLE = ("n", "p", "g", "w", "i")
"""Axes that nobody splits: states, the size of a head, groups, taps, micro-batches."""

PACKED = "ssd, packed and continued", "gated_delta_rule, packed and continued"
"""They take as long to compile as all others, and have the collectives of the packed selective_scan
and of the op where it is not packed."""

IN_PARTS = "linear_cross_entropy, in parts", "linear_cross_entropy, in chunks"
"""They have ways to be split of their own, and no symbolic shapes."""

ON_64 = {"rms_norm": "m d", "linear": "m h k", "linear_cross_entropy": "m", "mlp": "h"}
ON_64 |= {"causal_conv1d, continued": "l", "selective_scan": "b d l", "ssd": "heads l"}
ON_64 |= {"fused_adamw": "k"}
"""Axes of cases that are also compiled for 64 devices."""

Held = dict[str, dict[str, list[int]]]
"""Number and bytes of each kind of collective, by pass: ``"forward"`` and ``"both"``."""


def names() -> list[str]:
    """The programs: ``"rms_norm x m=8"`` has rows split between 8 devices."""
    found = []
    for of in _cases():
        axes = [axis for axis in of.axes.split() if axis not in WHOLE]
        if of.op == "mlp":
            axes = ["m", "h"]  # its d is the model's width, that of its residual
        found += [f"{of.name} x {axis}=8" for axis in axes]
        found += [f"{of.name} x {axis}=64" for axis in ON_64.get(of.name, "").split()]
    return found


def part() -> list[str]:
    """The programs that CI has time for: of scans, whose kernels take longest, one way or two."""
    slow = re.compile(r"=64|(scan|ssd|delta_rule).* x b=|packed")
    return [name for name in names() if not slow.search(name)]


def _cases() -> Iterator[case.Case]:
    """The cases with one call of each op, a block of several ops, and the optimizers."""
    for of in TABLE:
        strict = of.strict and of.name not in PACKED
        if strict or of.name in ("mlp", *IN_PARTS) or of in optim.CASES:
            yield of


def compiled(name: str) -> dict[str, Any]:
    """The collectives of the ``passes`` of a program, and a ``line`` of those of both."""
    of_case, axis, count = re.fullmatch(r"(.*) x (\w+)=(\d+)", name).groups()  # pyright: ignore
    of = next(of for of in _cases() if of.name == of_case)
    devices = described(GPUS["h200"], int(count))
    mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))
    sizes: dict[str, Any] = {name: SIZES[name] for name in of.axes.split()}
    if of.op.startswith("ssd"):
        sizes["n"] = 128
    if count == "64":
        sizes[axis] = MORE.get(axis, sizes[axis])
    *ins, of_result = (NamedSharding(mesh, spec) for spec in of.specs(axis, "x", sizes))
    types = of.types(sizes, case.dtypes("bfloat16", parameters="float32"))
    placed = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    arrays = [*map(placed, types, ins)]
    first = lambda *arrays: jax.tree.leaves(of.call(*arrays))[0]
    passes: dict[str, tuple[Any, Any]] = {"forward": (of.call, arrays)}
    if not of.op.endswith("_step") and of not in optim.CASES:
        dout = placed(jax.eval_shape(first, *types), of_result)
        both = lambda dout, *arrays: case.result_and_gradients(first, arrays, dout)
        passes["both"] = both, [dout, *arrays]
    found: Held = {}
    for direction, (f, arguments) in passes.items():
        text = jax.jit(f).lower(*arguments).compile().as_text()
        found[direction] = dict(sorted(exchanged_in(without_modules(text or "")[0]).items()))
    return {"passes": found, "line": "; ".join(exchanged(found))}


def differences(was: dict[str, Held], now: dict[str, Held]) -> Iterator[str]:
    """Tells where the number of a collective differs, of the programs `now`."""
    for name, held in now.items():
        if name not in was:
            yield f"{name}: is new"
            continue
        for direction, told in held.items():
            before = was[name].get(direction, {})
            counts = ({kind: count for kind, (count, _) in of.items()} for of in (before, told))
            yield from aot.other_counts(f"{name}, {direction}", *counts)


@program.command(
    write=(False, "renew the committed figures"),
    part=(False, "only what CI has time for"),
    only=("", "only programs whose name has this regular expression"),
    jobs=(2, "processes that compile"),
)
def main(args: Any) -> int:
    todo = [(name,) for name in (part if args.part else names)() if re.search(args.only, name)]
    was = json.loads(PATH.read_text())["programs"] if PATH.exists() else {}
    now: dict[str, Held] = {}
    faults = []
    for (name,), told in aot.run(compiled, todo, args.jobs):
        if isinstance(told, Failed):
            faults.append(f"{name}: {told}")
        else:
            now[name] = told["passes"]
    if args.write:
        every = {name: (was | now)[name] for name in names() if name in was | now}
        versions = {"jax": metadata.version("jax"), "commit": program.tree()}
        PATH.write_text(program.with_lines({**versions, "programs": every}))
        print(f"wrote {PATH}")
    else:
        faults += differences(was, now)
        if not args.only:
            faults += [f"{name}: is missing" for name in was if name not in names()]
    print(f"{len(now)} programs")
    return aot.status("collectives", faults)


def exchanged(of_passes: Held) -> tuple[str, str]:
    """The collectives of the forward, and of both passes."""

    counts = lambda found: ", ".join(f"{count} {kind}" for kind, (count, _) in found.items())
    told = {direction: counts(found) or "nothing" for direction, found in of_passes.items()}
    return told["forward"], told.get("both", "not differentiated")
