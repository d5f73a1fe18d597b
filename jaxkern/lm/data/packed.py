"""Windows of packed documents, with segment ids, in an order that is a function of the seed alone.

The documents of a source lie one after another, and window i has its tokens i·L to i·L + L: the
last token of a window is the first of the next, so that each is predicted once in an epoch, but for
the first of each document. A segment ends where a document does, and at the window's end. What is
missing of the last window is padding of one segment a token, of which none is predicted.

Sample n of a run is row n mod B of step n // B. Without weights all windows are one pool, drawn in
an order of its own in each epoch; with weights each source is a pool, and of every 65536 samples it
has its share. The order is a permutation by a keyed Feistel network, which is computed where it is
needed and holds no table.
"""

import bisect
import collections
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkern.lm.config import RunError
from jaxkern.lm.data.sources import Skipped, counted

_BLOCK = 1 << 16  # samples in which every source has its share
_OPEN = 64  # files that are mapped at once
_ROUNDS = 6


class Packed(NamedTuple):
    """A batch of packed documents.

    Attributes:
      tokens: (..., L + 1).
      segment_ids: (..., L + 1), int32; a document ends where the number changes.
    """

    tokens: Any
    segment_ids: Any


class Stream:
    """The documents of several shards, one after another, of which a part is looked at.

    Args:
        paths: what the files of each shard's part are called, without .tokens and .starts.
        sizes: the tokens of each.
        dtype: of the tokens.
        begin, end: the part, in tokens.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        sizes: Sequence[int],
        dtype: Any,
        begin: int = 0,
        end: int | None = None,
    ):
        kept = [(path, size) for path, size in zip(paths, sizes, strict=True) if size]
        self._paths = [path for path, _ in kept]
        self._sizes = [size for _, size in kept]
        self._firsts = np.cumsum([0, *self._sizes]).tolist()
        self._dtype = dtype
        self._begin = begin
        self.size = (self._firsts[-1] if end is None else end) - begin
        self._mapped: collections.OrderedDict[int, tuple[np.ndarray, np.ndarray]]
        self._mapped = collections.OrderedDict()

    def part(self, begin: int, end: int) -> "Stream":
        """Tokens `begin` to before `end` of it."""
        first = self._begin
        return Stream(self._paths, self._sizes, self._dtype, first + begin, first + end)

    def together(self, other: "Stream") -> "Stream":
        """All shards of it, and then those of another."""
        return Stream(self._paths + other._paths, self._sizes + other._sizes, self._dtype)

    def windows(self, seq_len: int) -> int:
        """How many windows hold all tokens."""
        return -(-(self.size - 1) // seq_len) if self.size > 1 else 0

    def window(self, index: int, seq_len: int) -> Packed:
        """Window `index` (L + 1), of which there may be none: it is padding alone."""
        size = seq_len + 1
        tokens, first = np.zeros(size, self._dtype), np.ones(size, bool)  # first of a segment
        begin = index * seq_len
        end = min(begin + size, self.size)
        at, position = self._begin + begin, 0
        while begin + position < end:
            shard = bisect.bisect_right(self._firsts, at) - 1
            content, starts = self._open(shard)
            inside = at - self._firsts[shard]
            count = min(end - begin - position, len(content) - inside)
            tokens[position : position + count] = content[inside : inside + count]
            among = slice(*np.searchsorted(starts, (inside, inside + count)))
            first[position : position + count] = False
            first[position + starts[among] - inside] = True
            position, at = position + count, at + count
        return Packed(tokens, np.cumsum(first, dtype=np.int32))

    def _open(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a shard and where its documents begin, mapped."""
        if shard not in self._mapped:
            path = self._paths[shard]
            starts = Path(f"{path}.starts")
            # Where a shard is inside a document, none begins in it; an empty file cannot be mapped.
            begins = np.memmap(starts, np.int64, "r") if starts.stat().st_size else np.zeros(0, int)
            self._mapped[shard] = np.memmap(f"{path}.tokens", self._dtype, "r"), begins
            if len(self._mapped) > _OPEN:
                self._mapped.popitem(last=False)
        return self._mapped[shard]


@dataclasses.dataclass(frozen=True)
class PackedSource:
    """The documents of one source, for training or for validation.

    Attributes:
      name: what reports call it.
      stream: its documents.
      weight: its share among the sources, not yet divided by their sum; ``None`` for its size.
      predicted: how many of its tokens are predicted: all but the first of each document.
      bytes: of its text.
    """

    name: str
    stream: Stream
    weight: float | None
    predicted: int
    bytes: int

    def together(self, other: "PackedSource") -> "PackedSource":
        """It and another of the same source."""
        return PackedSource(
            self.name,
            self.stream.together(other.stream),
            self.weight,
            self.predicted + other.predicted,
            self.bytes + other.bytes,
        )

    def part(self, begin: int, end: int) -> "PackedSource":
        """Its tokens `begin` to before `end`."""
        return dataclasses.replace(self, stream=self.stream.part(begin, end))


def shares(sources: Sequence[PackedSource]) -> list[float]:
    """The share of each source among what is drawn from all: by weight, or by size."""
    sizes = [s.stream.size if s.weight is None else s.weight for s in sources]
    return [size / sum(sizes) for size in sizes]


def tokens_per_byte(sources: Sequence[PackedSource]) -> float:
    """What turns a loss of tokens into one of bytes, of sources that are drawn by their shares."""
    of_each = zip(shares(sources), sources, strict=True)
    return 1 / sum(share * source.bytes / max(1, source.predicted) for share, source in of_each)


