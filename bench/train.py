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
contender that does not learn. ``--vocab`` says how many there are, 50280 in the papers. A batch
that does not fit in memory is halved, in JAX.

``python -m bench decode`` times decoding. A contender continues B prompts of one length at once,
each time with the likeliest token, after initial weights of the preset's shape with the vocabulary
of the Mamba papers.

    jaxkern       what ``jaxkern sample --dtype fp32`` runs
    jaxkern-bf16  what ``jaxkern sample`` runs: matrices and products in bf16, states in fp32
    mamba_ssm     its MambaLMHeadModel in bf16, by its generate with cg=True: a step is a CUDA graph
    transformers  its model of the same layout in bf16, by its generate, as it comes

Each preset is decoded by each contender in a process of its own, one after the other. Of every
batch it first decodes once what is timed, which compiles it. *First token* is the time from the
prompts, on the host, to one token after each, there too; jaxkern decodes 16 before it gives the
first. Tokens per second are of all rows together, those after the first, by the difference of two
times: that to the last token and that to the first.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkern
from bench import program, timing
from bench.cases.peers import load
from bench.program import Row
from jaxkern.lm import sample
from jaxkern.lm.config import PRESETS, ModelConfig, RunError
from jaxkern.lm.hf_layouts import layout_of
from jaxkern.lm.memory import check_memory, needed_memory
from jaxkern.lm.model import MambaLM, Options, count_params, decayed
from jaxkern.lm.step import compiler_options, loss_fn, make_model
from jaxkern.nn import mamba2
from jaxkern.precision import Policy

CONTENDERS = ("jaxkern", "jaxkern-remat", "jaxkern-loop", "xla", "xla-loop", "jla", "mamba_ssm")
_PEERS = ("jla", "mamba_ssm", "transformers")
_RATE, _BETAS, _DECAY = 1e-3, (0.9, 0.95), 0.1
BATCHES = 4
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Job:
    """A model to train, and by whom: `length` tokens a sequence, at most `tokens` a step."""

    contender: str
    preset: str
    length: int
    tokens: int
    steps: int
    vocab_size: int | None = None
    warmup: int = 3

    def __str__(self) -> str:
        return f"{self.contender}, {self.name}, length {self.length}"

    @property
    def name(self) -> str:
        """The model's."""
        return self.preset + (f", vocabulary {self.vocab_size:,}" if self.vocab_size else "")

    @property
    def model(self) -> ModelConfig:
        model = PRESETS[self.preset].model
        return dataclasses.replace(model, vocab_size=self.vocab_size or model.vocab_size)

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)


class Trainer(NamedTuple):
    """A model that is ready to train, in batches of as many sequences."""

    batch: int
    parameters: int
    step: Callable[[int], tuple[Any, Any]]  # starts step i: its loss, and what waits for its end
    told: Callable[[], Row]  # after all steps, what else belongs in the row


def draw(job: Job, batch: int) -> list[np.ndarray]:
    """Batches of windows (batch, length + 1), int32."""
    weights = 1 / np.arange(1, job.model.vocab_size + 1)
    rng, p = np.random.default_rng(0), weights / weights.sum()
    shape = (batch, job.length + 1)
    return [rng.choice(len(p), shape, p=p).astype(np.int32) for _ in range(BATCHES)]


Model = tuple[Callable[[], Any], Callable[..., jax.Array], Callable[[Any], Any]]
"""A model in JAX: what gives its parameters; the loss of these and of windows (B, length + 1); and
the optimizer's mask."""


def _own_model(job: Job, implementation: Any, how: str) -> Model:
    remat: Any = {"cheap": "cheap", "scan": "scan", "remat": "layer"}.get(how, "none")
    options = Options(Policy.parse("bf16"), implementation, remat, how == "loop")
    graphdef = make_model(job.model, options)
    init = lambda: nnx.to_pure_dict(nnx.state(MambaLM(job.model, rngs=nnx.Rngs(0))))
    return init, functools.partial(loss_fn, graphdef), decayed


def mamba_ssm_sizes(sizes: Any) -> Row:
    """The sizes of a block of Mamba or Mamba-2 by the names of mamba_ssm, but for the width."""
    names = ["d_state", "d_conv", "expand"]
    names += ["headdim", "ngroups"] if isinstance(sizes, mamba2.Sizes) else []
    return {name: getattr(sizes, name) for name in names}


def jla_sizes(sizes: Any) -> Row:
    """The sizes of a block by the names of jax-linear-attention."""
    names = {"d_conv": "conv_size", "headdim": "head_dim", "ngroups": "n_groups"}
    return {names.get(name, name): size for name, size in mamba_ssm_sizes(sizes).items()}


