"""Training the language model, end to end, beside PyTorch: ``python -m bench train``.

A step is forward, backward and AdamW of a preset of :mod:`jaxkern.lm.config` on random tokens.
Products are in bf16; parameters, gradients, the optimizer's state and the residual stream in fp32.
Gradients are not clipped, and activations not checkpointed, but for ``jaxkern-remat`` and what a
contender's own kernels compute again in the backward.

    jaxkern       the model of ``jaxkern train`` and fused_adamw, on kernels where they are fastest
    jaxkern-remat the same with ``--remat``, each layer computed again in the backward
    jaxkern-cheap, jaxkern-scan
                  the same with ``--remat cheap`` and ``--remat scan``, parts of each layer
    jaxkern-loop  the same as jaxkern with ``--scan-layers``
    xla           the same as jaxkern with every op in plain JAX
    xla-loop      the same with ``--scan-layers``
    jla           the model of jax-linear-attention without its checkpointing, whose residual stream
                  is in bf16, and its loss, on its kernels where it has any, with fused_adamw
    jla-loop      the same with its layers in a loop
    mamba_ssm     its MambaLMHeadModel under torch.autocast, with its fused add and norm, and
                  torch.optim.AdamW(fused=True)

Each trains in a process of its own, one after the other. The host is a step ahead of the device, as
in training, and a step takes from the end of the one before to its own end. The tokens have a
skewed distribution, token i with probability ~ 1/(i + 1), so that a loss that does not fall shows a
contender that does not learn. ``--vocab`` says how many there are, 50280 in the papers, and
``--documents`` packs documents of that mean length, which only jaxkern's model keeps apart. A batch
that does not fit in memory is halved, in JAX.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkern
from bench import program, timing
from bench.program import Row
from jaxkern.lm.config import PRESETS, ModelConfig, RunError
from jaxkern.lm.memory import check_memory
from jaxkern.lm.model import MambaLM, Options, count_params, decayed
from jaxkern.lm.step import compiler_options, loss_fn, make_model
from jaxkern.nn import mamba2
from jaxkern.precision import Policy

OTHERS = ("jaxkern-remat", "jaxkern-loop", "xla", "xla-loop", "jla", "mamba_ssm")
_PEERS = ("jla", "mamba_ssm", "transformers")
_RATE, _BETAS, _DECAY = 1e-3, (0.9, 0.95), 0.1
BATCHES = 4
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Job:
    """A model to train, and the library that does it.

    Attributes:
      contender: who trains it.
      preset: the model's shape.
      length: tokens a sequence.
      tokens: a step, at most; at least one sequence.
      steps: to time.
      warmup: steps before them.
      vocab_size: tokens that there are, where not the preset's.
      document: the mean length of documents that are packed and kept apart; ``None`` for none.
    """

    contender: str
    preset: str
    length: int
    tokens: int
    steps: int
    warmup: int
    vocab_size: int | None = None
    document: int | None = None

    def __str__(self) -> str:
        return f"{self.contender}, {self.name}, length {self.length}"

    @property
    def name(self) -> str:
        """The model's."""
        vocabulary = "" if self.vocab_size is None else f", vocabulary {self.vocab_size:,}"
        packed = "" if self.document is None else f", documents of {self.document:,}"
        return f"{self.preset}{vocabulary}{packed}"

    @property
    def model(self) -> ModelConfig:
        model = PRESETS[self.preset].model
        return dataclasses.replace(model, vocab_size=self.vocab_size or model.vocab_size)

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model that is ready to train.

    Attributes:
      batch: sequences a step.
      parameters: how many.
      step: starts step i, and returns what to `wait` for.
      wait: until a step has ended.
      loss: of a step that has ended.
      told: after all steps, what else belongs in the row.
    """

    batch: int
    parameters: int
    step: Callable[[int], Any]
    wait: Callable[[Any], Any]
    loss: Callable[[Any], float]
    told: Callable[[], Row]


def draw(job: Job, batch: int) -> list[np.ndarray]:
    """Batches of windows (batch, length + 1), int32."""
    weights = 1 / np.arange(1, job.model.vocab_size + 1)
    rng = np.random.default_rng(0)
    shape = (batch, job.length + 1)
    p = weights / weights.sum()
    return [rng.choice(len(p), shape, p=p).astype(np.int32) for _ in range(BATCHES)]


def draw_documents(job: Job, batch: int) -> list[dict[str, np.ndarray]]:
    """Ends of a batch's documents: ``segment_ids`` (batch, length + 1), or nothing."""
    if job.document is None:
        return [{}] * BATCHES
    rng = np.random.default_rng(1)
    begins = rng.random((BATCHES, batch, job.length + 1)) < 1 / job.document
    return [{"segment_ids": ids} for ids in np.cumsum(begins, axis=-1, dtype=np.int32)]


