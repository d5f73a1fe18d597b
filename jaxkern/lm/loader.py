"""Trained models in Python: a run's newest checkpoint, or one of Hugging Face's layout."""

import dataclasses
import functools
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.lm import checkpoint, data
from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.lm.data import tokenizer as tokenizers
from jaxkern.lm.hf_layouts import how_to_get, is_hf

try:
    from flax import nnx

    from jaxkern.lm import sample
    from jaxkern.lm.model import MambaLM, Options, initial_params
    from jaxkern.lm.step import make_model
except ImportError as error:
    raise ImportError(
        "jaxkern.lm.load needs flax; run: pip install flax orbax-checkpoint"
    ) from error

from jaxkern.precision import Policy


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A trained language model, to be called and sampled from.

    Attributes:
      config: its shape.
      params: its parameters, a nested dict of arrays; :meth:`module` says what they are of.
      step: the optimizer steps that it has been trained for; ``None`` if that is not known.
      codec: how text becomes tokens and tokens text; ``None`` if the checkpoint does not say.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkern.lm.config import PRESETS
      >>> from jaxkern.lm.loader import LanguageModel, initial
      >>> model = initial(PRESETS["micro"].model)
      >>> model(jnp.array([[100, 101, 102]])).shape  # (B, L) -> (B, L, vocab_size)
      (1, 3, 256)
      >>> [len(text) for text in model.generate(["def ", "a longer prompt"], length=8, top_k=1)]
      [8, 8]
    """

    config: ModelConfig
    params: Any = dataclasses.field(repr=False)
    step: int | None = None
    codec: Any = dataclasses.field(default=sample.Bytes(), repr=False)

    def module(self, options: Options | None = None) -> MambaLM:
        """The flax.nnx module with these parameters, to be trained further or changed.

        Args:
          options: how it runs: dtypes, implementation, recomputation.
        """
        return nnx.merge(make_model(self.config, options or Options()), self.params)

    def __call__(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Tokens (B, L) -> logits (B, L, vocab_size), compiled.

        The options are `segment_ids` and `mask` of :class:`jaxkern.lm.model.MambaLM`.
        """
        return _logits(make_model(self.config, Options()), self.params, tokens, **options)

    def generate(
        self,
        prompts: str | Sequence[Any],
        *,
        length: int = 400,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        timing: sample.Timing | None = None,
    ) -> Any:
        """Continue texts, or tokens.

        Args:
          prompts: a text or a sequence of tokens, or several of any lengths; each is continued as
            it is alone. A text begins with the token that begins one, tokens are taken as given.
          length: tokens of a continuation at most.
          temperature: divides the logits; 0 takes the likeliest token.
          top_k: draw from the k likeliest tokens; 0 for all.
          top_p: draw from the likeliest tokens that together have this probability.
          seed: of the draws; prompt i draws by ``seed + i``.
          stop: texts; the continuation of a text ends before the first that it has whole.
          timing: is told of the tokens that are decoded.

        Returns:
          What follows the prompt, or a list of what follows each: after a text a text, after tokens
          a list of tokens.

        Raises:
          TypeError, ValueError: a prompt is neither, or an option has a value that it cannot have.
          RunError: the checkpoint does not say what its tokens are, or has logits that are not
            numbers.
        """
        several, alone = _several(prompts)
        if not several:
            return []
        found: list[Any] = ["" if isinstance(prompt, (str, bytes)) else [] for prompt in several]
        options = {"length": length, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        options |= {"seed": seed, "stop": stop, "timing": timing}
        for pieces in self._continuations(several, **options):
            found = [before + piece for before, piece in zip(found, pieces, strict=True)]
        return found[0] if alone else found

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Any]:
        """What :meth:`generate` returns for one prompt, in pieces, as it is decoded."""
        several, alone = _several(prompt)
        if not alone:
            raise TypeError(f"prompt must be one text or one sequence of tokens, got {prompt!r}")
        return (piece for (piece,) in self._continuations(several, **options))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the one that begins it."""
        return self.known_codec().encode(text)

    def decode(self, tokens: Sequence[int] | jax.Array) -> str:
        """The text of tokens, (L,) integers, without those that begin and end it."""
        return self.known_codec().decode([int(token) for token in tokens])

    def _continuations(self, prompts: list[Any], **options: Any) -> Iterator[list[Any]]:
        texts = any(isinstance(prompt, (str, bytes)) for prompt in prompts)
        codec = self.known_codec() if texts else self.codec
        graphdef = sample.decoder(self.config)
        return sample.continuations(graphdef, self.params, codec, prompts, **options)

    def known_codec(self) -> Any:
        """The codec; raises RunError if the checkpoint does not say what its tokens are."""
        if self.codec is None:
            raise RunError(
                "the checkpoint holds no tokenizer.json, which says what its "
                f"{self.config.vocab_size} tokens are"
            )
        return self.codec


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens, **options):
    return nnx.merge(graphdef, params)(tokens, **options)


def _several(prompts: Any) -> tuple[list[Any], bool]:
    """Prompts, each a text or an array of tokens, and whether one was given by itself."""
    if isinstance(prompts, (str, bytes)):
        return [prompts], True
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a text or token ids, or several, got {prompts!r}")
    several, of_text = list(prompts), (str, bytes)
    if several and all(np.ndim(each) == 0 and not isinstance(each, of_text) for each in several):
        return [np.asarray(prompts)], True
    for i, prompt in enumerate(several):
        if not isinstance(prompt, of_text) and np.ndim(prompt) != 1:
            raise TypeError(f"prompts[{i}] must be a text or token ids, got {prompt!r}")
    return several, False


def write(model: LanguageModel, prompts: Sequence[str], **options: Any) -> None:
    """Write texts to stdout; with one prompt as its text is decoded.

    Args:
      model: that continues the prompts.
      prompts: what the texts begin with.
      **options: of :meth:`LanguageModel.generate`.
    """
    if len(prompts) == 1:
        graphdef, codec = sample.decoder(model.config), model.known_codec()
        sample.stream(graphdef, model.params, prompts[0], codec=codec, **options)
        print(flush=True)
        return
    for row, text in enumerate(model.generate(prompts, **options)):
        sample.show(f"--- {row + 1}\n{prompts[row]}{text}\n")


def initial(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A model of a given shape before any training."""
    return LanguageModel(config, jax.jit(lambda: initial_params(config, seed))(), 0)


