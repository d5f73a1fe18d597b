"""Transformers' layouts of language models: the keys of config.json, the tensors' names.

    model_type   a layer of theirs is                         here
    mamba        a Mamba block                                mamba
    mamba2       a Mamba-2 block                              mamba2
    nemotron_h   such a block, attention, or an MLP (relu²)   mamba2, attention or mlp
    bamba        such a block or attention, and a gated MLP   mamba2 or attention, and swiglu

Attention in Nemotron-H has no positions; in Bamba part of each head is rotated by them. What
config.json says of initial values (``initializer_range`` and the like) and of how transformers runs
the model does not matter here.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from jaxkern.lm import untrusted
from jaxkern.lm.config import ModelConfig, Positive, Rule, RunError, shortest_repeat, typed

CONFIG = "config.json"


def is_hf(folder: Path) -> bool:
    """Whether a folder holds a config.json of Hugging Face's layout; RunError if it is damaged."""
    return "model_type" in (untrusted.read_json(folder, CONFIG) or {})


HOW_TO_GET = (
    "give one that jaxkern train or transformers has written, or download a model of Hugging "
    "Face's hub: hf download OWNER/NAME --local-dir FOLDER"
)
_SIZE = Annotated[int, Rule("from 1 to 2^24", lambda value: 1 <= value <= 2**24)]
"""No product of such sizes is beyond an array's."""

_ORDERED = Rule("two numbers in order, such as [0, 1]", lambda v: len(v) == 2 and v[0] <= v[1])
_HINTS = {bool: bool, float: Positive, tuple: Annotated[tuple[float, ...], _ORDERED]}


