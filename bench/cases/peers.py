"""Other libraries' functions of the same arrays, by which the bench times a case.

Each is made by a function without arguments, which imports the library: none needs to be there.
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Peers = Mapping[str, Callable[[], Any]]

RATE = 0.1
"""At which dropout is timed."""


@dataclasses.dataclass(frozen=True)
class Arranged:
    """A function of arrays that are laid out in its own way.

    Attributes:
      call: the function.
      take: its arguments, from the case's; not timed.
      give: the case's result, from its own.
      back: the gradients of the case's floating arguments, from those of its own.
    """

    call: Callable[..., Any]
    take: Callable[..., Sequence[Any]] = lambda *arrays: arrays
    give: Callable[[Any], Any] = lambda out: out
    back: Callable[..., Sequence[Any]] = lambda *grads: grads


def load(path: str) -> Any:
    """The object ``"module:name"``, or a module, imported."""
    module, _, name = path.partition(":")
    return functools.reduce(getattr, filter(None, name.split(".")), importlib.import_module(module))


def _of(path: str, adapt: Callable[[Any], Any]) -> Callable[[], Any]:
    """Makes what `adapt` gives of the function at `path`."""
    return lambda: adapt(load(path))


def _at(path: str, *after: Any, **named: Any) -> Callable[[], Any]:
    """Makes the function at `path`, with these arguments behind the arrays."""
    return _of(path, lambda f: lambda *arrays: f(*arrays, *after, **named))


def _first(path: str, *after: Any) -> Callable[[], Any]:
    """Makes the same, of which the first result is the case's."""
    return _of(path, lambda f: lambda *arrays: f(*arrays, *after)[0])


def _laid(make: Callable[[], Any], **how: Any) -> Callable[[], Arranged]:
    """Makes the same with arrays that are laid out as the library has them."""
    return lambda: Arranged(make(), **how)


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


def _turned(x: Any) -> Any:
    """(B, L, D) as (B, D, L), or the other way round, in memory too."""
    return x.transpose(1, 2).contiguous()


def _flipped(w: Any) -> Any:
    """(K, V) as (V, K), or the other way round, in memory too."""
    return w.t().contiguous()


def _jla_scan(scan: Any) -> Any:
    return lambda x, dt, A, B, C, D, z, dt_bias: scan(
        "mamba1", C, B, x, dt=dt, a=A, d=D, z=z, dt_bias=dt_bias, dt_softplus=True
    )[0]


def _mamba_ssd(scan: Any) -> Any:
    """Makes the scan of mamba_ssm, in chunks of 256 tokens."""
    return lambda x, dt, A, B, C, D, dt_bias: scan(
        *(x, dt, A, B, C, 256), D=D, dt_bias=dt_bias, dt_softplus=True
    )


def _jla_ssd(scan: Any) -> Any:
    def call(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any) -> Any:
        dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
        return scan(x, dt, A, B, C, d=D, grouped_key_grads=True)[0]

    return call


