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
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from bench import program, timing
from bench.program import Row
from bench.train import GIB, found_peers, mamba_ssm_model, peak_gib, versions
from jaxkern.lm import sample
from jaxkern.lm.config import PRESETS, ModelConfig
from jaxkern.lm.hf_layouts import layout_of
from jaxkern.lm.model import Options, initial_params
from jaxkern.lm.step import make_model
from jaxkern.precision import Policy

OTHERS = ("jaxkern-bf16", "mamba_ssm", "transformers")
_PRECISIONS = {"jaxkern": "fp32", "jaxkern-bf16": "params=bfloat16,compute=bfloat16,output=float32"}


@dataclasses.dataclass(frozen=True)
class Job:
    """A model to decode, and the library that does it.

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


Decode = Callable[[np.ndarray, int], np.ndarray]
"""Prompts (B, prompt) and how many tokens -> these, (B, tokens), on the host."""


def of_jax(job: Job) -> tuple[Decode, str]:
    """The library's own model, as ``jaxkern sample`` runs it or in bf16, and its versions."""
    policy = Policy.parse(_PRECISIONS[job.contender])
    graphdef = make_model(job.model, Options(policy))
    params = jax.jit(lambda: policy.cast_to_params(initial_params(job.model)))()

    def decode(prompts: np.ndarray, length: int) -> np.ndarray:
        chunks = sample.generate_tokens(
            graphdef, params, list(prompts), length=length, temperature=0
        )
        return np.concatenate(list(chunks), axis=1)

    return decode, versions("jax")


def of_torch(job: Job) -> tuple[Decode, str]:
    """The model of mamba_ssm, or that of transformers, on a GPU where there is one."""
    import torch  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
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

    return decode, told


def _peak(job: Job) -> float | None:
    if job.contender in _PRECISIONS:
        return peak_gib(jax.local_devices()[0])
    import torch  # pyright: ignore[reportMissingImports]

    cuda = torch.cuda.is_available()
    return round(torch.cuda.max_memory_allocated() / GIB, 2) if cuda else None


def measure(job: Job) -> list[Row]:
    """Decodes, and returns a row for each batch."""
    of = {"mamba_ssm": of_torch, "transformers": of_torch}
    decode, told = of.get(job.contender, of_jax)(job)
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
        whole = [seconds(1 + job.tokens) for _ in range(job.repeats)]
        ms = lambda whole, first=first: round(1e3 * (whole - first) / job.tokens, 3)
        step = (statistics.median(whole) - first) / job.tokens
        rows.append(
            {
                "preset": job.preset,
                "batch": batch,
                "by": job.contender,
                "tokens_per_second": round(batch / step),
                "ms_step": ms(statistics.median(whole)),
                "ms_low": ms(min(whole)),
                "ms_high": ms(max(whole)),
                "ms_first": round(1e3 * first, 2),
                "peak_gib": _peak(job),
                "versions": told,
            }
        )
    return rows


def _told(job: Job, row: Row) -> str:
    rate = f"{row['tokens_per_second']:,} tokens/s"
    return f"{job}, batch {row['batch']}: {rate}, first after {row['ms_first']} ms"


def main(argv: Sequence[str] | None = None) -> int:
    args = program.parsed(
        "decode",
        argv,
        "decode",
        preset=([str], "the model's shape (130m, mamba2-130m, 370m; without a GPU micro)"),
        batch=([int], "prompts at once (1, 8, 64)"),
        vs=(",".join(found_peers(OTHERS)), "who decodes beside, comma-separated"),
        vocab=(50280, "tokens that there are"),
        prompt=(int, "tokens of a prompt (128; without a GPU 16)"),
        tokens=(int, "to time, a multiple of 16 (128; without a GPU 16)"),
        repeats=(3, "times that are taken of each"),
        limit=(400.0, "seconds for a preset by a contender"),
    )
    program.share_device(2)  # this process decodes nothing, and of the others one at a time
    gpu = timing.on_gpu()
    prompt, tokens = (given or (128 if gpu else 16) for given in (args.prompt, args.tokens))
    if tokens % 16:
        args.error(f"--tokens must be a multiple of 16, got {tokens}")
    batches = tuple(args.batch or (1, 8, 64))
    jobs = [
        Job(name, preset, args.vocab, batches, prompt, tokens, args.repeats)
        for preset in args.preset or (["130m", "mamba2-130m", "370m"] if gpu else ["micro"])
        for name in ("jaxkern", *filter(None, args.vs.split(",")))
    ]
    about = program.clock(gpu, "wall-clock time of generating")
    about |= {"prompt": prompt, "tokens": tokens, "vocab": args.vocab}
    how = {"apart": True, "most": 1, "limit": args.limit}
    return program.measured(args, "decode", measure, jobs, about, _told, **how)
