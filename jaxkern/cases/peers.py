"""Other libraries' functions of the same arrays, by which the bench times a case.

Each is made by a function without arguments, which imports the library: none needs to be there.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Peers = Mapping[str, Callable[[], Any]]

RATE = 0.1
"""At which dropout is timed."""
_EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}


@dataclasses.dataclass(frozen=True)
class Arranged:
    """A function in PyTorch of tensors that are laid out in its own way.

    Attributes:
      call: the function.
      take: its arguments, from the case's; not timed.
      give: the case's result, from its own.
    """

    call: Callable[..., Any]
    take: Callable[..., Sequence[Any]] = lambda *tensors: tensors
    give: Callable[[Any], Any] = lambda out: out


def _tokamax(op: str) -> Any:
    import tokamax  # pyright: ignore[reportMissingImports]

    centered = op == "layer_norm"
    norm = functools.partial(tokamax.layer_norm, epsilon=_EPS[op], subtract_mean=centered)
    return lambda x, w, b=None: norm(x, w, b)


def _product(x: Any, w: Any) -> Any:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _linear_by_hand(x: Any, w: Any) -> Any:
    return _product(x, w).astype(x.dtype)


def _gelu_by_hand(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(_product(x, w) + b).astype(x.dtype)


def _gated_by_hand(x: Any, gate: Any, up: Any) -> Any:
    return (jax.nn.silu(_product(x, gate)) * _product(x, up)).astype(x.dtype)


def _accumulated_by_hand(x: Any, dout: Any) -> Any:
    add = lambda total, both: (total + both[0].T @ both[1], None)
    return jax.lax.scan(add, jnp.zeros((x.shape[2], dout.shape[2])), (x, dout))[0]


def _liger_rms_norm() -> Any:
    from liger_kernel.ops.rms_norm import (  # pyright: ignore[reportMissingImports]
        LigerRMSNormFunction,
    )

    return lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)


def _liger_layer_norm() -> Any:
    from liger_kernel.ops.layer_norm import (  # pyright: ignore[reportMissingImports]
        LigerLayerNormFunction,
    )

    return lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)


def _fla_rms_norm() -> Any:
    from fla.modules.norm.layernorm import rms_norm  # pyright: ignore[reportMissingImports]

    return lambda x, w: rms_norm(x, w, None, eps=1e-6)


def _fla_layer_norm() -> Any:
    from fla.modules.norm.layernorm import layer_norm  # pyright: ignore[reportMissingImports]

    return lambda x, w, b: layer_norm(x, w, b, eps=1e-5)


def _fla_gated() -> Any:
    from fla.modules.norm.fused_norm_gate import (  # pyright: ignore[reportMissingImports]
        rms_norm_gated,
    )

    return lambda x, w, gate: rms_norm_gated(x, gate, w, None, eps=1e-6)


def _fla_scan() -> Any:
    """HGRN's recurrence: it takes the decay's logarithm, and gives the gradient of that."""
    from fla.ops.hgrn import chunk_hgrn  # pyright: ignore[reportMissingImports]

    return Arranged(
        lambda log_decay, x: chunk_hgrn(x, log_decay)[0], lambda decay, x: [decay.log(), x]
    )


def _quack_rms_norm() -> Any:
    from quack.rmsnorm import rmsnorm  # pyright: ignore[reportMissingImports]

    return lambda x, w: rmsnorm(x, w, eps=1e-6)


def _turned(x: Any) -> Any:
    """(B, L, D) as (B, D, L), or the other way round, in memory too."""
    return x.transpose(1, 2).contiguous()


def _mamba_scan() -> Any:
    from mamba_ssm.ops.selective_scan_interface import (  # pyright: ignore[reportMissingImports]
        selective_scan_fn,
    )

    def take(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any) -> list[Any]:
        x, dt, B, C, z = map(_turned, (x, dt, B, C, z))
        return [x, dt, A, B, C, D, z, dt_bias]

    return Arranged(functools.partial(selective_scan_fn, delta_softplus=True), take, _turned)


def _mamba_ssd() -> Any:
    from mamba_ssm.ops.triton.ssd_combined import (  # pyright: ignore[reportMissingImports]
        mamba_chunk_scan_combined,
    )

    chunk = 256  # its own default
    return lambda x, dt, A, B, C, D, dt_bias: mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk, D=D, dt_bias=dt_bias, dt_softplus=True
    )


def _jla_ssd() -> Any:
    from jla.layers.ssm import mamba2_ssd  # pyright: ignore[reportMissingImports]

    def call(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any) -> Any:
        dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
        return mamba2_ssd(x, dt, A, B, C, d=D, grouped_key_grads=True)[0]

    return call


def _fla_ssd() -> Any:
    """Its gated linear attention with a decay for a head, and the rest in PyTorch's functions."""
    import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
    from fla.ops.simple_gla import chunk_simple_gla  # pyright: ignore[reportMissingImports]

    def call(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any) -> Any:
        dt = F.softplus(dt.float() + dt_bias)
        of_heads = lambda v: v.repeat_interleave(x.shape[2] // v.shape[2], dim=2)
        v = (x * dt[..., None]).to(x.dtype)
        out, _ = chunk_simple_gla(of_heads(C), of_heads(B), v, g=dt * A, scale=1.0)
        return (out + D[:, None] * x).to(x.dtype)

    return call


def _mamba_conv() -> Any:
    from causal_conv1d import causal_conv1d_fn  # pyright: ignore[reportMissingImports]

    return Arranged(
        lambda x, weight, bias: causal_conv1d_fn(x, weight, bias, activation="silu"),
        lambda x, *rest: [_turned(x), *rest],
        _turned,
    )


def _mamba_norm(name: str) -> Any:
    norms = importlib.import_module("mamba_ssm.ops.triton.layer_norm")
    norm = getattr(norms, f"{name}_fn")
    return lambda x, w, b=None: norm(x, w, b, eps=_EPS[name])


def _mamba_gated() -> Any:
    from mamba_ssm.ops.triton.layernorm_gated import (  # pyright: ignore[reportMissingImports]
        rmsnorm_fn,
    )

    return lambda x, w, gate: rmsnorm_fn(x, w, None, z=gate, eps=1e-6)


def _mamba_normed() -> Any:
    from mamba_ssm.ops.triton.layer_norm import (  # pyright: ignore[reportMissingImports]
        layer_norm_linear_fn,
    )

    return Arranged(
        lambda x, weight, bias, w: layer_norm_linear_fn(x, weight, bias, w, None, eps=1e-5),
        lambda *rest: [*rest[:-1], rest[-1].t().contiguous()],
    )


def _compiled(formula: Callable[..., Any]) -> Callable[[], Any]:
    def make() -> Any:
        import torch  # pyright: ignore[reportMissingImports]
        from torch._functorch import config  # pyright: ignore[reportMissingImports]

        config.donated_buffer = False  # the backward runs many times
        return torch.compile(formula, dynamic=False)

    return make


def _rms_norm_formula(x: Any, w: Any) -> Any:
    v = x.float()
    return (v * (v.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w).to(x.dtype)


def _layer_norm_formula(x: Any, w: Any, b: Any) -> Any:
    v = x.float()
    v = v - v.mean(-1, keepdim=True)
    return (v * (v.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w + b).to(x.dtype)


def _linear_formula(x: Any, w: Any) -> Any:
    return x @ w


def _gated_formula(x: Any, gate: Any, up: Any) -> Any:
    from torch.nn.functional import silu  # pyright: ignore[reportMissingImports]

    return silu(x @ gate) * (x @ up)


def _normed_formula(x: Any, weight: Any, bias: Any, w: Any) -> Any:
    return _layer_norm_formula(x, weight, bias) @ w


def _normed_apart(x: Any, weight: Any, bias: Any, w: Any) -> Any:
    from torch.nn.functional import layer_norm  # pyright: ignore[reportMissingImports]

    return layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype)) @ w


def _mlp_formula(x: Any, weight: Any, bias: Any, w: Any, gate: Any, up: Any, down: Any) -> Any:
    return x + _gated_formula(_normed_apart(x, weight, bias, w), gate, up) @ down


def _liger_gated(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply


def _functional(name: str) -> Any:
    """A formula of PyTorch's own functions."""
    import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

    tanh, erf = (functools.partial(F.gelu, approximate=how) for how in ("tanh", "none"))
    drop = functools.partial(F.dropout, p=RATE, training=True)
    halves = lambda f: lambda x: f(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    return {
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "geglu": lambda gate, up: tanh(gate) * up,
        "reglu": lambda gate, up: F.relu(gate) * up,
        "silu_and_mul": halves(F.silu),
        "gelu_and_mul": halves(tanh),
        "relu": F.relu,
        "relu_squared": lambda x: F.relu(x).square(),
        "silu": F.silu,
        "gelu": tanh,
        "gelu, erf": erf,
        "dropout": drop,
        "dropout, silu": lambda x: drop(F.silu(x)),
        "dropout_add": lambda x, residual: residual + drop(x),
    }[name]


def _by_compile(name: str) -> Callable[[], Any]:
    return lambda: _compiled(_functional(name))()


RMS_NORM: Peers = {
    "tokamax": lambda: _tokamax("rms_norm"),
    "liger": _liger_rms_norm,
    "fla": _fla_rms_norm,
    "quack": _quack_rms_norm,
    "mamba_ssm": lambda: _mamba_norm("rms_norm"),
    "compile": _compiled(_rms_norm_formula),
}
RMS_NORM_GATE: Peers = {"fla": _fla_gated, "mamba_ssm": _mamba_gated}
LAYER_NORM: Peers = {
    "tokamax": lambda: _tokamax("layer_norm"),
    "liger": _liger_layer_norm,
    "fla": _fla_layer_norm,
    "mamba_ssm": lambda: _mamba_norm("layer_norm"),
    "compile": _compiled(_layer_norm_formula),
}
LINEAR: Peers = {"jax": lambda: _linear_by_hand, "torch": lambda: _linear_formula}
LINEAR_GELU: Peers = {"jax": lambda: _gelu_by_hand}
ACCUMULATE_WEIGHT_GRAD: Peers = {"jax": lambda: _accumulated_by_hand}
GATED_LINEAR_UNIT: Peers = {
    "jax": lambda: _gated_by_hand,
    "torch": lambda: _gated_formula,
    "compile": _compiled(_gated_formula),
}
LAYER_NORM_LINEAR: Peers = {
    "torch": lambda: _normed_apart,
    "compile": _compiled(_normed_formula),
    "mamba_ssm": _mamba_normed,
}
MLP: Peers = {"torch": lambda: _mlp_formula, "compile": _compiled(_mlp_formula)}
SSD: Peers = {"mamba_ssm": _mamba_ssd, "jla": _jla_ssd, "fla": _fla_ssd}
SELECTIVE_SCAN: Peers = {"mamba_ssm": _mamba_scan}
CAUSAL_CONV1D: Peers = {"mamba_ssm": _mamba_conv}
LINEAR_SCAN: Peers = {"fla": _fla_scan}
_LIGER = {
    "swiglu": _liger_gated("swiglu", "LigerSiLUMulFunction"),
    "silu_and_mul": _liger_gated("swiglu", "LigerFusedGateUpSiLUMulFunction"),
    "geglu": _liger_gated("geglu", "LigerGELUMulFunction"),
}


def activation(name: str) -> Peers:
    """Those of an activation or a gated unit."""
    of_liger = {"liger": _LIGER[name]} if name in _LIGER else {}
    return of_liger | {"compile": _by_compile(name)}


def dropout(name: str) -> Peers:
    """PyTorch has kernels for it, in some cases faster than what it compiles."""
    return {"compile": _by_compile(name), "torch": lambda: _functional(name)}