def _jla_model(job: Job, how: str) -> Model:
    import equinox as eqx

    config, step = (load(f"jla.{name}") for name in ("models.config", "training.step"))
    m = job.model
    model_config = config.ModelConfig(
        vocab_size=m.vocab_size,
        d_model=m.d_model,
        n_layers=m.n_layers,
        d_ff=0,
        attention=config.AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=64),  # unused
        ssm=config.SSMConfig(**jla_sizes(m.sizes)),
        layer_types=({"mamba": "mamba1", "mamba2": "mamba2"}[m.block.name],) * m.n_layers,
        mlp_types=("none",) * m.n_layers,
        norm_eps=1e-5,
        remat="none",
        scan_layers=how == "loop",
    )
    make = lambda: load("jla.models:build_model")(model_config, key=jax.random.key(0))
    structure = eqx.filter_eval_shape(make)
    summed = step.lm_loss(step.LossConfig(impl="auto", grad_in_forward=True))

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

    def step(params: Any, state: Any, windows: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, windows)
        return *jaxkern.apply(tx, grads, state, params), loss

    device = jax.local_devices()[0]
    how_compiled = compiler_options(device.platform)
    program = jax.jit(step, donate_argnums=(0, 1), compiler_options=how_compiled)
    batch = job.batch
    while True:
        windows = jax.ShapeDtypeStruct((batch, job.length + 1), jnp.int32)
        start = time.perf_counter()
        lowered = program.lower(*jax.eval_shape(init), windows)
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
    batches = [jax.device_put(windows, device) for windows in draw(job, batch)]

    def advance(i: int) -> Any:
        *held[:], loss = compiled(*held, batches[i % BATCHES])
        return loss, loss.block_until_ready

    def told() -> Row:
        return {
            "peak_gib": peak_gib(device),
            "program_gib": round(needed_memory(compiled) / GIB, 2),
            "compile_s": round(seconds, 1),
            "versions": versions("jax", *([] if own else ["jla"])),
        }

    return Trainer(batch, count_params(held[0]), advance, told)


