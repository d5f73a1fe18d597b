"""What a compiled program copies: bytes that XLA moves without computing anything.

A slice of a product's result, or a concatenation of gradients, is a pass over memory that another
way to write the same program may not need. The program's text tells of each.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_MOVING = {"copy", "slice", "dynamic-slice", "concatenate", "transpose", "pad"}
_FREE = {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element"}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)$", re.MULTILINE)


class _Instruction(NamedTuple):
    type: str
    operation: str
    rest: str


def copied_in(text: str) -> int:
    """Bytes that a program writes by instructions that only move data; of a loop's, once."""
    computations = {
        name: [_Instruction(*found) for found in _INSTRUCTION.findall(body)]
        for name, body in _COMPUTATION.findall(text)
    }
    fused = set(re.findall(r"calls=%?([\w.-]+)", text))
    return sum(
        sum(sizes_in(instruction.type))
        for name, body in computations.items()
        if name not in fused
        for instruction in body
        if _moves(set(_operations(instruction, computations)))
    )


def _operations(
    instruction: _Instruction, computations: dict[str, list[_Instruction]]
) -> Iterator[str]:
    """The operation of an instruction, or of a fusion those that are fused."""
    if instruction.operation != "fusion":
        yield instruction.operation
    elif called := re.search(r"calls=%?([\w.-]+)", instruction.rest):
        yield from (of.operation for of in computations[called[1]])


def _moves(operations: set[str]) -> bool:
    return bool(operations & _MOVING) and operations <= _MOVING | _FREE


def sizes_in(types: str) -> list[int]:
    """Bytes of each array of a result's type, one or a tuple."""
    return [
        math.prod(int(size) for size in shape.split(",") if size) * int(bits) // 8
        for bits, shape in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", types)
    ]
