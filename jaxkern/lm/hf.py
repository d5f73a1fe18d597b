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
:mod:`jaxkern.lm.hf_layouts`; of a hybrid, `blocks` has a table for each kind. What config.json says
of initial values (``initializer_range`` and the like) and of how transformers runs the model does
not matter here; the residual stream is always float32. The norm inside a Mamba-2 block normalises
each of the ``n_groups`` groups of channels by itself, as mamba_ssm and the newest transformers do;
earlier ones normalised all channels together.

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
import numpy as np

from jaxkern.lm import untrusted
from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.lm.data import tokenizer, write_atomically
from jaxkern.lm.hf_layouts import CONFIG, LAYOUTS, Layout, Values, how_to_get, layout_of
from jaxkern.lm.model import initial_params

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file
except ImportError as error:
    raise ImportError(
        "jaxkern.lm.hf needs safetensors; run: pip install safetensors tokenizers"
    ) from error

_HEAD = "lm_head.weight"
_DTYPES = ("F64", "F32", "F16", "BF16")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"


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
    embedding, norm = layout.outer
    tensors = _Tensors(folder, layout)
    if config.tie_embeddings and embedding not in tensors and _HEAD in tensors:
        tensors.rename(_HEAD, embedding)  # one array, stored under its other name
    params: dict[str, Any] = {"embedding": tensors.take(embedding), "norm": tensors.take(norm)}
    if not config.tie_embeddings:
        params["head"] = tensors.take(_HEAD).T
    elif _HEAD in tensors and not np.array_equal(tensors.take(_HEAD), params["embedding"]):
        raise RunError(
            f"{folder}: {_HEAD} differs from the embedding, and by {CONFIG} they are one; where "
            f'the model has both, {CONFIG} says "tie_word_embeddings": false'
        )
    expected = _shapes(config)
    stacks: dict[str, Any] = {}
    for kind, names in _stacks(config, expected).items():
        layers = [i for i, each in enumerate(config.kinds) if each == kind]
        stacks[kind] = {}
        for name in names:
            stored = [layout.tensor(config, i, name) for i in layers]
            try:
                stacks[kind][name] = np.stack([t.here(tensors.take(t.name)) for t in stored])
            except ValueError as error:
                theirs = stored[0].name.split(".", 3)[-1]
                raise RunError(
                    f"{folder}: the layers' {theirs} are of wrong shapes: {error}"
                ) from None
    params["blocks"] = stacks if config.hybrid else stacks[config.kinds[0]]
    tensors.check_all_taken()
    if difference := _difference(params, expected):
        raise RunError(f"{folder}: the weights have shapes {difference}")
    return config, params


def _shapes(config: ModelConfig) -> dict[str, Any]:
    return jax.eval_shape(lambda: initial_params(config))


