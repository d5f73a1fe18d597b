"""Layers side by side: ``python -m bench layers`` times blocks beside other libraries'.

The blocks are Mamba-2 (``mamba2``), Gated DeltaNet (``gdn``) and Kimi Delta Attention (``kda``):

    auto        the block of jaxkern.nn, each op by its fastest implementation
    xla         the same with every op in plain JAX
    jla         the layer of jax-linear-attention, of Mamba-2 with its fused glue
    mamba_ssm   the Mamba2 layer of mamba_ssm, with its fused convolution, scan and norm
    jaxkern-cheap, jaxkern-scan
                that of auto under jax.checkpoint with remat.CHEAP and remat.SCAN

All compute one function of the same weights: its result and the gradient of its input must agree
with plain JAX's. Matrices and activations are in bf16, the other weights in fp32. Times are of one
call: the output (forward), and the output and the gradients of input and weights in one program
(both).

What a layer keeps for its backward is told beside its input, its weights and its output: in JAX,
by how much a second layer enlarges the temporary memory of the compiled program, less the second
layer's input; in PyTorch, by how much the forward enlarges the memory in use, less its output.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import peers, processes, program, timing
from bench.cases.peers import Arranged
from bench.figures import CHOSEN
from bench.measured import bytes_of
from bench.program import Row
from bench.train import jla_sizes, mamba_ssm_sizes
from jaxkern.nn import delta_net, mamba2, remat
from jaxkern.nn.common import Block

POLICIES = {"jaxkern-cheap": remat.CHEAP, "jaxkern-scan": remat.SCAN}
CONTENDERS = (CHOSEN, *POLICIES, "xla", "jla", "mamba_ssm")

Gdn, Kda = delta_net.GatedDeltaNetSizes, delta_net.KimiDeltaAttentionSizes
BLOCKS = (mamba2.BLOCK, delta_net.GATED_DELTA_NET, delta_net.KIMI_DELTA_ATTENTION)
SIZES: dict[str, list[Any]] = {
    "mamba2": [mamba2.Sizes(width) for width in (1024, 2048, 2560)],
    "gdn": [Gdn(1024, num_heads=8), Gdn(2048, num_heads=32, num_key_heads=16)],
    "kda": [Kda(1024, num_heads=8), Kda(2048, num_heads=32)],
}
SMALL: dict[str, list[Any]] = {
    "mamba2": [mamba2.Sizes(32, d_state=16, headdim=16)],
    "gdn": [Gdn(32, num_heads=4, num_key_heads=2, d_key=16, d_value=16)],
    "kda": [Kda(32, num_heads=2, d_key=16, d_value=16)],
}
"""Sizes of the same layers for a machine without a GPU."""
SHAPES = {"mamba2": ((8, 2048), (2, 8192))}
SHAPES |= dict.fromkeys(("gdn", "kda"), ((8, 2048), (1, 16384)))
"""Sequences, and their length."""

Call = Callable[[Any, Any], Any]
"""A layer: its parameters, and x (B, L, D) -> (B, L, D)."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A layer to time, and by whom: a case of :mod:`bench.peers`, of weights and an input."""

    contender: str
    sizes: Any
    batch: int
    length: int
    calls: int

    passes, with_gradients, drawn = ("forward", "both"), True, False
    limit = 0.02
    """The largest relative error: of a handful of roundings to bf16 in a row, each 2⁻⁹."""

    def __str__(self) -> str:
        of = f"{self.contender}, {self.block.name}, d_model {self.sizes.d_model}"
        return f"{of}, {self.batch} × {self.length}"

    @property
    def block(self) -> Block:
        """The kind of block that has these sizes."""
        return next(block for block in BLOCKS if block.sizes is type(self.sizes))

    def arrays(self, key: Any) -> tuple[Any, jax.Array]:
        """The initial values of a block, and the input."""
        inits = self.block.initializers(self.sizes)
        *keys, last = jax.random.split(key, len(inits) + 1)
        dtype = lambda name: jnp.bfloat16 if name.endswith("_proj") else jnp.float32
        every = zip(keys, inits.items(), strict=True)
        drawn = {name: init(k, shape, dtype(name)) for k, (name, (init, shape)) in every}
        shape = (self.batch, self.length, self.sizes.d_model)
        return self.block.weights_from(drawn), jax.random.normal(last, shape, jnp.bfloat16)

    def plain(self, arrays: Any, dout: Any) -> Any:
        """The output of plain JAX, and the gradient of the input."""
        out, vjp = jax.vjp(_own("xla", self), *arrays)
        return out, vjp(dout)[1]