def mamba_ssm_model(m: ModelConfig, dtype: Any) -> Any:
    """The model of mamba_ssm for PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    models = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    torch.manual_seed(0)
    mixer: Row = {"layer": {"mamba": "Mamba1", "mamba2": "Mamba2"}[m.block.name]}
    config = models.MambaConfig(
        d_model=m.d_model,
        n_layer=m.n_layers,
        vocab_size=m.vocab_size,
        ssm_cfg=mixer | mamba_ssm_sizes(m.sizes),
        rms_norm=True,
        residual_in_fp32=True,
        fused_add_norm=True,
    )
    return models.MambaLMHeadModel(config, device="cuda", dtype=dtype)


def of_torch(job: Job) -> Trainer:
    """The model of mamba_ssm, which compiles its kernels in its first step."""
    import torch  # pyright: ignore[reportMissingImports]

    model = mamba_ssm_model(job.model, torch.float32)
    is_matrix = lambda name, p: p.ndim > 1 and not name.endswith("A_log")
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, p in model.named_parameters():
        groups[is_matrix(name, p)].append(p)
    decays = [{"params": of, "weight_decay": _DECAY * is_of} for is_of, of in groups.items()]
    optimizer = torch.optim.AdamW(decays, lr=_RATE, betas=_BETAS, fused=True)
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
        return loss.detach(), end.synchronize

    told = lambda: {
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "compile_s": round(first_step[0], 1),
        "versions": versions("torch", "triton", "mamba_ssm", "causal_conv1d"),
    }
    return Trainer(job.batch, sum(p.numel() for p in model.parameters()), advance, told)


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
    trainer = (of_torch if job.contender == "mamba_ssm" else of_jax)(job)
    losses, waits, ends = [], [], []
    for i in range(job.warmup + job.steps + 1):
        if i < job.warmup + job.steps:
            loss, wait = trainer.step(i)
            losses.append(loss)
            waits.append(wait)
        if i:
            waits[i - 1]()
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
        **{
            name: round(of, 2) for name, of in zip(("ms", "ms_low", "ms_high"), ms[:3], strict=True)
        },
        "steps": ms.calls,
        "tflop_s": round(per_second * product_operations(job.model) * 1e-12, 1),
        "parameters": trainer.parameters,
        "first_loss": round(float(losses[0]), 3),
        "last_loss": round(statistics.mean(map(float, losses[-BATCHES:])), 3),
        **trainer.told(),
    }


def found_peers(names: Sequence[str]) -> str:
    """The contenders that can run here, comma-separated."""
    return ",".join(n for n in names if n not in _PEERS or importlib.util.find_spec(n))


@program.command(
    "lm",
    preset=([str], "the model's shape (130m; without a GPU tiny)"),
    length=([int], "tokens of a sequence (2048; without a GPU 64)"),
    only=(found_peers(CONTENDERS), "contenders, comma-separated"),
    tokens=(int, "a step (16384; without a GPU 512)"),
    vocab=(int, "tokens that there are, where not the preset's"),
    steps=(20, "to time; on plain JAX half of them"),
    limit=(480.0, "seconds for a contender"),
)
def main(args: Any) -> int:
    program.share_device(2)  # this process trains nothing, and of the others one at a time
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"
    gpu = timing.on_gpu()
    tokens = args.tokens or (16384 if gpu else 512)
    steps = lambda name: args.steps // 2 if name.startswith("xla") else args.steps
    jobs = [
        Job(name, preset, length, tokens, steps(name), args.vocab)
        for preset in args.preset or ["130m" if gpu else "tiny"]
        for length in args.length or [2048 if gpu else 64]
        for name in args.only.split(",")
    ]
    clock = program.clock(gpu, "wall-clock time of steps")
    return program.measured(args, measure, jobs, clock, limit=args.limit, **program.ALONE)


# Time that checkpoints cost

_REPORT = re.compile(r"step +(\d+)/\d+ · loss")


def reports(flags: Row, folder: Path) -> dict[int, float]:
    """When ``jaxkern train`` reported each step that it reports, in seconds."""
    words = [str(word) for flag in flags.items() for word in flag]
    command = [sys.executable, "-u", "-m", "jaxkern", "train", *words, "--out", str(folder)]
    seen: dict[int, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if found := _REPORT.match(line):
                seen[int(found[1])] = time.perf_counter()
    if process.returncode:
        raise RuntimeError(f"jaxkern train ended with status {process.returncode}")
    return seen


def _step_ms(flags: Row, run: tuple[int, int]) -> Row:
    """The time of a step, by the first report after everything was run and the last but one."""
    first, last = flags["--log-every"], flags["--steps"] - flags["--log-every"]
    with tempfile.TemporaryDirectory() as folder:
        seen = reports(flags | {"--checkpoint-every": run[1]}, Path(folder) / "run")
    ms = 1e3 * (seen[last] - seen[first]) / (last - first)
    return {"preset": flags["--preset"], "checkpoints": run[1] < flags["--steps"], "ms": ms}


def checkpoint_share(rows: list[Row]) -> Row:
    """The rows, and the percentage of the time that checkpoints take, by the best of each kind."""
    best = {row["checkpoints"]: row["ms"] for row in sorted(rows, key=lambda row: -row["ms"])}
    told = {"percent": round(100 * (best[True] / best[False] - 1), 2)} if len(best) == 2 else {}
    return told | {"rows": rows}


@program.command(
    "checkpoints",
    preset=("130m", "the model's shape"),
    every=(100, "steps between two checkpoints"),
    count=(4, "checkpoints that are timed"),
    log_every=(50, "steps between two reports"),
    repeats=(2, "runs of each kind, in turn"),
)
def checkpoints(args: Any) -> int:
    """Runs ``python -m bench checkpoints``: compares the time between two reports of a run."""
    if args.every % args.log_every or args.every < 2 * args.log_every:
        args.error(f"--every must be twice --log-every or another multiple; got {args.every}")
    program.share_device(2, one=False)  # this process trains nothing
    steps = args.count * args.every + 2 * args.log_every
    gpu = timing.on_gpu()
    flags: Row = {"--preset": args.preset, "--mixed-precision": "bf16" if gpu else "fp32"}
    flags |= {"--steps": steps, "--log-every": args.log_every, "--eval-every": steps}
    clock = program.clock(gpu, "wall-clock time of steps")
    told = f"a checkpoint every {args.every} steps takes {{percent}}% of the time".format_map
    return program.measured(
        args,
        functools.partial(_step_ms, flags | {"--eval-batches": 1}),
        [*itertools.product(range(args.repeats), (args.every, steps))],
        clock | {"every": args.every, "count": args.count},
        finish=checkpoint_share,
        end=lambda report: [told(report)] if "percent" in report else [],
    )


# Decoding

DECODERS = ("jaxkern", "jaxkern-bf16", "mamba_ssm", "transformers")
_DTYPES = {"jaxkern": "fp32", "jaxkern-bf16": "bf16"}


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A model to decode, and by whom: `tokens`, a multiple of 16, after prompts and one token."""

    contender: str
    preset: str
    vocab_size: int
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    repeats: int

    def __str__(self) -> str:
        return f"{self.contender}, {self.preset}"

    @property
    def model(self) -> ModelConfig:
        return dataclasses.replace(PRESETS[self.preset].model, vocab_size=self.vocab_size)


class Decoder(NamedTuple):
    """A model that is ready to decode: prompts (B, prompt), tokens -> (B, tokens), on the host."""

    decode: Callable[[np.ndarray, int], np.ndarray]
    versions: str
    peak: Callable[[], float | None]  # GiB