def value_of(content: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of a key of config.json, of the type of its default; RunError if it is of another.

    ``[type]`` stands for a list of that type, None for a size without a default, and "auto" for
    None or a size.
    """
    value, hint = content.get(name, default), _HINTS.get(type(default), _SIZE)
    if isinstance(default, tuple) and isinstance(value, list):
        # transformers spells infinity as a table since its version 5.
        value = [each.get("__float__") if isinstance(each, dict) else each for each in value]
    elif isinstance(default, list):
        hint, value = tuple[default[0], ...], [] if value in (None, default) else value
    elif default == "auto" and value in (None, "auto"):
        return None
    try:
        return typed(hint, value)
    except (TypeError, ValueError) as error:
        raise RunError(f"{CONFIG}: {name} is {value!r}, and must be {error}") from None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Transformers' layout of the language models of one of its classes."""

    model_type: str
    architecture: str  # the class
    kinds: Mapping[str, tuple[str, str]]  # of layers, how their tensors' names begin, their norms
    # The field of the model's shape that each key of config.json gives, and its default. Fields
    # "heads" of Mamba-2 and "inner", the channels of Mamba, follow from others.
    keys: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]]  # what config.json may say otherwise, and models here not
    # The other fields, from the content and what the keys say, and the other keys.
    read: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]] = lambda *_: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda _: {}
    outer: tuple[str, str] = ("backbone.embeddings.weight", "backbone.norm_f.weight")
    gated: bool = False  # one layer of theirs is two here, and attention rotates its heads

    @property
    def prefix(self) -> str:
        return self.outer[0].partition(".")[0] + "."

    def views(
        self, config: ModelConfig, params: Mapping[tuple[str, ...], np.ndarray]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor by its name, a view of the parameters, whose paths are the keys."""
        for path, array in params.items():
            name, kind = path[-1], path[1] if len(path) == 3 else config.kinds[0]
            if len(path) == 1:
                outer = {"embedding": self.outer[0], "norm": self.outer[1], "head": HEAD}
                yield outer[name], array.T if name == "head" else array
                continue
            inside, norm = self.kinds[kind]
            theirs = _TENSORS.get(name, f"{name}.weight" if name.endswith("_proj") else name)
            if (kind, name) == ("mamba", "dt_bias"):
                theirs = "dt_proj.bias"
            theirs = norm if name == "norm" else f"{inside}.{theirs}"
            layers = (i for i, each in enumerate(config.kinds) if each == kind)
            for i, leaf in zip(layers, array, strict=True):
                # Their matrices multiply from the left, and a filter has one group a channel.
                leaf = leaf.T if name.endswith("_proj") else leaf
                leaf = leaf[:, None] if name == "conv_weight" else leaf
                yield f"{self.prefix}layers.{i // (1 + self.gated)}.{theirs}", leaf

    def holds(self, config: ModelConfig) -> bool:
        """Whether a model of this shape can be stored so."""
        if "attention" in config.kinds and self.gated != bool(config.rotary_dim):
            return False
        gated = [kind == "swiglu" for kind in config.kinds]
        right = not self.gated or gated == [False, True] * (config.n_layers // 2)
        return {*config.kinds} <= self.kinds.keys() and right

    def shape(self, content: Mapping[str, Any]) -> ModelConfig:
        """The shape of the model that config.json describes."""
        fields = {f: value_of(content, name, default) for name, (f, default) in self.keys.items()}
        names = {field: name for name, (field, _) in self.keys.items()}
        width = fields["d_model"]
        if inner := fields.pop("inner", None):
            if inner % width:
                what = f"{CONFIG}: {names['inner']} is {inner}"
                raise RunError(f"{what}, and here it is a multiple of hidden_size, {width}")
            fields["expand"] = inner // width
        if count := fields.pop("heads", 0):
            inner = fields["expand"] * width
            fields["head_dim"] = fields["head_dim"] or inner // count
            if (found := count * fields["head_dim"]) != inner:
                what = f"{CONFIG}: {names['heads']} · {names['head_dim']} is {found}"
                raise RunError(f"{what}, and here it is expand · hidden_size, {inner}")
        return ModelConfig(**fields | self.read(content, fields))

    def content(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of config.json for a model of this shape; ValueError if there is none."""
        for name, other in (("norm_groups", "n_groups"), ("norm_eps", "eps")):
            own, same = getattr(config, name), getattr(config, other)
            if "mamba2" in config.kinds and own not in (None, same):
                what = f"{name} is {own} and {other} {same}"
                raise ValueError(f"{what}, and transformers has one number for both")
        (queries, keys), width = config.heads
        fields = dataclasses.asdict(config) | {"dt_limit": [*config.dt_limit]}
        fields |= {"n_heads": queries, "n_kv_heads": keys, "attention_head_dim": width}
        fields |= {"inner": config.expand * config.d_model, "d_mlp": config.mlp_width}
        for name, inside in (("dt_rank", "rank"), ("heads", "heads"), ("d_state", "d_state")):
            fields[name] = getattr(config.sizes, inside, None)
        told = {name: values[0] for name, values in self.fixed.items()}
        told |= {name: fields[field] for name, (field, _) in self.keys.items()}
        told |= {"model_type": self.model_type, "architectures": [self.architecture]}
        return told | self.write(config)


HEAD = "lm_head.weight"
_TENSORS = {"conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias"}
_TENSORS |= {"in_bias": "in_proj.bias", "out_bias": "out_proj.bias", "norm_weight": "norm.weight"}
"""A layer's tensors of other names than its parameters."""

_SILU = ("silu", "swish")
_SIZES = {"hidden_size": ("d_model", None), "num_hidden_layers": ("n_layers", None)}
_SIZES |= {"vocab_size": ("vocab_size", None)}
_BLOCK = {
    "expand": ("expand", 2),
    "conv_kernel": ("d_conv", 4),
    "use_bias": ("use_bias", False),
    "use_conv_bias": ("use_conv_bias", True),
    "layer_norm_epsilon": ("eps", 1e-5),
}
_LIMIT = {"time_step_limit": ("dt_limit", (0.0, math.inf))}
_ATTENTION = {"num_attention_heads": ("n_heads", 32), "num_key_value_heads": ("n_kv_heads", 8)}

_NAMES = {"mamba2": "linear_attention", "attention": "full_attention", "mlp": "mlp"}
_LETTERS = {"mamba2": "M", "attention": "*", "mlp": "-"}
_NEMOTRON = {name: kind for names in (_NAMES, _LETTERS) for kind, name in names.items()}
_NEMOTRON |= {"mamba": "mamba2", "attention": "attention"}


def _layers(kinds: list[str]) -> dict[str, Any]:
    """The fields of a model's shape that say the kinds of its layers."""
    runs = ((kind, len([*run])) for kind, run in itertools.groupby(shortest_repeat(tuple(kinds))))
    told = ", ".join(f"{kind}*{count}" if count > 1 else kind for kind, count in runs)
    return {"layers": told, "n_layers": len(kinds)}


def _read_nemotron_h(content: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Reads a list of names, or as before transformers 5 a text with a letter for each."""
    listed = [*value_of(content, "layers_block_type", [str])]
    listed = listed or str(content.get("hybrid_override_pattern"))
    if not {*listed} <= _NEMOTRON.keys():
        right = "linear_attention (M), full_attention (*) and mlp (-)"
        raise RunError(f"{CONFIG}: the layers are {listed!r}, and here they are {right}")
    low = value_of(content, "time_step_min", 1e-3)  # transformers leaves time_step_limit out
    layers = _layers([_NEMOTRON[name] for name in listed])
    return {"dt_limit": (low, math.inf), "tie_embeddings": False, **layers}


def _write_nemotron_h(config: ModelConfig) -> dict[str, Any]:
    low, high = config.dt_limit
    if not low or high != math.inf:
        right = "a number above 0 and infinity, such as (1e-3, inf)"
        raise ValueError(f"dt_limit is {config.dt_limit}, and Nemotron-H's is {right}")
    return {
        "layers_block_type": [_NAMES[kind] for kind in config.kinds],
        "hybrid_override_pattern": "".join(_LETTERS[kind] for kind in config.kinds),
        "num_hidden_layers": config.n_layers,
        "time_step_min": low,
        "mamba_proj_bias": config.use_bias,
    }


def _read_bamba(content: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    rope = content.get("rope_parameters") or {}
    plain = isinstance(rope, dict) and rope.get("rope_type", "default") == "default"
    if not plain or content.get("rope_scaling"):
        raise RunError(f"{CONFIG}: rope_parameters is {rope!r}, and here rope_type is 'default'")
    theta = value_of(content, "rope_theta", 1e4)
    width = value_of(content, "head_dim", max(1, fields["d_model"] // fields["n_heads"]))
    attention = value_of(content, "attn_layer_indices", [int])
    first = ["attention" if i in attention else "mamba2" for i in range(fields["n_layers"])]
    return {
        "attention_head_dim": width,
        "rotary_dim": int(width * value_of(rope, "partial_rotary_factor", 0.5)),
        "rope_theta": value_of(rope, "rope_theta", float(theta)),
        **_layers([kind for each in first for kind in (each, "swiglu")]),
    }


def _write_bamba(config: ModelConfig) -> dict[str, Any]:
    width = config.heads[1]
    rope = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
    rope["partial_rotary_factor"] = config.rotary_dim / width if config.rotary_dim else 0.5
    return {
        "num_hidden_layers": config.n_layers // 2,
        "attn_layer_indices": [i for i, k in enumerate(config.kinds[::2]) if k == "attention"],
        "head_dim": width,
        "rope_parameters": rope,
    }


_ALL = (
    Layout(
        *("mamba", "MambaForCausalLM", {"mamba": ("mixer", "norm.weight")}),
        keys={
            **_SIZES,
            **_BLOCK,
            "state_size": ("d_state", 16),
            "intermediate_size": ("inner", "auto"),
            "time_step_rank": ("dt_rank", "auto"),
            "tie_word_embeddings": ("tie_embeddings", True),
        },
        fixed={"hidden_act": _SILU, "rms_norm": (True,)},
    ),
    Layout(
        *("mamba2", "Mamba2ForCausalLM", {"mamba2": ("mixer", "norm.weight")}),
        keys={
            **_SIZES,
            **_BLOCK,
            **_LIMIT,
            "state_size": ("d_state", 128),
            "n_groups": ("n_groups", 8),
            "num_heads": ("heads", 128),
            "head_dim": ("head_dim", "auto"),
            "tie_word_embeddings": ("tie_embeddings", False),
        },
        fixed={"hidden_act": _SILU, "rms_norm": (True,)},
        read=lambda *_: {"layers": "mamba2"},
    ),
    Layout(
        *("nemotron_h", "NemotronHForCausalLM", dict.fromkeys(_NAMES, ("mixer", "norm.weight"))),
        keys={
            **{name: key for name, key in _SIZES.items() if name != "num_hidden_layers"},
            **_BLOCK,
            **_ATTENTION,
            "ssm_state_size": ("d_state", 128),
            "n_groups": ("n_groups", 8),
            "mamba_num_heads": ("heads", 128),
            "mamba_head_dim": ("head_dim", "auto"),
            "head_dim": ("attention_head_dim", 128),
            "intermediate_size": ("d_mlp", 21504),
        },
        fixed={"mlp_hidden_act": ("relu2",), "mamba_hidden_act": _SILU, "sliding_window": (None,)}
        | dict.fromkeys(("mlp_bias", "attention_bias", "tie_word_embeddings"), (False,)),
        read=_read_nemotron_h,
        write=_write_nemotron_h,
    ),
    Layout(
        *("bamba", "BambaForCausalLM"),
        {
            "mamba2": ("mamba", "input_layernorm.weight"),
            "attention": ("self_attn", "input_layernorm.weight"),
            "swiglu": ("feed_forward", "pre_ff_layernorm.weight"),
        },
        keys={
            **_SIZES,
            **_LIMIT,
            **_ATTENTION,
            "mamba_expand": ("expand", 2),
            "mamba_d_state": ("d_state", 256),
            "mamba_d_conv": ("d_conv", 4),
            "mamba_n_groups": ("n_groups", 1),
            "mamba_n_heads": ("heads", 128),
            "mamba_d_head": ("head_dim", "auto"),
            "mamba_proj_bias": ("use_bias", False),
            "mamba_conv_bias": ("use_conv_bias", True),
            "intermediate_size": ("d_mlp", 14336),
            "rms_norm_eps": ("eps", 1e-5),
            "tie_word_embeddings": ("tie_embeddings", False),
        },
        fixed={"hidden_act": _SILU, "mlp_bias": (False,), "attention_bias": (False,)},
        read=_read_bamba,
        write=_write_bamba,
        outer=("model.embed_tokens.weight", "model.final_layernorm.weight"),
        gated=True,
    ),
)
LAYOUTS = {layout.model_type: layout for layout in _ALL}
"""The layouts, by the ``model_type`` of config.json."""


def layout_of(config: ModelConfig) -> Layout:
    """The first of the layouts that holds models of this shape; ValueError if none does."""
    for layout in LAYOUTS.values():
        if layout.holds(config):
            return layout
    raise ValueError(
        f"layers are {config.layers!r} and rotary_dim {config.rotary_dim}, and transformers has "
        "mamba; mamba2; mamba2, mlp and attention without rotations (Nemotron-H); and mamba2 or "
        "rotated attention, each before a swiglu (Bamba)"
    )