class Order:
    """Which window each sample of a run is.

    Args:
        windows: how many each source has.
        weights: of the sources; ``None`` for one pool of all.
        seed: of the run.
    """

    def __init__(self, windows: Sequence[int], weights: Sequence[float] | None, seed: int):
        self._firsts = np.cumsum([0, *windows])
        self._pools = list(windows) if weights is not None else [sum(windows)]
        self._seed = seed
        quotas = np.array([1.0] if weights is None else weights, np.float64)
        ends = np.rint(np.cumsum(quotas / quotas.sum()) * _BLOCK).astype(np.int64)
        self._of_pool = np.diff(ends, prepend=0)  # of each block of samples
        for weight, count in zip(quotas, self._of_pool, strict=True):
            if not count:
                raise RunError(
                    f"--data …={weight:g}: the weight is less than 1/{_BLOCK} of all; leave that "
                    "source out, or raise it"
                )

    def __call__(self, samples: np.ndarray) -> list[tuple[int, int]]:
        """The source, and its window, of each of some samples."""
        return [self._one(int(sample)) for sample in samples]

    def _one(self, sample: int) -> tuple[int, int]:
        block, row = divmod(sample, _BLOCK)
        pool, rank = 0, row
        if len(self._pools) > 1:
            pools, ranks = _mixed(tuple(self._of_pool.tolist()), self._seed, block)
            pool, rank = int(pools[row]), int(ranks[row])
        drawn = block * int(self._of_pool[pool]) + rank
        epoch, index = divmod(drawn, self._pools[pool])
        window = permuted(index, self._pools[pool], (self._seed, pool, epoch))
        if len(self._pools) > 1:
            return pool, window
        source = int(np.searchsorted(self._firsts, window, "right")) - 1
        return source, window - int(self._firsts[source])


@functools.lru_cache(2)
def _mixed(of_pool: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The pool of each sample of a block, and how many of that pool come before it."""
    pools = np.repeat(np.arange(len(of_pool)), of_pool)
    generator = np.random.Generator(np.random.Philox(key=[seed, block]))
    pools = pools[np.argsort(generator.random(_BLOCK), kind="stable")]
    ranks = np.empty(_BLOCK, np.int64)
    for pool, count in enumerate(of_pool):
        ranks[pools == pool] = np.arange(count)
    return pools, ranks


def permuted(index: int, size: int, key: tuple[int, ...]) -> int:
    """Where a permutation of 0 … size − 1 that a key chooses takes an index."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = _round_keys(key)
    # The network permutes up to 4 times as many numbers; those that are too large go on.
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ (_hash(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


@functools.lru_cache(256)
def _round_keys(key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64).tolist())


def _hash(value: int) -> int:
    """Mixes 64 bits, by the finalizer of SplitMix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


@dataclasses.dataclass(frozen=True)
class PackedCorpus:
    """Tokenised documents, in sources.

    Attributes:
      train, validation: what is learned from and validated with.
      tokenizer: that made their tokens.
      info: what config.json keeps of them.
    """

    train: list[PackedSource]
    validation: list[PackedSource]
    tokenizer: Any
    info: dict[str, Any]

    def describe(self) -> str:
        """What it holds, in a line."""
        documents = sum(source["documents"] for source in self.info["sources"])
        sizes = (sum(s.stream.size for s in part) for part in (self.train, self.validation))
        held = self.info["split"]
        text = "{:,} tokens to train on, {:,} held out".format(*sizes)
        text = f"{counted(documents, 'document')}: {text}"
        text += {"by position": " (their end)", "by source": " (of --eval-data)"}.get(held, "")
        text += f"; {1 / self.tokens_per_byte:.2f} bytes per token"
        sources = self.info["sources"]
        each = (Skipped(source["skipped"], source.get("skipped_example", "")) for source in sources)
        if (skipped := sum(each, Skipped())).count:
            text += f"; {skipped.describe('skipped')}"
        return text

    @property
    def tokens_per_byte(self) -> float:
        """What turns a loss of its tokens into one of bytes."""
        return tokens_per_byte(self.train)

    def batch(
        self, *, batch_size: int, seq_len: int, seed: int, step: int, rows: Any = None
    ) -> Packed:
        """The windows of one step (B, L + 1), by the data, the seed and the step alone.

        With `rows`, numbers of rows, only these.
        """
        order = self._order(seq_len, seed)
        samples = step * batch_size + (np.arange(batch_size) if rows is None else rows)
        windows = [self.train[source].stream.window(i, seq_len) for source, i in order(samples)]
        return _stacked(windows)

    def _order(self, seq_len: int, seed: int) -> Order:
        windows = [source.stream.windows(seq_len) for source in self.train]
        weights = [source.weight for source in self.train if source.weight is not None]
        return Order(windows, weights or None, seed)

    def validation_batches(
        self, source: int, *, batch_size: int, seq_len: int, batches: int
    ) -> list[Packed]:
        """Up to `batches` fixed batches (B, L + 1) of a source, spread evenly over it."""
        stream = self.validation[source].stream
        there = stream.windows(seq_len)
        count = batch_size * max(1, min(batches, there // batch_size))
        chosen = np.linspace(0, there - 1, count).astype(int) if count <= there else range(count)
        rows = [stream.window(int(i), seq_len) for i in chosen]
        return [_stacked(rows[i : i + batch_size]) for i in range(0, count, batch_size)]


def _stacked(rows: Sequence[Packed]) -> Packed:
    return Packed(*(np.stack(leaves) for leaves in zip(*rows, strict=True)))


def predicted(batch: Packed) -> int:
    """How many tokens of a batch are predicted: all but the first of each segment."""
    segments = batch.segment_ids
    return int(np.count_nonzero(segments[..., 1:] == segments[..., :-1]))
