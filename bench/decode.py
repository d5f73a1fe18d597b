"""Decoding with the language model beside PyTorch: ``python -m bench decode``.

A contender continues B prompts of one length at once, each time with the likeliest token, after
initial weights of the preset's shape with the vocabulary of the Mamba papers.

    jaxkern       what ``jaxkern sample`` runs: weights, states and products in fp32
    jaxkern-bf16  the same with weights and products in bf16
    mamba_ssm     its MambaLMHeadModel in bf16, by its generate with cg=True: a step is a CUDA graph
    transformers  its model of the same layout in bf16, by its generate, as it comes

Each preset is decoded by each contender in a process of its own, one after the other. Of every
batch it first decodes once what is timed, which compiles it. *First token* is the time from the
prompts, on the host, to one token after each, there too; jaxkern decodes 16 before it gives the
first. Tokens per second are of all rows together, those after the first, by the difference of two
times: that to the last token and that to the first.

``--scan`` times one op of a decoded token alone, that which updates the scan's state, by the kernel
and by plain JAX: device time in a loop over the model's layers, divided by these. The states of few
sequences stay in the GPU's cache from one token to the next, as they do where a model decodes.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from bench import program, timing
from bench.cases import TABLE
from bench.cases.case import dtypes
from bench.train import attempt, found_peers
from bench.trainers import mamba_ssm_model, versions
from jaxkern.lm import sample
from jaxkern.lm.config import PRESETS, ModelConfig
from jaxkern.lm.hf_layouts import layout_of
from jaxkern.lm.model import Options, initial_params
from jaxkern.lm.step import make_model
from jaxkern.nn import mamba2
from jaxkern.precision import Policy

OTHERS = ("jaxkern-bf16", "mamba_ssm", "transformers")
_GIB = 2**30
_PRECISIONS = {"jaxkern": "fp32", "jaxkern-bf16": "params=bfloat16,compute=bfloat16,output=float32"}


@dataclasses.dataclass(frozen=True)
class Job:
    """What to decode, and by whom.

    Attributes:
      contender: who decodes.
      preset: the model's shape, but for the vocabulary.
      vocab_size: tokens that there are.
      batches: prompts at once.
      prompt: tokens of each.
      tokens: decoded after the first, a multiple of 16.
      repeats: times that are taken of each batch.
    """

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


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model that is ready to decode.

    Attributes:
      decode: prompts (B, prompt) and how many tokens -> these, (B, tokens), on the host.
      peak: bytes that were in use at most; ``None`` if that is not known.
      versions: of the packages.
    """

    decode: Callable[[np.ndarray, int], np.ndarray]
    peak: Callable[[], int | None]
    versions: str


