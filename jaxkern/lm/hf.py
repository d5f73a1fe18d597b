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

The output layer is the embedding, transposed. The checkpoints ``state-spaces/mamba-*-hf`` are of
this layout, and so is what ``transformers.MambaForCausalLM.save_pretrained`` writes.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.lm.data import write_atomically
from jaxkern.lm.model import EPS
from jaxkern.nn.mamba import Sizes, initializers

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
}
_TOP = {"embedding": "backbone.embeddings.weight", "norm": "backbone.norm_f.weight"}
_HEAD = "lm_head.weight"

# What config.json may say otherwise, and the model here cannot be.
_FIXED = {
    "model_type": "mamba",
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": EPS,
    "tie_word_embeddings": True,
}
_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def load(folder: Path | str) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a checkpoint.

    Args:
      folder: with config.json and model.safetensors, or several files and their index.

    Returns:
      The model's shape, and the parameters of :class:`jaxkern.lm.model.MambaLM`: a nested dict of
      NumPy arrays, float32.

    Raises:
      RunError: the folder holds no such checkpoint, or one of a model that this one cannot be.

    Example:
      >>> from flax import nnx
      >>> from jaxkern.lm import hf
      >>> from jaxkern.lm.step import Options, make_model
      >>> config, params = hf.load("mamba-130m-hf")  # doctest: +SKIP
      >>> model = nnx.merge(make_model(config, Options()), params)  # doctest: +SKIP
      >>> logits = model(tokens)  # doctest: +SKIP
    """
    folder = Path(folder)
    config = model_config(read_config(folder))
    tensors = _Tensors(folder)
    top = {ours: tensors.take(theirs) for ours, theirs in _TOP.items()}
    if _HEAD in tensors and not np.array_equal(tensors.take(_HEAD), top["embedding"]):
        raise RunError(f"{folder}: {_HEAD} differs from the embedding, and the model here has one")
    blocks = {}
    for ours, (theirs, (here, _)) in _LAYER.items():
        names = (f"backbone.layers.{i}.{theirs}" for i in range(config.n_layers))
        blocks[ours] = np.stack([here(tensors.take(name)) for name in names])
    params = {**top, "blocks": blocks}
    tensors.check_all_taken()
    _check_shapes(folder, config, params)
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
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {theirs: params[ours] for ours, theirs in _TOP.items()}
    for ours, (theirs, (_, back)) in _LAYER.items():
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
    written |= _FIXED | {
        "architectures": ["MambaForCausalLM"],
        "dtype": str(tensors[_TOP["embedding"]].dtype),
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_inner,
        "num_hidden_layers": config.n_layers,
        "state_size": config.d_state,
        "expand": config.expand,
        "conv_kernel": config.d_conv,
        "time_step_rank": config.dt_rank,
    }
    written.pop("torch_dtype", None)
    write_atomically(folder / _CONFIG, json.dumps(written, indent=2, sort_keys=True) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint."""
    path = folder / _CONFIG
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError
    except FileNotFoundError:
        raise RunError(
            f"{folder} holds no checkpoint (no {_CONFIG}); give a folder of the layout of "
            "state-spaces/mamba-130m-hf"
        ) from None
    except (ValueError, NotADirectoryError):
        raise RunError(f"{path} is no configuration of a model") from None
    return config


def model_config(config: dict[str, Any]) -> ModelConfig:
    """The shape of the model that config.json tells of.

    Raises:
      RunError: it is not one that the model here can be.
    """
    for name, value in _FIXED.items():
        if config.get(name, value) != value:
            raise RunError(f"{_CONFIG}: {name} is {config[name]!r}, and here it is {value!r}")
    try:
        model = ModelConfig(
            d_model=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            d_state=config.get("state_size", 16),
            expand=config.get("expand", 2),
            d_conv=config.get("conv_kernel", 4),
            vocab_size=config["vocab_size"],
        )
    except KeyError as error:
        raise RunError(f"{_CONFIG} does not say {error.args[0]}") from None
    rank, inner = config.get("time_step_rank", "auto"), config.get("intermediate_size")
    if rank not in ("auto", model.dt_rank):
        raise RunError(
            f"{_CONFIG}: time_step_rank is {rank!r}, and here it is {model.dt_rank}, a sixteenth "
            "of hidden_size"
        )
    if inner not in (None, model.d_inner):
        raise RunError(f"{_CONFIG}: intermediate_size is {inner!r}, not expand · hidden_size")
    return model


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
                raise RunError(f"{folder} holds no {path.name}; only safetensors are read")
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
        return file.get_tensor(stored).astype(np.float32)

    def check_all_taken(self) -> None:
        if self._left:
            raise RunError(
                f"{self._folder}: the weights have {min(self._left)}, and the model here has not"
            )


def _check_shapes(folder: Path, config: ModelConfig, params: dict[str, Any]) -> None:
    sizes = Sizes(config.d_model, config.d_state, config.d_conv, config.expand, config.dt_rank)
    vector = (config.d_model,)
    expected: dict[str, Any] = {"embedding": (config.vocab_size, *vector), "norm": vector}
    layer = {name: shape for name, (_, shape) in initializers(sizes).items()} | {"norm": vector}
    expected["blocks"] = {name: (config.n_layers, *shape) for name, shape in layer.items()}
    found = {name: params[name].shape for name in _TOP}
    found["blocks"] = {name: array.shape for name, array in params["blocks"].items()}
    if found != expected:
        raise RunError(
            f"{folder}: the weights have shapes {found}, and by {_CONFIG} they are {expected}"
        )
