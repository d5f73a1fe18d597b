"""The trainers that ``python -m bench train`` times, in JAX and in PyTorch."""

import dataclasses
import functools
import importlib
import importlib.metadata
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkern
from jaxkern.lm.config import PRESETS, ModelConfig, RunError
from jaxkern.lm.memory import check_memory
from jaxkern.lm.model import MambaLM, Options, count_params, decayed
from jaxkern.lm.step import compiler_options, loss_fn, make_model
from jaxkern.nn import mamba2
from jaxkern.precision import Policy

_RATE, _BETAS, _DECAY = 1e-3, (0.9, 0.95), 0.1
BATCHES = 4
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, and by whom.

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
        if self.vocab_size is None:
            return model
        return dataclasses.replace(model, vocab_size=self.vocab_size)

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
    told: Callable[[], dict[str, Any]]


def draw(job: Job, batch: int) -> list[np.ndarray]:
    """Batches of windows (batch, length + 1), int32."""
    weights = 1 / np.arange(1, job.model.vocab_size + 1)
    rng = np.random.default_rng(0)
    shape = (batch, job.length + 1)
    p = weights / weights.sum()
    return [rng.choice(len(p), shape, p=p).astype(np.int32) for _ in range(BATCHES)]


def draw_documents(job: Job, batch: int) -> list[dict[str, np.ndarray]]:
    """What says where a batch's documents end: ``segment_ids`` (batch, length + 1), or nothing."""
    if job.document is None:
        return [{}] * BATCHES
    rng = np.random.default_rng(1)
    begins = rng.random((BATCHES, batch, job.length + 1)) < 1 / job.document
    return [{"segment_ids": ids} for ids in np.cumsum(begins, axis=-1, dtype=np.int32)]


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model in JAX.

    Attributes:
      init: gives the parameters.
      loss: of parameters and windows (B, length + 1); of jaxkern's model also with `segment_ids`.
      decayed: the optimizer's mask.
    """

    init: Callable[[], Any]
    loss: Callable[..., jax.Array]
    decayed: Callable[[Any], Any]


def _own_model(job: Job, implementation: Any, how: str) -> Model:
    remat: Any = {"cheap": "cheap", "scan": "scan", "remat": "layer"}.get(how, "none")
    options = Options(Policy.parse("bf16"), implementation, remat, how == "loop")
    graphdef = make_model(job.model, options)
    init = lambda: nnx.to_pure_dict(nnx.state(MambaLM(job.model, rngs=nnx.Rngs(0))))
    return Model(init, functools.partial(loss_fn, graphdef), decayed)


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
    return Model(lambda: eqx.filter(make(), eqx.is_array), loss, mask)


def of_jax(job: Job, wait: Callable[[], None]) -> Trainer:
    """The library's own model, or that of jla, and the library's optimizer."""
    name, _, how = job.contender.partition("-")
    implementation = "xla" if name == "xla" else None
    model = _jla_model(job, how) if name == "jla" else _own_model(job, implementation, how)
    tx = jaxkern.fused_adamw(
        _RATE,
        *_BETAS,
        weight_decay=_DECAY,
        mask=model.decayed,
        implementation=implementation,
    )

    def init() -> Any:
        params = model.init()
        return params, tx.init(params)

    def step(params: Any, state: Any, windows: Any, documents: dict[str, Any]) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(params, windows, **documents)
        return *jaxkern.apply(tx, grads, state, params), loss

    device = jax.local_devices()[0]
    how_compiled = compiler_options(device.platform)
    program = jax.jit(step, donate_argnums=(0, 1), compiler_options=how_compiled)
    shapes = jax.eval_shape(init)
    compiled: Any = None
    batch, seconds = 2 * job.batch, 0.0
    while compiled is None:
        batch //= 2
        windows = jax.ShapeDtypeStruct((batch, job.length + 1), jnp.int32)
        documents = dict.fromkeys(draw_documents(job, 1)[0], windows)
        start = time.perf_counter()
        lowered = program.lower(*shapes, windows, documents)
        if implementation == "xla" and "mosaic_gpu" in lowered.as_text():
            raise RuntimeError("there is a kernel in the program of plain JAX")
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        try:
            check_memory(compiled, device)
        except RunError:
            if batch == 1:
                raise
            compiled = None
    wait()
    held = list(jax.jit(init)())
    parameters = count_params(held[0])
    drawn = zip(draw(job, batch), draw_documents(job, batch), strict=True)
    batches = [jax.device_put(each, device) for each in drawn]

    def advance(i: int) -> Any:
        *held[:], loss = compiled(*held, *batches[i % BATCHES])
        return loss

    def told() -> dict[str, Any]:
        m = compiled.memory_analysis()
        needed = m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        return {
            "peak_gib": peak and round(peak / _GIB, 2),
            "program_gib": round((needed - m.alias_size_in_bytes) / _GIB, 2),
            "compile_s": round(seconds, 1),
            "versions": versions("jax", *(["jla"] if name == "jla" else ())),
        }

    return Trainer(batch, parameters, advance, jax.block_until_ready, float, told)


def mamba_ssm_model(m: ModelConfig, dtype: Any) -> Any:
    """The model of mamba_ssm for PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    models = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    torch.manual_seed(0)
    sizes = m.sizes
    mixer: dict[str, Any] = {"layer": {"mamba": "Mamba1", "mamba2": "Mamba2"}[m.block.name]}
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


def of_torch(job: Job, wait: Callable[[], None]) -> Trainer:
    """The model of mamba_ssm, which compiles its kernels in its first step."""
    import torch  # pyright: ignore[reportMissingImports]

    wait()
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

    def told() -> dict[str, Any]:
        return {
            "peak_gib": round(torch.cuda.max_memory_allocated() / _GIB, 2),
            "compile_s": round(first_step[0], 1),
            "versions": versions("torch", "triton", "mamba_ssm", "causal_conv1d"),
        }

    parameters = sum(p.numel() for p in model.parameters())
    return Trainer(
        batch=job.batch,
        parameters=parameters,
        step=advance,
        wait=lambda handle: handle[0].synchronize(),
        loss=lambda handle: float(handle[1]),
        told=told,
    )


def versions(*names: str) -> str:
    """Names of packages and their versions."""
    return ", ".join(f"{name} {_version(name)}" for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # built in a folder, without metadata
        return getattr(importlib.import_module(name), "__version__", "")
