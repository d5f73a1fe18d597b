"""Cases of several parameters, of which the default suite runs a few."""

import itertools
from collections.abc import Collection
from typing import Any

import pytest


def combinations(names: str, *axes: Collection[Any], few: int | None = None) -> Any:
    """Cases of all combinations of the axes' values; the default suite has `few` of them.

    The i-th of these has the i-th value of each axis, counted from the first again at its end. By
    default they are as many as have every value. An axis is a list, or a dict of test ids' names.
    """
    count = max(map(len, axes)) if few is None else few
    chosen = {tuple([*axis][i % len(axis)] for axis in axes) for i in range(count)}
    value = lambda axis, key: axis[key] if isinstance(axis, dict) else key
    name = lambda key: getattr(key, "name", getattr(key, "__name__", str(key)))
    return pytest.mark.parametrize(
        names.split(),
        [
            pytest.param(
                *map(value, axes, case),
                id="-".join(map(name, case)),
                marks=[] if case in chosen else pytest.mark.exhaustive,
            )
            for case in itertools.product(*axes)
        ],
    )
