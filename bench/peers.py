"""Times functions of JAX and of other libraries on the same cases, by their passes.

Those of PyTorch get JAX's arrays without a copy, and are timed as JAX's are: by the durations of
their kernels, with arguments that are not in the cache. No speed from a wrong result: it must be
that of plain JAX, which a case has as ``plain(arrays, dout)``.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench import processes, timing
from bench.cases.optim import Step
from bench.cases.peers import Arranged
from bench.measured import Case, bytes_of, floating

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
    ``torch`` the formula in PyTorch's own functions, ``compile`` that through ``torch.compile``;
    ``optax`` and ``update``, jaxkern's as Optax runs any, have optimizers alone.
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


def measure_jax(case: Any, of: Arranged, calls: int) -> timing.Passes:
    """The forward, the backward from what the forward saves, and both in one program."""

    save = lambda arrays: jax.vjp(of.call, *arrays)

    def both(arrays: Any, dout: Any) -> Any:
        out, vjp = save(arrays)
        # A loss ends what is differentiated: nothing is multiplied by 1.
        one = lambda o, d: d if o.ndim else jnp.ones_like(o)
        return out, floating(vjp(jax.tree.map(one, out, dout)))

    def differ(got: Any, want: Any) -> Any:
        return error((of.give(got[0]), of.back(*got[1])) if with_gradients else of.give(got), want)

    with_gradients, key = case.with_gradients, jax.random.key(0)
    given = jax.eval_shape(case.arrays, key)
    shapes = tuple(jax.eval_shape(of.take, *given))
    out = jax.eval_shape(of.call, *shapes)
    keys = jax.random.split(key, timing.sets_needed(bytes_of((shapes, out))))
    normal = lambda key: jax.tree.map(lambda o: jax.random.normal(key, o.shape, o.dtype), out)
    vjp = of_save = None
    with processes.compiling():
        programs = {"forward": timing.Program(of.call, *shapes)}
        make, cotangent = timing.compiled(case.arrays, key), timing.compiled(normal, key)
        if "both" in case.passes:
            programs["both"] = timing.Program(both, shapes, out)
        if "backward" in case.passes:
            of_save, vjp = timing.compiled(save, shapes), jax.eval_shape(save, shapes)[1]
            programs["backward"] = timing.Program(lambda vjp, dout: vjp(dout), vjp, out)
        plain, dout = _plain(case, given, out), out if with_gradients else None
        told = jax.eval_shape(both, shapes, out) if with_gradients else out
        compare = timing.compiled(differ, told, jax.eval_shape(case.plain, given, dout))
    with processes.alone():
        sets = [tuple(of.take(*make(k))) for k in keys]
        with_dout = [(arrays, cotangent(k)) for arrays, k in zip(sets, keys, strict=True)]
        arguments = {"forward": sets, "both": with_dout}
        first = "both" if with_gradients else "forward"
        got, dout = programs[first].run(*arguments[first][0]), with_dout[0][1]
        want = plain(make(keys[0]), dout if with_gradients else None)
        timing.agrees(str(case), compare(got, want), case.limit)
        del got, want, dout
        found = {d: programs[d].timed(arguments[d], calls) for d in arguments if d in programs}
        if of_save:
            saved = [(of_save(arrays)[1], dout) for arrays, dout in with_dout]
            del sets, with_dout, arguments
            found["backward"] = programs["backward"].timed(saved, calls)
    return found


def _plain(case: Any, given: Any, out: Any) -> Any:
    """Plain JAX's results, compiled without a search, as nobody times them."""
    lowered = jax.jit(case.plain).lower(given, out if case.with_gradients else None)
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return lowered.compile(compiler_options=options if timing.on_gpu() else None)


