"""The split of a language model between devices: over which axes of a mesh, and along what.

    data      every device has all parameters, and a part of the batch
    sequence  every device has all parameters, and a part of each sequence
    fsdp      a device has a part of each matrix, gathered where a layer needs it, and of the batch
    tensor    a device has a part of the channels or heads of a block, and of the vocabulary

The axes multiply. A step is the program of one device inside ``shard_map``, so that what devices
exchange stands in the model (:mod:`jaxkern.nn.collectives`) and is nothing else:

- over `data` the gradients are added up in fp32, all layers' stacked; over `sequence`, too, where a
  scan also hands on its state, forward and backward, and a convolution the last inputs of its
  filter. The windows of a batch are cut on the host, so that a part has the label of its last
  token. Everything else computes tokens one by one;
- over `fsdp` each layer gathers its matrices in the dtype of the products, and their gradients are
  added up in fp32 and scattered. What is no matrix is small, and every device has it;
- of a batch in parts (``--grad-accum``) gradients are added up after the last part alone, and all
  matrices gathered before the first;
- over `tensor` a block adds up what `out_proj` gives, forward, and the gradient of its input; a
  Mamba block also what `x_proj` gives, a Mamba-2 block the mean squares of its norm, and a block of
  the gated delta rule the gradient of its norm's weight. Embedding
  and loss add up rows and a few numbers of each token.

A device has part of the columns of u and of those of z, which stand side by side in `in_proj`.
So while a model is split over `tensor` its columns are in the order of the devices (`to_devices`);
checkpoints have them in the model's own.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxkern.lm.config import AXES, ModelConfig, RunError, TrainConfig, axes_of
from jaxkern.nn import delta_net, mamba2
from jaxkern.nn.collectives import enter, gather
from jaxkern.optim.gradients import sum_of_squares

BATCH = ("data", "fsdp")
"""The axes between whose devices the sequences of a batch are split."""

TOKENS = ("data", "sequence", "fsdp")
"""The axes between whose devices the tokens of a batch are split."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Number of devices along each axis that splits a model of the shape `model`."""

    model: ModelConfig
    data: int = 1
    sequence: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh's axes."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def of_batch(self) -> int:
        """Number of devices between which the sequences of a batch are split."""
        return math.prod(getattr(self, axis) for axis in BATCH)

    @property
    def of_tokens(self) -> int:
        """Number of devices between which the tokens of a batch are split."""
        return self.of_batch * self.sequence

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh that more than one device shares."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1)

    def axis(self, name: str) -> str | None:
        """`name` if more than one device shares that axis."""
        return name if getattr(self, name) > 1 else None

    def windows(self, tokens: np.ndarray) -> np.ndarray:
        """Cuts windows (…, L + 1) into those of the parts of L, side by side: (…, S · (L / S + 1)).

        The last token of a part's window, a label alone, is the first of the next one's.
        """
        if self.sequence == 1:
            return tokens
        length = (tokens.shape[-1] - 1) // self.sequence
        first = length * np.arange(self.sequence)
        return tokens[..., (first[:, None] + np.arange(length + 1)).reshape(-1)]

    # Where a parameter lies

    def specs(self, tree: Any, *, stored: bool = False) -> Any:
        """The specs of parameters or a training state, or with `stored` of those in checkpoints."""
        return jax.tree.map_with_path(lambda path, _: self._spec(path, stored), tree)

    def _spec(self, path: Any, stored: bool) -> PartitionSpec:
        name, stacked = _name_of(path)
        of_tensor, of_fsdp = _DIMENSIONS.get(name, (None, None))
        if stored and name in self._reordered:  # split along its rows, whose order is the same
            of_tensor = of_fsdp if self.model.d_model % (self.fsdp * self.tensor) == 0 else None
        entries: list[tuple[str, ...]] = [(), (), ()]
        for axis, dimension in (("tensor", of_tensor), ("fsdp", of_fsdp)):
            if dimension is not None and self.axis(axis):
                entries[dimension + stacked] += (axis,)
        while entries and not entries[-1]:
            entries.pop()
        return PartitionSpec(*(entry or None for entry in entries))

    # What devices exchange

    def gathered(self, tree: Any, dtype: Any, *, without: str | None = None) -> Any:
        """Joins the parts of the matrices of a tree of parameters, in `dtype`.

        Their gradients are added up over the batch, each device's part of them where it is split;
        and so are those of all other parameters. The tree may be that of one layer. Embedding and
        output layer keep their dtype: they are read in full precision, too. A parameter of the name
        `without` is left as it is.
        """

        def whole(path, leaf):
            name, stacked = _name_of(path)
            if name == without:
                return leaf
            leaf, at = enter(leaf, self._summed_over(name)), self._gathered_dimension(name)
            if at is None:
                return leaf
            return gather(leaf, "fsdp", at + stacked, leaf.dtype if name in _OUTER else dtype)

        return jax.tree.map_with_path(whole, tree)

    def added_up(self, grads: Any, *, exchanged: bool) -> Any:
        """Adds up the devices' gradients of all parameters.

        They are those of what :meth:`gathered` was given if they are `exchanged`, else of what it
        gives; each device keeps its part.
        """

        def summed(path, grad):
            name, stacked = _name_of(path)
            at, over = self._gathered_dimension(name), self._summed_over(name)
            if not exchanged and at is not None:
                at += stacked
                grad = lax.psum_scatter(grad, "fsdp", scatter_dimension=at, tiled=True)
            if not exchanged and over is not None:
                grad = lax.psum(grad, over)
            for part in self._repeated(name):
                grad = grad.at[part].set(lax.psum(grad[part], "tensor"))
            return grad

        return jax.tree.map_with_path(summed, grads)

    def _gathered_dimension(self, name: str) -> int | None:
        """The dimension of a parameter, of one layer, that `fsdp` splits; ``None`` for none."""
        return _DIMENSIONS.get(name, (None, None))[1] if self.axis("fsdp") else None

    def _summed_over(self, name: str) -> tuple[str, ...] | None:
        """The axes over which a parameter's gradients are added up, and not scattered by `fsdp`."""
        scattered = self._gathered_dimension(name) is not None
        over = (axis for axis in TOKENS if not (scattered and axis == "fsdp"))
        return tuple(axis for axis in over if self.axis(axis)) or None

    def sum_of_squares(self, mode: Any, grads: Any) -> jax.Array:
        """The sum of the squares of the whole gradients, from a device's parts of their sums."""
        shared = tuple(axis for axis in ("fsdp", "tensor") if self.axis(axis))
        if not shared:
            return sum_of_squares(mode, jax.tree.leaves(grads))
        groups: dict[float, list[Any]] = {}
        for path, grad in jax.tree.leaves_with_path(grads):
            split = jax.tree.leaves(tuple(self._spec(path, False)))
            copies = math.prod(getattr(self, axis) for axis in shared if axis not in split)
            groups.setdefault(1 / copies, []).append(grad)
            for part in self._repeated(_name_of(path)[0]):
                groups.setdefault((1 / self.tensor - 1) / copies, []).append(grad[part])
        squares = (weight * sum_of_squares(mode, group) for weight, group in groups.items())
        return lax.psum(sum(squares), shared)

    def mean_of_batch(self, x: Any) -> Any:
        """The mean over the devices between which the tokens of a batch are split."""
        over = tuple(axis for axis in TOKENS if self.axis(axis))
        return lax.pmean(x, over) if over else x

    # The order of columns

    @property
    def _reordered(self) -> dict[str, int]:
        """The parameters whose columns `tensor` reorders, and their dimension, of all layers'."""
        if self.tensor == 1:
            return {}
        if isinstance(self.model.sizes, mamba2.Sizes | delta_net.Sizes):
            return {"in_proj": 2, "in_bias": 1, "conv_weight": 1, "conv_bias": 1}
        return {"in_proj": 2, "in_bias": 1}

    def parts(self, name: str) -> list[tuple[int, bool]]:
        """The parts side by side of a parameter: how many columns, and whether they are split."""
        sizes = self.model.sizes
        inner = (sizes.d_inner, True)
        if isinstance(sizes, delta_net.Sizes):
            columns = [*sizes.columns.values()][: 3 if name.startswith("conv") else None]
            low_rank = isinstance(sizes, delta_net.KimiDeltaAttentionSizes)
            return [(size, not (low_rank and i > 3)) for i, size in enumerate(columns)]
        if not isinstance(sizes, mamba2.Sizes):
            return [inner, inner]
        shared = [(sizes.d_bc, True)] * 2 if sizes.ngroups > 1 else [(2 * sizes.d_bc, False)]
        convolved = [inner, *shared]  # x, B and C, of one group of which every head needs all
        return convolved if name.startswith("conv") else [inner, *convolved, (sizes.heads, True)]

    def _order(self, name: str) -> np.ndarray:
        """The checkpoint's column of each column of the devices, one device after the other."""
        parts = self.parts(name)
        starts = np.cumsum([0, *(size for size, _ in parts[:-1])])
        columns = []
        for device in range(self.tensor):
            for start, (size, split) in zip(starts, parts, strict=True):
                part = np.arange(start, start + size)
                columns.append(np.split(part, self.tensor)[device] if split else part)
        return np.concatenate(columns)

    def to_devices(self, tree: Any) -> Any:
        """Brings the columns of a tree of parameters, or a state, into the order of the devices."""
        return self._columns(tree, lambda order: order)

    def to_stored(self, tree: Any) -> Any:
        """Brings the columns into the model's own order, that of checkpoints."""
        return self._columns(tree, lambda order: np.unique(order, return_index=True)[1])

    def _columns(self, tree: Any, index: Any) -> Any:
        def move(path, leaf):
            name, _ = _name_of(path)
            if name not in self._reordered:
                return leaf
            return jnp.take(leaf, index(self._order(name)), axis=self._reordered[name])

        return jax.tree.map_with_path(move, tree)

    def _repeated(self, name: str) -> list[tuple[Any, ...]]:
        """Indices of those of a device's columns of a parameter that every device has."""
        if name not in self._reordered:
            return []
        parts, before = self.parts(name), (slice(None),) * self._reordered[name]
        counts = [size // self.tensor if split else size for size, split in parts]
        ends = itertools.accumulate(counts)
        spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return [(*before, s) for s, (_, split) in zip(spans, parts, strict=True) if not split]


_DIMENSIONS: dict[str, tuple[int | None, int | None]] = {
    "embedding": (0, 1),  # (vocabulary, D)
    "head": (1, 0),  # (D, vocabulary)
    "in_proj": (1, 0),  # (D, columns)
    "in_bias": (0, None),
    "conv_weight": (0, None),
    "conv_bias": (0, None),
    "x_proj": (0, 0),  # (E, …)
    "dt_proj": (1, 1),  # (…, E)
    "dt_bias": (0, None),
    "A_log": (0, None),
    "D": (0, None),
    "norm_weight": (0, None),
    **dict.fromkeys(("f_proj", "g_proj"), (1, 1)),  # (R, channels)
    "out_proj": (0, 1),  # (E, D)
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), (None, 0)),  # (D, …)
    **dict.fromkeys(("o_proj", "down_proj"), (None, 1)),  # (…, D)
}
"""The dimensions of a layer's parameter that `tensor` and `fsdp` split; others all have whole."""

