"""How transformers stores each kind of language model: the keys of config.json, the tensors' names.

What all have in common stands in :mod:`jaxkern.lm.hf`, and so do the tables of both. Mamba and
Mamba-2 have one block a layer. A layer of Nemotron-H is a Mamba-2 block, attention without
rotations, or an MLP with relu². One of Bamba is a Mamba-2 block or attention, of which half of each
head is rotated, and an MLP with a gate: here these are two layers.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkern.lm import untrusted
from jaxkern.lm.config import ModelConfig, RunError, shortest_repeat

CONFIG = "config.json"
_LARGEST = 2**24  # of sizes: no product of them is beyond an array's


def is_hf(folder: Path) -> bool:
    """Whether a folder holds a config.json of Hugging Face's layout; RunError if it is damaged."""
    content = untrusted.read_json(folder, CONFIG, "configuration of a model") or {}
    return "format" not in content and "model_type" in content


def how_to_get(folder: Path) -> str:
    """What to do about a folder that does not exist: it may be a name on Hugging Face's hub."""
    name = folder.as_posix()
    if len(folder.parts) == 2 and not folder.is_absolute() and folder.parts[0] not in ("..", "."):
        return (
            f"if it is a model of Hugging Face's hub, download it, for example by: hf download "
            f"{name} --local-dir {folder.name} and give the folder {folder.name}"
        )
    return "give one that jaxkern train, transformers or hf download has written"


# Tensors


class Tensor(NamedTuple):
    """A tensor of a layer, and how theirs becomes ours and ours theirs."""

    name: str
    here: Callable[[np.ndarray], np.ndarray] = np.asarray
    back: Callable[[np.ndarray], np.ndarray] = np.asarray


def _matrix(name: str) -> Tensor:
    """A matrix that multiplies from the left."""
    return Tensor(f"{name}.weight", np.transpose, np.transpose)


def _filter(name: str) -> Tensor:
    """A filter (channels, 1, W) of one group a channel."""
    return Tensor(name, lambda theirs: np.squeeze(theirs, 1), lambda ours: ours[:, None])


def _matrices(*names: str) -> dict[str, Tensor]:
    return {name: _matrix(name) for name in names}


