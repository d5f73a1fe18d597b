"""selective_scan's kernels, each by itself: interpreted in short chunks, and how they are cut."""

import jax.numpy as jnp
import pytest

from jaxkern.ops.selective_scan import backward, forward, tiles
from tests import check
from tests.selective_scan import KERNELS, SIZE, Kernels, check_case, inputs_and_state
from tests.ssd import NAMES, packed_ids

CUT = tiles.ScanGrid.cut
PASSES = pytest.mark.parametrize("name", ["forward", "backward"])


@PASSES
def test_every_argument(name):
    KERNELS.check(name, inputs_and_state(*SIZE))


def without_optional(arrays):
    """Neither D nor a gate nor a bias."""
    return tuple(
        None if name in ("D", "z", "dt_bias") else v for name, v in zip(NAMES, arrays, strict=True)
    )


def packed(length):
    """Groups, and both half precisions."""
    first, second = (
        inputs_and_state(1, length, 6, 2, dtype, "float32", groups=2)
        for dtype in ("bfloat16", "float16")
    )
    of = dict(zip(NAMES, first, strict=True)) | {"dt": jnp.exp(second[1]), "C": second[4]}
    return without_optional(of.values()), packed_ids(1, length)


PACKED = Kernels(2, 2, dt_softplus=False, dt_limit=(0.05, 0.3))


def cut_grid(monkeypatch, module, cut):
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr(module, f"{name}_grid", lambda columns, units, *_: cut(columns, units))


def test_forward_of_segments_in_subparts(monkeypatch):
    """Two parts of two chunks, each a subpart."""
    cut_grid(monkeypatch, forward, lambda columns, units: CUT(columns, units, 0, 2, 2))
    PACKED.check("forward", *packed(7))


WHOLE = lambda columns, units: CUT(columns, units, columns, 1)


@pytest.mark.exhaustive
def test_backward_of_segments(monkeypatch):
    cut_grid(monkeypatch, backward, WHOLE)
    PACKED.check("backward", *packed(5))


def test_backward_between_saved_states(monkeypatch):
    """Two chunks from one saved state to the next, the last of which has one."""
    cut_grid(monkeypatch, backward, WHOLE)
    Kernels(chunk=2, every=4).check("backward", without_optional(inputs_and_state(1, 9, 2, 2)))


def test_backward_in_parts(monkeypatch):
    """Three parts of a chunk each."""
    cut_grid(monkeypatch, backward, lambda columns, units: CUT(columns, units, 0, units))
    Kernels(chunk=2, every=2).check("backward", without_optional(inputs_and_state(1, 5, 2, 2)))


@pytest.mark.exhaustive
@pytest.mark.gpu
def test_uneven_parts(monkeypatch):
    """Columns of blocks halved, in parts and whole side by side, and of two warpgroups.

    Tiles of four chunks, of which there are five, so that the last tile overlaps another.
    """
    monkeypatch.setattr(tiles, "num_sms", lambda: 3)
    monkeypatch.setattr(backward, "backward_warpgroups", lambda *_: 2)
    cut = lambda columns, units: CUT(columns, units, 1, 2)
    cut_grid(monkeypatch, backward, cut)
    halved, split = tiles.forward_grid(columns=4, chunks=5, halves=True), cut(2, 3)
    assert (halved.whole, halved.halved, halved.count) == (4, 1, 5)
    assert (split.whole, split.rest, split.parts, split.count) == (1, 1, 2, 3)
    states = 16 if check.ON_GPU else 4
    check_case(inputs_and_state(2, 40, 128, states), "mosaic", checkpoint_every=16)


@pytest.mark.exhaustive
@pytest.mark.gpu
def test_subparts(monkeypatch):
    """Parts whose carries are found in subparts, the last of which is short."""
    cut = lambda columns, units: CUT(columns, units, 0, 2, 3)
    cut_grid(monkeypatch, forward, cut)
    cut_grid(monkeypatch, backward, cut)
    grid = cut(1, 11)
    assert (grid.length, grid.parts, grid.of_carries().count) == (6, 2, 3)
    # The backward's last subpart of two chunks has one.
    assert grid.of_carries().parts == 6
    assert 11 % grid.of_carries().length == 1
    check_case(inputs_and_state(1, 88, 34, 9 if check.ON_GPU else 3), "mosaic")
