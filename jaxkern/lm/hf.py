"""Checkpoints in the layout of Hugging Face: a folder of config.json and safetensors::

    theirs, layer by layer                     ours, the layers of a kind stacked
    backbone.embeddings.weight  (V, D)         embedding            (V, D)
    backbone.norm_f.weight      (D,)           norm                 (D,)
    lm_head.weight              (V, D)         head                 (D, V)          if untied
    backbone.layers.I.
      norm.weight               (D,)           blocks.norm          (layers, D)
      mixer.in_proj.weight      (K, D)         blocks.in_proj       (layers, D, K)
      …

The tensors of each kind of layer, and the names that Bamba has, stand in
:mod:`jaxkern.lm.hf_layouts`; of a hybrid, `blocks` has a table for each kind. The residual stream
is always float32. The norm inside a Mamba-2 block normalises each of the ``n_groups`` groups of
channels by itself, as mamba_ssm and the newest transformers do; earlier ones normalised all
channels together.

As in transformers a ``model.safetensors`` comes before an index of several files, names may lack
``backbone.``, and a tied embedding may be stored as ``lm_head.weight`` alone. What begins and ends
a text that is generated stands in generation_config.json, or without it in config.json; the special
tokens of a tokenizer.json in tokenizer_config.json and, where that lists no added tokens, in
special_tokens_map.json and added_tokens.json. Files lie in the folder itself, links followed, or in
the blobs of a cache of the hub; what is there and cannot be read is an error.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxkern.lm import checkpoint, sample, untrusted
from jaxkern.lm import tokenizer as tokenizers
from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.lm.data import write_atomically
from jaxkern.lm.hf_layouts import CONFIG, HEAD, HOW_TO_GET, LAYOUTS, Layout, is_hf, layout_of
from jaxkern.lm.model import count_params, initial_params
from jaxkern.lm.stop import say

_STORED = ("F64", "F32", "F16", "BF16")
_WRITTEN = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_GENERATION = "generation_config.json"


def load(folder: Path | str) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a checkpoint.

    Args:
      folder: with config.json and model.safetensors, or several files and their index.

    Returns:
      The model's shape, and the parameters of :class:`jaxkern.lm.model.MambaLM`: a nested dict of
      NumPy arrays, float32.

    Raises:
      RunError: the folder holds no such checkpoint, or one of a model that this one cannot be:
        the message names the key and its value.

    Example:
      >>> from flax import nnx
      >>> from jaxkern.lm import hf
      >>> from jaxkern.lm.step import Options, make_model
      >>> # hf download state-spaces/mamba-130m-hf --local-dir mamba-130m-hf
      >>> config, params = hf.load("mamba-130m-hf")  # doctest: +SKIP
      >>> model = nnx.merge(make_model(config, Options()), params)  # doctest: +SKIP
      >>> logits = model(tokens)  # doctest: +SKIP
    """
    folder = Path(folder)
    content = read_config(folder)
    config, layout = model_config(content), _layout(content)
    stored = _stored(folder, layout)
    head, embedding = stored.get(HEAD), layout.outer[0]
    if config.tie_embeddings and head is not None:
        stored.pop(HEAD)
        if not np.array_equal(_read(folder, *head), _read(folder, *stored.get(embedding, head))):
            what = f"{folder}: {HEAD} differs from the embedding"
            raise RunError(f"{what}, and by tie_word_embeddings of {CONFIG} they are one")
        stored.setdefault(embedding, head)  # one array, stored under its other name
    params = {path: np.empty(shape, np.float32) for path, shape in _shapes(config).items()}
    for name, view in layout.views(config, params):
        if name not in stored:
            raise RunError(f"{folder}: the weights have no {name}")
        tensor = _read(folder, *stored.pop(name))
        if tensor.shape != view.shape:
            what = f"{folder}: {name} has shape {tensor.shape}"
            raise RunError(f"{what}, and by {CONFIG} it is {view.shape}")
        view[...] = tensor
    if stored:
        name = _shown(stored[min(stored)][1])
        raise RunError(f"{folder}: the weights have {name}, and the model here has not")
    return config, traverse_util.unflatten_dict(params)