def _fla_ssd(scan: Any) -> Any:
    """Makes fla's gated linear attention with a decay for a head; the rest is in PyTorch."""
    import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

    def call(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any) -> Any:
        dt = F.softplus(dt.float() + dt_bias)
        of_heads = lambda v: v.repeat_interleave(x.shape[2] // v.shape[2], dim=2)
        v = (x * dt[..., None]).to(x.dtype)
        out, _ = scan(of_heads(C), of_heads(B), v, g=dt * A, scale=1.0)
        return (out + D[:, None] * x).to(x.dtype)

    return call


def _jla_delta_rule(kind: str) -> Callable[[], Any]:
    """KDA there takes as many key heads as value heads: they are repeated, as in its layer."""

    def adapt(scan: Any) -> Any:
        def call(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
            if kind == "kda":
                q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
            return scan(kind, q, k, v, g=g, beta=beta)[0]

        return call

    return _of("jla.ops:linear_attention", adapt)


def _fla_delta_rule(path: str) -> Callable[[], Any]:
    """Makes fla's rule; its backward by heads raises on Hopper with Triton 3.4 to 3.7.0."""

    def make() -> Any:
        os.environ["FLA_FLASH_QLA"] = "0"  # FlashQLA, which fla calls where it is installed
        return _first(path)()

    return make


def _flash_qla(scan: Any) -> Any:
    def call(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        if {k.shape[-1], v.shape[-1]} != {128}:
            raise NotImplementedError("FlashQLA takes keys and values of 128 channels a head alone")
        return scan(q, k, v, g, beta)[0]

    return call


def _loss_of_torch(make: Callable[[], Any]) -> Callable[[], Arranged]:
    """The function of `make`, with int64 labels and any weight as an embedding lies."""
    take = lambda x, *rest: (x, *map(_flipped, rest[:-1]), rest[-1].long())
    return _laid(make, take=take, back=lambda dx, *rest: (dx, *map(_flipped, rest)))


def _jla_loss(name: str, total: str) -> Callable[[], Arranged]:
    """A mean by its sum, `total`; the weight lies as an embedding does, (V, K)."""

    def adapt(f: Any) -> Any:
        def call(x: Any, w: Any, labels: Any) -> Any:
            out = f(x, w, labels, impl="auto")
            return getattr(out, total) / out.num_valid

        return call

    take, back = (lambda x, w, labels: (x, w.T, labels)), (lambda dx, dw: (dx, dw.T))
    return _laid(_of(f"jla.ops.cross_entropy:{name}", adapt), take=take, back=back)


def _torch(name: str) -> Callable[[], Any]:
    """Makes a formula of PyTorch's own functions."""

    def make() -> Any:
        import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

        tanh, erf = (functools.partial(F.gelu, approximate=how) for how in ("tanh", "none"))
        drop = functools.partial(F.dropout, p=RATE, training=True)
        halves = lambda f: lambda x: f(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
        gated = lambda x, gate, up: F.silu(x @ gate) * (x @ up)

        def normalised(v: Any, eps: float) -> Any:
            return v * (v.pow(2).mean(-1, keepdim=True) + eps).rsqrt()

        def rms_norm(x: Any, w: Any) -> Any:
            return (normalised(x.float(), 1e-6) * w).to(x.dtype)

        def layer_norm(x: Any, w: Any, b: Any) -> Any:
            v = x.float()
            return (normalised(v - v.mean(-1, keepdim=True), 1e-5) * w + b).to(x.dtype)

        def apart(x: Any, weight: Any, bias: Any, w: Any) -> Any:
            return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype)) @ w

        return {
            "rms_norm": rms_norm,
            "layer_norm": layer_norm,
            "linear": lambda x, w: x @ w,
            "gated_linear_unit": gated,
            "layer_norm_linear": lambda x, weight, bias, w: layer_norm(x, weight, bias) @ w,
            "layer_norm_linear, apart": apart,
            "mlp": lambda x, weight, bias, w, gate, up, down: (
                x + gated(apart(x, weight, bias, w), gate, up) @ down
            ),
            "cross_entropy": lambda x, of: F.cross_entropy(x.float(), of, reduction="none"),
            "linear_cross_entropy": lambda x, w, of: F.cross_entropy((x @ w.t()).float(), of),
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

    return make


def _compiled(name: str) -> Callable[[], Any]:
    """Makes the same by ``torch.compile``."""

    def make() -> Any:
        import torch  # pyright: ignore[reportMissingImports]
        from torch._functorch import config  # pyright: ignore[reportMissingImports]

        config.donated_buffer = False  # the backward runs many times
        return torch.compile(_torch(name)(), dynamic=False)

    return make


def in_torch(name: str) -> Peers:
    """PyTorch as it comes, whose kernels are in some cases faster than what it compiles."""
    return {"compile": _compiled(name), "torch": _torch(name)}


RMS_NORM: Peers = {
    "tokamax": _at("tokamax:layer_norm", None, epsilon=1e-6, subtract_mean=False),
    "liger": _at("liger_kernel.ops.rms_norm:LigerRMSNormFunction.apply", 1e-6, 0.0, "llama", False),
    "fla": _at("fla.modules.norm.layernorm:rms_norm", None, eps=1e-6),
    "quack": _at("quack.rmsnorm:rmsnorm", eps=1e-6),
    "mamba_ssm": _at("mamba_ssm.ops.triton.layer_norm:rms_norm_fn", None, eps=1e-6),
    "compile": _compiled("rms_norm"),
}
RMS_NORM_GATE: Peers = {
    "fla": _of(
        "fla.modules.norm.fused_norm_gate:rms_norm_gated",
        lambda norm: lambda x, w, gate: norm(x, gate, w, None, eps=1e-6),
    ),
    "mamba_ssm": _of(
        "mamba_ssm.ops.triton.layernorm_gated:rmsnorm_fn",
        lambda norm: lambda x, w, gate: norm(x, w, None, z=gate, eps=1e-6),
    ),
}
LAYER_NORM: Peers = {
    "tokamax": _at("tokamax:layer_norm", epsilon=1e-5, subtract_mean=True),
    "liger": _at("liger_kernel.ops.layer_norm:LigerLayerNormFunction.apply", 1e-5),
    "fla": _at("fla.modules.norm.layernorm:layer_norm", eps=1e-5),
    "mamba_ssm": _at("mamba_ssm.ops.triton.layer_norm:layer_norm_fn", eps=1e-5),
    "compile": _compiled("layer_norm"),
}
LINEAR: Peers = {"jax": lambda: _linear_by_hand, "torch": _torch("linear")}
LINEAR_GELU: Peers = {"jax": lambda: _gelu_by_hand}
ACCUMULATE_WEIGHT_GRAD: Peers = {"jax": lambda: _accumulated_by_hand}
GATED_LINEAR_UNIT: Peers = {"jax": lambda: _gated_by_hand, **in_torch("gated_linear_unit")}
LAYER_NORM_LINEAR: Peers = {
    "torch": _torch("layer_norm_linear, apart"),
    "compile": _compiled("layer_norm_linear"),
    "mamba_ssm": _laid(
        _at("mamba_ssm.ops.triton.layer_norm:layer_norm_linear_fn", None, eps=1e-5),
        take=lambda *rest: [*rest[:-1], _flipped(rest[-1])],
    ),
}
MLP: Peers = in_torch("mlp")
GATED_DELTA_RULE: Peers = {
    "jla": _jla_delta_rule("gated_deltanet"),
    "fla": _fla_delta_rule("fla.ops.gated_delta_rule:chunk_gated_delta_rule"),
    "flash_qla": _of("flash_qla:chunk_gated_delta_rule", _flash_qla),
}
KDA: Peers = {"jla": _jla_delta_rule("kda"), "fla": _fla_delta_rule("fla.ops.kda:chunk_kda")}
SSD: Peers = {
    "mamba_ssm": _of("mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined", _mamba_ssd),
    "jla": _of("jla.layers.ssm:mamba2_ssd", _jla_ssd),
    "fla": _of("fla.ops.simple_gla:chunk_simple_gla", _fla_ssd),
}
SELECTIVE_SCAN: Peers = {
    "mamba_ssm": _laid(
        _at("mamba_ssm.ops.selective_scan_interface:selective_scan_fn", delta_softplus=True),
        take=lambda *arrays: [_turned(x) if x.ndim == 3 else x for x in arrays],
        give=_turned,
    ),
    "jla": _of("jla.ops:linear_attention", _jla_scan),
}
CAUSAL_CONV1D: Peers = {
    "mamba_ssm": _laid(
        _at("causal_conv1d:causal_conv1d_fn", activation="silu"),
        take=lambda x, *rest: [_turned(x), *rest],
        give=_turned,
    ),
    "jla": _at("jla.ops.mosaic_gpu.short_conv:short_conv", activation=True),
}
LINEAR_SCAN: Peers = {
    # HGRN's recurrence: it takes the decay's logarithm, and gives the gradient of that.
    "fla": _laid(
        _of("fla.ops.hgrn:chunk_hgrn", lambda scan: lambda log_decay, x: scan(x, log_decay)[0]),
        take=lambda decay, x: [decay.log(), x],
    )
}
CROSS_ENTROPY: Peers = {
    "liger": _loss_of_torch(
        _first(  # it writes the gradient where the logits were
            "liger_kernel.ops.cross_entropy:LigerCrossEntropyFunction.apply",
            *(None, -100, 0.0, 0.0, "none"),
        )
    ),
    "quack": _loss_of_torch(_at("quack.cross_entropy:cross_entropy", reduction="none")),
    "compile": _loss_of_torch(_compiled("cross_entropy")),
}
_LIGER_LINEAR = "liger_kernel.ops.fused_linear_cross_entropy"
_QUACK_LINEAR = "quack.linear_cross_entropy:chunked_linear_cross_entropy"
LINEAR_CROSS_ENTROPY: Peers = {
    "jla": _jla_loss("linear_cross_entropy_objective", "objective_sum"),
    "liger": _loss_of_torch(_first(f"{_LIGER_LINEAR}:LigerFusedLinearCrossEntropyFunction.apply")),
    "quack": _loss_of_torch(_at(_QUACK_LINEAR, tuned=False)),
    "compile": _loss_of_torch(_compiled("linear_cross_entropy")),
}
LINEAR_CROSS_ENTROPY_IN_PARTS: Peers = {
    "jla": _jla_loss("linear_cross_entropy", "loss_sum"),
    "liger": LINEAR_CROSS_ENTROPY["liger"],
}
"""The functions of other libraries that save memory."""
_LIGER = {
    "swiglu": _at("liger_kernel.ops.swiglu:LigerSiLUMulFunction.apply"),
    "silu_and_mul": _at("liger_kernel.ops.swiglu:LigerFusedGateUpSiLUMulFunction.apply"),
    "geglu": _at("liger_kernel.ops.geglu:LigerGELUMulFunction.apply"),
}


def activation(name: str) -> Peers:
    """The peers of an activation or a gated unit."""
    of_liger = {"liger": _LIGER[name]} if name in _LIGER else {}
    return of_liger | {"compile": _compiled(name)}