_OUTER = ("embedding", "head")


def _name_of(path: Any) -> tuple[str, int]:
    """The name of the parameter that a leaf is, or is kept of, and 1 if all layers' are stacked."""
    names = [key.key for key in path if hasattr(key, "key")]
    return (names or [""])[-1], int("blocks" in names)


def split_of(config: TrainConfig, devices: int) -> Split:
    """The split of a run's model between devices."""
    sizes = axes_of(config.mesh) or {config.parallel or "data": devices}
    if (count := math.prod(sizes.values())) != devices:
        what = f"--mesh {config.mesh} is of {count} devices and --devices says {devices}"
        raise RunError(f"{what}; leave one out, or give --parallel, too")
    split = Split(config.model, **sizes)
    asked = f"--mesh {config.mesh}"
    if not config.mesh:
        asked = f"--parallel {config.parallel or 'data'} over {devices} devices"
    _check_model(split, asked)
    parts = config.grad_accum * split.of_batch
    if config.batch_size % parts:
        over = f"--grad-accum {config.grad_accum} × {split.of_batch} devices ({asked})"
        what = f"--batch-size {config.batch_size} cannot be split over {over}"
        raise RunError(f"{what}; choose a multiple of {parts}")
    chunk, before = config.model.block.chunk, config.model.sizes.d_conv - 1
    length, least = config.seq_len, split.sequence * chunk
    if split.sequence > 1 and (length % least or length < split.sequence * before):
        multiple = max(-(-length // least), -(-before // chunk)) * least
        parts = f"equal parts of whole chunks of {chunk} tokens and at least {before}"
        what = f"{asked} cannot split the {length} tokens of --seq-len into {parts}"
        raise RunError(f"{what}; choose --seq-len {multiple}, or a smaller axis")
    return split


def _check_model(split: Split, asked: str) -> None:
    """Refuses axes of which a dimension of the model is no multiple."""
    model, sizes = split.model, split.model.sizes
    across = "attention" in model.kinds and split.axis("sequence")
    if across or (model.hybrid and split.axis("tensor")):
        why = "tensor splits models of blocks alone, and sequence those without attention"
        raise RunError(f"{asked} cannot split layers {model.layers!r}: {why}")
    dimensions = [
        (split.fsdp, model.d_model, "width d_model of {}"),
        (split.fsdp * split.tensor, sizes.d_inner, "{} inner channels"),
        (split.tensor, model.vocab_size, "vocabulary of {} tokens"),
    ]
    if isinstance(sizes, mamba2.Sizes):
        of_norm = sizes.ngroups if sizes.norm_groups is None else sizes.norm_groups
        dimensions.append((split.tensor, sizes.heads, "{} heads"))
        for groups, what in ((sizes.ngroups, "that share B and C"), (of_norm, "of the norm")):
            if groups > 1:  # of one every device has all
                dimensions.append((split.tensor, groups, f"{{}} groups {what}"))
    if isinstance(sizes, delta_net.Sizes):
        dimensions.append((split.tensor, sizes.heads, "{} heads"))
        dimensions.append((split.tensor, sizes.key_heads, "{} key heads"))
        if isinstance(sizes, delta_net.KimiDeltaAttentionSizes):
            dimensions.append((split.fsdp * split.tensor, sizes.d_keys, "{} key channels"))
    for count, size, what in dimensions:
        if size % count:
            parts = f"the model's {what.format(size)} into {count} equal parts"
            raise RunError(f"{asked} cannot split {parts}; choose a divisor of {size}")
