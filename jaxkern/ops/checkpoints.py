"""How many tokens apart a scan saves its states for the backward."""

from typing import Any

from jaxkern.core.arguments import check_integer


def check_checkpoint_every(every: Any, chunk: int, *, one: bool = False) -> int | None:
    """`every` as an int, a multiple of `chunk` or, if `one` may be, 1; or ``None``."""
    if every is None:
        return None
    tokens = check_integer("checkpoint_every", every, optional=True)
    if (tokens <= 0 or tokens % chunk) and not (one and tokens == 1):
        either = f"1, a multiple of {chunk}" if one else f"a multiple of {chunk}"
        raise ValueError(
            f"checkpoint_every must be {either} or None, got {tokens}; "
            f"try {max(chunk, tokens // chunk * chunk)}"
        )
    return tokens