def load(folder: Path | str, *, step: int | None = None) -> LanguageModel:
    """Load a trained language model; see :func:`jaxkern.lm.load`."""
    folder = Path(folder)
    if not folder.exists():
        raise RunError(f"there is no folder {folder}; {how_to_get(folder)}")
    if is_hf(folder):
        if step is not None:
            raise RunError(f"{folder} is no run, so that it has no step {step}; leave step out")
        return load_hf(folder)
    model, notes = load_run(folder, step=step)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return model


def load_run(run: Path, *, step: int | None = None) -> tuple[LanguageModel, list[str]]:
    """Load a run's newest checkpoint that is whole, or that of a step.

    Args:
      run: the run's folder.
      step: which checkpoint; by default the newest.

    Returns:
      The model, and what to tell of damaged checkpoints that are newer.

    Raises:
      RunError: with what is wrong and what to do.
    """
    run = Path(run)
    if run.parent.name == "checkpoints" and run.name.isdigit():
        raise RunError(f"{run} is one checkpoint of a run; give the run's folder, {run.parents[1]}")
    if is_hf(run):
        raise RunError(
            f"{run} is a checkpoint in the layout of Hugging Face, and no run; load it with "
            "jaxkern sample --hf, or jaxkern.lm.load"
        )
    stored = checkpoint.read_config(run)
    try:
        config = ModelConfig.from_stored(stored["model"])
        policy = Policy.parse(stored["precision"])
    except (KeyError, TypeError, ValueError) as error:
        version = (stored.get("versions") or {}).get("jaxkern", "another version")
        raise RunError(
            f"{run} was written by jaxkern {version}, and this one cannot read it ({error}); "
            "install that one, or train again"
        ) from None
    like = jax.eval_shape(lambda: policy.cast_to_params(initial_params(config)))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    found = checkpoint.restore(run, {"params": checkpoint.abstract(like, device)}, step)
    notes = [f"{what}; that of step {found.step} is loaded" for what in found.damaged]
    spec = stored["flags"].get("tokenizer", "bytes")
    check_has_tokenizer(run, spec, stored["data"])
    codec = sample.codec_of(data.open_tokenizer(spec, run, stored["data"]))
    return LanguageModel(config, found.state["params"], found.step, codec), notes


def check_has_tokenizer(run: Path, spec: str, info: dict[str, Any]) -> None:
    """Refuse a run that has lost its tokenizer; `info` is of its tokens, which have a copy."""
    if spec == "bytes" or (run / "tokenizer.json").is_file():
        return
    copy = run / "corpus" / str(info.get("folder")) / "tokenizer.json"
    whence = "from a backup, its --data-cache, or a folder that jaxkern export wrote"
    if copy.is_file():
        whence = f"with: cp {shlex.quote(str(copy))} {shlex.quote(str(run))}"
    raise RunError(
        f"{run} has lost its tokenizer.json, by which its model reads and writes text; put it back "
        + whence
    )


def load_hf(folder: Path | str) -> LanguageModel:
    """Load a checkpoint in the layout of Hugging Face; see :func:`jaxkern.lm.hf.load`.

    Without a tokenizer.json a model of 256 tokens is one of bytes.
    """
    from jaxkern.lm import hf

    config, params = hf.load(folder)
    tokenizer = hf.load_tokenizer(Path(folder))
    codec: Any = sample.Bytes() if config.vocab_size == 256 else None
    if tokenizer is not None:
        begin, ends = tokenizers.generation(Path(folder))
        codec = sample.Tokens(tokenizer, config.vocab_size, first=begin, ends=frozenset(ends))
    return LanguageModel(config, jax.tree.map(jnp.asarray, params), None, codec)