_BLOCK = _matrices("in_proj", "out_proj") | {
    "in_bias": Tensor("in_proj.bias"),
    "conv_weight": _filter("conv1d.weight"),
    "conv_bias": Tensor("conv1d.bias"),
    "A_log": Tensor("A_log"),
    "D": Tensor("D"),
    "out_bias": Tensor("out_proj.bias"),
}
_TENSORS = {
    "mamba": _BLOCK | _matrices("x_proj", "dt_proj") | {"dt_bias": Tensor("dt_proj.bias")},
    "mamba2": _BLOCK | {"dt_bias": Tensor("dt_bias"), "norm_weight": Tensor("norm.weight")},
    "attention": _matrices("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": _matrices("up_proj", "down_proj"),
    "swiglu": _matrices("gate_proj", "up_proj", "down_proj"),
}
"""The tensors of a layer of each kind, by the names of its parameters."""


# config.json


class Values:
    """The values of config.json, each checked when it is read.

    Raises:
      RunError: a value is missing or of another type; it names the key and the value.
    """

    def __init__(self, config: Mapping[str, Any]):
        self._config = config

    def size(self, name: str, default: int | None = None, rule: str = "a whole number") -> int:
        value = self._config.get(name, default)
        if value is None:
            raise RunError(f"{CONFIG} does not say {name}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, value, f"{rule}, at least 1")
        if value > _LARGEST:
            raise self._wrong(name, value, f"{rule}, at most {_LARGEST}")
        return value

    def size_or_auto(self, name: str) -> int | None:
        if self._config.get(name, "auto") == "auto":
            return None
        return self.size(name, rule='"auto" or a whole number')

    def given(self, name: str) -> Any:
        return self._config.get(name)

    def text(self, name: str, default: str) -> str:
        value = self._config.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def list_of(self, kind: type, name: str) -> list[Any] | None:
        """A list of texts or whole numbers; ``None`` if there is none."""
        value = self._config.get(name)
        if value is not None and not (
            isinstance(value, list) and all(type(each) is kind for each in value)
        ):
            told = {str: "texts", int: "whole numbers"}[kind]
            raise self._wrong(name, value, f"a list of {told}")
        return value

    def table(self, name: str) -> "Values":
        value = self._config.get(name) or {}
        if not isinstance(value, dict):
            raise self._wrong(name, value, "a table")
        return Values(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._config.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def positive(self, name: str, default: float) -> float:
        value = self._config.get(name, default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise self._wrong(name, value, f"a number above 0, such as {default:g}")
        return value

    def limits(self, name: str) -> tuple[float, float]:
        """Two numbers in order; transformers spells infinity as a table since its version 5."""
        value = self._config.get(name, [0.0, math.inf])
        known = {"Infinity": math.inf, "-Infinity": -math.inf}
        spelled = lambda v: known.get(str(v.get("__float__"))) if isinstance(v, dict) else v
        match [spelled(each) for each in value] if isinstance(value, list) else []:
            case [int() | float() as low, int() | float() as high] if low <= high:
                if bool not in (type(low), type(high)):
                    return low, high
        raise self._wrong(name, value, "two numbers in order, such as [0.0, Infinity]")

    @staticmethod
    def _wrong(name: str, value: Any, rule: str) -> RunError:
        return RunError(f"{CONFIG}: {name} is {value!r}, and must be {rule}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How transformers stores the language models of one of its classes.

    Attributes:
      model_type: what config.json calls it.
      architecture: the class of transformers.
      kinds: what a layer can be, and how its tensors' names and that of its norm begin.
      read: the values of config.json -> the fields of :class:`ModelConfig` of this class alone.
      write: a model's shape -> the keys of config.json for these.
      tied: whether the output layer is the embedding if config.json does not say; ``None`` if it
        cannot be, and is a copy of it where a model's is.
      outer: the names of the embedding and the last norm; what is before the first dot begins all.
      eps: the key of the norms' epsilon.
      halves: how many layers here are one of theirs.
      fixed: what config.json may say otherwise, and the models here cannot be.
    """

    model_type: str
    architecture: str
    kinds: Mapping[str, tuple[str, str]]
    read: Callable[[Values], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    tied: bool | None
    outer: tuple[str, str] = ("backbone.embeddings.weight", "backbone.norm_f.weight")
    eps: str = "layer_norm_epsilon"
    halves: int = 1
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return self.outer[0].partition(".")[0] + "."

    def tensor(self, config: ModelConfig, layer: int, name: str) -> Tensor:
        """The tensor that a parameter of a layer is stored as."""
        kind = config.kinds[layer]
        inside, norm = self.kinds[kind]
        found = Tensor(norm) if name == "norm" else _TENSORS[kind][name]
        inside = "" if name == "norm" else f"{inside}."
        return found._replace(
            name=f"{self.prefix}layers.{layer // self.halves}.{inside}{found.name}"
        )

    def holds(self, config: ModelConfig) -> bool:
        """Whether a model of this shape can be stored so."""
        if self.halves == 2:
            pairs = zip(config.kinds[::2], config.kinds[1::2], strict=True)
            return config.n_layers % 2 == 0 and all(
                first in ("mamba2", "attention") and second == "swiglu" for first, second in pairs
            )
        rotated = "attention" in config.kinds and config.rotary_dim
        return {*config.kinds} <= self.kinds.keys() and not rotated


def _write_eps(config: ModelConfig) -> None:
    """Refuses norms in Mamba-2 blocks that transformers has not."""
    if config.norm_groups not in (None, config.n_groups):
        raise ValueError(
            f"norm_groups is {config.norm_groups}, and transformers normalises as many groups of "
            f"channels as share B and C; it must be None or n_groups, {config.n_groups}"
        )
    if config.norm_eps not in (None, config.eps):
        raise ValueError(
            f"norm_eps is {config.norm_eps:g} and eps {config.eps:g}, and transformers has one "
            "epsilon for all norms; they must be equal"
        )


def _multiple(name: str, inner: int, width: int) -> int:
    """The multiple of the model's width that its blocks have inside."""
    if inner % width:
        raise RunError(
            f"{CONFIG}: {name} is {inner}, and here it is a multiple of hidden_size, {width}"
        )
    return inner // width


def _groups(values: Values, name: str, default: int, heads_name: str, heads: int) -> int:
    groups = values.size(name, default)
    if heads % groups:
        raise RunError(f"{CONFIG}: {name} is {groups}, and here it divides {heads_name}, {heads}")
    return groups


def _layers(kinds: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a model's shape that say the kinds of its layers."""
    runs = ((kind, len([*run])) for kind, run in itertools.groupby(shortest_repeat(kinds)))
    told = ", ".join(f"{kind}*{count}" if count > 1 else kind for kind, count in runs)
    return {"layers": told, "n_layers": len(kinds)}


# Mamba and Mamba-2: a layer is a block


def _read(values: Values, kind: str, d_state: int) -> dict[str, Any]:
    states = values.size("state_size", d_state)
    return {
        "layers": kind,
        "n_layers": values.size("num_hidden_layers"),
        "d_model": values.size("hidden_size"),
        "expand": values.size("expand", 2),
        "d_state": None if states == d_state else states,
        "d_conv": values.size("conv_kernel", 4),
        "use_bias": values.flag("use_bias", False),
        "use_conv_bias": values.flag("use_conv_bias", True),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.d_model,
        "expand": config.expand,
        "state_size": config.sizes.d_state,
        "conv_kernel": config.d_conv,
        "use_bias": config.use_bias,
        "use_conv_bias": config.use_conv_bias,
        "hidden_act": "silu",
    }


def _read_mamba(values: Values) -> dict[str, Any]:
    read = _read(values, "mamba", 16)
    width = read["d_model"]
    inner = values.size("intermediate_size", width * read["expand"])
    rank = values.size_or_auto("time_step_rank")
    return read | {
        "expand": _multiple("intermediate_size", inner, width),
        "dt_rank": None if rank == math.ceil(width / 16) else rank,
    }


def _write_mamba(config: ModelConfig) -> dict[str, Any]:
    sizes: Any = config.sizes
    return _write(config) | {"intermediate_size": sizes.d_inner, "time_step_rank": sizes.rank}


def _read_mamba2(values: Values) -> dict[str, Any]:
    read = _read(values, "mamba2", 128)
    heads, head_dim = values.size("num_heads", 128), values.size("head_dim", 64)
    inner = read["expand"] * read["d_model"]
    if heads * head_dim != inner:
        raise RunError(
            f"{CONFIG}: num_heads · head_dim is {heads * head_dim}, and here it is expand · "
            f"hidden_size, {inner}"
        )
    return read | {
        "head_dim": head_dim,
        "n_groups": _groups(values, "n_groups", 8, "num_heads", heads),
        "dt_limit": values.limits("time_step_limit"),
    }


def _write_mamba2(config: ModelConfig) -> dict[str, Any]:
    _write_eps(config)
    sizes: Any = config.sizes
    return _write(config) | {
        "num_heads": sizes.heads,
        "head_dim": config.head_dim,
        "n_groups": config.n_groups,
        "time_step_limit": list(config.dt_limit),
    }


_SILU = ("silu", "swish")
MAMBA = Layout(
    *("mamba", "MambaForCausalLM", {"mamba": ("mixer", "norm.weight")}),
    *(_read_mamba, _write_mamba, True),
    fixed={"hidden_act": _SILU, "rms_norm": (True,)},
)
MAMBA2 = Layout(
    *("mamba2", "Mamba2ForCausalLM", {"mamba2": ("mixer", "norm.weight")}),
    *(_read_mamba2, _write_mamba2, False),
    fixed=MAMBA.fixed,
)


# Nemotron-H: a layer is a Mamba-2 block, attention or an MLP

_NEMOTRON = {"M": "mamba2", "*": "attention", "-": "mlp"}
_NAMES = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
_NAMES |= {"mlp": "-", "moe": "E"}  # of lists, those before transformers 5, too


def _read_nemotron_h(values: Values) -> dict[str, Any]:
    listed = values.list_of(str, "layers_block_type")
    pattern = (
        values.text("hybrid_override_pattern", "")
        if listed is None
        else "".join(_NAMES.get(name, "?") for name in listed)
    )
    if not pattern or not {*pattern} <= _NEMOTRON.keys():
        name = "hybrid_override_pattern" if listed is None else "layers_block_type"
        raise RunError(
            f"{CONFIG}: {name} is {pattern if listed is None else listed!r}, and here layers are "
            "linear_attention (M), full_attention (*) and mlp (-)"
        )
    width, states = values.size("hidden_size"), values.size("ssm_state_size", 128)
    heads, head_dim = values.size("mamba_num_heads", 128), values.size("mamba_head_dim", 64)
    return {
        "d_model": width,
        **_layers(tuple(_NEMOTRON[letter] for letter in pattern)),
        "d_state": None if states == 128 else states,
        "d_conv": values.size("conv_kernel", 4),
        "expand": _multiple("mamba_num_heads · mamba_head_dim", heads * head_dim, width),
        "head_dim": head_dim,
        "n_groups": _groups(values, "n_groups", 8, "mamba_num_heads", heads),
        "dt_limit": (values.positive("time_step_min", 1e-3), math.inf),
        "use_bias": values.flag("use_bias", False),
        "use_conv_bias": values.flag("use_conv_bias", True),
        "n_heads": (attention := values.size("num_attention_heads", 32)),
        "n_kv_heads": values.size("num_key_value_heads", min(8, attention)),
        "attention_head_dim": values.size("head_dim", 128),
        "d_mlp": values.size("intermediate_size", 21504),
    }


def _write_nemotron_h(config: ModelConfig) -> dict[str, Any]:
    _write_eps(config)
    if not config.dt_limit[0] > 0 or config.dt_limit[1] != math.inf:
        raise ValueError(
            f"dt_limit is {config.dt_limit}, and Nemotron-H's is a number above 0 and infinity, "
            "such as (1e-3, inf)"
        )
    names = {"mamba2": "linear_attention", "attention": "full_attention", "mlp": "mlp"}
    letters = {kind: letter for letter, kind in _NEMOTRON.items()}
    (queries, keys), width = config.heads
    sizes: Any = config.sizes
    return {
        "hidden_size": config.d_model,
        "layers_block_type": [names[kind] for kind in config.kinds],
        "hybrid_override_pattern": "".join(letters[kind] for kind in config.kinds),
        "num_hidden_layers": config.n_layers,
        "ssm_state_size": sizes.d_state,
        "conv_kernel": config.d_conv,
        "expand": config.expand,
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": config.head_dim,
        "n_groups": config.n_groups,
        "time_step_min": config.dt_limit[0],
        "use_bias": config.use_bias,
        "mamba_proj_bias": config.use_bias,
        "use_conv_bias": config.use_conv_bias,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": width,
        "intermediate_size": config.mlp_width,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
    }


NEMOTRON_H = Layout(
    *("nemotron_h", "NemotronHForCausalLM"),
    dict.fromkeys(_NEMOTRON.values(), ("mixer", "norm.weight")),
    *(_read_nemotron_h, _write_nemotron_h, None),
    fixed={
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": _SILU,
        "mlp_bias": (False,),
        "attention_bias": (False,),
        "sliding_window": (None,),
        "tie_word_embeddings": (False,),
    },
)


# Bamba: a layer is a Mamba-2 block or attention, and an MLP


def _read_bamba(values: Values) -> dict[str, Any]:
    width, n_layers = values.size("hidden_size"), values.size("num_hidden_layers")
    attention = values.list_of(int, "attn_layer_indices") or []
    first = ["attention" if i in attention else "mamba2" for i in range(n_layers)]
    expand, heads = values.size("mamba_expand", 2), values.size("mamba_n_heads", 128)
    head_dim = values.size_or_auto("mamba_d_head") or expand * width // heads
    if heads * head_dim != expand * width:
        raise RunError(
            f"{CONFIG}: mamba_n_heads · mamba_d_head is {heads * head_dim}, and here it is "
            f"mamba_expand · hidden_size, {expand * width}"
        )
    queries = values.size("num_attention_heads", 32)
    of_head = values.size("head_dim", max(1, width // queries))
    rope = values.table("rope_parameters")
    if rope.text("rope_type", "default") != "default" or values.given("rope_scaling"):
        raise RunError(f"{CONFIG}: rope_parameters are of another kind than here, 'default'")
    return {
        "d_model": width,
        **_layers(tuple(kind for each in first for kind in (each, "swiglu"))),
        "d_state": None if (states := values.size("mamba_d_state", 256)) == 128 else states,
        "d_conv": values.size("mamba_d_conv", 4),
        "expand": expand,
        "head_dim": head_dim,
        "n_groups": _groups(values, "mamba_n_groups", 1, "mamba_n_heads", heads),
        "dt_limit": values.limits("time_step_limit"),
        "use_bias": values.flag("mamba_proj_bias", False),
        "use_conv_bias": values.flag("mamba_conv_bias", True),
        "n_heads": queries,
        "n_kv_heads": values.size("num_key_value_heads", min(8, queries)),
        "attention_head_dim": of_head,
        "rotary_dim": int(of_head * rope.positive("partial_rotary_factor", 0.5)),
        "rope_theta": rope.positive("rope_theta", values.positive("rope_theta", 1e4)),
        "d_mlp": values.size("intermediate_size", 14336),
    }


def _write_bamba(config: ModelConfig) -> dict[str, Any]:
    _write_eps(config)
    (queries, keys), width = config.heads
    if "attention" in config.kinds and not config.rotary_dim:
        raise ValueError(
            f"rotary_dim is 0, and Bamba's attention rotates; it must be such as {width // 2}"
        )
    sizes: Any = config.sizes
    rope = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
    return {
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layers // 2,
        "attn_layer_indices": [
            i // 2 for i, kind in enumerate(config.kinds) if kind == "attention"
        ],
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": width,
        "rope_parameters": rope | {"partial_rotary_factor": (config.rotary_dim or width) / width},
        "mamba_d_state": sizes.d_state,
        "mamba_d_conv": config.d_conv,
        "mamba_expand": config.expand,
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": config.head_dim,
        "mamba_n_groups": config.n_groups,
        "mamba_proj_bias": config.use_bias,
        "mamba_conv_bias": config.use_conv_bias,
        "time_step_limit": list(config.dt_limit),
        "hidden_act": "silu",
    }


BAMBA = Layout(
    *("bamba", "BambaForCausalLM"),
    {
        "mamba2": ("mamba", "input_layernorm.weight"),
        "attention": ("self_attn", "input_layernorm.weight"),
        "swiglu": ("feed_forward", "pre_ff_layernorm.weight"),
    },
    *(_read_bamba, _write_bamba, False),
    outer=("model.embed_tokens.weight", "model.final_layernorm.weight"),
    eps="rms_norm_eps",
    halves=2,
    fixed={"hidden_act": _SILU, "mlp_bias": (False,), "attention_bias": (False,)},
)

LAYOUTS = {layout.model_type: layout for layout in (MAMBA, MAMBA2, NEMOTRON_H, BAMBA)}
"""The layouts, by the ``model_type`` of config.json."""


def layout_of(config: ModelConfig) -> Layout:
    """The first of the layouts that holds models of this shape."""
    for layout in LAYOUTS.values():
        if layout.holds(config):
            return layout
    raise ValueError(
        f"layers are {config.layers!r} and rotary_dim {config.rotary_dim}, and transformers has "
        "mamba; mamba2; mamba2, attention without rotations and mlp (Nemotron-H); and mamba2 or "
        "attention, each before a swiglu (Bamba)"
    )
