"""Writes a run's model as a checkpoint in the layout of Hugging Face: ``jaxkern export``."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.lm import checkpoint, data, hf, loader, untrusted
from jaxkern.lm.config import RunError
from jaxkern.lm.data import tokenizer as tokenizers
from jaxkern.lm.data import write_atomically
from jaxkern.lm.hf_layouts import is_hf
from jaxkern.lm.model import count_params
from jaxkern.lm.stop import say

_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def export(
    run: Path, folder: Path, *, step: int | None = None, dtype: str = "fp32"
) -> loader.LanguageModel:
    """Write a checkpoint of a run so that transformers, and ``jaxkern sample --hf``, read it.

    Args:
      run: the run's folder.
      folder: is made if it is not there; a checkpoint of Hugging Face in it is replaced. What the
        model is goes to config.json and model.safetensors; the run's tokenizer goes along, and what
        else the checkpoint has that the run began with.
      step: which checkpoint of the run; by default the newest that is whole.
      dtype: "fp32" or "bf16", of the weights.

    Returns:
      The model that was written, in the dtypes of the run.

    Raises:
      RunError: with what is wrong and what to do.
    """
    model, notes = loader.load_run(run, step=step)
    for note in notes:
        say(f"warning: {note}")
    stored = checkpoint.read_config(run)
    begun = stored["flags"].get("init_hf")
    like = Path(begun) if begun and (Path(begun) / hf.CONFIG).exists() else None
    _check_target(folder, like)
    params = jax.tree.map(lambda leaf: leaf.astype(_DTYPES[dtype]), model.params)
    try:
        with checkpoint.written(folder / "model.safetensors"):
            hf.save(folder, model.config, params, like=like)
    except ValueError as error:
        raise RunError(f"the model of {run} cannot be written to --hf: {error}") from None
    spec = stored["flags"].get("tokenizer", "bytes")
    tokenizer = data.open_tokenizer(spec, run, stored["data"])
    _write_tokenizer(folder, tokenizer, like, spec)
    say(f"{folder}: step {model.step} of {run}, {count_params(model.params):,} parameters, {dtype}")
    return model


def _write_tokenizer(folder: Path, tokenizer: Any, like: Path | None, spec: str) -> None:
    """Write the tokenizer of a run, and in every file which of its tokens begin and end a text.

    What a folder says of its tokenizer holds where that is the run's; of another's tokens nothing
    stays.
    """
    of_bytes = isinstance(tokenizer, tokenizers.Bytes)
    given = None if of_bytes else tokenizers.kind_of(spec)
    begun = _same(like, tokenizer)
    source = begun or _same(given, tokenizer) or tokenizer
    if not begun:
        for name in (hf.GENERATION, *tokenizers.FILES):
            (folder / name).unlink(missing_ok=True)
    ids = {"bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.end}
    ids["pad_token_id"] = source.pad
    for name in (hf.CONFIG, hf.GENERATION):
        content = untrusted.read_json(folder, name, "configuration")
        if content is not None and not begun:
            content = {key: v for key, v in content.items() if not key.endswith("_token_id")}
        if content is not None:
            ends = content.get("eos_token_id")
            more = isinstance(ends, list) and tokenizer.end in ends  # of a chat, say
            _write(folder / name, content | ids | ({"eos_token_id": ends} if more else {}))
    if of_bytes:
        return
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    texts = {key.removesuffix("_id"): tokenizer.tokenizer.id_to_token(ids[key]) for key in ids}
    # A run adds the token that begins a text itself, and leaves out what would add it.
    first = texts["bos_token"]
    begun = {"single": [first, "$A"], "pair": [first, "$A", first, "$B"]}
    written = Tokenizer.from_str(tokenizer.stored())
    written.post_processor = TemplateProcessing(**begun, special_tokens=[(first, tokenizer.begin)])
    _write(folder / tokenizers.FILE, json.loads(written.to_str()))
    for name in ("special_tokens_map.json", "added_tokens.json"):  # `said` has what they say
        (folder / name).unlink(missing_ok=True)
    said = {name: v for name, v in source.said.items() if name != "added_tokens_decoder"}
    said |= {name: tokenizers.text_of(said, name) for name in tokenizers.NAMED if said.get(name)}
    of_class = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": False}
    of_class |= {"add_bos_token": True, "add_eos_token": False}
    _write(folder / "tokenizer_config.json", said | of_class | texts)


def _same(path: Any, tokenizer: Any) -> Any:
    """The tokenizer of a file or folder if it is this one, else ``None``."""
    if not isinstance(path, (str, Path)):
        return None
    try:
        found = tokenizers.load(path)
    except RunError:
        return None
    return found if found.stored() == tokenizer.stored() else None


def _write(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    write_atomically(path, text + "\n")


def _check_target(folder: Path, like: Path | None) -> None:
    """Refuse a folder where something else would be lost."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"--hf {folder} is a file; name a folder")
    if like is not None and folder.exists() and folder.samefile(like):
        raise RunError(f"--hf {folder} is the checkpoint that the run began with; name another")
    if checkpoint.is_run(folder):
        raise RunError(f"--hf {folder} holds a run; name another folder")
    if (folder / hf.CONFIG).exists() and not is_hf(folder):
        raise RunError(
            f"--hf {folder} holds a {hf.CONFIG} that is not of Hugging Face's layout; name another "
            "folder"
        )