def _stacks(config: ModelConfig, params: Any) -> dict[str, dict[str, Any]]:
    """The stacked parameters of the layers of each kind."""
    return params["blocks"] if config.hybrid else {config.kinds[0]: params["blocks"]}


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
      ValueError: the parameters are not those of a model of this shape, transformers has no model
        of this shape, or `like` is `folder`.
    """
    folder, layout = Path(folder), layout_of(config)
    of_layout = layout.content(config)
    if like is not None and folder.exists() and folder.samefile(like):
        raise ValueError(f"like is {like}, the folder that is written; give another folder")
    if difference := _difference(params, _shapes(config)):
        raise ValueError(f"params has shapes {difference}, for {config}")
    folder.mkdir(parents=True, exist_ok=True)
    embedding, norm = layout.outer
    tensors = {embedding: np.asarray(params["embedding"]), norm: np.asarray(params["norm"])}
    if not config.tie_embeddings:
        tensors[_HEAD] = np.transpose(params["head"])
    elif layout.copied_head:
        tensors[_HEAD] = tensors[embedding]
    for kind, stack in _stacks(config, params).items():
        layers = [i for i, each in enumerate(config.kinds) if each == kind]
        for name, stacked in stack.items():
            for i, leaf in zip(layers, np.asarray(stacked), strict=True):
                tensor = layout.tensor(config, i, name)
                tensors[tensor.name] = tensor.back(leaf)
    partial = folder / f"{_WEIGHTS}.partial"
    partial.unlink(missing_ok=True)
    partial.touch()
    usual = partial.stat().st_mode  # by the umask; what safetensors writes is its owner's alone
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
        partial,
        metadata={"format": "pt"},
    )
    partial.chmod(usual)
    os.replace(partial, folder / _WEIGHTS)
    for name in (_INDEX, GENERATION, *tokenizer.FILES):
        (folder / name).unlink(missing_ok=True)
    written = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if like is not None:
        written = read_config(Path(like))
        for path in Path(like).iterdir():
            known = path.suffix in (".json", ".txt", ".jinja") and path.name not in (CONFIG, _INDEX)
            if known and not path.is_dir() and untrusted.file_in(Path(like), path.name):
                shutil.copyfile(path, folder / path.name)
    written |= of_layout | {"dtype": str(tensors[embedding].dtype)}
    written.pop("torch_dtype", None)
    write_atomically(folder / CONFIG, json.dumps(written, indent=2, sort_keys=True) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json of a checkpoint."""
    config = untrusted.read_json(folder, CONFIG, "configuration of a model")
    if config is None and not folder.exists():
        raise RunError(f"there is no folder {folder}; {how_to_get(folder)}")
    if config is None:
        raise RunError(
            f"{folder} holds no checkpoint (no {CONFIG}); give a folder of {CONFIG} and "
            f"{_WEIGHTS}, such as hf download state-spaces/mamba-130m-hf --local-dir mamba-130m-hf "
            "writes"
        )
    return config


def model_config(config: dict[str, Any]) -> ModelConfig:
    """The shape of the model that config.json describes.

    Raises:
      RunError: it is not one that the model here can be.
    """
    try:
        return _layout(config).shape(Values(config))
    except ValueError as error:  # of values that do not fit one another
        raise RunError(f"{CONFIG}: {error}") from None


def _layout(config: dict[str, Any]) -> Layout:
    """The layout that config.json is of; refuses a model that is of none here."""
    if "format" in config and "flags" in config:
        raise RunError(
            f"{CONFIG} is that of a run of jaxkern train; load it with jaxkern sample --run, or "
            "jaxkern.lm.load"
        )
    if "hidden_size" not in config and "d_model" in config:
        ssm = config.get("ssm_cfg")
        kind = "mamba2" if isinstance(ssm, dict) and ssm.get("layer") == "Mamba2" else "mamba"
        raise RunError(
            f"{CONFIG} says d_model and no hidden_size: the checkpoint is in the layout of "
            "mamba_ssm; take the one of the same name that ends in -hf, or convert it with the "
            f"script convert_{kind}_ssm_checkpoint_to_pytorch.py of transformers"
        )
    kind = config.get("model_type", "mamba")
    if not isinstance(kind, str) or kind not in LAYOUTS:
        *others, last = map(repr, LAYOUTS)
        known = f"{', '.join(others)} or {last}"
        raise RunError(f"{CONFIG}: model_type is {kind!r}, and here it is {known}")
    for name, known in LAYOUTS[kind].fixed.items():
        if config.get(name, known[0]) not in known:
            raise RunError(f"{CONFIG}: {name} is {config[name]!r}, and here it is {known[0]!r}")
    if (weights := config.get("transformers_weights") or _WEIGHTS) != _WEIGHTS:
        raise RunError(
            f"{CONFIG}: transformers_weights is {weights!r}, and here it is {_WEIGHTS!r}"
        )
    if config.get("quantization_config") is not None:
        raise RunError(
            f"{CONFIG}: quantization_config is {config['quantization_config']!r}, and weights "
            "here are bfloat16, float16 or float32; take the model that was quantized"
        )
    return LAYOUTS[kind]


