"""Other libraries' kernels on the same cases, where they are installed.

Those of PyTorch get JAX's arrays without a copy, and are timed as JAX's are: by the durations of
their kernels, with arguments that are not in the cache.
"""

import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench import timing
from bench.cases import Case, bytes_of
from bench.turns import Alone, Turns
from jaxkern.cases.dropout import RATE
from jaxkern.cases.optim import Step

_EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}
_MODULES = {
    "jax": "jax",
    "torch": "torch",
    "tokamax": "tokamax",
    "liger": "liger_kernel",
    "fla": "fla",
    "quack": "quack",
    "mamba_ssm": "mamba_ssm",
    "compile": "torch",
    "optax": "optax",
    "update": "optax",
}
_OF_JAX = ("jax", "tokamax", "optax", "update")


def installed() -> list[str]:
    """The peers that can be imported.

    ``jax`` is what a user would write, with sums of products in fp32 but for ``acc + x.T @ dout``,
    ``torch`` the formula in PyTorch's own functions, and ``compile`` that through
    ``torch.compile``; ``optax`` has optimizers alone, and so has ``update``, jaxkern's as Optax
    runs any.
    """
    return [name for name, module in _MODULES.items() if importlib.util.find_spec(module)]


def has(case: Case | Step, name: str) -> bool:
    """Whether a peer has what the case computes."""
    if isinstance(case, Step):
        of_optax = not {"mu_dtype", "nu_dtype"} & case.options.keys()
        has_it = {"optax": of_optax, "torch": not case.options, "update": True}
        return case.op == "fused_adamw" and has_it.get(name, False)
    if name == "tokamax":
        return _key(case) in _EPS
    return (_key(case) in _JAX) if name == "jax" else (name, _key(case)) in _TORCH


def _key(case: Case) -> str:
    """The op and its options."""
    return "-".join([case.op, *case.shape.replace("/", "-/").split("-")[1:]])


def is_torch(name: str) -> bool:
    return name in _MODULES and name not in _OF_JAX


def jax_call(case: Case, name: str) -> Callable[..., Any]:
    """The case's function in a library for JAX."""
    if not has(case, name):
        raise NotImplementedError(f"{name} does not have it")
    if name == "tokamax":
        import tokamax  # pyright: ignore[reportMissingImports]

        centered = case.op == "layer_norm"
        norm = functools.partial(tokamax.layer_norm, epsilon=_EPS[case.op], subtract_mean=centered)
        return lambda x, w, b=None: norm(x, w, b)
    return _JAX[_key(case)]


def _product(x: Any, w: Any) -> Any:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


_JAX: dict[str, Callable[..., Any]] = {
    "linear": lambda x, w: _product(x, w).astype(x.dtype),
    "linear-gelu": lambda x, w, b: jax.nn.gelu(_product(x, w) + b).astype(x.dtype),
    "accumulate_weight_grad": lambda x, d: jax.lax.scan(
        lambda acc, both: (acc + both[0].T @ both[1], None),
        jnp.zeros((x.shape[2], d.shape[2])),
        (x, d),
    )[0],
    "gated_linear_unit": lambda x, g, u: (jax.nn.silu(_product(x, g)) * _product(x, u)).astype(
        x.dtype
    ),
}


@dataclasses.dataclass(frozen=True)
class _Arranged:
    """A function in PyTorch of tensors that are laid out in its own way.

    Attributes:
      call: the function.
      take: its arguments, from the case's; not timed.
      give: the case's result, from its own.
    """

    call: Callable[..., Any]
    take: Callable[..., Sequence[Any]] = lambda *tensors: tensors
    give: Callable[[Any], Any] = lambda out: out


def measure_torch(
    case: Case, name: str, calls: int, turn: Alone | Turns, check: Callable[[Any, Any], None]
) -> dict[str, timing.Timing]:
    """Times of the case's passes in a library for PyTorch.

    Args:
      case: what to compute.
      name: whose kernels.
      calls: timed calls of each pass.
      turn: held while the device is used.
      check: raises if the first result is not the second, plain JAX's.
    """
    import torch  # pyright: ignore[reportMissingImports]

    found = _TORCH[name, _key(case)]()
    arranged = found if isinstance(found, _Arranged) else _Arranged(found)
    f = arranged.call
    timed = functools.partial(timing.measure, calls=calls, wait=lambda _: torch.cuda.synchronize())

    def tensors(arrays: Any) -> list[Any]:
        arrays = jax.block_until_ready(arrays)
        return [t.requires_grad_() for t in arranged.take(*map(torch.from_dlpack, arrays))]

    def forward(*args: Any) -> Any:
        with torch.no_grad():
            return f(*args)

    def backward(out: Any, dout: Any, *args: Any) -> Any:
        return torch.autograd.grad(out, args, dout, retain_graph=True)

    def both(dout: Any, *args: Any) -> Any:
        return torch.autograd.grad(f(*args), args, dout)

    key, make = jax.random.key(0), jax.jit(case.arrays)
    with turn.compiling():
        arrays = make(key)
        # Copies: some write their gradients where their arguments were.
        first = [t.detach().clone().requires_grad_() for t in tensors(arrays)]
        out = forward(*first)
        dout = torch.randn_like(out)
        both(dout, *first)
        torch.cuda.synchronize()
        plain = jax.jit(lambda a: case.call(*a, implementation="xla")).lower(arrays).compile()
    with turn:
        check(jax.dlpack.from_dlpack(arranged.give(out)), plain(arrays))
        keys = jax.random.split(key, timing.sets_needed(bytes_of(arrays) + out.nbytes))
        sets = [tuple(tensors(make(k))) for k in keys]
        douts = [torch.randn_like(out) for _ in sets]
        times = {"forward": timed(forward, sets)}
        with_dout = [(d, *args) for d, args in zip(douts, sets, strict=True)]
        times["both"] = timed(both, with_dout)
        saved = [(f(*args), d, *args) for d, args in zip(douts, sets, strict=True)]
        times["backward"] = timed(backward, saved)
    return times