# In JAX


def _own(implementation: Any, job: Job) -> Call:
    apply = job.block.apply
    return lambda weights, x: apply(weights, job.sizes, x, implementation=implementation)


def _of_jla(make: Callable[[Any], Any], parts: Any, take: Callable[[Any], list[Any]]) -> Arranged:
    """A layer that a key makes: its parameters, and the same from our weights."""
    import equinox as eqx

    layer = eqx.filter_eval_shape(make, jax.random.key(0))
    call = lambda params, x: eqx.tree_at(parts, layer, params)(x)
    return Arranged(call, lambda weights, x: (take(weights), x), back=_of_input)


def _jla_delta(sizes: Any) -> Arranged:
    """Gated DeltaNet or KDA, whose output gate has a bias there, and is left without."""
    import equinox as eqx

    layers = importlib.import_module("jla.layers.linear_attention")
    of_channels = isinstance(sizes, Kda)
    low = "fz" if of_channels else ""  # what is projected to a rank, and up from it
    config = importlib.import_module("jla.models.config").LinearAttentionConfig(
        num_k_heads=sizes.key_heads,
        num_v_heads=sizes.heads,
        head_k_dim=sizes.d_key,
        head_v_dim=sizes.d_value,
        conv_size=sizes.d_conv,
        gate_low_rank_dim=sizes.rank if of_channels else None,
    )

    def make(key: Any) -> Any:
        kind = layers.KDA if of_channels else layers.GatedDeltaNet
        layer = kind(sizes.d_model, config, key=key, std=0.02, norm_eps=sizes.norm_eps)
        return eqx.tree_at(lambda of: of.g_proj.up.bias, layer, None) if of_channels else layer

    def parts(layer: Any) -> list[Any]:
        of: dict[str, Any] = {"z": layer.g_proj}
        of |= {n: getattr(layer, f"{n}_proj", None) for n in "qkvbaf"}
        columns = [of[name].down if name in low else of[name] for name in sizes.columns]
        of_convs = [layer.q_conv, layer.k_conv, layer.v_conv]
        return [
            *(part.weight for part in (*columns, *of_convs, layer.o_norm, layer.o_proj)),
            *(layer.dt_bias, layer.A_log, *(of[name].up.weight for name in low)),
        ]

    def take(w: Any) -> list[Any]:
        columns = jnp.split(w.in_proj, np.cumsum([*sizes.columns.values()])[:-1], axis=1)
        convs = jnp.split(w.conv_weight, [sizes.d_keys, 2 * sizes.d_keys])
        ups = [w.f_proj, w.g_proj] if of_channels else []
        return [*columns, *convs, w.head_norm, w.out_proj, w.dt_bias, w.A_log, *ups]

    return _of_jla(make, parts, take)


def _jla_mamba2(sizes: mamba2.Sizes) -> Arranged:
    ssm = importlib.import_module("jla.layers.ssm")
    config = importlib.import_module("jla.models.config").SSMConfig(**jla_sizes(sizes))
    make = lambda key: ssm.Mamba2(sizes.d_model, config, key=key, std=0.02, norm_eps=sizes.norm_eps)
    e = sizes.d_inner

    def parts(layer: Any) -> list[Any]:
        convs = (layer.x_conv, layer.bc_conv)
        return [
            *(layer.zx_proj.weight, layer.bc_proj.weight, layer.dt_proj.weight),
            *(conv.weight for conv in convs),
            *(conv.bias for conv in convs),
            *(layer.dt_bias, layer.A_log, layer.D, layer.norm.weight, layer.out_proj.weight),
        ]

    def take(w: mamba2.Weights) -> list[Any]:
        zx, bc, dt = jnp.split(w.in_proj, [2 * e, e + sizes.d_convolved], axis=1)
        stacked = [v.reshape(sizes.d_model, 2, -1) for v in (zx, bc)]
        of_convs: Any = (w.conv_weight, w.conv_bias)
        convs = [half for v in of_convs for half in jnp.split(v, [e])]
        return [*stacked, dt, *convs, w.dt_bias, w.A_log, w.D, w.norm_weight, w.out_proj]

    return _of_jla(make, parts, take)


_of_input = lambda *grads: grads[-1:]
"""The gradient of x, which is the last one."""


def arranged(job: Job) -> Arranged:
    """The layer of a contender, and how it takes the block's weights."""
    if job.contender == "jla":
        of_mamba2 = isinstance(job.sizes, mamba2.Sizes)
        return (_jla_mamba2 if of_mamba2 else _jla_delta)(job.sizes)
    if job.contender == "mamba_ssm":
        return _of_mamba_ssm(job.sizes)
    if job.contender in POLICIES:
        call = jax.checkpoint(_own(None, job), policy=POLICIES[job.contender])
        return Arranged(call, back=_of_input)
    return Arranged(_own(None if job.contender == CHOSEN else "xla", job), back=_of_input)


