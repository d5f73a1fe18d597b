"""The configuration of a run, which command line, YAML file and Python share.

A run's is its preset's, changed by a file, changed by flags; a preset is such a file, too. Imports
neither JAX nor an optional package but PyYAML: --help waits for none.
"""

import contextlib
import dataclasses
import difflib
import functools
import glob
import math
import numbers
import os
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

import yaml

if TYPE_CHECKING:
    from jaxkern.nn import delta_net, mamba, mamba2
    from jaxkern.nn.common import Block


class RunError(Exception):
    """Something the user can put right; shown as one line, without a stack trace."""


class FlagError(RunError):
    """A setting of a name, which `what` says is wrong or unknown."""

    def __init__(self, name: str, what: str):
        super().__init__(f"--{name.replace('_', '-')} {what}")
        self.name, self.what = name, what


class Rule(NamedTuple):
    """A rule for the values of a field, in its type: ``Annotated[int, Rule("even", …)]``."""

    words: str
    holds: Callable[[Any], Any]


_INT32 = "from 1 to 2^31 - 1", "from 0 to 2^31 - 1"  # counters of steps, sizes of axes
Count = Annotated[int, Rule(_INT32[0], lambda value: 1 <= value < 2**31)]
Whole = Annotated[int, Rule(_INT32[1], lambda value: 0 <= value < 2**31)]
Size = Annotated[int, Rule("at least 1", lambda value: value >= 1)]
Positive = Annotated[float, Rule("above 0 and finite", lambda value: 0 < value < math.inf)]
Temperature = Annotated[float, Rule("at least 0 and finite", lambda value: 0 <= value < math.inf)]
Probability = Annotated[float, Rule("above 0 and at most 1", lambda value: 0 < value <= 1)]
Below1 = Annotated[float, Rule("at least 0 and below 1", lambda value: 0 <= value < 1)]
# A float32, and its product with the schedule's factors.
Float32 = Annotated[float, Rule("from 1e-30 to 1e+30", lambda value: 1e-30 <= value <= 1e30)]

_WORDS = {str: "a text", bool: "True or False", int: "a whole number", float: "a number"}
_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}
_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def check_fields(config: Any, prefix: str | None = "") -> None:
    """Bring the fields of a dataclass to their types, and refuse what is of none or breaks a rule.

    Lists become tuples, and texts such as 1e-3, which is one to YAML, numbers where these belong.
    Where the fields are flags of this prefix, a FlagError tells of a wrong one, else TypeError or
    ValueError.
    """
    for field in dataclasses.fields(config):
        hint = _hints(type(config))[field.name]
        value = getattr(config, field.name)
        try:
            object.__setattr__(config, field.name, typed(hint, value))
        except (TypeError, ValueError) as error:
            what = f"must be {error}, got {value!r:.80}"
            if prefix is None:
                raise type(error)(f"{field.name} {what}") from None
            raise FlagError(prefix + field.name, what) from None


