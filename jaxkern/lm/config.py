"""The configuration of a run: what the command line, a YAML file and Python say in one.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml

if TYPE_CHECKING:
    from jaxkern.nn import mamba, mamba2
    from jaxkern.nn.common import Block


class RunError(Exception):
    """Something the user can put right; shown as one line, without a stack trace."""


class FlagError(RunError):
    """A setting of a name, which `what` says is wrong or unknown."""

    def __init__(self, name: str, what: str):
        super().__init__(f"--{name.replace('_', '-')} {what}")
        self.name, self.what = name, what


class SplitError(RunError):
    """A run that devices cannot share as it is asked; `what` is the message without its remedy."""

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what}; {remedy}")
        self.what = what


@dataclasses.dataclass(frozen=True)
class Limits:
    """The numbers that a flag may have."""

    kind: Callable[[Any], Any]  # int or float
    low: float
    high: float = math.inf
    zero: bool = False  # is allowed although it is lower

    def check(self, value: Any) -> Any:
        """Return `value`; raise ValueError if it is of another kind or not within the limits."""
        kind: Any = numbers.Integral if self.kind is int else numbers.Real
        if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(value)
        if not self.low <= value <= self.high and not (self.zero and value == 0):
            raise ValueError(value)
        return value

    def __str__(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        zero = "0, or " if self.zero else ""
        if self.high == math.inf:
            return f"{zero}{kind}, at least {self.low:g}"
        high = "2^31 - 1" if self.high == _INT32 else f"{self.high:g}"
        return f"{zero}{kind} from {self.low:g} to {high}"


_INT32 = 2**31 - 1  # counters of steps, sizes of axes
_COUNT, _WHOLE = Limits(int, 1, _INT32), Limits(int, 0, _INT32)
_BELOW_1 = Limits(float, 0, 0.99999)

LIMITS = {
    **dict.fromkeys(("steps", "batch_size", "seq_len", "vocab_size", "keep"), _COUNT),
    **dict.fromkeys(("log_every", "eval_every", "eval_batches", "checkpoint_every"), _COUNT),
    **dict.fromkeys(("grad_accum", "decay"), _COUNT),
    **dict.fromkeys(("seed", "warmup"), _WHOLE),
    "lr": Limits(float, 1e-30, 1e30),  # a float32, and its product with the schedule's factors
    "final": Limits(float, 0, 1),
    "b1": _BELOW_1,
    "b2": _BELOW_1,
    "eps": Limits(float, 1e-30, 1e30),
    "weight_decay": Limits(float, 0, 1e30),
    "clip_norm": Limits(float, 1e-30, 1e30),
    "length": Limits(int, 1),
    "temperature": Limits(float, 1e-4, 1e4, zero=True),
    "top_k": Limits(int, 0),
    "top_p": Limits(float, 1e-6, 1),
    "processes": Limits(int, 1),
    "process": Limits(int, 0),
    "step": Limits(int, 1),
}

Axis = Literal["data", "sequence", "fsdp", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""The axes of a mesh; those whose devices exchange most come last, as these are neighbours.

Over `sequence` these are states of the scans, which do not grow with the length: for a few
sequences on a device fewer bytes than a layer's matrices, over `fsdp`.
"""

Tracker = Literal["tensorboard", "wandb"]
TRACKERS: tuple[Tracker, ...] = get_args(Tracker)

Remat = Literal["none", "cheap", "scan", "layer"]
REMATS: tuple[Remat, ...] = get_args(Remat)
DEFAULT_REMAT: Remat = "none"
"""What the backward computes again, from nothing to whole layers."""

BLOCKS = ("mamba", "mamba2")
"""The state space blocks; every model has layers of one of them."""

