"""The checks of the arguments of the selective scan and of one step of it."""

from typing import Any

from jaxkern.core.arguments import check_array, check_floating

STATE_SHAPE = "(B, D, N) of x and A"


def check(lead, x, dt, A, B, C, D, z, dt_bias) -> Any:
    """The arguments as arrays; `lead` names the dimensions before the last of those with tokens."""
    x, A, B = check_floating("x", x), check_floating("A", A), check_floating("B", B)
    tokens = ", ".join(lead)
    if x.ndim != len(lead) + 1:
        raise ValueError(f"x must have shape ({tokens}, D), got {x.shape}")
    channels = x.shape[-1:]
    if A.ndim != 2 or A.shape[:1] != channels or A.shape[1] == 0:
        raise ValueError(
            f"A must have shape (D, N), D the {channels[0]} channels of x and N at least 1; "
            f"got {A.shape}"
        )
    states, meaning = (*x.shape[:-1], A.shape[1]), f"({tokens}, N) of x and A"
    if B.ndim == x.ndim + 1:
        groups = B.shape[-2]
        if groups == 0 or channels[0] % groups:
            raise ValueError(
                f"B must have a number of groups that divides the {channels[0]} channels of x; "
                f"got {groups}, in shape {B.shape}"
            )
        states = (*x.shape[:-1], groups, A.shape[1])
        meaning = f"({tokens}, G, N) of x, B and A"

    def optional(name, value, shape, meaning):
        return None if value is None else check_array(name, value, shape, meaning)

    dt = check_array("dt", dt, x.shape, f"({tokens}, D) of x")
    B = check_array("B", B, states, meaning)
    C = check_array("C", C, states, f"{meaning}, as B")
    D = optional("D", D, channels, "(D,) of x")
    z = optional("z", z, x.shape, f"({tokens}, D) of x")
    return x, dt, A, B, C, D, z, optional("dt_bias", dt_bias, channels, "(D,) of x")
