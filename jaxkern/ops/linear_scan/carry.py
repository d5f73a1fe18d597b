"""The carries of the parts of a sequence, so that all parts can be worked on at once.

A first kernel finds, for every part, the state after it if nothing comes in, and the product of its
a. Every block of the main kernel folds the parts before its own (in the backward: after it) into
the state that it starts from.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.ops.linear_scan.blocks import PART, Scan, entered_by_chunk, scan_of
from jaxkern.ops.linear_scan.reference import reference_bwd_carry, reference_carry
from jaxkern.ops.linear_scan.tiles import Options
from jaxkern.ops.section_states import state_after_all

_FOLD = 8
"""Parts whose carries are loaded together, to wait for memory once."""


def launch_device_carry(options: Options, a: Any, b: Any, entered: Any) -> tuple[Any, Any]:
    """The product of a on this device, NaN where a segment begins, and its last state, (B, D)."""
    return _of_device(options, a, b, entered, transposed=False)


def launch_device_bwd_carry(options: Options, a: Any, dout: Any, entered: Any) -> tuple[Any, Any]:
    """The product of this device's decays, and the gradient of the state before its part."""
    return _of_device(options, a, dout, entered, transposed=True)


def _of_device(options: Options, a: Any, x: Any, entered: Any, *, transposed: bool) -> Any:
    if a.size == 0:
        return (reference_bwd_carry if transposed else reference_carry)(options, a, x, entered)
    scan = scan_of(options, a, x, arrays=3, packed=entered is not None)
    entered, name = entered_by_chunk(scan, entered), "bwd" if transposed else "fwd"
    name = f"linear_scan_{name}_carry"
    got = launch_carry(scan, name, a, x, None, entered, transposed=transposed, every_part=True)
    product, state = got["product"], got["state"]
    return jnp.prod(product, 0), state_after_all(product, state, reverse=transposed)


def launch_carry(
    scan: Scan,
    name: str,
    a: Any,
    x: Any,
    initial: Any,
    entered: Any,
    *,
    transposed: bool,
    every_part: bool = False,
) -> dict[str, Any]:
    """The carry of every part, (parts − 1, B, D) in fp32; of one part alone there is none.

    Forward, of all parts but the last; transposed, of all but the first; or of `every_part`.
    """
    if scan.parts == 1 and not every_part:
        return {"product": None, "state": None}
    count = scan.parts - (not every_part)
    carry = jax.ShapeDtypeStruct((count, scan.batch, scan.dim), jnp.float32)
    ins = {"a": a, "x": x, "entered": entered, "initial": initial}
    outs = {"product": carry, "state": carry}
    kernel = _transposed_carry_kernel if transposed else _carry_kernel
    return scan.launch(name, kernel, count, ins, outs)


def _carry_kernel(scan: Scan, refs: Any, smem: Any) -> None:
    batch, channels = scan.block()
    part, first, whole, count = _part(scan, skipped=0)

    def step(entered, a, x, state):
        return a * scan.begun(entered, refs.initial, state) + x

    ranges = [(count, _steps(scan, smem, scan.steps, step))]
    if scan.tail and refs.product.shape[0] == scan.parts:
        ranges = [
            (whole, _steps(scan, smem, scan.steps, step)),
            (count, _steps(scan, smem, scan.tail, step)),
        ]
    carry = scan.stream(refs, smem, lambda i: first + i, ranges, _nothing(scan))
    for ref, value in zip((refs.product, refs.state), carry, strict=True):
        scan.store(ref, value, (part, batch, channels))


def _transposed_carry_kernel(scan: Scan, refs: Any, smem: Any) -> None:
    batch, channels = scan.block()
    skipped = scan.parts - refs.product.shape[0]
    part, first, _, count = _part(scan, skipped)

    def step(entered, a, x, state):
        return scan.begun(entered, None, a * (state + x))

    tails = count - scan.range(part + skipped)[1]
    ranges = [(count, _steps(scan, smem, scan.steps, step, backwards=True))]
    if scan.tail:
        ranges.insert(0, (tails, _steps(scan, smem, scan.tail, step, backwards=True)))
    chunk = lambda i: first + count - 1 - i
    carry = scan.stream(refs, smem, chunk, ranges, _nothing(scan))
    for ref, value in zip((refs.product, refs.state), carry, strict=True):
        scan.store(ref, value, (part, batch, channels))


def _part(scan: Scan, skipped: int) -> tuple[Any, ...]:
    """The number of this block's carry, and the chunks of its part; the first parts are skipped."""
    number = lax.axis_index(PART)
    return number, *scan.range(number + skipped)


def _nothing(scan: Scan) -> tuple[jax.Array, jax.Array]:
    """The carry of no steps."""
    return scan.zeros() + 1.0, scan.zeros()


def _steps(
    scan: Scan, smem: Any, valid: int, next_state: Callable[..., Any], backwards: bool = False
) -> Callable[..., Any]:
    """Advances the product of a and the state over the last `valid` steps of a chunk."""

    def body(c, stage, carry):
        def step(row, carry):
            product, state = carry
            a, x = (scan.load_copied(ref, stage, c, row) for ref in (smem.a, smem.x))
            entered = scan.entered(smem, stage, row)
            state = next_state(entered, a, x, state)
            after = scan.multiply(product, a)
            if scan.packed:
                after = jnp.where(product != product, product, after)
            return _forgotten(scan, entered, after), state

        return scan.loop(valid, step, carry, backwards=backwards)

    return body


def _forgotten(scan: Scan, entered: Any, product: jax.Array) -> jax.Array:
    """The product of a over some steps: NaN, and so to the end, where a segment began.

    It hides no product that is NaN: the state is NaN then, too.
    """
    if entered is None:
        return product
    return scan.where(entered < 0, product, scan.zeros() + float("nan"))


def _decayed(scan: Scan, product: jax.Array, state: jax.Array) -> jax.Array:
    """product · state; 0 where a segment began in between, whatever the state is."""
    after = scan.multiply(product, state)
    return jnp.where(product != product, scan.zeros(), after) if scan.packed else after


def fold(scan: Scan, refs: Any, count: Any, index: Callable[[Any], Any], state: Any) -> Any:
    """`state` after the parts ``index(0)`` … ``index(count − 1)``, in that order."""
    batch, channels = scan.block()
    carries = refs.product, refs.state

    def group(g, state):
        order = [g * _FOLD + k for k in range(_FOLD)]
        loaded = []
        for i in order:
            s = index(jnp.minimum(i, count - 1))
            loaded.append([scan.load(ref.at[s, batch, channels]) for ref in carries])
        for i, (product, passed) in zip(order, loaded, strict=True):
            valid = scan.zeros() + jnp.where(i < count, 1.0, 0.0)
            state = jnp.where(valid > 0, passed + _decayed(scan, product, state), state)
        return state

    return lax.fori_loop(0, (count + _FOLD - 1) // _FOLD, group, state)