LAYERS = (*BLOCKS, "attention", "mlp", "swiglu")
"""The kinds of layer: a block, attention, an MLP with relu² or with a gate."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the language model.

    Attributes:
      d_model: width of the residual stream.
      n_layers: how many layers.
      layers: their kinds in order, such as ``"mamba2"`` or ``"mamba2*7, attention"``: names of
        :data:`LAYERS`, each with how often it stands there. Shorter than `n_layers` it repeats, and
        then divides it. All blocks of a model are Mamba's or Mamba-2's.
      d_state: states a channel of a block; ``None`` for 16 of Mamba and 128 of Mamba-2.
      d_conv: taps of a block's convolution.
      expand: inner channels of a block, in `d_model`.
      head_dim: channels a head of Mamba-2.
      n_groups: groups of heads of Mamba-2 that share B and C.
      norm_groups: groups of channels that Mamba-2 normalises together; ``None`` for `n_groups`.
      norm_eps: of the norm in Mamba-2; ``None`` for `eps`.
      dt_rank: width of the projection to Mamba's step sizes; ``None`` for `d_model` / 16.
      dt_limit: least and largest step size of Mamba-2.
      use_bias: whether the projections of a block have biases.
      use_conv_bias: whether its convolution has one.
      n_heads: query heads of attention; ``None`` for as many as `d_model` has 64 channels.
      n_kv_heads: heads of keys and values, a divisor of `n_heads`; ``None`` for `n_heads`.
      attention_head_dim: channels a head of attention; ``None`` for `d_model` / `n_heads`.
      rotary_dim: channels of such a head that positions rotate, the first ones; 0 for none.
      rope_theta: the base of the rotations' wavelengths.
      d_mlp: width of an MLP; ``None`` for 4 · `d_model`.
      vocab_size: tokens that there are.
      tie_embeddings: whether the output layer is the embedding, transposed.
      eps: of the norms before the layers and of the last one.
      dropout: rate of zeros in what a layer adds to the stream, in training.

    Raises:
      TypeError: a value is of another type.
      ValueError: a number is out of range, does not divide what it must, or `layers` does not fit.

    Example:
      >>> from jaxkern.lm.config import ModelConfig
      >>> config = ModelConfig(768, 24, layers="mamba2*7, attention", n_kv_heads=4)
      >>> config.kinds[-2:], config.count("attention"), config.sizes.heads
      (('mamba2', 'attention'), 3, 24)
    """

    d_model: int
    n_layers: int
    layers: str = "mamba"
    _: dataclasses.KW_ONLY
    d_state: int | None = None
    d_conv: int = 4
    expand: int = 2
    head_dim: int = 64
    n_groups: int = 1
    norm_groups: int | None = None
    norm_eps: float | None = None
    dt_rank: int | None = None
    dt_limit: tuple[float, float] = (0.0, math.inf)
    use_bias: bool = False
    use_conv_bias: bool = True
    n_heads: int | None = None
    n_kv_heads: int | None = None
    attention_head_dim: int | None = None
    rotary_dim: int = 0
    rope_theta: float = 1e4
    d_mlp: int | None = None
    vocab_size: int = 256
    tie_embeddings: bool = True
    eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name = field.name
            value: Any = getattr(self, name)
            told, right = _TYPES.get(field.type, (None, object))
            if not isinstance(value, right) or (isinstance(value, bool) and field.type is not bool):
                raise TypeError(f"{name} must be {told}, got {value!r}")
            if isinstance(value, (bool, str, type(None), tuple, list)):
                continue
            zero = name in ("rotary_dim", "dropout")
            if not 0 <= value < math.inf or (value == 0 and not zero):
                whole = field.type in (int, int | None)
                rule = f"at least {1 - zero}" if whole else "above 0 and finite"
                raise ValueError(f"{name} must be {rule}, got {value!r}")
        if self.dropout >= 1:
            raise ValueError(f"dropout must be below 1, got {self.dropout!r}")
        object.__setattr__(self, "dt_limit", tuple(self.dt_limit))  # of a list, from a file
        numbers_only = all(isinstance(each, numbers.Real) for each in self.dt_limit)
        if len(self.dt_limit) != 2 or not numbers_only or self.dt_limit[0] > self.dt_limit[1]:
            raise ValueError(f"dt_limit must be two numbers in order, got {self.dt_limit!r}")
        if "mamba2" in self.kinds:
            self._check_mamba2()
        if "attention" in self.kinds:
            self._check_attention()

    def _check_mamba2(self) -> None:
        inner = self.expand * self.d_model
        for name, told, whole in (
            ("head_dim", "the inner channels, expand · d_model", inner),
            ("n_groups", "the heads, expand · d_model / head_dim", inner // self.head_dim),
            ("norm_groups", "the inner channels, expand · d_model", inner),
        ):
            value = getattr(self, name)
            if value is not None and whole % value:
                raise ValueError(f"{name} must divide {told} = {whole}, got {value}")

    def _check_attention(self) -> None:
        (queries, keys), width = self.heads
        if self.attention_head_dim is None and self.d_model % queries:
            raise ValueError(
                f"n_heads must divide d_model = {self.d_model}, got {queries}; or give "
                "attention_head_dim"
            )
        if queries % keys:
            raise ValueError(f"n_kv_heads must divide n_heads = {queries}, got {keys}")
        if self.rotary_dim > width or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim must be even and at most the {width} channels of a head of attention, "
                f"got {self.rotary_dim}"
            )

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, of :data:`LAYERS`."""
        pattern: list[str] = []
        for entry in self.layers.split(","):
            name, times, count = (part.strip() for part in entry.partition("*"))
            if name not in LAYERS or (times and not re.fullmatch("[1-9][0-9]{0,4}", count)):
                raise ValueError(
                    f"layers must be names of {', '.join(LAYERS)}, each with a count or none, such "
                    f"as 'mamba2*7, attention'; got {self.layers!r}"
                )
            pattern += [name] * int(count or 1)
        if self.n_layers % len(pattern):
            multiple = -(-self.n_layers // len(pattern)) * len(pattern)
            raise ValueError(
                f"layers {self.layers!r} are {len(pattern)} layers, and n_layers {self.n_layers} "
                f"is no multiple of them; choose {multiple}"
            )
        if len({*pattern} & {*BLOCKS}) != 1:
            raise ValueError(
                f"layers must have one of {' and '.join(BLOCKS)}, and not both; got {self.layers!r}"
            )
        return tuple(pattern) * (self.n_layers // len(pattern))

    @property
    def pattern(self) -> tuple[str, ...]:
        """The shortest run of kinds of which `kinds` are repeats."""
        return shortest_repeat(self.kinds)

    def count(self, kind: str) -> int:
        """How many layers are of a kind."""
        return self.kinds.count(kind)

    @property
    def hybrid(self) -> bool:
        """Whether there are layers of more than one kind."""
        return len(self.pattern) > 1

    @property
    def block(self) -> "Block":
        """The block of its state space layers."""
        from jaxkern.nn import mamba, mamba2  # which import JAX, and --help does not wait for it

        return mamba.BLOCK if "mamba" in self.kinds else mamba2.BLOCK

    @functools.cached_property
    def sizes(self) -> "mamba.Sizes | mamba2.Sizes":
        """The dimensions of that block."""
        from jaxkern.nn import mamba, mamba2

        names = "d_state", "d_conv", "expand", "use_bias", "use_conv_bias"
        shared = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
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
        return (queries, self.n_kv_heads or queries), (
            self.attention_head_dim or self.d_model // queries
        )

    @property
    def mlp_width(self) -> int:
        """The inner channels of an MLP."""
        return self.d_mlp or 4 * self.d_model

    def stored(self) -> dict[str, Any]:
        """The shape as a run's files hold it, in values that JSON has."""
        return {name: _in_json(value) for name, value in dataclasses.asdict(self).items()}

    @staticmethod
    def from_stored(stored: dict[str, Any]) -> "ModelConfig":
        """The shape that a file of a run holds.

        Raises:
          TypeError, ValueError: it is no shape of a model.
        """
        return ModelConfig(**{name: _from_json(value) for name, value in dict(**stored).items()})


