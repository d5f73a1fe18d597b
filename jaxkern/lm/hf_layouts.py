"""How transformers stores each kind of language model: the keys of config.json, the tensors' names.

    model_type   a layer of theirs is                         here
    mamba        a Mamba block                                mamba
    mamba2       a Mamba-2 block                              mamba2
    nemotron_h   such a block, attention, or an MLP (relu²)   mamba2, attention or mlp
    bamba        such a block or attention, and a gated MLP   mamba2 or attention, and swiglu

Attention in Nemotron-H has no positions; in Bamba part of each head is rotated by them.
"""

import contextlib
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


class Tensor(NamedTuple):
    """A tensor of a layer, and how theirs becomes ours and ours theirs."""

    name: str
    here: Callable[[np.ndarray], np.ndarray] = np.asarray
    back: Callable[[np.ndarray], np.ndarray] = np.asarray


def _matrices(*names: str) -> dict[str, Tensor]:
    """Matrices that multiply from the left."""
    return {name: Tensor(f"{name}.weight", np.transpose, np.transpose) for name in names}


_BLOCK = {name: Tensor(name) for name in ("A_log", "D")} | _matrices("in_proj", "out_proj")
_BLOCK |= {"in_bias": Tensor("in_proj.bias"), "out_bias": Tensor("out_proj.bias")}
_BLOCK |= {
    # A filter (channels, 1, W) has one group a channel.
    "conv_weight": Tensor("conv1d.weight", lambda w: np.squeeze(w, 1), lambda w: w[:, None]),
    "conv_bias": Tensor("conv1d.bias"),
}
_TENSORS = {
    "mamba": _BLOCK | _matrices("x_proj", "dt_proj") | {"dt_bias": Tensor("dt_proj.bias")},
    "mamba2": _BLOCK | {"dt_bias": Tensor("dt_bias"), "norm_weight": Tensor("norm.weight")},
    "attention": _matrices("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": _matrices("up_proj", "down_proj"),
    "swiglu": _matrices("gate_proj", "up_proj", "down_proj"),
}
"""The tensors of a layer of each kind, by the names of its parameters."""


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of config.json, each checked when it is read; RunError names a wrong one."""

    content: Mapping[str, Any]

    def size(self, name: str, default: int | None = None, rule: str = "a whole number") -> int:
        value = self.content.get(name, default)
        if value is None:
            raise RunError(f"{CONFIG} does not say {name}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, value, f"{rule}, at least 1")
        if value > _LARGEST:
            raise self._wrong(name, value, f"{rule}, at most {_LARGEST}")
        return value

    def size_or_auto(self, name: str) -> int | None:
        if self.content.get(name, "auto") == "auto":
            return None
        return self.size(name, rule='"auto" or a whole number')

    def flag(self, name: str, default: bool) -> bool:
        value = self.content.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.content.get(name, default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise self._wrong(name, value, f"a number above 0, such as {default:g}")
        return value

    def limits(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers in order; transformers spells infinity as a table since its version 5."""
        value = self.content.get(name, [*default])
        known = {"Infinity": math.inf, "-Infinity": -math.inf}
        spelled = lambda v: known.get(str(v.get("__float__"))) if isinstance(v, dict) else v
        match [spelled(each) for each in value] if isinstance(value, list) else []:
            case [int() | float() as low, int() | float() as high] if low <= high:
                if bool not in (type(low), type(high)):
                    return low, high
        raise self._wrong(name, value, "two numbers in order, such as [0.0, Infinity]")

    def list_of(self, kind: type, name: str) -> list[Any]:
        value = self.content.get(name) or []
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise self._wrong(name, value, f"a list of {'texts' if kind is str else 'numbers'}")
        return value

    @staticmethod
    def _wrong(name: str, value: Any, rule: str) -> RunError:
        return RunError(f"{CONFIG}: {name} is {value!r}, and must be {rule}")


class Key(NamedTuple):
    """A key of config.json: the field of :class:`ModelConfig`, its check and default."""

    name: str
    field: str
    check: Callable[..., Any]  # of Values
    default: Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """How transformers stores the language models of one of its classes.

    Attributes:
      model_type: what config.json calls it.
      architecture: the class of transformers.
      kinds: what a layer can be, and how its tensors' names and that of its norm begin.
      keys: the keys of config.json that are a field of the model's shape.
      heads: the keys of Mamba-2's heads and of their channels; ``None`` for Mamba.
      read, write: the other fields, from what the keys say, and the other keys.
      fixed: what config.json may say otherwise, and the models here cannot be.
      copied_head: whether the output layer is stored where it is the embedding, too.
      outer: the names of the embedding and of the last norm.
      halves: how many layers here are one of theirs.
    """

    model_type: str
    architecture: str
    kinds: Mapping[str, tuple[str, str]]
    keys: tuple[Key, ...]
    heads: tuple[str, str] | None
    read: Callable[[Values, dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    copied_head: bool = False
    outer: tuple[str, str] = ("backbone.embeddings.weight", "backbone.norm_f.weight")
    halves: int = 1

    @property
    def prefix(self) -> str:
        return self.outer[0].partition(".")[0] + "."

    def tensor(self, config: ModelConfig, layer: int, name: str) -> Tensor:
        """The tensor that a parameter of a layer is stored as."""
        inside, norm = self.kinds[config.kinds[layer]]
        found = Tensor(norm) if name == "norm" else _TENSORS[config.kinds[layer]][name]
        inside = "" if name == "norm" else f"{inside}."
        at = f"{self.prefix}layers.{layer // self.halves}.{inside}{found.name}"
        return found._replace(name=at)

    def holds(self, config: ModelConfig) -> bool:
        """Whether a model of this shape can be stored so."""
        kinds, rotates = config.kinds, self.halves == 2
        if "attention" in kinds and rotates != bool(config.rotary_dim):
            return False
        gated = [kind == "swiglu" for kind in kinds] == [False, True] * (len(kinds) // 2)
        return {*kinds} <= self.kinds.keys() and (gated or not rotates)

    def shape(self, values: Values) -> ModelConfig:
        """The shape of the model that config.json describes, ``None`` where a default is meant."""
        fields = {key.field: key.check(values, key.name, key.default) for key in self.keys}
        if self.heads:
            heads, inner = self.heads, fields["expand"] * fields["d_model"]
            count = values.size(heads[0], 128)
            head_dim = values.size_or_auto(heads[1]) or inner // count
            if count * head_dim != inner:
                raise RunError(
                    f"{CONFIG}: {' · '.join(heads)} is {count * head_dim}, and here it is expand · "
                    f"hidden_size, {inner}"
                )
            fields["head_dim"] = head_dim
        config = ModelConfig(**fields | self.read(values, fields))
        for name in ("d_state", "dt_rank", "n_heads", "n_kv_heads", "attention_head_dim", "d_mlp"):
            with contextlib.suppress(ValueError):  # of a default that does not fit the others
                less = dataclasses.replace(config, **{name: None})
                config = less if _whole(less) == _whole(config) else config
        return config

    def content(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of config.json for a model of this shape.

        Raises:
          ValueError: transformers has no such model.
        """
        whole, heads = _whole(config), self.heads
        if heads and config.norm_groups not in (None, config.n_groups):
            raise ValueError(
                f"norm_groups is {config.norm_groups}, and transformers normalises as many groups "
                f"of channels as share B and C; it must be None or n_groups, {config.n_groups}"
            )
        if heads and config.norm_eps not in (None, config.eps):
            raise ValueError(
                f"norm_eps is {config.norm_eps:g} and eps {config.eps:g}, and transformers has one "
                "epsilon for all norms; they must be equal"
            )
        found = {key.name: whole[key.field] for key in self.keys}
        if heads:
            found |= dict(zip(heads, (whole["heads"], config.head_dim), strict=True))
        known = {name: values[0] for name, values in self.fixed.items()}
        if self.copied_head:
            known["tie_word_embeddings"] = False
        told = {"model_type": self.model_type, "architectures": [self.architecture]}
        return known | told | found | self.write(config)


def _whole(config: ModelConfig) -> dict[str, Any]:
    """The fields of a model's shape, defaults filled in, and the heads of Mamba-2."""
    (queries, keys), width = config.heads
    named: dict[str, Any] = {"n_heads": queries, "n_kv_heads": keys, "attention_head_dim": width}
    for name, inside in (("dt_rank", "rank"), ("heads", "heads"), ("d_state", "d_state")):
        named[name] = getattr(config.sizes, inside, None)
    limits = {"dt_limit": list(config.dt_limit), "d_mlp": config.mlp_width}
    return {name: getattr(config, name) for name in _FIELDS} | named | limits


_FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]


def _layers(kinds: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a model's shape that say the kinds of its layers."""
    runs = ((kind, len([*run])) for kind, run in itertools.groupby(shortest_repeat(kinds)))
    told = ", ".join(f"{kind}*{count}" if count > 1 else kind for kind, count in runs)
    return {"layers": told, "n_layers": len(kinds)}


def _keys(d_state: int, tied: bool | None = None) -> tuple[Key, ...]:
    """The keys that Mamba, Mamba-2 and Nemotron-H have in common."""
    common = [
        Key("hidden_size", "d_model", Values.size, None),
        Key("vocab_size", "vocab_size", Values.size, None),
        Key("expand", "expand", Values.size, 2),
        Key("state_size", "d_state", Values.size, d_state),
        Key("conv_kernel", "d_conv", Values.size, 4),
        Key("use_bias", "use_bias", Values.flag, False),
        Key("use_conv_bias", "use_conv_bias", Values.flag, True),
        Key("layer_norm_epsilon", "eps", Values.positive, 1e-5),
    ]
    if tied is not None:
        common.append(Key("tie_word_embeddings", "tie_embeddings", Values.flag, tied))
        common.append(Key("num_hidden_layers", "n_layers", Values.size, None))
    return tuple(common)


_SILU = ("silu", "swish")
_GROUPS = Key("n_groups", "n_groups", Values.size, 8)
_LIMIT = Key("time_step_limit", "dt_limit", Values.limits, (0.0, math.inf))
_ATTENTION = (
    Key("num_attention_heads", "n_heads", Values.size, 32),
    Key("num_key_value_heads", "n_kv_heads", Values.size, 8),
)


def _read_mamba(values: Values, fields: dict[str, Any]) -> dict[str, Any]:
    width = fields["d_model"]
    inner = values.size("intermediate_size", width * fields["expand"])
    if inner % width:
        raise RunError(
            f"{CONFIG}: intermediate_size is {inner}, and here it is a multiple of hidden_size, "
            f"{width}"
        )
    return {"expand": inner // width, "dt_rank": values.size_or_auto("time_step_rank")}


MAMBA = Layout(
    *("mamba", "MambaForCausalLM", {"mamba": ("mixer", "norm.weight")}),
    keys=_keys(16, tied=True),
    heads=None,
    read=_read_mamba,
    write=lambda config: {
        "intermediate_size": config.expand * config.d_model,
        "time_step_rank": _whole(config)["dt_rank"],
    },
    fixed={"hidden_act": _SILU, "rms_norm": (True,)},
)
MAMBA2 = Layout(
    *("mamba2", "Mamba2ForCausalLM", {"mamba2": ("mixer", "norm.weight")}),
    keys=(*_keys(128, tied=False), _GROUPS, _LIMIT),
    heads=("num_heads", "head_dim"),
    read=lambda values, fields: {"layers": "mamba2"},
    write=lambda config: {},
    fixed=MAMBA.fixed,
)

_NEMOTRON = {"M": "mamba2", "*": "attention", "-": "mlp"}
_NAMES = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
_NAMES |= {"mlp": "-"}


def _read_nemotron_h(values: Values, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a list of names, or before transformers 5 of a text of a letter each."""
    listed = values.list_of(str, "layers_block_type")
    letters = [_NAMES.get(name, "?") for name in listed]
    letters = letters or [*str(values.content.get("hybrid_override_pattern") or "?")]
    if not {*letters} <= _NEMOTRON.keys():
        raise RunError(
            f"{CONFIG}: the layers are {listed or ''.join(letters)!r}, and here they are "
            "linear_attention (M), full_attention (*) and mlp (-)"
        )
    low = values.positive("time_step_min", 1e-3)  # transformers leaves time_step_limit out
    layers = _layers(tuple(_NEMOTRON[letter] for letter in letters))
    return {"dt_limit": (low, math.inf), "tie_embeddings": False, **layers}


def _write_nemotron_h(config: ModelConfig) -> dict[str, Any]:
    low, high = config.dt_limit
    if not low or high != math.inf:
        raise ValueError(
            f"dt_limit is {config.dt_limit}, and Nemotron-H's is a number above 0 and infinity, "
            "such as (1e-3, inf)"
        )
    letters = {kind: letter for letter, kind in _NEMOTRON.items()}
    names = {letter: name for name, letter in reversed(_NAMES.items())}
    pattern = "".join(letters[kind] for kind in config.kinds)
    return {
        "layers_block_type": [names[letter] for letter in pattern],
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": config.n_layers,
        "time_step_min": low,
        "mamba_proj_bias": config.use_bias,
    }


NEMOTRON_H = Layout(
    *("nemotron_h", "NemotronHForCausalLM"),
    dict.fromkeys(_NEMOTRON.values(), ("mixer", "norm.weight")),
    keys=(
        *(k._replace(name="ssm_state_size") if k.field == "d_state" else k for k in _keys(128)),
        *(_GROUPS, *_ATTENTION, Key("head_dim", "attention_head_dim", Values.size, 128)),
        Key("intermediate_size", "d_mlp", Values.size, 21504),
    ),
    heads=("mamba_num_heads", "mamba_head_dim"),
    read=_read_nemotron_h,
    write=_write_nemotron_h,
    fixed={"mlp_hidden_act": ("relu2",), "mamba_hidden_act": _SILU, "sliding_window": (None,)}
    | dict.fromkeys(("mlp_bias", "attention_bias", "tie_word_embeddings"), (False,)),
    copied_head=True,
)


def _read_bamba(values: Values, fields: dict[str, Any]) -> dict[str, Any]:
    rope = values.content.get("rope_parameters") or {}
    plain = isinstance(rope, dict) and rope.get("rope_type", "default") == "default"
    if not plain or values.content.get("rope_scaling"):
        raise RunError(f"{CONFIG}: rope_parameters is {rope!r}, and here rope_type is 'default'")
    theta = values.positive("rope_theta", 1e4)
    share = Values(rope).positive("partial_rotary_factor", 0.5)
    width = values.size("head_dim", max(1, fields["d_model"] // fields["n_heads"]))
    attention = values.list_of(int, "attn_layer_indices")
    first = ("attention" if i in attention else "mamba2" for i in range(fields["n_layers"]))
    return {
        "attention_head_dim": width,
        "rotary_dim": int(width * share),
        "rope_theta": Values(rope).positive("rope_theta", theta),
        **_layers(tuple(kind for each in first for kind in (each, "swiglu"))),
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


BAMBA = Layout(
    *("bamba", "BambaForCausalLM"),
    {
        "mamba2": ("mamba", "input_layernorm.weight"),
        "attention": ("self_attn", "input_layernorm.weight"),
        "swiglu": ("feed_forward", "pre_ff_layernorm.weight"),
    },
    keys=(
        Key("hidden_size", "d_model", Values.size, None),
        Key("num_hidden_layers", "n_layers", Values.size, None),
        Key("vocab_size", "vocab_size", Values.size, None),
        Key("mamba_expand", "expand", Values.size, 2),
        Key("mamba_d_state", "d_state", Values.size, 256),
        Key("mamba_d_conv", "d_conv", Values.size, 4),
        Key("mamba_n_groups", "n_groups", Values.size, 1),
        Key("mamba_proj_bias", "use_bias", Values.flag, False),
        Key("mamba_conv_bias", "use_conv_bias", Values.flag, True),
        Key("rms_norm_eps", "eps", Values.positive, 1e-5),
        Key("tie_word_embeddings", "tie_embeddings", Values.flag, False),
        *(_LIMIT, *_ATTENTION, Key("intermediate_size", "d_mlp", Values.size, 14336)),
    ),
    heads=("mamba_n_heads", "mamba_d_head"),
    read=_read_bamba,
    write=_write_bamba,
    fixed={"hidden_act": _SILU, "mlp_bias": (False,), "attention_bias": (False,)},
    outer=("model.embed_tokens.weight", "model.final_layernorm.weight"),
    halves=2,
)

LAYOUTS = {layout.model_type: layout for layout in (MAMBA, MAMBA2, NEMOTRON_H, BAMBA)}
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
