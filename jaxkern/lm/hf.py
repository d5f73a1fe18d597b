"""Mamba checkpoints in the layout of Hugging Face: a folder of config.json and safetensors::

    theirs, layer by layer                     ours, all layers stacked
    backbone.embeddings.weight  (V, D)         embedding            (V, D)
    backbone.norm_f.weight      (D,)           norm                 (D,)
    backbone.layers.I.
      norm.weight               (D,)           blocks.norm          (layers, D)
      mixer.in_proj.weight      (2 E, D)       blocks.in_proj       (layers, D, 2 E)
      mixer.conv1d.weight       (E, 1, W)      blocks.conv_weight   (layers, E, W)
      mixer.conv1d.bias         (E,)           blocks.conv_bias     (layers, E)
      mixer.x_proj.weight       (R + 2 N, E)   blocks.x_proj        (layers, E, R + 2 N)
      mixer.dt_proj.weight      (E, R)         blocks.dt_proj       (layers, R, E)
      mixer.dt_proj.bias        (E,)           blocks.dt_bias       (layers, E)
      mixer.A_log, mixer.D                     blocks.A_log, blocks.D
      mixer.out_proj.weight     (D, E)         blocks.out_proj      (layers, E, D)

      mixer.in_proj.bias        (2 E,)         blocks.in_bias       (layers, 2 E)   use_bias
      mixer.out_proj.bias       (D,)           blocks.out_bias      (layers, D)     use_bias
    lm_head.weight              (V, D)         head                 (D, V)          untied

The last three are there where config.json says ``use_bias`` and ``tie_word_embeddings: false``; a
tied output layer is the embedding, transposed. The checkpoints ``state-spaces/mamba-*-hf`` are of
this layout, and so is what ``transformers.MambaForCausalLM.save_pretrained`` writes. What
config.json says of initial values (``initializer_range``, ``time_step_min`` and the like) and of
how transformers runs the model does not matter here; the residual stream is always float32.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.lm.data import write_atomically
from jaxkern.lm.loader import how_to_get
from jaxkern.lm.model import initial_params

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file
except ImportError as error:
    raise ImportError('jaxkern.lm.hf needs safetensors; run: pip install "jaxkern[hf]"') from error

_MATRIX = (np.transpose, np.transpose)
_FILTER = (lambda theirs: theirs[:, 0], lambda ours: ours[:, None])
_SAME = (lambda theirs: theirs, lambda ours: ours)

# Ours: theirs, and how the one becomes the other and back.
_LAYER: dict[str, tuple[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "norm": ("norm.weight", _SAME),
    "in_proj": ("mixer.in_proj.weight", _MATRIX),
    "conv_weight": ("mixer.conv1d.weight", _FILTER),
    "conv_bias": ("mixer.conv1d.bias", _SAME),
    "x_proj": ("mixer.x_proj.weight", _MATRIX),
    "dt_proj": ("mixer.dt_proj.weight", _MATRIX),
    "dt_bias": ("mixer.dt_proj.bias", _SAME),
    "A_log": ("mixer.A_log", _SAME),
    "D": ("mixer.D", _SAME),
    "out_proj": ("mixer.out_proj.weight", _MATRIX),
    "in_bias": ("mixer.in_proj.bias", _SAME),
    "out_bias": ("mixer.out_proj.bias", _SAME),
}
_TOP = {"embedding": "backbone.embeddings.weight", "norm": "backbone.norm_f.weight"}
_HEAD = "lm_head.weight"

# What config.json may say otherwise, and the model here cannot be.
_FIXED = {"model_type": ("mamba",), "hidden_act": ("silu", "swish"), "rms_norm": (True,)}
# Fields of ModelConfig: what config.json calls them, and what they are if it does not say.
_SIZES = {
    "d_model": ("hidden_size", None),
    "n_layers": ("num_hidden_layers", None),
    "d_state": ("state_size", 16),
    "expand": ("expand", 2),
    "d_conv": ("conv_kernel", 4),
    "vocab_size": ("vocab_size", None),
}
_FLAGS = {
    "use_bias": ("use_bias", False),
    "use_conv_bias": ("use_conv_bias", True),
    "tie_embeddings": ("tie_word_embeddings", True),
}
_DTYPES = ("F64", "F32", "F16", "BF16")
_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


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
    config = model_config(read_config(folder))
    tensors = _Tensors(folder)
    top = {ours: tensors.take(theirs) for ours, theirs in _TOP.items()}
    if not config.tie_embeddings:
        top["head"] = tensors.take(_HEAD).T
    elif _HEAD in tensors and not np.array_equal(tensors.take(_HEAD), top["embedding"]):
        raise RunError(
            f"{folder}: {_HEAD} differs from the embedding, and by {_CONFIG} they are one; where "
            f'the model has both, {_CONFIG} says "tie_word_embeddings": false'
        )
    blocks = {}
    for ours, (theirs, (here, _)) in _layer(config).items():
        names = (f"backbone.layers.{i}.{theirs}" for i in range(config.n_layers))
        blocks[ours] = np.stack([here(tensors.take(name)) for name in names])
    params = {**top, "blocks": blocks}
    tensors.check_all_taken()
    if difference := _difference(params, config):
        raise RunError(f"{folder}: the weights have shapes {difference}")
    return config, params


def save(
    folder: Path | str, config: ModelConfig, params: Any, *, like: Path | str | None = None
) -> None:
    """Write a checkpoint that `load` and ``transformers.MambaForCausalLM`` read.

    Args:
      folder: is made if it is not there; a checkpoint in it is replaced.
      config: the model's shape.
      params: the parameters of :class:`jaxkern.lm.model.MambaLM`, in the dtypes that are written.
      like: the checkpoint that these parameters began as: what else its config.json says, and its
        tokenizer, are taken over.

    Raises:
      ValueError: the parameters are not those of a model of this shape.
    """
    folder = Path(folder)
    if difference := _difference(params, config):
        raise ValueError(f"params has shapes {difference}, for {config}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {theirs: params[ours] for ours, theirs in _TOP.items()}
    if not config.tie_embeddings:
        tensors[_HEAD] = np.transpose(params["head"])
    for ours, (theirs, (_, back)) in _layer(config).items():
        stacked = np.asarray(params["blocks"][ours])
        for i in range(config.n_layers):
            tensors[f"backbone.layers.{i}.{theirs}"] = back(stacked[i])
    partial = folder / f"{_WEIGHTS}.partial"
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
        partial,
        metadata={"format": "pt"},
    )
    os.replace(partial, folder / _WEIGHTS)
    (folder / _INDEX).unlink(missing_ok=True)
    written = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if like is not None:
        written = read_config(Path(like))
        for path in Path(like).iterdir():
            if path.suffix in (".json", ".txt") and path.name not in (_CONFIG, _INDEX):
                shutil.copy(path, folder)
    for of_ours, (theirs, _) in (_SIZES | _FLAGS).items():
        written[theirs] = getattr(config, of_ours)
    written |= {
        "model_type": "mamba",
        "hidden_act": "silu",
        "architectures": ["MambaForCausalLM"],
        "dtype": str(tensors[_TOP["embedding"]].dtype),
        "intermediate_size": config.d_inner,
        "time_step_rank": config.rank,
        "layer_norm_epsilon": config.eps,
    }
    written.pop("torch_dtype", None)
    write_atomically(folder / _CONFIG, json.dumps(written, indent=2, sort_keys=True) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json of a checkpoint."""
    path = folder / _CONFIG
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError
    except FileNotFoundError:
        if not folder.exists():
            raise RunError(f"there is no folder {folder}; {how_to_get(folder)}") from None
        raise RunError(
            f"{folder} holds no checkpoint (no {_CONFIG}); give a folder of {_CONFIG} and "
            f"{_WEIGHTS}, such as hf download state-spaces/mamba-130m-hf --local-dir mamba-130m-hf "
            "writes"
        ) from None
    except (ValueError, NotADirectoryError):
        raise RunError(f"{path} is no configuration of a model") from None
    return config