_TYPES: dict[Any, tuple[str, Any]] = {
    str: ("a text", str),
    bool: ("True or False", bool),
    int: ("a whole number", numbers.Integral),
    float: ("a number", numbers.Real),
    int | None: ("a whole number or None", (numbers.Integral, type(None))),
    float | None: ("a number or None", (numbers.Real, type(None))),
}
"""The types of the fields of a model's shape: how an error says it, and what values are."""


def shortest_repeat(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest tuple of which another one is repeats."""
    sizes = (size for size in range(1, len(kinds) + 1) if len(kinds) % size == 0)
    return next(kinds[:size] for size in sizes if kinds[:size] * (len(kinds) // size) == kinds)


_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def _in_json(value: Any) -> Any:
    """A value of a shape as JSON has it, which knows neither tuples nor infinity."""
    if isinstance(value, tuple):
        return [_in_json(each) for each in value]
    return str(value) if value in _INFINITE.values() else value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(each) for each in value)
    return _INFINITE.get(value, value) if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and the rate by which it learns.

    Attributes:
      lr: peak learning rate; --lr for short.
      schedule: what follows a linear warm-up: a cosine to the last step; wsd, lr until a straight
        line at the end; or constant.
      warmup: steps of the warm-up; by default a tenth of the run, at most 500.
      decay: steps of that line of wsd; by default a tenth of the run.
      final: at the last step, in lr.
      b1: how much of the gradients' mean stays from step to step.
      b2: the same of their squares.
      eps: added to the root of the squares' mean.
      weight_decay: of matrices, times the learning rate; nothing else decays.
      clip_norm: global norm that longer gradients are shortened to; None for no limit.

    Raises:
      FlagError: a value is out of range.
    """

    lr: float
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: int | None = None
    decay: int | None = None
    final: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self):
        check_values(self, "optimizer.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a training run.

    Attributes:
      preset: kind and size of the model, and what suits it, by a file of jaxkern/lm/presets: micro,
        tiny, 130m, 370m, 1.4b, mamba2-micro, mamba2-130m, mamba2-370m, mamba2-780m or mamba2-1.3b.
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
      remat: what the backward computes again to save memory: none; cheap, the convolution and step
        sizes of each block; scan, these and its scan; or, which --remat alone means, the layer.
      scan_layers: run the layers in a loop: a smaller program, slower steps.
      implementation: of the ops: auto (the fastest), mosaic (GPU kernels), xla.
      devices: how many share each batch, those of all processes, or all; auto is all GPUs or one
        CPU, all with --parallel or of several processes.
      parallel: what devices share: data, the batch; sequence, each sequence; fsdp, the batch and
        the matrices; tensor, the channels of each block.
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
      FlagError: a value is out of range or of another type.

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
    vocab_size: int | None = None
    pack: bool = False
    steps: int
    batch_size: int
    seq_len: int
    grad_accum: int = 1
    mixed_precision: str = "fp32"
    remat: Remat = DEFAULT_REMAT
    scan_layers: bool = False
    implementation: Literal["auto", "mosaic", "xla"] = "auto"
    devices: str = "auto"
    parallel: Axis = "data"
    mesh: str = ""
    seed: int = 0
    log_every: int = 10
    eval_every: int
    eval_batches: int = 16
    checkpoint_every: int = 100
    keep: int = 3
    log_to: tuple[Literal["tensorboard", "wandb", "none"], ...] = ()

    def __post_init__(self):
        check_values(self)
        become = functools.partial(object.__setattr__, self)
        if not re.fullmatch("auto|all|[1-9][0-9]{0,8}", self.devices):
            raise FlagError("devices", f"must be a number, all or auto, got {self.devices!r}")
        try:
            become("mesh", mesh_of(axes_of(self.mesh)) if self.mesh else "")
        except ValueError as error:
            rule = "must be axes and their sizes such as data=2,fsdp=4"
            raise FlagError("mesh", f"{rule}, got {self.mesh!r}: {error}") from None
        if "none" in self.log_to and {*self.log_to} != {"none"}:
            told = " ".join(self.log_to)
            raise FlagError(
                "log_to", f"{told} names none and another; give none alone, or leave it out"
            )
        become("log_to", tuple(name for name in self.log_to if name != "none"))
        # None stands for what the tokenizer has, until that is known: see `for_tokens`.
        if self.vocab_size is None and self.model.vocab_size != _BYTES:
            become("vocab_size", self.model.vocab_size)
        if self.vocab_size not in (None, self.model.vocab_size):
            become("model", dataclasses.replace(self.model, vocab_size=self.vocab_size))
        weighted = any(split_weight(text)[1] is not None for text in self.data)
        asked = self.tokenizer != "bytes" or self.eval_data or weighted
        become("pack", self.pack or bool(asked))

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up, of which the last has the peak rate."""
        given = self.optimizer.warmup
        return max(1, min(500, self.steps // 10) if given is None else given)

    @property
    def decay(self) -> int:
        """Steps of the line at the end of the schedule wsd."""
        return self.optimizer.decay or max(1, self.steps // 10)

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
        given = settings(flags, file)
        return _built(given, _preset_of(given))._checked(flags)

    def _checked(self, flags: Mapping[str, Any]) -> "TrainConfig":
        """The configuration, unless its values do not go together."""
        if self.batch_size % self.grad_accum:
            raise RunError(
                f"--batch-size {self.batch_size} cannot be split into --grad-accum "
                f"{self.grad_accum} equal parts; choose a multiple of it"
            )
        if "float64" in self.mixed_precision:
            raise RunError(
                f"--mixed-precision {self.mixed_precision}: float64 is more than the float32 "
                "that the scans and sums of a run are in; write float32"
            )
        asked = flags.get("vocab_size", flags.get("model.vocab_size"))
        if self.tokenizer == "bytes" and asked not in (None, _BYTES):
            raise RunError(
                f"--vocab-size {self.vocab_size}: bytes are 256 tokens; leave it out, or add "
                "--tokenizer"
            )
        return self

    def save(self, path: Path) -> None:
        """Write the configuration as a file that `load` reads, and ``jaxkern train --config``."""
        flags = dataclasses.asdict(self)
        del flags["model"]["vocab_size"]  # which the run's is
        path.write_text(yaml.safe_dump(_plain(flags), sort_keys=False), encoding="utf-8")

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "TrainConfig":
        """Read a configuration, of a run or one's own; what it leaves out is the preset's.

        Raises:
          RunError: it is no such file, or a name or a value in it is wrong.
        """
        return cls.from_flags({}, Path(path))

    def for_tokens(self, size: int) -> "TrainConfig":
        """The configuration for a tokenizer of that many tokens, whose model has them all.

        Without --vocab-size it has the next multiple of 64: products of matrices are fastest so.
        """
        vocab_size = self.vocab_size or -(-size // 64) * 64
        if self.init_hf:
            vocab_size = self.model.vocab_size
        if vocab_size < size and self.init_hf:
            raise RunError(
                f"--tokenizer {self.tokenizer} has {size} tokens, more than the {vocab_size} of "
                f"--init-hf {self.init_hf}; name one of at most {vocab_size}"
            )
        if vocab_size < size:
            raise RunError(
                f"--vocab-size {vocab_size} is less than the {size} tokens of --tokenizer "
                f"{self.tokenizer}; leave it out, or give at least {size}"
            )
        return dataclasses.replace(self, vocab_size=vocab_size)


_BYTES = 256  # tokens
ALIASES = {"lr": "optimizer.lr"}
"""Short names of flags."""

_TABLES: dict[str, Any] = {"model": ModelConfig, "optimizer": OptimizerConfig}


def check_values(config: Any, prefix: str = "") -> None:
    """Refuse a value of a dataclass that is of another type than its field, or beyond LIMITS.

    Raises:
      FlagError: it names the field as a flag, with `prefix`.
    """
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        kinds, choices = get_args(field.type), ()
        if value is None and type(None) in kinds:
            continue
        several = get_origin(field.type) is tuple
        if several:
            kinds = get_args(kinds[0])
        if get_origin(field.type) is Literal or (several and kinds):
            choices = kinds
        each = value if several and isinstance(value, tuple) else (value,)
        rule = None
        if name in LIMITS:
            try:
                LIMITS[name].check(value)
            except ValueError:
                rule = str(LIMITS[name])
        elif choices:
            right = isinstance(value, tuple) == several and {*map(str, each)} <= {*choices}
            told = f"{'a list of' if several else 'one of'} {', '.join(choices)}"
            rule = None if right else told
        elif several or str in (field.type, *kinds):
            right = isinstance(value, tuple) == several and all(isinstance(v, str) for v in each)
            told = "a list of texts" if several else "a text"
            rule = None if right else told
        elif field.type is bool and not isinstance(value, bool):
            rule = "true or false"
        elif name in _TABLES and not isinstance(value, _TABLES[name]):
            rule = "a table"
        if rule:
            raise FlagError(prefix + name, f"must be {rule}, got {value!r:.80}")


def _tables(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags by name, those of model and optimizer in tables of their own.

    Raises:
      FlagError: a name is none of a configuration.
    """
    found: dict[str, Any] = {}
    for given, value in flags.items():
        table, _, name = ALIASES.get(given, given).rpartition(".")
        if not table and name in _TABLES and isinstance(value, Mapping):
            inner = {f"{name}.{each}": one for each, one in value.items()}
            found[name] = found.get(name, {}) | _tables(inner).get(name, {})
            continue
        known = _TABLES.get(table, TrainConfig if not table else None)
        names = [field.name for field in dataclasses.fields(known)] if known else []
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1)
            remedy = f"did you mean {near[0]}?" if near else "jaxkern train --help names all"
            raise FlagError(str(given), f"is no setting of a run; {remedy}")
        if not table:
            found[name] = value
        elif isinstance(found.setdefault(table, {}), dict):
            found[table][name] = value
        else:
            found[table] = dataclasses.replace(found[table], **{name: value})
    return found


