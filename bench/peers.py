"""Times other libraries' kernels on the same cases, where they are installed.

Those of PyTorch get JAX's arrays without a copy, and are timed as JAX's are: by the durations of
their kernels, with arguments that are not in the cache.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import jax

from bench import processes, timing
from bench.cases.optim import Step
from bench.cases.peers import Arranged
from bench.measured import Case, bytes_of

_MODULES = {
    "jax": "jax",
    "torch": "torch",
    "tokamax": "tokamax",
    "jla": "jla",
    "liger": "liger_kernel",
    "fla": "fla",
    "quack": "quack",
    "mamba_ssm": "mamba_ssm",
    "flash_qla": "flash_qla",
    "compile": "torch",
    "optax": "optax",
    "update": "optax",
}
_OF_JAX = ("jax", "tokamax", "jla", "optax", "update")


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
    return name in case.of.peers and not case.at.options


def is_torch(name: str) -> bool:
    return name in _MODULES and name not in _OF_JAX


def arranged(case: Case, name: str) -> Arranged:
    """The case's function in another library."""
    if not has(case, name):
        raise NotImplementedError(f"{name} does not have it")
    found = case.of.peers[name]()
    return found if isinstance(found, Arranged) else Arranged(found)


def measure_torch(
    case: Case, name: str, calls: int, check: Callable[[Any, Any], None]
) -> dict[str, tuple[timing.Timing, int]]:
    """Times of the case's passes in a library for PyTorch, and what both in one take of memory.

    Args:
      case: what to compute.
      name: whose kernels.
      calls: timed calls of each pass.
      check: raises if the first result is not the second, plain JAX's.

    Returns:
      By pass the time, and the bytes beside arguments and results that PyTorch's allocator gave
      out at once: 0 of a pass alone, which leaves to the other one what it saves.
    """
    import torch  # pyright: ignore[reportMissingImports]

    of = arranged(case, name)
    timed = functools.partial(timing.measure, calls=calls, wait=lambda _: torch.cuda.synchronize())

    def tensors(arrays: Any) -> list[Any]:
        arrays = jax.block_until_ready(arrays)
        taken = [_differentiable(t) for t in of.take(*map(torch.from_dlpack, arrays))]
        torch.cuda.synchronize()  # copies are made before JAX has the arrays' memory again
        return taken

    def cotangent(out: Any) -> Any:
        return torch.ones_like(out) if case.scalar else torch.randn_like(out)

    def forward(*args: Any) -> Any:
        with torch.no_grad():
            return of.call(*(t.detach() for t in args))

    def backward(out: Any, dout: Any, *args: Any) -> Any:
        wanted = [t for t in args if t.requires_grad]
        return torch.autograd.grad(out, wanted, dout, retain_graph=True)

    def both(dout: Any, *args: Any) -> Any:
        out = of.call(*args)
        return out.detach(), torch.autograd.grad(out, [t for t in args if t.requires_grad], dout)

    key, make = jax.random.key(0), jax.jit(case.arrays)
    with processes.compiling():
        arrays = make(key)
        # Copies: some write their gradients where their arguments were.
        first = [_differentiable(t.detach().clone()) for t in tensors(arrays)]
        out = forward(*first)
        of_both = both(cotangent(out), *first)
        torch.cuda.synchronize()
        plain = jax.jit(lambda a: case.plain(*a)).lower(arrays).compile()
    with processes.alone():
        got = of.give(out)
        if case.scalar:
            got = of.give(of_both[0]), list(of.back(*of_both[1]))
        check(jax.tree.map(jax.dlpack.from_dlpack, got), plain(arrays))
        size = bytes_of(arrays) + out.nbytes
        del arrays, first, of_both, got
        keys = jax.random.split(key, timing.sets_needed(size))
        sets = [tuple(tensors(make(k))) for k in keys]
        douts = [cotangent(out) for _ in sets]
        times = {"forward": (timed(forward, sets), 0)}
        with_dout = [(d, *args) for d, args in zip(douts, sets, strict=True)]
        times["both"] = timed(both, with_dout), _temporary(lambda: both(*with_dout[0]))
        if "backward" in case.of.passes:
            saved = [(of.call(*args), d, *args) for d, args in zip(douts, sets, strict=True)]
            times["backward"] = timed(backward, saved), 0
    return times


def _differentiable(tensor: Any) -> Any:
    """The tensor, which takes a gradient if it holds no integers."""
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor if whole else tensor.requires_grad_()


def _temporary(call: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's allocator has given out while `call` ran, beside what stays."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del results
    return most


def forget() -> None:
    """Frees what PyTorch keeps: memory, and programs, of which it makes only so many a function."""
    if torch := sys.modules.get("torch"):
        torch.compiler.reset()
        torch.cuda.empty_cache()


def measure_torch_step(step: Step, calls: int) -> timing.Timing:
    """Time of a step of PyTorch's fused AdamW."""
    import torch  # pyright: ignore[reportMissingImports]

    with processes.alone():
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
