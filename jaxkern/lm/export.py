"""Writes a run's model as a checkpoint in the layout of Hugging Face: ``jaxkern export``."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.lm import checkpoint, data, hf, loader
from jaxkern.lm.config import RunError
from jaxkern.lm.data import write_atomically
from jaxkern.lm.model import count_params
from jaxkern.lm.stop import say

_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
_TOKENIZER = "tokenizer.json"


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
    if (spec := stored["flags"].get("tokenizer", "bytes")) != "bytes":
        _write_tokenizer(folder, run, data.open_tokenizer(spec, run, stored["data"]))
    else:  # that of the checkpoint it began with does not make its bytes
        (folder / _TOKENIZER).unlink(missing_ok=True)
    say(f"{folder}: step {model.step} of {run}, {count_params(model.params):,} parameters, {dtype}")
    return model


def _write_tokenizer(folder: Path, run: Path, tokenizer: Any) -> None:
    """Write the tokenizer of a run, and which of its tokens begin and end a text."""
    ends = {"bos_token": tokenizer.begin, "eos_token": tokenizer.end, "pad_token": tokenizer.end}
    _update(folder / hf.CONFIG, {f"{name}_id": token for name, token in ends.items()})
    texts = {name: tokenizer.tokenizer.id_to_token(token) for name, token in ends.items()}
    shutil.copy(run / _TOKENIZER, folder)
    _update(
        folder / _TOKENIZER, {"post_processor": _beginning(texts["bos_token"], tokenizer.begin)}
    )
    _update(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
        }
        | texts,
    )


def _beginning(text: str, token: int) -> dict[str, Any]:
    """The post-processor of a tokenizer.json that puts a token before a text.

    A run adds the token itself, to documents and to prompts, and leaves this processor out.
    """
    special = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, special, second],
        "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}},
    }


def _update(path: Path, values: dict[str, Any]) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    text = json.dumps(content | values, indent=2, sort_keys=True, ensure_ascii=False)
    write_atomically(path, text + "\n")


def _check_target(folder: Path, like: Path | None) -> None:
    """Refuse a folder where something else would be lost."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"--hf {folder} is a file; name a folder")
    if like is not None and folder.exists() and folder.samefile(like):
        raise RunError(f"--hf {folder} is the checkpoint that the run began with; name another")
    if (folder / hf.CONFIG).exists() and not loader.is_hf(folder):
        raise RunError(
            f"--hf {folder} holds a {hf.CONFIG} that is not of Hugging Face's layout; name another "
            "folder"
        )