def settings(flags: Mapping[str, Any], file: Path | None = None) -> dict[str, Any]:
    """What flags say, and a file where they do not; for :meth:`TrainConfig.from_flags`.

    Raises:
      RunError: a name is wrong, or a value of the file.
    """
    given, written = _tables(flags), _read(file) if file else {}
    check_axes(given)
    if "devices" not in written:  # else the file of a run, whose mesh counts
        check_axes(written)
    if given.keys() & {"parallel", "mesh"}:
        written = {k: v for k, v in written.items() if k not in ("parallel", "mesh", "devices")}
    for name, value in written.items():
        own = given.get(name, value)
        given[name] = value | own if isinstance(own, dict) else own
    return with_devices(given)


def _built(given: dict[str, Any], base: "TrainConfig | None") -> "TrainConfig":
    """The configuration of these values, and for all others those of `base`.

    Raises:
      FlagError: a value is wrong.
    """
    values = dict(given)
    try:
        for name, kind in _TABLES.items():
            table = values.get(name, {} if base is None else None)
            if isinstance(table, dict):
                of_base: Any = getattr(base, name, None)
                values[name] = dataclasses.replace(of_base, **table) if base else kind(**table)
        if isinstance(given.get("model"), dict) and "vocab_size" in given["model"]:
            values.setdefault("vocab_size", given["model"]["vocab_size"])
        return dataclasses.replace(base, **values) if base else TrainConfig(**values)
    except (TypeError, ValueError) as error:  # of the model's shape
        name, _, what = str(error).partition(" ")
        raise FlagError(f"model.{name}", what) from None