def _shapes(config: ModelConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    params: Any = traverse_util.flatten_dict(jax.eval_shape(lambda: initial_params(config)))
    return {path: leaf.shape for path, leaf in params.items()}


def save(
    folder: Path | str, config: ModelConfig, params: Any, *, like: Path | str | None = None
) -> None:
    """Write a checkpoint that `load` and transformers read.

    Args:
      folder: is made if it is not there; a checkpoint in it is replaced.
      config: the model's shape.
      params: the parameters of :class:`jaxkern.lm.model.MambaLM`, in the dtypes that are written.
      like: the checkpoint that these parameters began as: what else its config.json says, and its
        tokenizer, are taken over.

    Raises:
      ValueError: the parameters do not fit a model of this shape, transformers has no such model,
        or `like` is `folder`.
    """
    folder, layout = Path(folder), layout_of(config)
    content = layout.content(config)
    if like is not None and folder.exists() and folder.samefile(like):
        raise ValueError(f"like is {like}, the folder that is written; give another folder")
    flat = {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(params).items()}
    found = {path: leaf.shape for path, leaf in flat.items()}
    if differing := {".".join(path) for path, _ in found.items() ^ _shapes(config).items()}:
        raise ValueError(f"params does not fit {config}: {min(differing)}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(view) for name, view in layout.views(config, flat)}
    if config.tie_embeddings and "tie_word_embeddings" in layout.fixed:
        tensors[HEAD] = tensors[layout.outer[0]]
    partial = folder / f"{_WEIGHTS}.partial"
    partial.unlink(missing_ok=True)
    partial.touch()
    usual = partial.stat().st_mode  # by the umask; what safetensors writes is its owner's alone
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(usual)
    os.replace(partial, folder / _WEIGHTS)
    for name in (_INDEX, _GENERATION, *tokenizers.FILES):
        (folder / name).unlink(missing_ok=True)
    before: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if like is not None:
        before = read_config(Path(like))
        for path in Path(like).iterdir():
            known = path.suffix in (".json", ".txt", ".jinja") and path.name not in (CONFIG, _INDEX)
            if known and not path.is_dir() and untrusted.file_in(Path(like), path.name):
                shutil.copyfile(path, folder / path.name)
    before.pop("torch_dtype", None)
    _write(folder / CONFIG, before | content | {"dtype": str(flat["embedding",].dtype)})


def _write(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    write_atomically(path, text + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    config = untrusted.read_json(folder, CONFIG)
    if config is None:
        what = f"holds no checkpoint (no {CONFIG})" if folder.exists() else "is no folder"
        raise RunError(f"{folder} {what}; {HOW_TO_GET}")
    return config


def model_config(config: dict[str, Any]) -> ModelConfig:
    """The shape of the model that config.json describes; RunError if none here can have it."""
    try:
        return _layout(config).shape(config)
    except ValueError as error:  # of values that do not fit one another
        raise RunError(f"{CONFIG}: {error}") from None


def _layout(config: dict[str, Any]) -> Layout:
    """The layout that config.json is of; refuses a model that is of none here."""
    if "hidden_size" not in config and "d_model" in config:
        remedy = "take the one of the same name that ends in -hf, or have transformers convert it"
        raise RunError(f"{CONFIG} is of the layout of mamba_ssm; {remedy}")
    kind = config.get("model_type", "mamba")
    known = {"model_type": tuple(LAYOUTS), "transformers_weights": (_WEIGHTS, None)}
    layout = LAYOUTS.get(kind) if isinstance(kind, str) else None
    for name, right in (known | dict(layout.fixed if layout else {})).items():
        if (value := config.get(name, right[0])) not in right:
            said = " or ".join(repr(each) for each in right if each is not None)
            raise RunError(f"{CONFIG}: {name} is {value!r}, and here it is {said}")
    assert layout is not None
    return layout


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of a checkpoint; ``None`` where it holds no tokenizer.json."""
    path = untrusted.file_in(folder, tokenizers.FILE)
    if path is None:
        return None
    opened, said = tokenizers.open_file(path)
    opened.encode_special_tokens = said.get("split_special_tokens") is True
    begin, ends = tokenizers.generation(folder)
    return tokenizers.Tokenizer(opened, begin, tuple(ends), said, template=True)


def _stored(folder: Path, layout: Layout) -> dict[str, tuple[Any, str]]:
    """The tensors of a checkpoint by their names in a whole model: of each a file and its name.

    An index counts only without the one file of all weights.
    """
    names: Any = [_WEIGHTS]
    if untrusted.file_in(folder, _WEIGHTS) is None:
        index = untrusted.read_json(folder, _INDEX)
        weight_map = {"": _WEIGHTS} if index is None else index.get("weight_map")
        names = weight_map.values() if isinstance(weight_map, dict) else [None]
        if not all(isinstance(name, str) for name in names):
            raise RunError(f"{folder / _INDEX} is no index of weights")
    tensors: dict[str, tuple[Any, str]] = {}
    for name in sorted({*names}):
        path = untrusted.file_in(folder, name)
        if path is None:
            remedy = "download it whole, or write safetensors by save_pretrained of transformers"
            raise RunError(f"{folder} holds no {_shown(name)}; {remedy}")
        try:
            file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path} is damaged: {error}") from None
        for stored in file.keys():  # noqa: SIM118
            # The embedding has had another name, and a model without its head no prefix.
            whole = stored.replace("embedding.", "embeddings.")
            if whole != HEAD:
                whole = whole.removeprefix("backbone.").removeprefix("model.")
                whole = layout.prefix + whole
            if whole in tensors:
                raise RunError(f"{folder}: the weights have {_shown(stored)} twice")
            tensors[whole] = file, stored
    return tensors


def _read(folder: Path, file: Any, name: str) -> np.ndarray:
    """A tensor of a file, float32."""
    dtype = file.get_slice(name).get_dtype()
    if dtype not in _STORED:
        what = f"{folder}: {_shown(name)} is of dtype {dtype}"
        raise RunError(f"{what}, and here weights are of {', '.join(_STORED)}")
    return file.get_tensor(name).astype(np.float32)


def _shown(name: str) -> str:
    """A name of a stranger, on one line."""
    return name if name.isprintable() else repr(name)


def export(
    run: Path, folder: Path, *, step: int | None = None, dtype: str = "fp32"
) -> sample.LanguageModel:
    """Write a checkpoint of a run so that transformers, and ``jaxkern sample --hf``, read it.

    The run's tokenizer goes along, and what else the checkpoint has that the run began with; one of
    Hugging Face that is in the folder is replaced. Returns the model, in the dtypes of the run.
    """
    model = sample.load_run(run, lambda note: say(f"warning: {note}"), step=step)
    config, _ = checkpoint.read(run)
    begun = Path(config.init_hf)
    like = begun if config.init_hf and (begun / CONFIG).exists() else None
    if checkpoint.is_run(folder) or ((folder / CONFIG).exists() and not is_hf(folder)):
        raise RunError(f"--hf {folder} holds something else; name another folder")
    params = jax.tree.map(lambda leaf: leaf.astype(_WRITTEN[dtype]), model.params)
    try:
        save(folder, model.config, params, like=like)
        _write_tokenizer(folder, model.codec, like, config.tokenizer)
    except ValueError as error:
        raise RunError(f"the model of {run} cannot be written to --hf: {error}") from None
    say(f"{folder}: step {model.step} of {run}, {count_params(model.params):,} parameters, {dtype}")
    return model


def _write_tokenizer(folder: Path, tokenizer: Any, like: Path | None, spec: str) -> None:
    """Write the tokenizer of a run, and in every file which of its tokens begin and end a text.

    What a folder says of its tokenizer holds where that is the run's.
    """
    begun = _same(like, tokenizer)
    source = begun or _same(tokenizers.kind_of(spec), tokenizer) or tokenizer
    if not begun:
        for name in (_GENERATION, *tokenizers.FILES):
            (folder / name).unlink(missing_ok=True)
    begin, end = tokenizer.begin, tokenizer.end
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": source.pad}
    for name in (CONFIG, _GENERATION):
        content = untrusted.read_json(folder, name)
        if content is None:
            continue
        kept = {key: v for key, v in content.items() if begun or not key.endswith("_token_id")}
        ends = kept.get("eos_token_id")
        more = isinstance(ends, list) and end in ends  # of a chat, say
        _write(folder / name, kept | ids | ({"eos_token_id": ends} if more else {}))
    if isinstance(tokenizer, tokenizers.Bytes):
        return
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    texts = {key.removesuffix("_id"): tokenizer.tokenizer.id_to_token(ids[key]) for key in ids}
    # A run adds the token that begins a text itself, and leaves out what would add it.
    first = texts["bos_token"]
    added = {"single": [first, "$A"], "pair": [first, "$A", first, "$B"]}
    written = Tokenizer.from_str(tokenizer.stored())
    written.post_processor = TemplateProcessing(**added, special_tokens=[(first, begin)])
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
