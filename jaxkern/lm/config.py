"""Presets and the configuration of a run. Imports no optional package: --help needs none."""

import dataclasses
import functools
import json
import math
import numbers
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxkern.lowering.target import GPUS

if TYPE_CHECKING:
    from jaxkern.nn import mamba, mamba2
    from jaxkern.nn.common import Block


class RunError(Exception):
    """Something the user can put right; shown as one line, without a stack trace."""


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
        whole = type(value) is int
        if not (whole or (type(value) is float and self.kind is float)):
            raise ValueError(value)
        if not self.low <= value <= self.high and not (self.zero and value == 0):
            raise ValueError(value)
        if not whole and not math.isfinite(value):
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
_COUNT = Limits(int, 1, _INT32)

LIMITS = {
    "steps": _COUNT,
    "batch_size": _COUNT,
    "seq_len": _COUNT,
    "vocab_size": Limits(int, 256, _INT32),
    "grad_accum": _COUNT,
    "log_every": _COUNT,
    "eval_every": _COUNT,
    "eval_batches": _COUNT,
    "checkpoint_every": _COUNT,
    "keep": _COUNT,
    "seed": Limits(int, 0, _INT32),
    "lr": Limits(float, 1e-30, 1e30),  # a float32, and its product with the schedule's factors
    "length": Limits(int, 1),
    "temperature": Limits(float, 1e-4, 1e4, zero=True),
    "top_k": Limits(int, 0),
    "top_p": Limits(float, 1e-6, 1),
}
AXES = ("data", "sequence", "fsdp", "tensor")
"""The axes of a mesh; those whose devices exchange most come last, as these are neighbours.

Over `sequence` these are states of the scans, which do not grow with the length: for a few
sequences on a device fewer bytes than a layer's matrices, over `fsdp`.
"""