def kept(call: Call, one: int, params: Any, x: Any) -> int:
    """Bytes kept for the backward, from what two layers need beyond the bytes of `one`."""

    def both(params: Any, x: Any, dout: Any) -> Any:
        two = lambda params, x: call(params[1], call(params[0], x))
        out, vjp = jax.vjp(two, params, x)
        return out, vjp(dout)

    with processes.compiling():
        program = timing.compiled(both, (params, params), x, x)
    return program.memory_analysis().temp_size_in_bytes - one - bytes_of(x)


# In PyTorch


def _of_mamba_ssm(sizes: mamba2.Sizes) -> Arranged:
    import torch  # pyright: ignore[reportMissingImports]

    if importlib.util.find_spec("causal_conv1d") is None:
        raise RuntimeError("causal_conv1d is not installed, without which its layer is slower")
    make = importlib.import_module("mamba_ssm.modules.mamba2").Mamba2
    layer = make(sizes.d_model, **mamba_ssm_sizes(sizes), device="cuda")
    names = [name for name, _ in layer.named_parameters()]

    def take(weights: Any, x: Any) -> list[Any]:
        named = {"in_proj.weight": weights.in_proj.t(), "out_proj.weight": weights.out_proj.t()}
        named |= {"conv1d.weight": weights.conv_weight[:, None], "conv1d.bias": weights.conv_bias}
        named |= {name: getattr(weights, name) for name in ("dt_bias", "A_log", "D")}
        named |= {"norm.weight": weights.norm_weight}
        copied = lambda v: v.clone(memory_format=torch.contiguous_format)
        return [*(copied(named.pop(name)) for name in names), x]

    def call(*arrays: Any) -> Any:
        *params, x = arrays
        return torch.func.functional_call(layer, dict(zip(names, params, strict=True)), (x,))

    back = lambda *grads: [grads[-1].contiguous()]
    return Arranged(call, take, lambda out: out.contiguous(), back)


def _kept_in_torch(job: Job, of: Arranged) -> int:
    """Bytes by which the forward enlarges the memory in use, less its output."""
    import torch  # pyright: ignore[reportMissingImports]

    params = peers.tensors(of, jax.jit(job.arrays)(jax.random.key(0)))
    before = torch.cuda.memory_allocated()
    out = of.call(*params)
    return torch.cuda.memory_allocated() - before - out.nbytes


# The command


def measure(job: Job) -> Row:
    """The row of a job."""
    of = arranged(job)
    if job.contender == "mamba_ssm":
        timed = peers.measure_torch(job, of, job.calls)
        bytes_kept = _kept_in_torch(job, of)
    else:
        timed = peers.measure_jax(job, of, job.calls)
        given = jax.eval_shape(job.arrays, jax.random.key(0))
        bytes_kept = kept(of.call, timed["both"][1]["temp_bytes"], *jax.eval_shape(of.take, *given))
    return {
        "layer": job.block.name,
        "d_model": job.sizes.d_model,
        "batch": job.batch,
        "length": job.length,
        "implementation": job.contender,
        **{f"{d}_us": round(1e3 * timed[d][0].median, 1) for d in job.passes},
        "kept_mib": round(bytes_kept / 2**20, 1),
        "kernels": len(timed["both"][0].kernels),
    }


@program.command(
    "layers",
    layer=([str], "of this kind alone", *SIZES),
    d_model=([int], "of this width alone"),
    only=(",".join(CONTENDERS), "contenders, comma-separated"),
    calls=(20, "timed calls of each pass"),
    jobs=(1, "processes that compile; they measure in turn"),
)
def main(args: Any) -> int:
    program.share_device(args.jobs)
    gpu = timing.on_gpu()
    jobs = [
        Job(name, sizes, batch, length, args.calls)
        for layer in args.layer or SIZES
        for sizes in (SIZES if gpu else SMALL)[layer]
        if not args.d_model or sizes.d_model in args.d_model
        for batch, length in (SHAPES[layer] if gpu else ((2, 64),))
        for name in args.only.split(",")
        if layer == "mamba2" or name != "mamba_ssm"
    ]
    if not jobs:
        args.error("no layer has that --d-model")
    clock = program.clock(gpu, "device time (CUPTI)")
    return program.measured(args, measure, jobs, clock, jobs=args.jobs)