Model = tuple[Callable[[], Any], Callable[..., jax.Array], Callable[[Any], Any]]
"""A model in JAX: what gives its parameters; the loss of these and of windows (B, length + 1), of
jaxkern's model also with `segment_ids`; and the optimizer's mask."""


def _own_model(job: Job, implementation: Any, how: str) -> Model:
    remat: Any = {"cheap": "cheap", "scan": "scan", "remat": "layer"}.get(how, "none")
    options = Options(Policy.parse("bf16"), implementation, remat, how == "loop")
    graphdef = make_model(job.model, options)
    init = lambda: nnx.to_pure_dict(nnx.state(MambaLM(job.model, rngs=nnx.Rngs(0))))
    return init, functools.partial(loss_fn, graphdef), decayed


def _jla_model(job: Job, how: str) -> Model:
    import equinox as eqx

    of = {name: importlib.import_module(f"jla.{name}") for name in ("models", "training.step")}
    config = importlib.import_module("jla.models.config")
    m, sizes = job.model, job.model.sizes
    shape = {"d_state": sizes.d_state, "conv_size": sizes.d_conv, "expand": sizes.expand}
    if isinstance(sizes, mamba2.Sizes):
        shape |= {"head_dim": sizes.headdim, "n_groups": sizes.ngroups}
    model_config = config.ModelConfig(
        vocab_size=m.vocab_size,
        d_model=m.d_model,
        n_layers=m.n_layers,
        d_ff=0,
        attention=config.AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=64),  # unused
        ssm=config.SSMConfig(**shape),
        layer_types=({"mamba": "mamba1", "mamba2": "mamba2"}[m.block.name],) * m.n_layers,
        mlp_types=("none",) * m.n_layers,
        norm_eps=1e-5,
        remat="none",
        scan_layers=how == "loop",
    )
    make = lambda: of["models"].build_model(model_config, key=jax.random.key(0))
    structure = eqx.filter_eval_shape(make)
    cross_entropy = of["training.step"].LossConfig(impl="auto", grad_in_forward=True)
    summed = of["training.step"].lm_loss(cross_entropy)

    def loss(params: Any, windows: Any) -> jax.Array:
        model = eqx.combine(params, eqx.filter(structure, eqx.is_array, inverse=True))
        batch = {"input_ids": windows[:, :-1], "labels": windows[:, 1:]}
        return summed(model, batch, jax.random.key(0))[0] / batch["labels"].size

    matrix = lambda path, p: p.ndim > 1 and path[-1].name == "weight"
    mask = functools.partial(jax.tree.map_with_path, matrix)
    return lambda: eqx.filter(make(), eqx.is_array), loss, mask