IMPLEMENTATIONS = ("auto", "mosaic", "xla")
TRACKERS = ("tensorboard", "wandb")
WARMED = tuple(name for name, gpu in GPUS.items() if gpu.unsupported is None)
"""The GPUs that kernels can be lowered for where there is none."""

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
        if len(self.dt_limit) != 2 or not self.dt_limit[0] <= self.dt_limit[1]:
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


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model shape and the training defaults that suit it."""

    model: ModelConfig
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    eval_every: int


PRESETS = {
    "tiny": Preset(ModelConfig(128, 4), 240, 8, 256, 5e-3, 40),
    "130m": Preset(ModelConfig(768, 24), 10_000, 8, 2048, 6e-4, 500),
    "370m": Preset(ModelConfig(1024, 48), 10_000, 8, 2048, 3e-4, 500),
    "1.4b": Preset(ModelConfig(2048, 48), 10_000, 8, 2048, 2e-4, 500),
    "mamba2-130m": Preset(ModelConfig(768, 24, "mamba2"), 10_000, 8, 2048, 6e-4, 500),
    "mamba2-370m": Preset(ModelConfig(1024, 48, "mamba2"), 10_000, 8, 2048, 3e-4, 500),
    "mamba2-780m": Preset(ModelConfig(1536, 48, "mamba2"), 10_000, 8, 2048, 2.5e-4, 500),
    "mamba2-1.3b": Preset(ModelConfig(2048, 48, "mamba2"), 10_000, 8, 2048, 2e-4, 500),
    # Compile and step in no time: for trying the machinery out, and for the tests.
    "micro": Preset(ModelConfig(16, 2, d_state=4), 20, 4, 32, 1e-2, 10),
    "mamba2-micro": Preset(
        ModelConfig(16, 2, "mamba2", d_state=4, head_dim=8), 20, 4, 32, 1e-2, 10
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a training run; what has no default here has its preset's.

    `shape` is that of the checkpoint `init_hf`, where the run begins with one; config.json has it
    as the run's model, and not among its flags.
    """

    preset: str = "tiny"
    init_hf: str = ""
    shape: ModelConfig | None = None
    data: tuple[str, ...] = ()
    eval_data: tuple[str, ...] = ()
    data_cache: str | None = None
    tokenizer: str = "bytes"
    vocab_size: int | None = None  # follows the tokenizer
    pack: bool = False
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    grad_accum: int = 1
    mixed_precision: str = "fp32"
    remat: Remat = DEFAULT_REMAT
    scan_layers: bool = False
    implementation: str = "auto"
    devices: str = "auto"
    parallel: str = "data"
    mesh: str = ""
    seed: int = 0
    log_every: int = 10
    eval_every: int
    eval_batches: int = 16
    checkpoint_every: int = 100
    keep: int = 3
    log_to: tuple[str, ...] = ()

    @property
    def model(self) -> ModelConfig:
        model = self.shape or PRESETS[self.preset].model
        return dataclasses.replace(model, vocab_size=self.vocab_size or model.vocab_size)

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up: a tenth of the run, at most 500."""
        return max(1, min(500, self.steps // 10))

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> "TrainConfig":
        """Fill flags that were not given with the preset's and the general defaults."""
        name = flags.get("preset", cls.preset)
        if name not in PRESETS:
            raise RunError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
        check_axes(flags)
        preset = PRESETS[name]
        by_preset = {field: getattr(preset, field) for field in PRESET_FLAGS}
        config = cls(**(by_preset | with_devices(flags)))
        if config.batch_size % config.grad_accum:
            raise RunError(
                f"--batch-size {config.batch_size} cannot be split into --grad-accum "
                f"{config.grad_accum} equal parts; choose a multiple of it"
            )
        # Not asked of a resumed run: one that an earlier version began so goes on in float32.
        if "float64" in config.mixed_precision:
            raise RunError(
                f"--mixed-precision {config.mixed_precision}: float64 is more than the float32 "
                "that the scans and sums of a run are in; write float32"
            )
        return dataclasses.replace(config, pack=config._packs())

    def save(self, path: Path) -> None:
        """Write the configuration as a file that `load` reads."""
        import yaml

        flags = json.loads(json.dumps(dataclasses.asdict(self)))
        del flags["shape"]
        path.write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "TrainConfig":
        """Read a configuration."""
        import yaml

        try:
            flags = yaml.safe_load(path.read_text(encoding="utf-8"))
            tuples = {name: tuple(flags[name]) for name in ("data", "eval_data", "log_to")}
            return cls(**flags | tuples)
        except (OSError, TypeError, ValueError, KeyError, yaml.YAMLError) as error:
            raise RunError(f"{path} cannot be read ({error}); put it back") from None

    def _packs(self) -> bool:
        """Whether documents are packed: where it is asked for, or what is asked for needs it."""
        from jaxkern.lm.data.sources import parse

        packs = self.pack or self.tokenizer != "bytes" or bool(self.eval_data)
        packs = packs or any(source.weight is not None for source in parse(self.data))
        if self.tokenizer == "bytes" and self.vocab_size not in (None, 256):
            raise RunError(
                f"--vocab-size {self.vocab_size}: bytes are 256 tokens; leave it out, or add "
                "--tokenizer"
            )
        return packs

    def for_tokens(self, size: int) -> "TrainConfig":
        """The configuration for a tokenizer of that many tokens, whose model has them all.

        Without --vocab-size it has the next multiple of 64: products of matrices are fastest so.
        """
        given = self.vocab_size or self.shape
        vocab_size = self.model.vocab_size if given else -(-size // 64) * 64
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


PRESET_FLAGS = ("steps", "batch_size", "seq_len", "lr", "eval_every")
DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for field in dataclasses.fields(TrainConfig)
    if field.name not in (*PRESET_FLAGS, "shape")
}


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


def check_axes(flags: dict[str, Any]) -> None:
    """Refuse flags of which --parallel names one axis and --mesh others."""
    parallel, mesh = flags.get("parallel"), flags.get("mesh")
    if parallel and mesh and axes_of(mesh).keys() != {parallel}:
        raise RunError(
            f"--parallel {parallel} and --mesh {mesh} name different axes; leave --parallel out, "
            f"or --mesh for all devices by {parallel}"
        )
