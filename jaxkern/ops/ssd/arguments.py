"""The arguments of the SSD scan and of one step of it: their checks, and the step sizes."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.lowering.bound import standard_promotion
from jaxkern.ops.ssd.reference import least_log_decay
from jaxkern.ops.step_sizes import StepSizes

STATE_SHAPE = "(B, H, P, N) of x and B"


def check(lead, x, dt, A, B, C, D, z, dt_bias) -> Any:
    """The arguments as arrays; `lead` names the dimensions before the heads.

    B and C of one group may be without its axis.
    """
    x, B, C = check_floating("x", x), check_floating("B", B), check_floating("C", C)
    tokens = ", ".join(lead)
    if B.ndim == C.ndim == len(lead) + 1:
        B, C = B[..., None, :], C[..., None, :]
    if x.ndim != len(lead) + 2:
        raise ValueError(f"x must have shape ({tokens}, H, P), got {x.shape}")
    heads = x.shape[-2]
    if B.ndim != x.ndim or B.shape[:-2] != x.shape[:-2] or B.shape[-1] == 0:
        raise ValueError(
            f"B must have shape ({tokens}, G, N), or ({tokens}, N) for one group, with "
            f"{x.shape[:-2]} of x and N at least 1; got {B.shape}"
        )
    if B.shape[-2] == 0 or heads % B.shape[-2]:
        raise ValueError(
            f"B must have a number of groups that divides the {heads} heads of x; "
            f"got {B.shape[-2]}, in shape {B.shape}"
        )

    def optional(name, value, shape, meaning):
        return None if value is None else check_array(name, value, shape, meaning)

    dt = check_array("dt", dt, x.shape[:-1], f"({tokens}, H) of x")
    A = check_array("A", A, (heads,), "(H,) of x")
    C = check_array("C", C, B.shape, f"({tokens}, G, N), as B")
    if D is not None:
        D = check_floating("D", D)
        either = (
            (x.shape[-2:], "(H, P) of x") if D.ndim == 2 else ((heads,), "(H,) of x, or (H, P)")
        )
        D = check_array("D", D, *either)
    z = optional("z", z, x.shape, f"({tokens}, H, P) of x")
    return x, dt, A, B, C, D, z, optional("dt_bias", dt_bias, (heads,), "(H,) of x")


@standard_promotion()  # in the backward's rule too
def log_decays(sizes: StepSizes, dt: Any, A: Any, dt_bias: Any) -> tuple[jax.Array, jax.Array]:
    """Step sizes and logarithms of decays, (…, G, R), at least float32."""
    acc = jnp.result_type(jnp.float32, *(v for v in (dt, A, dt_bias) if v is not None))
    lead = (None,) * (dt.ndim - 2)
    dt = dt.astype(acc)
    dt = sizes(dt if dt_bias is None else dt + dt_bias.astype(acc)[lead])
    a, least = dt * A.astype(acc)[lead], least_log_decay(acc)
    return dt, jnp.where(a < least, least, a)