def of_jax(job: Job) -> Decoder:
    """The library's own model, as ``jaxkern sample`` runs it or in bf16."""
    policy = Policy.parse(_PRECISIONS[job.contender])
    graphdef = make_model(job.model, Options(policy))
    params = jax.jit(lambda: policy.cast_to_params(initial_params(job.model)))()

    def decode(prompts: np.ndarray, length: int) -> np.ndarray:
        chunks = sample.generate_tokens(
            graphdef, params, list(prompts), length=length, temperature=0
        )
        return np.concatenate(list(chunks), axis=1)

    stats = lambda: (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return Decoder(decode, stats, versions("jax"))


def of_mamba_ssm(job: Job) -> Decoder:
    """The model of mamba_ssm."""
    import torch  # pyright: ignore[reportMissingImports]

    model = mamba_ssm_model(job.model, torch.bfloat16).eval()

    def decode(prompts: np.ndarray, length: int) -> np.ndarray:
        ids = torch.from_numpy(prompts).cuda().long()
        out = model.generate(ids, max_length=prompts.shape[1] + length, cg=True, top_k=1)
        return out[:, prompts.shape[1] :].cpu().numpy()

    told = versions("torch", "triton", "mamba_ssm", "causal_conv1d")
    return Decoder(decode, torch.cuda.max_memory_allocated, told)


def of_transformers(job: Job) -> Decoder:
    """The model of transformers, on a GPU where there is one."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    content = layout_of(job.model).content(job.model)
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_config(config).to(device, torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def decode(prompts: np.ndarray, length: int) -> np.ndarray:
        ids = torch.from_numpy(prompts).to(device).long()
        mask = torch.ones_like(ids)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=length,
            min_new_tokens=length,
        )
        return out[:, prompts.shape[1] :].cpu().numpy()

    peak = torch.cuda.max_memory_allocated if device == "cuda" else lambda: None
    return Decoder(decode, peak, versions("torch", "transformers"))


def measure(job: Job, wait: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Decodes, and returns a row for each batch; waits before it allocates anything."""
    wait()
    of = {"mamba_ssm": of_mamba_ssm, "transformers": of_transformers}
    decoder = of.get(job.contender, of_jax)(job)
    rng = np.random.default_rng(0)
    rows = []
    for batch in job.batches:
        prompts = rng.integers(0, job.vocab_size, (batch, job.prompt)).astype(np.int32)

        def seconds(length: int, prompts: np.ndarray = prompts) -> float:
            began = time.perf_counter()
            out = decoder.decode(prompts, length)
            took = time.perf_counter() - began
            if out.shape != (len(prompts), length):
                raise RuntimeError(f"{job} gave {out.shape} tokens, not {(len(prompts), length)}")
            return took

        for length in (1 + job.tokens, 1):  # compiles, and captures graphs
            seconds(length)
        first = [seconds(1) for _ in range(job.repeats)]
        whole = [seconds(1 + job.tokens) for _ in range(job.repeats)]
        step = (statistics.median(whole) - statistics.median(first)) / job.tokens
        peak = decoder.peak()
        rows.append(
            {
                "preset": job.preset,
                "batch": batch,
                "by": job.contender,
                "tokens_per_second": round(batch / step),
                "ms_step": round(1e3 * step, 3),
                "ms_low": round(1e3 * (min(whole) - statistics.median(first)) / job.tokens, 3),
                "ms_high": round(1e3 * (max(whole) - statistics.median(first)) / job.tokens, 3),
                "ms_first": round(1e3 * statistics.median(first), 2),
                "peak_gib": peak and round(peak / _GIB, 2),
                "versions": decoder.versions,
            }
        )
    return rows


def measure_scan(preset: str, batch: int, implementation: Any, tokens: int = 4) -> dict[str, Any]:
    """Times the step of the scan in a loop over the preset's layers, whose state is donated."""
    model = PRESETS[preset].model
    sizes: Any = model.sizes
    op, widths = "selective_scan_step", (sizes.d_inner, sizes.d_state)
    if isinstance(sizes, mamba2.Sizes):
        op, widths = "ssd_step", (sizes.heads, sizes.headdim, sizes.d_state, sizes.ngroups)
    case = next(of for of in TABLE if of.op == op)
    shape = case.sizes((batch, *widths))
    make = lambda key: case.arrays(key, shape, dtypes("bfloat16", parameters="float32"))
    first, *others = jax.jit(make)(jax.random.key(0))
    layers = jnp.arange(model.n_layers)

    def run(state: Any, others: Any) -> Any:
        def layer(state: Any, number: Any) -> Any:
            given = {"layer": number, "implementation": implementation, **case.options}
            return getattr(jaxkern, op)(state, *others, **given)[::-1]

        return jax.lax.scan(layer, state, layers)

    held = [jnp.tile(first, (model.n_layers, *[1] * first.ndim))]
    compiled = jax.jit(run, donate_argnums=0).lower(held[0], others).compile()

    def token(*_: Any) -> Any:
        held[0], out = compiled(held[0], others)
        return out

    timed = timing.measure(token, [()], tokens)
    us = 1e3 * timed.median / model.n_layers
    return {
        "preset": preset,
        "op": op,
        "batch": batch,
        "by": "kernel" if implementation == "mosaic" else "plain JAX",
        "us_layer": round(us, 2),
        "gb_s": round(2 * first.nbytes / us * 1e-3),  # the state, read and written
    }


def main(argv: Sequence[str] | None = None) -> int:
    p = program.parser("decode", "decode")
    p.add_argument(
        "--preset",
        action="append",
        help="repeat for more (130m, mamba2-130m, 370m; without a GPU micro)",
    )
    p.add_argument("--batch", action="append", type=int, help="repeat for more (1, 8, 64)")
    p.add_argument(
        "--vs", default=",".join(found_peers(OTHERS)), help="who decodes beside, comma-separated"
    )
    p.add_argument("--vocab", type=int, default=50280, help="tokens that there are")
    p.add_argument("--prompt", type=int, help="tokens of a prompt (128; without a GPU 16)")
    p.add_argument("--tokens", type=int, help="to time, a multiple of 16 (128; without a GPU 16)")
    p.add_argument("--repeats", type=int, default=3, help="times that are taken of each")
    p.add_argument("--limit", type=float, default=400, help="seconds for a preset by a contender")
    p.add_argument("--scan", action="store_true", help="time the scan of a layer alone, too")
    args = p.parse_args(argv)
    program.share_device(2)  # this process decodes nothing, and of the others one at a time
    gpu = timing.on_gpu()
    told = {
        "prompt": args.prompt or (128 if gpu else 16),
        "tokens": args.tokens or (128 if gpu else 16),
        "vocab": args.vocab,
    }
    if told["tokens"] % 16:
        p.error(f"--tokens must be a multiple of 16, got {told['tokens']}")
    clock = program.clock(gpu, "wall-clock time of generating")
    report: dict[str, Any] = (
        program.machine(args.commit) | {"clock": clock} | told | {"failed": [], "rows": []}
    )
    out = args.out
    for preset in args.preset or (["130m", "mamba2-130m", "370m"] if gpu else ["micro"]):
        for name in ("jaxkern", *filter(None, args.vs.split(","))):
            job = Job(
                contender=name,
                preset=preset,
                vocab_size=args.vocab,
                batches=tuple(args.batch or (1, 8, 64)),
                prompt=told["prompt"],
                tokens=told["tokens"],
                repeats=args.repeats,
            )
            for _, rows in attempt([job], args.limit, measure):
                if isinstance(rows, str):
                    report["failed"].append(f"{job}: {rows}")
                    print(report["failed"][-1], flush=True)
                    continue
                report["rows"] += rows
                for row in rows:
                    print(
                        f"{job}, batch {row['batch']}: {row['tokens_per_second']:,} tokens/s, "
                        f"first after {row['ms_first']} ms",
                        flush=True,
                    )
            out = program.write(report, args.out, "decode")  # a run that is stopped keeps its rows
        implementations = ("xla", "mosaic") if gpu else ("xla",)
        for batch, by in itertools.product(args.batch or (1, 8, 64), implementations):
            if args.scan:
                report.setdefault("scans", []).append(row := measure_scan(preset, batch, by))
                print(f"{row['op']}, batch {batch}, {row['by']}: {row['us_layer']} us a layer")
                out = program.write(report, args.out, "decode")
    print(f"wrote {out}")
    return 1 if report["failed"] else 0