def decoder_of_jax(job: Decoding) -> Decoder:
    """The library's own model, as ``jaxkern sample`` runs it."""
    graphdef, params = sample.initial(job.model).decoder(_DTYPES[job.contender])

    def decode(prompts: np.ndarray, length: int) -> np.ndarray:
        chunks = sample.generate_tokens(
            graphdef, params, list(prompts), length=length, temperature=0
        )
        return np.concatenate(list(chunks), axis=1)

    return Decoder(decode, versions("jax"), lambda: peak_gib(jax.local_devices()[0]))


def decoder_of_torch(job: Decoding) -> Decoder:
    """The model of mamba_ssm, or that of transformers, on a GPU where there is one."""
    import torch  # pyright: ignore[reportMissingImports]

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if job.contender == "mamba_ssm":
        model = mamba_ssm_model(job.model, torch.bfloat16).eval()
        told = versions("torch", "triton", "mamba_ssm", "causal_conv1d")
    else:
        import transformers  # pyright: ignore[reportMissingImports]

        content = layout_of(job.model).content(job.model)
        config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model = model.to(device, torch.bfloat16).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        told = versions("torch", "transformers")

    def decode(prompts: np.ndarray, length: int) -> np.ndarray:
        ids = torch.from_numpy(prompts).to(device).long()
        how: Row = {"max_length": ids.shape[1] + length, "cg": True, "top_k": 1}
        if job.contender == "transformers":
            how = {"attention_mask": torch.ones_like(ids), "do_sample": False}
            how |= {"max_new_tokens": length, "min_new_tokens": length}
        return model.generate(ids, **how)[:, ids.shape[1] :].cpu().numpy()

    peak = lambda: round(torch.cuda.max_memory_allocated() / GIB, 2) if cuda else None
    return Decoder(decode, told, peak)


def measure_decoding(job: Decoding) -> list[Row]:
    """Decodes, and returns a row for each batch."""
    decode, told, peak = (decoder_of_jax if job.contender in _DTYPES else decoder_of_torch)(job)
    rng = np.random.default_rng(0)
    rows = []
    for batch in job.batches:
        prompts = rng.integers(0, job.vocab_size, (batch, job.prompt)).astype(np.int32)

        def seconds(length: int, prompts: np.ndarray = prompts) -> float:
            began = time.perf_counter()
            out = decode(prompts, length)
            took = time.perf_counter() - began
            if out.shape != (len(prompts), length):
                raise RuntimeError(f"{job} gave {out.shape} tokens, not {(len(prompts), length)}")
            return took

        for length in (1 + job.tokens, 1):  # compiles, and captures graphs
            seconds(length)
        first = statistics.median(seconds(1) for _ in range(job.repeats))
        whole = (seconds(1 + job.tokens) for _ in range(job.repeats))
        ms = [1e3 * (s - first) / job.tokens for s in whole]
        step = statistics.median(ms)
        rows.append(
            {
                "preset": job.preset,
                "batch": batch,
                "by": job.contender,
                "tokens_per_second": round(1e3 * batch / step),
                "ms_step": round(step, 3),
                "ms_low": round(min(ms), 3),
                "ms_high": round(max(ms), 3),
                "ms_first": round(1e3 * first, 2),
                "peak_gib": peak(),
                "versions": told,
            }
        )
    return rows


@program.command(
    "decode",
    preset=([str], "the model's shape (130m, mamba2-130m, 370m; without a GPU micro)"),
    batch=([int], "prompts at once (1, 8, 64)"),
    only=(found_peers(DECODERS), "contenders, comma-separated"),
    vocab=(50280, "tokens that there are"),
    prompt=(int, "tokens of a prompt (128; without a GPU 16)"),
    tokens=(int, "to time, a multiple of 16 (128; without a GPU 16)"),
    repeats=(3, "times that are taken of each"),
    limit=(400.0, "seconds for a preset by a contender"),
)
def decode(args: Any) -> int:
    """Runs ``python -m bench decode``."""
    program.share_device(2)  # this process decodes nothing, and of the others one at a time
    gpu = timing.on_gpu()
    prompt, tokens = (given or (128 if gpu else 16) for given in (args.prompt, args.tokens))
    if tokens % 16:
        args.error(f"--tokens must be a multiple of 16, got {tokens}")
    batches = tuple(args.batch or (1, 8, 64))
    jobs = [
        Decoding(name, preset, args.vocab, batches, prompt, tokens, args.repeats)
        for preset in args.preset or (["130m", "mamba2-130m", "370m"] if gpu else ["micro"])
        for name in args.only.split(",")
    ]
    about = program.clock(gpu, "wall-clock time of generating")
    about |= {"prompt": prompt, "tokens": tokens, "vocab": args.vocab}
    how = program.ALONE | {"limit": args.limit}
    return program.measured(args, measure_decoding, jobs, about, **how)