def forget() -> None:
    """Frees what PyTorch keeps: memory, and programs, of which it makes only so many a function."""
    if torch := sys.modules.get("torch"):
        torch.compiler.reset()
        torch.cuda.empty_cache()


def measure_torch_step(step: Step, calls: int, turn: Alone | Turns) -> timing.Timing:
    """Time of a step of PyTorch's fused AdamW."""
    import torch  # pyright: ignore[reportMissingImports]

    with turn:
        draw = lambda shape: torch.randn(*shape, device="cuda", dtype=getattr(torch, step.dtype))
        params = [torch.nn.Parameter(draw(shape)) for shape in step.shapes]
        for p in params:
            p.grad = draw(p.shape)
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3, fused=True)
        return timing.measure(optimizer.step, [()], calls, lambda _: torch.cuda.synchronize())


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

    return _Arranged(
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

    return _Arranged(functools.partial(selective_scan_fn, delta_softplus=True), take, _turned)


def _mamba_conv() -> Any:
    from causal_conv1d import causal_conv1d_fn  # pyright: ignore[reportMissingImports]

    return _Arranged(
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

    return _Arranged(
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


def _functional() -> dict[str, Callable[..., Any]]:
    """The formulas that are PyTorch's own functions."""
    import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

    tanh, erf = (functools.partial(F.gelu, approximate=how) for how in ("tanh", "none"))
    drop = functools.partial(F.dropout, p=RATE, training=True)
    return {
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "geglu": lambda gate, up: tanh(gate) * up,
        "reglu": lambda gate, up: F.relu(gate) * up,
        "silu_and_mul": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        "gelu_and_mul": lambda x: tanh(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        "relu": F.relu,
        "relu_squared": lambda x: F.relu(x).square(),
        "silu": F.silu,
        "gelu": tanh,
        "gelu-erf": erf,
        "dropout": drop,
        "dropout-silu": lambda x: drop(F.silu(x)),
        "dropout_add": lambda x, residual: residual + drop(x),
    }


_FUNCTIONAL = (
    *("swiglu", "geglu", "reglu", "silu_and_mul", "gelu_and_mul"),
    *("relu", "relu_squared", "silu", "gelu", "gelu-erf"),
    *("dropout", "dropout-silu", "dropout_add"),
)
_EAGER = ("dropout", "dropout-silu", "dropout_add")
"""What PyTorch has kernels for, and is faster in some than what it compiles."""

_TORCH: dict[tuple[str, str], Callable[[], Any]] = {
    ("torch", "linear"): lambda: _linear_formula,
    ("torch", "gated_linear_unit"): lambda: _gated_formula,
    ("torch", "layer_norm_linear"): lambda: _normed_apart,
    ("torch", "mlp"): lambda: _mlp_formula,
    ("compile", "mlp"): _compiled(_mlp_formula),
    ("compile", "gated_linear_unit"): _compiled(_gated_formula),
    ("compile", "layer_norm_linear"): _compiled(_normed_formula),
    ("liger", "rms_norm"): _liger_rms_norm,
    ("liger", "layer_norm"): _liger_layer_norm,
    ("fla", "rms_norm"): _fla_rms_norm,
    ("fla", "layer_norm"): _fla_layer_norm,
    ("fla", "rms_norm-gate"): _fla_gated,
    ("fla", "linear_scan"): _fla_scan,
    ("quack", "rms_norm"): _quack_rms_norm,
    ("mamba_ssm", "selective_scan"): _mamba_scan,
    ("mamba_ssm", "causal_conv1d"): _mamba_conv,
    ("mamba_ssm", "rms_norm"): lambda: _mamba_norm("rms_norm"),
    ("mamba_ssm", "layer_norm"): lambda: _mamba_norm("layer_norm"),
    ("mamba_ssm", "rms_norm-gate"): _mamba_gated,
    ("mamba_ssm", "layer_norm_linear"): _mamba_normed,
    ("compile", "rms_norm"): _compiled(_rms_norm_formula),
    ("compile", "layer_norm"): _compiled(_layer_norm_formula),
    ("liger", "swiglu"): _liger_gated("swiglu", "LigerSiLUMulFunction"),
    ("liger", "silu_and_mul"): _liger_gated("swiglu", "LigerFusedGateUpSiLUMulFunction"),
    ("liger", "geglu"): _liger_gated("geglu", "LigerGELUMulFunction"),
    **{("compile", k): lambda k=k: _compiled(_functional()[k])() for k in _FUNCTIONAL},
    **{("torch", k): lambda k=k: _functional()[k] for k in _EAGER},
}
