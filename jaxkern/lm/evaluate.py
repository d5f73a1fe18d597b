"""Validation: the loss on a fixed part of what is held out, and that of every source."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxkern.lm import data
from jaxkern.lm.config import TrainConfig
from jaxkern.lm.data.packed import predicted, shares, tokens_per_byte
from jaxkern.lm.program import Placement, Programs
from jaxkern.lm.report import BITS, PERPLEXITY
from jaxkern.lm.rows import put


def evaluation(
    config: TrainConfig, corpus: Any, placement: Placement, programs: Programs
) -> Callable[[Any], dict[str, float]]:
    """A function of the parameters: what a record of metrics.jsonl says of the validation data.

    The loss is that of all tokens; of several sources the mean by their shares, beside the loss and
    perplexity of each, whose names follow a slash.
    """
    sizes = {"batch_size": config.batch_size // config.grad_accum, "seq_len": config.seq_len}
    batches = config.eval_batches * config.grad_accum
    # Made whole by every process, which needs the counts of all rows for the mean of the losses.
    windows = lambda batch: jax.tree.map(placement.split.windows, as_tokens(batch, config))
    to_devices = lambda batch: put(windows(batch), placement.first_split)
    if not isinstance(corpus, data.PackedCorpus):
        there = [
            to_devices(batch)
            for batch in data.validation_batches(corpus.validation, batches=batches, **sizes)
        ]

        def evaluate(params: Any) -> dict[str, float]:
            losses = jax.device_get([programs.loss(params, batch) for batch in there])
            mean = float(np.mean(losses, dtype=np.float64))
            return {"validation_loss": mean, "validation_bits_per_byte": mean * BITS}

        return evaluate

    sources = corpus.validation
    of_each = max(1, batches // len(sources))
    held = [corpus.validation_batches(i, batches=of_each, **sizes) for i in range(len(sources))]
    counts = [np.array([predicted(batch) for batch in batches], np.float64) for batches in held]
    placed = [[to_devices(batch) for batch in batches] for batches in held]

    def evaluate_sources(params: Any) -> dict[str, float]:
        found = [[programs.loss(params, batch) for batch in batches] for batches in placed]
        losses = [
            float(np.average(np.array(each, np.float64), weights=count))
            for each, count in zip(jax.device_get(found), counts, strict=True)
        ]
        record = {}
        if len(sources) > 1:
            for source, loss in zip(sources, losses, strict=True):
                record[f"validation_loss/{source.name}"] = loss
                record[f"{PERPLEXITY}/{source.name}"] = _perplexity(loss)
        mean = float(np.dot(shares(sources), losses))
        bits = mean * BITS * tokens_per_byte(sources)
        whole = {"validation_loss": mean, "validation_bits_per_byte": bits}
        return whole | {PERPLEXITY: _perplexity(mean)} | record

    return evaluate_sources


def as_tokens(batch: Any, config: TrainConfig) -> Any:
    """A batch in the integers that the programs take."""
    dtype = data.dtype_of(config.model.vocab_size)
    if isinstance(batch, data.Packed):
        return batch._replace(tokens=batch.tokens.astype(dtype, copy=False))
    return batch.astype(dtype, copy=False)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # of what is larger there is no number