def model_config(config: dict[str, Any]) -> ModelConfig:
    """The shape of the model that config.json describes.

    Raises:
      RunError: it is not one that the model here can be.
    """
    _check_kind(config)
    sizes = {ours: _size(config, *theirs) for ours, theirs in _SIZES.items()}
    inner = _size(config, "intermediate_size", sizes["d_model"] * sizes["expand"])
    if inner % sizes["d_model"]:
        raise RunError(
            f"{_CONFIG}: intermediate_size is {inner}, and here it is a multiple of hidden_size, "
            f"{sizes['d_model']}"
        )
    sizes["expand"] = inner // sizes["d_model"]
    flags = {ours: config.get(*theirs) for ours, theirs in _FLAGS.items()}
    for ours, (theirs, _) in _FLAGS.items():
        if not isinstance(flags[ours], bool):
            raise RunError(f"{_CONFIG}: {theirs} is {flags[ours]!r}, and must be true or false")
    eps = config.get("layer_norm_epsilon", 1e-5)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < math.inf:
        raise RunError(
            f"{_CONFIG}: layer_norm_epsilon is {eps!r}, and must be a number above 0, such as 1e-5"
        )
    rank = config.get("time_step_rank", "auto")
    rank = None if rank == "auto" else _size(config, "time_step_rank", None)
    if rank == math.ceil(sizes["d_model"] / 16):
        rank = None
    return ModelConfig(**sizes, **flags, eps=eps, dt_rank=rank)