def load_tokenizer(folder: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a checkpoint; ``None`` where it holds no tokenizer.json."""
    path = untrusted.file_in(folder, tokenizer.FILE)
    if path is None:
        return None
    opened, said = tokenizer.open_file(path)
    opened.encode_special_tokens = said.get("split_special_tokens") is True
    return opened


def _in_safetensors(folder: Path) -> str:
    """What to do about a folder without weights that can be read."""
    others = sorted(path.name for path in folder.glob("*.bin"))
    if not others:
        return "download it whole, or give another folder"
    return (
        f"{others[0]} is not read; write safetensors with transformers: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
    )


class _Tensors:
    """The arrays of a checkpoint, read one at a time; their names are those of a whole model."""

    def __init__(self, folder: Path, layout: Layout):
        self._folder = folder
        self._files: dict[str, Any] = {}
        for name in self._names():
            path = untrusted.file_in(folder, name)
            if path is None:
                raise RunError(f"{folder} holds no {_shown(name)}; {_in_safetensors(folder)}")
            try:
                file = safe_open(path, framework="numpy")
                _check_header(path)
            except (OSError, SafetensorError) as error:
                raise RunError(f"{path} is damaged: {error}") from None
            for stored in file.keys():  # noqa: SIM118
                # The embedding has had another name, and a model without its head no prefix.
                whole = stored.replace("embedding.", "embeddings.")
                if whole != _HEAD:
                    bare = whole.removeprefix("backbone.").removeprefix("model.")
                    whole = layout.prefix + bare
                if whole in self._files:
                    raise RunError(f"{folder}: the weights have {_shown(stored)} twice")
                self._files[whole] = file, stored
        self._left = set(self._files)

    def _names(self) -> list[str]:
        """The files: one, and only without it those of an index."""
        if untrusted.file_in(self._folder, _WEIGHTS) is not None:
            return [_WEIGHTS]
        index = untrusted.read_json(self._folder, _INDEX, "index of weights")
        if index is None:
            return [_WEIGHTS]
        files = index.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise RunError(f"{self._folder / _INDEX} is no index of weights")
        return sorted({*files.values()})

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def rename(self, old: str, new: str) -> None:
        self._files[new] = self._files.pop(old)
        self._left = set(self._files)

    def take(self, name: str) -> np.ndarray:
        if name not in self._files:
            raise RunError(f"{self._folder}: the weights have no {name}")
        self._left.discard(name)
        file, stored = self._files[name]
        dtype = file.get_slice(stored).get_dtype()
        if dtype not in _DTYPES:
            raise RunError(
                f"{self._folder}: {name} is of dtype {dtype}, and here weights are of "
                f"{', '.join(_DTYPES)}"
            )
        return file.get_tensor(stored).astype(np.float32)

    def check_all_taken(self) -> None:
        if self._left:
            stored = _shown(self._files[min(self._left)][1])
            raise RunError(f"{self._folder}: the weights have {stored}, and the model here has not")


def _check_header(path: Path) -> None:
    """Refuse a file of safetensors that has a tensor twice: its reader takes the last."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        untrusted.parse(file.read(size).decode(), path, "file of safetensors")


def _shown(name: str) -> str:
    """A name of a stranger, on one line."""
    return name if name.isprintable() else repr(name)


def _difference(params: Any, expected: Any) -> str:
    """Says which parameters have other shapes than those of a model; "" if none."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree.leaves_with_path(tree)
        return {".".join(key.key for key in path): np.shape(leaf) for path, leaf in leaves}

    found, wanted = shapes(params), shapes(expected)
    names = [name for name in found | wanted if found.get(name) != wanted.get(name)]
    if not names:
        return ""
    told = lambda of: {name: of[name] for name in names if name in of}
    return f"{told(found)}, and by the model's configuration they are {told(wanted)}"