def of_jax(job: Job) -> Trainer:
    """The library's own model, or that of jla, and the library's optimizer."""
    name, _, how = job.contender.partition("-")
    implementation = "xla" if name == "xla" else None
    own = name != "jla"
    weights, loss_of, mask = _own_model(job, implementation, how) if own else _jla_model(job, how)
    tx = jaxkern.fused_adamw(
        _RATE, *_BETAS, weight_decay=_DECAY, mask=mask, implementation=implementation
    )

    def init() -> Any:
        params = weights()
        return params, tx.init(params)

    def step(params: Any, state: Any, windows: Any, documents: dict[str, Any]) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, windows, **documents)
        return *jaxkern.apply(tx, grads, state, params), loss

    device = jax.local_devices()[0]
    how_compiled = compiler_options(device.platform)
    program = jax.jit(step, donate_argnums=(0, 1), compiler_options=how_compiled)
    batch = job.batch
    while True:
        windows = jax.ShapeDtypeStruct((batch, job.length + 1), jnp.int32)
        documents = dict.fromkeys(draw_documents(job, 1)[0], windows)
        start = time.perf_counter()
        lowered = program.lower(*jax.eval_shape(init), windows, documents)
        if implementation == "xla" and "mosaic_gpu" in lowered.as_text():
            raise RuntimeError("there is a kernel in the program of plain JAX")
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        try:
            check_memory(compiled, device)
            break
        except RunError:
            if batch == 1:
                raise
            batch //= 2
    held = list(jax.jit(init)())
    parameters = count_params(held[0])
    drawn = zip(draw(job, batch), draw_documents(job, batch), strict=True)
    batches = [jax.device_put(each, device) for each in drawn]

    def advance(i: int) -> Any:
        *held[:], loss = compiled(*held, *batches[i % BATCHES])
        return loss

    def told() -> Row:
        m: Any = compiled.memory_analysis()
        needed = m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes
        return {
            "peak_gib": peak_gib(device),
            "program_gib": round((needed - m.alias_size_in_bytes) / GIB, 2),
            "compile_s": round(seconds, 1),
            "versions": versions("jax", *([] if own else ["jla"])),
        }

    return Trainer(batch, parameters, advance, jax.block_until_ready, float, told)


def mamba_ssm_model(m: ModelConfig, dtype: Any) -> Any:
    """The model of mamba_ssm for PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    models = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    torch.manual_seed(0)
    sizes = m.sizes
    mixer: Row = {"layer": {"mamba": "Mamba1", "mamba2": "Mamba2"}[m.block.name]}
    mixer |= {"d_state": sizes.d_state, "d_conv": sizes.d_conv, "expand": sizes.expand}
    if isinstance(sizes, mamba2.Sizes):
        mixer |= {"headdim": sizes.headdim, "ngroups": sizes.ngroups}
    config = models.MambaConfig(
        d_model=m.d_model,
        n_layer=m.n_layers,
        vocab_size=m.vocab_size,
        ssm_cfg=mixer,
        rms_norm=True,
        residual_in_fp32=True,
        fused_add_norm=True,
    )
    return models.MambaLMHeadModel(config, device="cuda", dtype=dtype)


def of_torch(job: Job) -> Trainer:
    """The model of mamba_ssm, which compiles its kernels in its first step."""
    import torch  # pyright: ignore[reportMissingImports]

    model = mamba_ssm_model(job.model, torch.float32)
    matrices = lambda name, p: p.ndim > 1 and not name.endswith("A_log")
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if matrices(name, p) == decayed],
            "weight_decay": _DECAY if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=_RATE, betas=_BETAS, fused=True)
    batches = [torch.from_numpy(windows).cuda().long() for windows in draw(job, job.batch)]
    first_step: list[float] = []

    def advance(i: int) -> Any:
        start = time.perf_counter()
        windows = batches[i % BATCHES]
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(windows[:, :-1]).logits
        targets = windows[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end = torch.cuda.Event()
        end.record()
        if not first_step:
            end.synchronize()
            first_step.append(time.perf_counter() - start)
        return end, loss.detach()

    told = lambda: {
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "compile_s": round(first_step[0], 1),
        "versions": versions("torch", "triton", "mamba_ssm", "causal_conv1d"),
    }
    return Trainer(
        batch=job.batch,
        parameters=sum(p.numel() for p in model.parameters()),
        step=advance,
        wait=lambda handle: handle[0].synchronize(),
        loss=lambda handle: float(handle[1]),
        told=told,
    )


def versions(*names: str) -> str:
    """Names of packages and their versions; of one built in a folder, its own word."""
    told = []
    for name in names:
        try:
            told.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            told.append(f"{name} {getattr(importlib.import_module(name), '__version__', '')}")
    return ", ".join(told)


def peak_gib(device: Any) -> float | None:
    """GiB that were in use at most, or ``None`` where the device does not say."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return peak and round(peak / GIB, 2)