def error(got: Any, want: Any, drawn: bool = False) -> jax.Array:
    """The largest relative error of several results; if they are `drawn` apart, of their norms.

    That of a scalar counts a hundredfold: a mean of many rows has little of each one's rounding.
    """
    errors = []
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        weight = 100 if w.ndim == 0 else 1
        norms = (jnp.linalg.norm(v.astype(jnp.float32)) for v in (g, w))
        errors.append(weight * (timing.error(*norms) if drawn else timing.error(g, w)))
    return jnp.max(jnp.stack(errors))


def measure_torch(case: Any, of: Arranged, calls: int) -> timing.Passes:
    """Times the passes of a library for PyTorch, and finds what both in one take of memory.

    Memory is what PyTorch's allocator gave out at once beside arguments and results. It is 0 for a
    pass alone, which leaves to the other one what it saves.
    """
    import torch  # pyright: ignore[reportMissingImports]

    timed = functools.partial(timing.measure, calls=calls, wait=lambda _: torch.cuda.synchronize())

    cotangent = lambda out: torch.randn_like(out) if out.ndim else torch.ones_like(out)

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
        first = differentiable([t.detach().clone() for t in tensors(of, arrays)])
        out = forward(*first)
        dout = cotangent(out)
        of_both = both(dout, *first)
        torch.cuda.synchronize()
        as_jax = functools.partial(jax.tree.map, jax.dlpack.from_dlpack)
        given = as_jax(dout) if case.with_gradients else None
        plain = _plain(case, arrays, given)
    with processes.alone():
        got = of.give(out)
        if case.with_gradients:
            got = of.give(of_both[0]), list(of.back(*of_both[1]))
        differ = jax.jit(functools.partial(error, drawn=case.drawn))
        timing.agrees(str(case), differ(as_jax(got), plain(arrays, given)), case.limit)
        keys = jax.random.split(key, timing.sets_needed(bytes_of(arrays) + out.nbytes))
        del arrays, first, of_both, got, given
        sets = [tuple(tensors(of, make(k))) for k in keys]
        douts = [cotangent(out) for _ in sets]
        found: timing.Passes = {"forward": (timed(forward, sets), {})}
        with_dout = [(d, *args) for d, args in zip(douts, sets, strict=True)]
        of_both = timed(both, with_dout)
        found["both"] = of_both, {"temp_bytes": _temporary(lambda: both(*with_dout[0]))}
        if "backward" in case.passes:
            saved = [(of.call(*args), d, *args) for d, args in zip(douts, sets, strict=True)]
            found["backward"] = timed(backward, saved), {}
    return found


def tensors(of: Arranged, arrays: Any) -> list[Any]:
    """JAX's arrays as a library for PyTorch takes them."""
    import torch  # pyright: ignore[reportMissingImports]

    arrays = jax.block_until_ready(arrays)
    taken = differentiable(of.take(*jax.tree.map(torch.from_dlpack, arrays)))
    torch.cuda.synchronize()  # copies are made before JAX has the arrays' memory again
    return taken


def differentiable(taken: Sequence[Any]) -> list[Any]:
    """The tensors, which take gradients but for those that hold integers."""
    holds_floats = lambda t: t.is_floating_point() or t.is_complex()
    return [t.requires_grad_() if holds_floats(t) else t for t in taken]


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


def measure_torch_step(step: Step, _: str, calls: int) -> timing.Passes:
    """Time of a step of PyTorch's fused AdamW."""
    import torch  # pyright: ignore[reportMissingImports]

    with processes.alone():
        draw = lambda shape: torch.randn(*shape, device="cuda", dtype=getattr(torch, step.dtype))
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for shape in step.shapes:
            parameter = torch.nn.Parameter(draw(shape))
            parameter.grad = draw(shape)
            groups[len(shape) > 1].append(parameter)
        decayed = [
            {"params": of, "weight_decay": 0.1 * is_of} for is_of, of in groups.items() if of
        ]
        optimizer = torch.optim.AdamW(decayed, lr=1e-3, fused=True)
        wait = lambda _: torch.cuda.synchronize()
        return {"step": (timing.measure(optimizer.step, [()], calls, wait), {})}