def _read(path: Path) -> dict[str, Any]:
    """The values of a file of YAML.

    Raises:
      RunError: it cannot be read, or a name in it is none of a configuration.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise RunError(f"{path} cannot be read ({reason}); it must be a file of YAML") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} must be a table of names and values, got {values!r:.40}")
    try:
        found = _typed(_tables(values))
        _built(found, _preset_of(found))
    except FlagError as error:
        raise RunError(f"{path}: {error.name} {error.what}") from None
    return found


def _preset_of(values: dict[str, Any]) -> TrainConfig:
    """The preset that values name.

    Raises:
      FlagError: there is none of that name.
    """
    name = values.get("preset", TrainConfig.preset)
    if name not in PRESETS:
        raise FlagError("preset", f"must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def _typed(values: dict[str, Any], kind: Any = None) -> dict[str, Any]:
    """The values of a file as Python has them: tuples for lists, numbers for texts as 1e-3."""
    types = {field.name: field.type for field in dataclasses.fields(kind or TrainConfig)}
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, dict):
            found[name] = _typed(value, _TABLES[name])
        elif isinstance(value, list):
            of_numbers = types[name] == tuple[float, float]
            found[name] = tuple(map(_number, value) if of_numbers else value)
        elif types[name] in (float, float | None):
            found[name] = _number(value)
    return found


def _number(value: Any) -> Any:
    """The number that a text is, if it is one: YAML wants 1.0e-3 and has 1e-3 as a text."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def _plain(value: Any) -> Any:
    """A value as YAML has it, which knows no tuples."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return value


def split_weight(text: str) -> tuple[str, str | None]:
    """Part an argument of --data at the = before its weight, if there is one.

    Infinity and NaN are taken for numbers, too, so that they are refused as weights and no part of
    a field's name.
    """
    pattern = r"(?is)(.+)=([-+.\w]*\d[-+.\w]*|[-+]?(?:inf|infinity|nan))"
    found = None if is_there(text) else re.fullmatch(pattern, text)
    return (found[1], found[2]) if found else (text, None)


def is_there(path: str) -> bool:
    """Whether a path, or a pattern of some, names files or folders."""
    return os.path.exists(path) or (glob.has_magic(path) and bool(glob.glob(path, recursive=True)))


def axes_of(mesh: str) -> dict[str, int]:
    """The sizes of a mesh's axes from the text of ``--mesh``, such as ``"data=2,fsdp=4"``.

    Raises:
      ValueError: it is no such text; the message says why.
    """
    sizes: dict[str, int] = {}
    for entry in mesh.split(","):
        axis, _, size = (part.strip() for part in entry.partition("="))
        if axis not in AXES:
            raise ValueError(f"{axis!r} is not one of {', '.join(AXES)}")
        if axis in sizes:
            raise ValueError(f"{axis} is named twice")
        if not re.fullmatch("[1-9][0-9]{0,5}", size):
            raise ValueError(f"the size of {axis} must be from 1 to 999999, not {size!r}")
        sizes[axis] = int(size)
    return sizes


def mesh_of(sizes: dict[str, int]) -> str:
    """The text of ``--mesh`` that names axes of these sizes."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def with_devices(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of a run, in which --parallel alone asks for all devices, also on a CPU."""
    alone = "parallel" in flags and not flags.get("mesh")
    return {"devices": "all"} | flags if alone else flags


def check_axes(flags: Mapping[str, Any]) -> None:
    """Refuse flags of which --parallel names one axis and --mesh others."""
    parallel, mesh = flags.get("parallel"), flags.get("mesh")
    if parallel and mesh and axes_of(mesh).keys() != {parallel}:
        raise RunError(
            f"--parallel {parallel} and --mesh {mesh} name different axes; leave --parallel out, "
            f"or --mesh for all devices by {parallel}"
        )


def _presets() -> dict[str, TrainConfig]:
    """The presets by name, small models first."""
    found = {}
    for path in (Path(__file__).parent / "presets").glob("*.yaml"):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        found[path.stem] = _built(_tables({"preset": path.stem} | values), None)
    size = lambda config: (config.model.layers, config.model.d_model, config.model.n_layers)
    return dict(sorted(found.items(), key=lambda item: size(item[1])))


PRESETS = _presets()