def product_operations(model: ModelConfig) -> int:
    """Operations of the matrix products a token: two a weight, forward, and four, backward."""
    shapes = {name: shape for name, (_, shape) in model.block.initializers(model.sizes).items()}
    layer = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("_proj"))
    return 6 * (model.n_layers * layer + model.vocab_size * model.d_model)


def measure(job: Job) -> Row:
    """Trains, and returns the row."""
    if job.document is not None and job.contender.startswith(_PEERS):
        raise ValueError(f"the model of {job.contender} does not keep documents apart")
    trainer = (of_torch if job.contender == "mamba_ssm" else of_jax)(job)
    started, ends = [], []
    for i in range(job.warmup + job.steps):
        started.append(trainer.step(i))
        if i:
            trainer.wait(started[i - 1])
            ends.append(time.perf_counter())
    trainer.wait(started[-1])
    ends.append(time.perf_counter())
    times = [1e3 * (after - before) for before, after in itertools.pairwise(ends)]
    ms = timing.Timing.of(times[-job.steps :])
    per_second = 1e3 * trainer.batch * job.length / ms.median
    return {
        "preset": job.name,
        "length": job.length,
        "batch": trainer.batch,
        "contender": job.contender,
        "tokens_per_second": round(per_second),
        "ms": round(ms.median, 2),
        "ms_low": round(ms.low, 2),
        "ms_high": round(ms.high, 2),
        "steps": ms.calls,
        "tflop_s": round(per_second * product_operations(job.model) * 1e-12, 1),
        "parameters": trainer.parameters,
        "first_loss": round(trainer.loss(started[0]), 3),
        "last_loss": round(statistics.mean(map(trainer.loss, started[-BATCHES:])), 3),
        **trainer.told(),
    }


def found_peers(names: Sequence[str]) -> list[str]:
    """Returns the contenders that can run here."""
    return [n for n in names if n not in _PEERS or importlib.util.find_spec(n)]


def _told(job: Job, row: Row) -> str:
    return (
        f"{job.contender:10} {job.name:6}{row['batch']:4} × {job.length:<6}"
        f"{row['tokens_per_second']:10,} tokens/s {row['ms']:9.1f} ms"
        f" {row['peak_gib'] or 0:7.2f} GiB  compiled in {row['compile_s']:.1f} s"
        f"  loss {row['first_loss']:.2f} → {row['last_loss']:.2f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = program.parsed(
        "train",
        argv,
        "lm",
        preset=([str], "the model's shape (130m; without a GPU tiny)"),
        length=([int], "tokens of a sequence (2048; without a GPU 64)"),
        vs=(",".join(found_peers(OTHERS)), "whom to train beside, comma-separated"),
        only=(str, "contenders, comma-separated, where not jaxkern and --vs"),
        tokens=(int, "a step (16384; without a GPU 512)"),
        vocab=(int, "tokens that there are, where not the preset's"),
        documents=(int, "mean length of documents that are packed and kept apart"),
        steps=(20, "to time"),
        steps_xla=(10, "to time on plain JAX"),
        warmup=(3, "steps before them, at least one"),
        limit=(480.0, "seconds for a contender"),
    )
    program.share_device(2)  # this process trains nothing, and of the others one at a time
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"
    gpu = timing.on_gpu()
    names = args.only.split(",") if args.only else ["jaxkern", *filter(None, args.vs.split(","))]
    jobs = [
        Job(
            contender=name,
            preset=preset,
            length=length,
            tokens=args.tokens or (16384 if gpu else 512),
            steps=args.steps_xla if name.startswith("xla") else args.steps,
            warmup=max(1, args.warmup),
            vocab_size=args.vocab,
            document=args.documents,
        )
        for preset in args.preset or ["130m" if gpu else "tiny"]
        for length in args.length or [2048 if gpu else 64]
        for name in names
    ]
    clock, how = program.clock(gpu, "wall-clock time of steps"), {"apart": True, "most": 1}
    return program.measured(args, "lm", measure, jobs, clock, _told, limit=args.limit, **how)
