"""The guides' tables of what was compiled for GPUs that were not there, from bench/results/aot-*.

The figures are those of ``python -m bench aot`` and ``collectives``.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import collectives as of_ops
from bench.cases import optim
from bench.figures import table
from bench.program import RESULTS

Held = dict[str, Any]
"""A file of :mod:`bench.aot`."""

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

COMPOSED = ("mlp", "layer_norm_linear", "rms_norm_linear")
"""Cases of several ops, each of which has rows of its own."""


def load(folder: Path = RESULTS) -> dict[str, Held]:
    """The committed figures of each generation, as ``"sm_90"``, from the oldest on."""
    found = {path.stem.removeprefix("aot-"): path for path in folder.glob("aot-sm_*.json")}
    order = sorted(found, key=lambda name: int(name.removeprefix("sm_")))
    return {name: json.loads(found[name].read_text()) for name in order}


def heading(name: str, held: Held) -> str:
    """A generation and the GPU that stands for it."""
    return f"{name}, {re.sub('NVIDIA |-SXM.*| SXM.*| Blackwell', '', held['gpu'])}"


def operations() -> list[str]:
    """The ops, in the order of the cases."""
    from bench.aot import Training, tasks  # with JAX, which the rest has no need of

    ops = [name.split()[0] for name, task in tasks().items() if not isinstance(task, Training)]
    return [op for op in dict.fromkeys(ops) if op not in COMPOSED]


def matrix(held_of: dict[str, Held]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows: for each op and generation, how many of its cases are kernels alone."""
    head = ["", *(heading(name, held) for name, held in held_of.items())]
    rows = []
    for op in operations():
        rows.append([f"`{op}`", *(_cell(op, held) for held in held_of.values())])
    return head, rows


def _cell(op: str, held: Held) -> str:
    names = [name for name in held["kernels"] if name.split()[0] == op]
    if not names:
        return "not compiled"
    without = [name for name in names if name in held.get("plain", {})]
    if not any(held["kernels"][name] for name in names):
        return "plain JAX"
    spilling = sum(any(k[1] for of in held["kernels"][n].values() for k in of) for n in names)
    told = f"{len(names) - len(without)} of {len(names)}" if without else f"{len(names)}"
    return told + (f", spills at {spilling}" if spilling else "")


def plain(held_of: dict[str, Held]) -> Iterator[list[str]]:
    """Rows of passes that are plain JAX: the kernels, at what shapes, on which generations, why."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for generation, held in held_of.items():
        for name, passes in held.get("plain", {}).items():
            op, _, shape = name.partition(" ")
            if op in COMPOSED:
                continue
            for kernel, reason in passes.items():
                why = re.sub(r", and (?:this is for|NVIDIA).*", "", reason)
                why = re.sub(r"rows of \d+ elements", "such rows", why)
                shapes = found.setdefault((kernel, why), {}).setdefault(generation, [])
                shapes.append(shape.removesuffix(" bfloat16"))
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for (kernel, why), of_generation in found.items():
        for generation, shapes in of_generation.items():
            told = "all" if "wgmma" in why else ", ".join(shapes)
            grouped.setdefault((told, why, generation), []).append(kernel)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (told, why, generation), kernels in grouped.items():
        rows.setdefault((", ".join(f"`{k}`" for k in kernels), told, why), []).append(generation)
    for (kernels, told, why), names in rows.items():
        yield [kernels, told, ", ".join(names), why]


def spills(held_of: dict[str, Held]) -> Iterator[list[str]]:
    """Rows of kernels that spill: the kernel, and on each generation the bytes and the shapes."""
    found: dict[str, dict[str, dict[int, list[str]]]] = {}
    for generation, held in held_of.items():
        for name, passes in held["kernels"].items():
            op, _, shape = name.partition(" ")
            if name in held["training"] or op in COMPOSED:
                continue
            for kernel, each in passes.items():
                most = max(k[1] for k in each)
                if most:
                    of_kernel = found.setdefault(kernel, {}).setdefault(generation, {})
                    of_kernel.setdefault(most, []).append(shape.removesuffix(" bfloat16"))
    for kernel, of_generation in sorted(found.items()):
        cells = (_range(of_generation.get(name, {})) for name in held_of)
        yield [f"`{kernel}`", *cells]


def _range(of_kernel: dict[int, list[str]]) -> str:
    """The most bytes, and at which shape; at how many others."""
    if not of_kernel:
        return ""
    most = max(of_kernel)
    others = sum(map(len, of_kernel.values())) - 1
    return f"{most} at {of_kernel[most][0]}" + (f"; {others} more" if others else "")


def versions(held_of: dict[str, Held]) -> str:
    """Lists the programs that compiled, and the differences of other versions of JAX."""
    newest = next(iter(held_of.values()))
    sentences = [f"JAX {newest['jax']} and ptxas {newest['ptxas']} compiled them."]
    for key in sorted({key for held in held_of.values() for key in held}):
        if not key.startswith("jax "):
            continue
        of_key = {name: held[key] for name, held in held_of.items() if key in held}
        count = sum(map(len, of_key.values()))
        told = [f"{n}: {d}" for n, of in of_key.items() for each in of.values() for d in each]
        same = "the same passes in plain JAX, and no spill where that has none"
        sentences.append(
            f"{key.replace('jax', 'JAX')} compiled {count} programs for {', '.join(of_key)}: "
            + (f"{same}, but for {'; '.join(told)}." if told else f"{same}.")
        )
    return " ".join(sentences)


def generations() -> str:
    """The tables of the guide to GPUs."""
    held = load()
    parts = [
        table(*matrix(held)),
        versions(held),
        'What is plain JAX under `None`, and why; under `"mosaic"` these words are the error:',
        table(["kernels", "shapes", "generations", "why"], plain(held)),
        "Kernels that spill registers, with the bytes that a thread stores and loads:",
        table(["", *held], spills(held)),
    ]
    return "\n\n".join(parts)


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