def _check_kind(config: dict[str, Any]) -> None:
    """Refuse a model that is no Mamba of this layout."""
    if "format" in config and "flags" in config:
        raise RunError(
            f"{_CONFIG} is that of a run of jaxkern train; load it with jaxkern sample --run, or "
            "jaxkern.lm.load"
        )
    if "hidden_size" not in config and "d_model" in config:
        raise RunError(
            f"{_CONFIG} says d_model and no hidden_size: the checkpoint is in the layout of "
            "mamba_ssm; take the one of the same name that ends in -hf, or convert it with the "
            "script convert_mamba_ssm_checkpoint_to_pytorch.py of transformers"
        )
    for name, values in _FIXED.items():
        if config.get(name, values[0]) not in values:
            raise RunError(f"{_CONFIG}: {name} is {config[name]!r}, and here it is {values[0]!r}")
    if config.get("quantization_config") is not None:
        raise RunError(
            f"{_CONFIG}: quantization_config is {config['quantization_config']!r}, and weights "
            "here are bfloat16, float16 or float32; take the model that was quantized"
        )


def _size(config: dict[str, Any], name: str, default: int | None) -> int:
    value = config.get(name, default)
    if value is None:
        raise RunError(f"{_CONFIG} does not say {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        rule = '"auto" or a whole number' if name == "time_step_rank" else "a whole number"
        raise RunError(f"{_CONFIG}: {name} is {value!r}, and must be {rule}, at least 1")
    return value


def _layer(config: ModelConfig) -> dict[str, Any]:
    """The parameters of a layer of this model: _LAYER's, with or without biases."""
    return {name: _LAYER[name] for name in ("norm", *config.block.initializers(config))}


def load_tokenizer(folder: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a checkpoint; ``None`` where it holds no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers has no exception of its own
        raise RunError(f"{path} cannot be read: {error}") from None


def _in_safetensors(folder: Path) -> str:
    """What to do about a folder without weights that can be read."""
    others = sorted(path.name for path in folder.glob("*.bin"))
    if not others:
        return "download it whole, or give another folder"
    return (
        f"{others[0]} is not read; write safetensors with transformers: "
        f"MambaForCausalLM.from_pretrained(folder).save_pretrained(folder)"
    )


class _Tensors:
    """The arrays of a checkpoint, read one at a time."""

    def __init__(self, folder: Path):
        self._folder = folder
        paths = [folder / _WEIGHTS]
        if (folder / _INDEX).exists():
            try:
                index = json.loads((folder / _INDEX).read_text())
                paths = [folder / name for name in sorted(set(index["weight_map"].values()))]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise RunError(f"{folder / _INDEX} is no index of weights") from None
        self._files: dict[str, Any] = {}
        for path in paths:
            if not path.exists():
                raise RunError(f"{folder} holds no {path.name}; {_in_safetensors(folder)}")
            try:
                file = safe_open(path, framework="numpy")
            except SafetensorError as error:
                raise RunError(f"{path} is damaged: {error}") from None
            for stored in file.keys():  # noqa: SIM118
                # The embedding has had another name.
                name = stored.replace("backbone.embedding.", "backbone.embeddings.")
                self._files[name] = file, stored
        self._left = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

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
            raise RunError(
                f"{self._folder}: the weights have {min(self._left)}, and the model here has not"
            )


def _difference(params: dict[str, Any], config: ModelConfig) -> str:
    """Says which parameters have other shapes than those of a model; "" if none."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        blocks = {f"blocks.{name}": leaf for name, leaf in tree.get("blocks", {}).items()}
        named = {name: leaf for name, leaf in tree.items() if name != "blocks"} | blocks
        return {name: np.shape(leaf) for name, leaf in named.items()}

    found, expected = shapes(params), shapes(jax.eval_shape(lambda: initial_params(config)))
    names = [name for name in found | expected if found.get(name) != expected.get(name)]
    if not names:
        return ""
    told = lambda of: {name: of[name] for name in names if name in of}
    return f"{told(found)}, and by the model's configuration they are {told(expected)}"
