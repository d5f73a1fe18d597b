"""How transformers stores a language model of each kind of block.

A :class:`Layout` names the tensors of a layer and the keys of config.json that are the block's own;
what all kinds have in common stands in :mod:`jaxkern.lm.hf`, and so do the tables of both.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.nn import mamba, mamba2
from jaxkern.nn.common import Block

CONFIG = "config.json"
_LARGEST = 2**24  # of sizes: no product of them is beyond an array's


class Tensor(NamedTuple):
    """A tensor of a layer, and how theirs becomes ours and ours theirs."""

    name: str
    here: Callable[[np.ndarray], np.ndarray] = np.asarray
    back: Callable[[np.ndarray], np.ndarray] = np.asarray


def _matrix(name: str) -> Tensor:
    """A matrix that multiplies from the left."""
    return Tensor(name, np.transpose, np.transpose)


def _filter(name: str) -> Tensor:
    """A filter (channels, 1, W) of one group a channel."""
    return Tensor(name, lambda theirs: np.squeeze(theirs, 1), lambda ours: ours[:, None])


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
    """How transformers stores the language models of one kind of block.

    Attributes:
      block: the kind.
      model_type: what config.json calls it.
      architecture: the class of transformers.
      mixer: the tensors of a layer's mixer, by the names of the block's weights.
      tied: whether the output layer is the embedding if config.json does not say.
      read: the values of config.json -> the block's sizes.
      write: a model's shape -> the keys of config.json that are the block's.
    """

    block: Block
    model_type: str
    architecture: str
    mixer: Mapping[str, Tensor]
    tied: bool
    read: Callable[[Values], Any]
    write: Callable[[ModelConfig], dict[str, Any]]

    def layer(self, config: ModelConfig) -> dict[str, Tensor]:
        """The tensors of a layer of this model, by the names of its parameters."""
        mixer = {
            name: self.mixer[name]._replace(name=f"mixer.{self.mixer[name].name}")
            for name in self.block.initializers(config.sizes)
        }
        return {"norm": Tensor("norm.weight"), **mixer}


# What both kinds have

_MIXER = {
    "in_proj": _matrix("in_proj.weight"),
    "in_bias": Tensor("in_proj.bias"),
    "conv_weight": _filter("conv1d.weight"),
    "conv_bias": Tensor("conv1d.bias"),
    "A_log": Tensor("A_log"),
    "D": Tensor("D"),
    "out_proj": _matrix("out_proj.weight"),
    "out_bias": Tensor("out_proj.bias"),
}


def _read(values: Values, *, d_state: int) -> dict[str, Any]:
    return {
        "d_model": values.size("hidden_size"),
        "expand": values.size("expand", 2),
        "d_state": None if d_state == (size := values.size("state_size", d_state)) else size,
        "d_conv": values.size("conv_kernel", 4),
        "use_bias": values.flag("use_bias", False),
        "use_conv_bias": values.flag("use_conv_bias", True),
    }


def _write(sizes: mamba.Sizes | mamba2.Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.d_model,
        "expand": sizes.expand,
        "state_size": sizes.d_state,
        "conv_kernel": sizes.d_conv,
        "use_bias": sizes.use_bias,
        "use_conv_bias": sizes.use_conv_bias,
    }


# Mamba


def _read_mamba(values: Values) -> dict[str, Any]:
    sizes = _read(values, d_state=16)
    width = sizes["d_model"]
    inner = values.size("intermediate_size", width * sizes["expand"])
    if inner % width:
        raise RunError(
            f"{CONFIG}: intermediate_size is {inner}, and here it is a multiple of hidden_size, "
            f"{width}"
        )
    sizes["expand"] = inner // width
    rank = values.size_or_auto("time_step_rank")
    return sizes | {"dt_rank": None if rank == math.ceil(width / 16) else rank}


def _write_mamba(config: ModelConfig) -> dict[str, Any]:
    sizes = config.sizes
    assert isinstance(sizes, mamba.Sizes)
    return _write(sizes) | {"intermediate_size": sizes.d_inner, "time_step_rank": sizes.rank}


MAMBA = Layout(
    block=mamba.BLOCK,
    model_type="mamba",
    architecture="MambaForCausalLM",
    mixer=_MIXER
    | {
        "x_proj": _matrix("x_proj.weight"),
        "dt_proj": _matrix("dt_proj.weight"),
        "dt_bias": Tensor("dt_proj.bias"),
    },
    tied=True,
    read=_read_mamba,
    write=_write_mamba,
)


# Mamba-2


def _read_mamba2(values: Values) -> dict[str, Any]:
    sizes = _read(values, d_state=128)
    heads, headdim = values.size("num_heads", 128), values.size("head_dim", 64)
    inner = sizes["expand"] * sizes["d_model"]
    if heads * headdim != inner:
        raise RunError(
            f"{CONFIG}: num_heads · head_dim is {heads * headdim}, and here it is expand · "
            f"hidden_size, {inner}"
        )
    groups = values.size("n_groups", 8)
    if heads % groups:
        raise RunError(f"{CONFIG}: n_groups is {groups}, and here it divides num_heads, {heads}")
    return sizes | {
        "head_dim": headdim,
        "n_groups": groups,
        "dt_limit": values.limits("time_step_limit"),
    }


def _write_mamba2(config: ModelConfig) -> dict[str, Any]:
    sizes = config.sizes
    assert isinstance(sizes, mamba2.Sizes)
    if sizes.norm_groups not in (None, sizes.ngroups):
        raise ValueError(
            f"norm_groups is {sizes.norm_groups}, and transformers normalises as many groups of "
            f"channels as share B and C; it must be None or ngroups, {sizes.ngroups}"
        )
    if sizes.norm_eps != config.eps:
        raise ValueError(
            f"norm_eps is {sizes.norm_eps:g} and eps {config.eps:g}, and transformers has one "
            "epsilon for all norms; they must be equal"
        )
    return _write(sizes) | {
        "num_heads": sizes.heads,
        "head_dim": sizes.headdim,
        "n_groups": sizes.ngroups,
        "time_step_limit": list(sizes.dt_limit),
    }


MAMBA2 = Layout(
    block=mamba2.BLOCK,
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    mixer=_MIXER | {"dt_bias": Tensor("dt_bias"), "norm_weight": Tensor("norm.weight")},
    tied=False,
    read=_read_mamba2,
    write=_write_mamba2,
)

LAYOUTS = {layout.model_type: layout for layout in (MAMBA, MAMBA2)}
"""The layouts, by the ``model_type`` of config.json."""


def layout_of(config: ModelConfig) -> Layout:
    """The layout of the models of this one's kind of block."""
    return next(layout for layout in LAYOUTS.values() if layout.block is config.block)