def typed(hint: Any, value: Any) -> Any:
    """The value as that type; TypeError or ValueError says what it must be."""
    kinds = get_args(hint)
    if hasattr(hint, "__metadata__"):  # Annotated
        value = typed(hint.__origin__, value)
        for rule in hint.__metadata__:
            if isinstance(rule, Rule) and not rule.holds(value):
                raise ValueError(rule.words)
        return value
    if type(None) in kinds:
        try:
            return None if value is None else typed(kinds[0], value)
        except TypeError as error:
            raise TypeError(f"{error} or None") from None
    if get_origin(hint) is Literal:
        if value not in kinds:
            raise ValueError(f"one of {', '.join(kinds)}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError("a list")
        return tuple(typed(kinds[0], each) for each in value)
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    of_kind = isinstance(value, _NUMBERS.get(hint, hint))
    if not of_kind or (isinstance(value, bool) and hint is not bool):
        raise TypeError(_WORDS.get(hint, f"a {hint.__name__}"))
    return hint(value) if hint in _NUMBERS else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of drawing tokens.

    Attributes:
      length: tokens to write.
      temperature: lower is less random, 0 is not at all.
      top_k: draw from the K likeliest of them, 0 from all.
      top_p: draw from the likeliest that together have this probability.
      seed: of the first text's draws; the second text has the next number, and so on.
    """

    length: Whole = 400
    temperature: Temperature = 0.8
    top_k: Whole = 40
    top_p: Probability = 1.0
    seed: Whole = 0

    def __post_init__(self):
        check_fields(self, prefix=None)


Axis = Literal["data", "sequence", "fsdp", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""The axes of a mesh; those whose devices exchange most come last, as these are neighbours.

Over `sequence` these are states of the scans, which do not grow with the length: for a few
sequences on a device fewer bytes than a layer's matrices, over `fsdp`.
"""

Remat = Literal["none", "cheap", "scan", "layer"]
REMATS: tuple[Remat, ...] = get_args(Remat)
DEFAULT_REMAT: Remat = "none"
"""Levels of recomputation in the backward, from nothing to whole layers."""

BLOCKS = ("mamba", "mamba2", "gdn", "kda")
"""The recurrent blocks, of the last two Gated DeltaNet and Kimi Delta Attention; every model has
layers of one of them."""

LAYERS = (*BLOCKS, "attention", "mlp", "swiglu")
"""The kinds of layer: a block, attention, an MLP with relu² or with a gate."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the language model.

    Attributes:
      d_model: width of the residual stream.
      n_layers: how many layers.
      layers: their kinds in order, such as "mamba2" or "mamba2*7, attention": mamba, mamba2, gdn
        (Gated DeltaNet), kda (Kimi Delta Attention), attention, mlp (relu²) or swiglu, each with
        how often it stands there. Shorter than n_layers it repeats, and then divides it. All blocks
        of a model, which mamba, mamba2, gdn and kda are, are of one kind.
      d_state: states a channel of a block, in gdn and kda the key channels of a head; None for 16
        of Mamba, 128 of Mamba-2 and head_dim of gdn and kda.
      d_conv: taps of a block's convolution.
      expand: inner channels of a block, as a multiple of d_model.
      head_dim: channels a head of Mamba-2, and value channels a head of gdn and kda.
      n_groups: groups of heads of Mamba-2 that share B and C.
      n_key_heads: heads of q and k of gdn, a divisor of those of v; None for as many.
      norm_groups: groups of channels that Mamba-2 normalises together; None for n_groups.
      norm_eps: of the norm in Mamba-2, gdn and kda; None for eps.
      dt_rank: width of the projection to Mamba's step sizes; None for d_model / 16.
      dt_limit: least and largest step size of Mamba-2.
      use_bias: whether the projections of a block have biases.
      use_conv_bias: whether its convolution has one.
      n_heads: query heads of attention; None for as many as d_model has 64 channels.
      n_kv_heads: heads of keys and values, a divisor of n_heads; None for n_heads.
      attention_head_dim: channels a head of attention; None for d_model / n_heads.
      rotary_dim: channels of such a head that positions rotate, the first ones; 0 for none.
      rope_theta: the base of the rotations' wavelengths.
      d_mlp: width of an MLP; None for 4 · d_model.
      vocab_size: tokens that there are.
      tie_embeddings: whether the output layer is the embedding, transposed.
      eps: of the norms before the layers and of the last one.
      dropout: rate of zeros in what a layer adds to the stream, in training.

    Raises:
      TypeError: a value is of another type.
      ValueError: a number is out of range, does not divide what it must, or layers does not fit.

    Example:
      >>> from jaxkern.lm.config import ModelConfig
      >>> config = ModelConfig(768, 24, layers="mamba2*7, attention", n_kv_heads=4)
      >>> config.kinds[-2:], config.count("attention"), config.sizes.heads
      (('mamba2', 'attention'), 3, 24)
    """

    d_model: Size
    n_layers: Size
    layers: str = "mamba"
    _: dataclasses.KW_ONLY
    d_state: Size | None = None
    d_conv: Size = 4
    expand: Size = 2
    head_dim: Size = 64
    n_groups: Size = 1
    n_key_heads: Size | None = None
    norm_groups: Size | None = None
    norm_eps: Positive | None = None
    dt_rank: Size | None = None
    dt_limit: tuple[float, float] = (0.0, math.inf)
    use_bias: bool = False
    use_conv_bias: bool = True
    n_heads: Size | None = None
    n_kv_heads: Size | None = None
    attention_head_dim: Size | None = None
    rotary_dim: Annotated[int, Rule("at least 0", lambda value: value >= 0)] = 0
    rope_theta: Positive = 1e4
    d_mlp: Size | None = None
    vocab_size: Size = 256
    tie_embeddings: bool = True
    eps: Positive = 1e-5
    dropout: Below1 = 0.0

    def __post_init__(self):
        check_fields(self, prefix=None)
        if len(self.dt_limit) != 2 or not self.dt_limit[0] <= self.dt_limit[1]:
            raise ValueError(f"dt_limit must be two numbers in order, got {self.dt_limit!r}")
        (queries, keys), width = self.heads
        inner, divisors = self.expand * self.d_model, []
        told = "the inner channels, expand · d_model"
        of_heads = "the heads, expand · d_model / head_dim"
        if "mamba" not in self.kinds:
            divisors = [("head_dim", self.head_dim, told, inner)]
        if "mamba2" in self.kinds:
            divisors += [
                ("n_groups", self.n_groups, of_heads, inner // self.head_dim),
                ("norm_groups", self.norm_groups or 1, told, inner),
            ]
        if "gdn" in self.kinds:
            divisors += [("n_key_heads", self.n_key_heads or 1, of_heads, inner // self.head_dim)]
        if "attention" in self.kinds:
            split = self.attention_head_dim is None
            divisors += [
                ("n_heads", queries if split else 1, "d_model", self.d_model),
                ("n_kv_heads", keys, "n_heads", queries),
            ]
            if self.rotary_dim > width or self.rotary_dim % 2:
                rule = f"even and at most the {width} channels of a head of attention"
                raise ValueError(f"rotary_dim must be {rule}, got {self.rotary_dim}")
        for name, value, told, whole in divisors:
            if whole % value:
                raise ValueError(f"{name} must divide {told} = {whole}, got {value}")

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, of :data:`LAYERS`."""
        pattern: list[str] = []
        for entry in self.layers.split(","):
            name, times, count = (part.strip() for part in entry.partition("*"))
            if name not in LAYERS or (times and not re.fullmatch("[1-9][0-9]{0,4}", count)):
                rule = f"names of {', '.join(LAYERS)}, such as 'mamba2*7, attention'"
                raise ValueError(f"layers must be {rule}, got {self.layers!r}")
            pattern += [name] * int(count or 1)
        if self.n_layers % len(pattern):
            what = f"n_layers must be a multiple of the {len(pattern)} of layers {self.layers!r}"
            raise ValueError(f"{what}, got {self.n_layers}")
        if len({*pattern} & {*BLOCKS}) != 1:
            rule = f"must have one of {', '.join(BLOCKS)}, and not several"
            raise ValueError(f"layers {rule}; got {self.layers!r}")
        return tuple(pattern) * (self.n_layers // len(pattern))

    @property
    def pattern(self) -> tuple[str, ...]:
        """The shortest run of kinds of which `kinds` are repeats."""
        return shortest_repeat(self.kinds)

    def count(self, kind: str) -> int:
        """Number of layers of a kind."""
        return self.kinds.count(kind)

    @property
    def hybrid(self) -> bool:
        """Whether there are layers of more than one kind."""
        return len(self.pattern) > 1

    @property
    def block(self) -> "Block":
        """The block of its recurrent layers."""
        # Which import JAX, and --help does not wait for it.
        from jaxkern.nn import delta_net, mamba, mamba2

        of_delta = delta_net.GATED_DELTA_NET, delta_net.KIMI_DELTA_ATTENTION
        blocks = mamba.BLOCK, mamba2.BLOCK, *of_delta
        return next(block for block in blocks if block.name in self.kinds)

    @functools.cached_property
    def sizes(self) -> "mamba.Sizes | mamba2.Sizes | delta_net.Sizes":
        """The dimensions of that block."""
        from jaxkern.nn import delta_net, mamba, mamba2

        names = "d_conv", "use_bias", "use_conv_bias"
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        if {"gdn", "kda"} & {*self.kinds}:
            shared |= {"num_heads": self.expand * self.d_model // self.head_dim}
            shared |= {"d_key": self.d_state or self.head_dim, "d_value": self.head_dim}
            shared |= {"norm_eps": self.norm_eps or self.eps}
            if "kda" in self.kinds:
                return delta_net.KimiDeltaAttentionSizes(self.d_model, **shared)
            keys = self.n_key_heads
            return delta_net.GatedDeltaNetSizes(self.d_model, **shared, num_key_heads=keys)
        shared["expand"] = self.expand
        if self.d_state is not None:
            shared["d_state"] = self.d_state
        if "mamba" in self.kinds:
            return mamba.Sizes(self.d_model, **shared, dt_rank=self.dt_rank)
        return mamba2.Sizes(
            self.d_model,
            **shared,
            headdim=self.head_dim,
            ngroups=self.n_groups,
            norm_groups=self.norm_groups,
            norm_eps=self.norm_eps or self.eps,
            dt_limit=self.dt_limit,
        )

    @property
    def heads(self) -> tuple[tuple[int, int], int]:
        """Heads of attention, of queries and of keys and values; and the channels of one."""
        queries = self.n_heads or max(1, self.d_model // 64)
        width = self.attention_head_dim or self.d_model // queries
        return (queries, self.n_kv_heads or queries), width

    @property
    def mlp_width(self) -> int:
        """The inner channels of an MLP."""
        return self.d_mlp or 4 * self.d_model


def shortest_repeat(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest tuple of which another one is repeats."""
    sizes = (size for size in range(1, len(kinds) + 1) if len(kinds) % size == 0)
    return next(kinds[:size] for size in sizes if kinds[:size] * (len(kinds) // size) == kinds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and the rate by which it learns.

    Attributes:
      lr: peak learning rate; --lr for short.
      schedule: what follows a linear warm-up: a cosine to the last step; wsd, lr until a straight
        line at the end; or constant.
      warmup: steps of the warm-up; by default a tenth of the run, at most 500.
      decay: steps of that line of wsd; by default a tenth of the run.
      final: the rate at the last step, as a part of lr.
      b1: how much of the gradients' mean stays from step to step.
      b2: the same of their squares.
      eps: added to the root of the squares' mean.
      weight_decay: of matrices, times the learning rate; nothing else decays.
      clip_norm: global norm that longer gradients are shortened to; None for no limit.

    Raises:
      FlagError: a value is out of range.
    """

    lr: Float32
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: Whole | None = None
    decay: Count | None = None
    final: Annotated[float, Rule("from 0 to 1", lambda value: 0 <= value <= 1)] = 0.1
    b1: Below1 = 0.9
    b2: Below1 = 0.95
    eps: Float32 = 1e-8
    weight_decay: Annotated[float, Rule("from 0 to 1e+30", lambda v: 0 <= v <= 1e30)] = 0.1
    clip_norm: Float32 | None = 1.0

    def __post_init__(self):
        check_fields(self, "optimizer.")


_AXIS = f"({'|'.join(AXES)})=[1-9][0-9]{{0,5}}"
_MESH = Rule(
    f"axes and their sizes such as data=2,fsdp=4, each of {', '.join(AXES)} at most once",
    lambda text: (
        not text
        or (re.fullmatch(f"({_AXIS},)*{_AXIS}", text) and len(axes_of(text)) == text.count("="))
    ),
)
_DEVICES = Rule("a number, all or auto", lambda text: re.fullmatch("auto|all|[1-9]\\d{0,8}", text))
_LOG_TO = Rule("none alone, or without it", lambda names: "none" not in names or len(names) == 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a training run.

    Attributes:
      preset: kind and size of the model, and what suits it, by a file of jaxkern/lm/presets: micro,
        tiny, 130m, 370m, 1.4b, mamba2-micro, mamba2-130m, mamba2-370m, mamba2-780m, mamba2-1.3b,
        gdn-130m, gdn-hybrid-130m, gdn-370m or kda-130m.
      model: shape of the language model.
      optimizer: AdamW and its rate.
      init_hf: begin with a checkpoint in the layout of Hugging Face, in this folder; the model has
        its shape, and what is not given the default of the preset most like it.
      data: files of text, JSON Lines or Parquet, also .gz or .zst; folders and patterns of them.
        PATH:FIELD names the field or column of the documents (text), and =WEIGHT behind it the
        share of what is drawn. By default Python's standard library.
      eval_data: files to validate with, as for --data, a part of which is held out by default.
      data_cache: folder for the tokens, which runs may share; by default that of the run.
      tokenizer: bytes; a tokenizer.json of Hugging Face or its folder; or bpe:32000, which trains a
        byte-level BPE of that many tokens on --data.
      vocab_size: tokens of the model; by default those of the tokenizer, rounded up to 64.
      pack: keep documents apart that share a sequence, and see each once in an epoch; else
        sequences begin anywhere. On for tokens, weights and --eval-data, off for bytes.
      steps: optimizer steps.
      batch_size: sequences per step.
      seq_len: tokens per sequence.
      grad_accum: parts that a batch is computed in, one after another.
      mixed_precision: fp32, bf16, fp16 (with loss scaling), or for example
        params=float32,compute=bfloat16,output=float32.
      remat: what the backward computes again to save memory: none; cheap, what of a block waits for
        memory alone; scan, this, convolutions and its scan; or, which --remat alone means, the
        layer. auto is cheap where all layers are of Mamba or Mamba-2, at 3 to 5% of the speed, else
        none.
      scan_layers: run the layers in a loop: a smaller program, slower steps.
      implementation: of the ops: auto (the fastest), mosaic (GPU kernels), xla.
      devices: how many share each batch, those of all processes, or all; auto is all GPUs or one
        CPU, all with --parallel or of several processes.
      parallel: what devices share: data, the batch; sequence, each sequence; fsdp, the batch and
        the matrices; tensor, the channels of each block. None is data.
      mesh: several of these, and how many devices each takes, for example data=2,fsdp=4; by
        default all for --parallel.
      seed: of the parameters, the order of the data and dropout.
      log_every: steps between two reports.
      eval_every: steps between two validations.
      eval_batches: batches per validation.
      checkpoint_every: steps between two checkpoints; of these --keep stay.
      keep: how many checkpoints stay, the newest; a new one that is whole removes the oldest.
      log_to: beside metrics.jsonl: tensorboard, wandb or both.

    Raises:
      RunError: a value is out of range or of another type, or two do not go together.

    Example:
      >>> from jaxkern.lm.config import PRESETS, TrainConfig
      >>> config = TrainConfig.from_flags({"preset": "tiny", "model.d_model": 256, "lr": 1e-3})
      >>> config.model.d_model, config.optimizer.lr, config.steps
      (256, 0.001, 240)
    """

    preset: str = "tiny"
    model: ModelConfig
    optimizer: OptimizerConfig
    init_hf: str = ""
    data: tuple[str, ...] = ()
    eval_data: tuple[str, ...] = ()
    data_cache: str | None = None
    tokenizer: str = "bytes"
    vocab_size: Count | None = None
    pack: bool = False
    steps: Count = 10_000
    batch_size: Count = 8
    seq_len: Count = 2048
    grad_accum: Count = 1
    mixed_precision: str = "fp32"
    remat: Literal["auto", Remat] = "auto"
    scan_layers: bool = False
    implementation: Literal["auto", "mosaic", "xla"] = "auto"
    devices: Annotated[str, _DEVICES] = "auto"
    parallel: Axis | None = None
    mesh: Annotated[str, _MESH] = ""
    seed: Whole = 0
    log_every: Count = 10
    eval_every: Count = 500
    eval_batches: Count = 16
    checkpoint_every: Count = 100
    keep: Count = 3
    log_to: Annotated[tuple[Literal["tensorboard", "wandb", "none"], ...], _LOG_TO] = ()

    def __post_init__(self):
        check_fields(self)
        if "float64" in self.mixed_precision:
            what = f"{self.mixed_precision}: float64 is more than the float32 that scans are in"
            raise FlagError("mixed_precision", what)
        if self.parallel and self.mesh and axes_of(self.mesh).keys() != {self.parallel}:
            what = f"{self.parallel} and --mesh {self.mesh} name different axes; leave one out"
            raise FlagError("parallel", what)
        become = functools.partial(object.__setattr__, self)
        become("log_to", tuple(name for name in self.log_to if name != "none"))
        # None stands for what the tokenizer has, until that is known: see `for_tokens`.
        if self.vocab_size is None and self.model.vocab_size != _BYTES:
            become("vocab_size", self.model.vocab_size)
        if self.vocab_size not in (None, self.model.vocab_size):
            become("model", dataclasses.replace(self.model, vocab_size=self.vocab_size))
        weighted = any(split_weight(text)[1] is not None for text in self.data)
        become("pack", self.pack or self.tokenizer != "bytes" or bool(self.eval_data) or weighted)

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up, of which the last has the peak rate."""
        given = self.optimizer.warmup
        return max(1, min(500, self.steps // 10) if given is None else given)

    @property
    def decay(self) -> int:
        """Steps of the line at the end of the schedule wsd."""
        return self.optimizer.decay or max(1, self.steps // 10)

    @property
    def device_count(self) -> int | None:
        """The number of devices that --devices or --mesh name, or ``None``."""
        if self.mesh and self.devices == "auto":
            return math.prod(axes_of(self.mesh).values())
        return int(self.devices) if self.devices.isdigit() else None

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any], file: Path | None = None) -> "TrainConfig":
        """Build a configuration from what differs from a preset's.

        Args:
          flags: values by name; of model and optimizer ``"model.d_model"``, or a table or all of
            it as ``"model"``.
          file: of YAML, with the same names; flags override it.

        Raises:
          RunError: a name or a value is wrong; the message says of which, and what is right.
        """
        given, asked = settings(flags, file), flags.get("vocab_size")
        config = _built(_of_preset(given) | given)
        if config.tokenizer == "bytes" and not config.init_hf and asked not in (None, _BYTES):
            raise FlagError("vocab_size", f"{asked}: bytes are 256 tokens; add --tokenizer")
        return config

    def with_values(self, values: Mapping[str, Any]) -> "TrainConfig":
        """The configuration with other values, by names such as ``"model.d_model"``."""
        return _built(_flat(self) | dict(values))

    def save(self, path: Path) -> None:
        """Write the configuration as a file that `load` reads, and ``jaxkern train --config``."""
        flags = dataclasses.asdict(self)
        del flags["model"]["vocab_size"]  # which the run's is
        path.write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "TrainConfig":
        """Read a configuration, of a run or one's own; what it leaves out is the preset's."""
        return cls.from_flags({}, Path(path))

    def for_tokens(self, size: int) -> "TrainConfig":
        """The configuration for a tokenizer of that many tokens, whose model has them all.

        Without --vocab-size it has the next multiple of 64: products of matrices are fastest so.
        """
        given = self.model.vocab_size if self.init_hf else self.vocab_size
        if given and given < size:
            whose = f"--init-hf {self.init_hf}" if self.init_hf else "--vocab-size"
            what = f"{self.tokenizer} has {size} tokens, more than the {given} of {whose}"
            raise FlagError("tokenizer", what)
        return dataclasses.replace(self, vocab_size=given or -(-size // 64) * 64)


_BYTES = 256  # tokens
_TABLES: dict[str, Any] = {"model": ModelConfig, "optimizer": OptimizerConfig}
_NAMES = {field.name for field in dataclasses.fields(TrainConfig)} - {*_TABLES} | {
    f"{name}.{field.name}" for name in _TABLES for field in dataclasses.fields(_TABLES[name])
}
ALIASES = {"lr": "optimizer.lr", "model.vocab_size": "vocab_size"}
"""Other names of settings."""


def settings(flags: Mapping[str, Any], file: Path | None = None) -> dict[str, Any]:
    """Settings of flags, else of a file, by names such as ``"model.d_model"``."""
    given, written = _named(flags), _read(file) if file else {}
    if given.keys() & {"parallel", "mesh"}:  # one of them says how devices are used anew
        written = {k: v for k, v in written.items() if k not in ("parallel", "mesh", "devices")}
    return written | given


def _named(values: Mapping[str, Any], table: str = "") -> dict[str, Any]:
    """Settings by their whole names; a value may be a table, or all of model or optimizer."""
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = ALIASES.get(f"{table}{given}", f"{table}{given}")
        if name in _NAMES:
            found[name] = value
        elif isinstance(value, _TABLES.get(name, ())):
            found |= _flat(value, f"{name}.")
        elif name in _TABLES and isinstance(value, Mapping):
            found |= _named(value, f"{name}.")
        elif name in _TABLES:
            raise FlagError(name, f"must be a table, got {value!r:.40}")
        else:
            near = difflib.get_close_matches(name, _NAMES, 1)
            remedy = f"did you mean {near[0]}?" if near else "jaxkern train --help names all"
            raise FlagError(name, f"is no setting of a run; {remedy}")
    return found


def _flat(config: Any, table: str = "") -> dict[str, Any]:
    """The settings of a dataclass by their whole names."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        inner = field.name in _TABLES
        found |= _flat(value, f"{field.name}.") if inner else {f"{table}{field.name}": value}
    return found


def _built(values: dict[str, Any]) -> TrainConfig:
    """The configuration of settings by their whole names."""
    tables: dict[str, dict[str, Any]] = {"": {}} | {table: {} for table in _TABLES}
    for name, value in values.items():
        table, _, field = name.rpartition(".")
        tables[table][field] = value
    try:
        built = {table: kind(**tables[table]) for table, kind in _TABLES.items()}
    except (TypeError, ValueError) as error:  # of the model's shape
        name, _, what = str(error).partition(" ")
        raise FlagError(f"model.{name}", what) from None
    return TrainConfig(**tables[""], **built)


def _read(path: Path) -> dict[str, Any]:
    """The settings of a file of YAML, all of which are right."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise RunError(f"{path} cannot be read ({reason}); it must be a file of YAML") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} must be a table of names and values, got {values!r:.40}")
    try:
        found = _named(values)
        _built(_of_preset(found) | found)
    except FlagError as error:
        raise RunError(f"{path}: {error.name} {error.what}") from None
    return found


def _of_preset(values: dict[str, Any]) -> dict[str, Any]:
    """All settings of the preset that values name."""
    name = values.get("preset", TrainConfig.preset)
    if name not in PRESETS:
        raise FlagError("preset", f"must be one of {', '.join(PRESETS)}, got {name!r}")
    return _flat(PRESETS[name])


def split_weight(text: str) -> tuple[str, float | None]:
    """Part an argument of --data at the = before its weight, a number, if there is one."""
    found = None if is_there(text) else re.fullmatch(r"(.+)=([-+\d.e]+)", text, re.I | re.S)
    with contextlib.suppress(ValueError):
        return (found[1], float(found[2])) if found else (text, None)
    return text, None


def is_there(path: str) -> bool:
    """Whether a path, or a pattern of some, names files or folders."""
    return os.path.exists(path) or (glob.has_magic(path) and bool(glob.glob(path, recursive=True)))


def axes_of(mesh: str) -> dict[str, int]:
    """The sizes of a mesh's axes from the text of ``--mesh``, such as ``"data=2,fsdp=4"``."""
    pairs = (entry.split("=") for entry in mesh.split(",") if mesh)
    return {axis: int(size) for axis, size in pairs}


def _preset(name: str) -> TrainConfig:
    text = (Path(__file__).parent / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    return _built(_named({"preset": name} | yaml.safe_load(text)))


_MAMBA2 = ("mamba2-micro", "mamba2-130m", "mamba2-370m", "mamba2-780m", "mamba2-1.3b")
_DELTA = ("gdn-130m", "gdn-hybrid-130m", "gdn-370m", "kda-130m")
PRESETS = {
    name: _preset(name) for name in ("micro", "tiny", "130m", "370m", "1.4b", *_MAMBA2, *_DELTA)
}
