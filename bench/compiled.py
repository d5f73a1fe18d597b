"""The guides' tables of what was compiled for GPUs that were not there, from bench/results/aot-*.

The figures are those of ``python -m bench aot`` and ``collectives``.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench import collectives as of_ops
from bench.cases import optim
from bench.compilers import COLLECTIVES
from bench.figures import table
from bench.measured import named
from bench.program import RESULTS

Held = dict[str, Any]
"""A file of :mod:`bench.aot`."""

COMPOSED = ("mlp", "layer_norm_linear", "rms_norm_linear")
"""Cases of several ops, each of which has rows of its own."""


def load(folder: Path = RESULTS) -> dict[str, Held]:
    """The committed figures of each generation, as ``"sm_90"``, from the oldest on."""
    found = {path.stem.removeprefix("aot-"): path for path in folder.glob("aot-sm_*.json")}
    order = sorted(found, key=lambda name: int(name.removeprefix("sm_")))
    return {name: json.loads(found[name].read_text()) for name in order}


def operations() -> list[str]:
    """The ops, in the order of the cases."""
    return [op for op in dict.fromkeys(case.op for case in named().values()) if op not in COMPOSED]


def matrix() -> str:
    """Counts the cases of each op that are kernels alone, on each generation; the compilers."""
    held_of = load()
    name_of = lambda held: re.sub("NVIDIA |-SXM.*| SXM.*| Blackwell", "", held["gpu"])
    rows = [[f"`{op}`", *(_cell(op, held) for held in held_of.values())] for op in operations()]
    cells = table(["", *(f"{name}, {name_of(held)}" for name, held in held_of.items())], rows)
    newest = next(iter(held_of.values()))
    return f"{cells}\n\nCompiled by JAX {newest['jax']} and ptxas {newest['ptxas']}."


def _cell(op: str, held: Held) -> str:
    of_op = {name: kernels for name, kernels in held["kernels"].items() if name.split()[0] == op}
    if not of_op:
        return "not compiled"
    if not any(of_op.values()):
        return "plain JAX"
    without = sum(name in held["plain"] for name in of_op)
    spilling = sum(any(k[1] for of in kernels.values() for k in of) for kernels in of_op.values())
    told = f"{len(of_op) - without} of {len(of_op)}" if without else f"{len(of_op)}"
    return told + (f", spills at {spilling}" if spilling else "")


def plain() -> str:
    """Passes that are plain JAX: the kernels, at what shapes, on which generations, why."""
    shapes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for generation, held in load().items():
        for name, passes in held["plain"].items():
            op, _, shape = name.removesuffix(" bfloat16").partition(" ")
            for kernel, reason in passes.items() if op not in COMPOSED else ():
                why = re.sub(r", and (?:this is for|NVIDIA).*", "", reason)
                why = re.sub(r"rows of \d+ elements", "such rows", why)
                shapes[kernel, why, generation].append(shape)
    kernels: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (kernel, why, generation), of_kernel in shapes.items():
        told = "all" if "wgmma" in why else ", ".join(of_kernel)
        kernels[told, why, generation].append(f"`{kernel}`")
    generations: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (told, why, generation), of_shapes in kernels.items():
        generations[", ".join(of_shapes), told, why].append(generation)
    rows = ([names, told, ", ".join(of), why] for (names, told, why), of in generations.items())
    return table(["kernels", "shapes", "generations", "why"], rows)


def versions() -> str:
    """Other versions of JAX: the programs that one compiled, and where they differ."""
    found: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for generation, held in load().items():
        for key in (key for key in held if key.startswith("jax ")):
            told = (f"{generation}: {each}" for of in held[key].values() for each in of)
            found[key][0].append(f"{len(held[key])} for {generation}")
            found[key][1].extend(told)
    rows = ([key[4:], ", ".join(of), "; ".join(told)] for key, (of, told) in found.items())
    return table(["JAX", "programs", "more passes in plain JAX, and more kernels that spill"], rows)


def meshes() -> str:
    """Training steps of one layer on meshes: what devices exchange, and their memory."""
    held, rows = load()["sm_90"], []
    for name, told in held["training"].items():
        preset, _, mesh = name.partition(" x ")
        if "=" not in mesh:
            continue
        counts, bytes_of = told["collectives"], told["exchanged"]
        cells = (
            f"{counts[kind]}, {bytes_of[kind] / 1e6:,.2f} MB" if kind in counts else ""
            for kind in COLLECTIVES
        )
        memory = f"{told['memory'] / 2**30:.2f} GiB"
        rows.append([f"`{preset}`", f"`{mesh}`", *cells, memory])
    head = ["a layer of", "`--mesh`", *COLLECTIVES, "memory of a device"]
    return f"{table(head, rows)}\n\nCompiled by JAX {held['jax']}."


SPLIT = {
    "m": "rows",
    "b": "batch",
    "d": "channels; features of a norm",
    "heads": "heads",
    "h": "outputs (N), or channels",
    "k": "inputs (K)",
    "parameters": "parameters, with their state",
    "v": "vocabulary",
    "l": "sequence",
}
"""Names of axes in the table, in its order."""


def collectives() -> str:
    """The exchanges of ops whose axes are split, in the guide to many GPUs."""
    held = json.loads(of_ops.PATH.read_text())
    programs: dict[str, Held] = held["programs"]
    optimizers = {case.op for case in optim.CASES}
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for name, of_passes in programs.items():
        of_case, axis, count = re.split(" x |=", name)
        told = of_ops.exchanged(of_passes)
        if count == "64" and told == of_ops.exchanged(programs[f"{of_case} x {axis}=8"]):
            continue
        op, _, variant = of_case.partition(", ")
        words = [variant] if variant else []
        words += ["on 64"] if count == "64" else []
        label = f"`{op}`" + (f" ({', '.join(words)})" if words else "")
        axis = "parameters" if op in optimizers else axis
        of_group = grouped.setdefault((axis, *told), [])
        if label not in of_group:  # parameters are split either way
            of_group.append(label)
    order = sorted(grouped, key=lambda key: [*SPLIT].index(key[0]))
    rows = [[SPLIT[key[0]], ", ".join(grouped[key]), *key[1:]] for key in order]
    count = sum(name.endswith("=64") for name in programs)
    return (
        table(["split", "ops", "forward", "forward and backward"], rows)
        + f"\n\nCompiled by JAX {held['jax']} for 8 H200s, and {count} of them for 64."
    )
