"""Validation: the loss on a fixed part of what is held out, and that of every source."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxkern.lm import data
from jaxkern.lm.config import TrainConfig
from jaxkern.lm.program import Placement, Programs
from jaxkern.lm.report import BITS, PERPLEXITY


def evaluation(
    config: TrainConfig, corpus: data.Corpus, placement: Placement, programs: Programs
) -> Callable[[Any], dict[str, float]]:
    """A function of the parameters: what a record of metrics.jsonl says of the validation data.

    The loss is that of all tokens; of several sources the mean by their shares, beside the loss and
    perplexity of each, whose names follow a slash.
    """
    windows = lambda batch: jax.tree.map(placement.split.windows, batch)
    to_devices = lambda batch: data.put(windows(batch), placement.first_split)
    held_out = corpus.validation(config)
    sources = [source for source, _ in held_out]
    counts = [[data.predicted(batch) for batch in batches] for _, batches in held_out]
    placed = [[to_devices(batch) for batch in batches] for _, batches in held_out]

    def evaluate(params: Any) -> dict[str, float]:
        found = [[programs.loss(params, batch) for batch in batches] for batches in placed]
        losses = [
            float(np.average(np.array(each, np.float64), weights=count))
            for each, count in zip(jax.device_get(found), counts, strict=True)
        ]
        mean = sum(source.share * loss for source, loss in zip(sources, losses, strict=True))
        bits = mean * BITS * data.tokens_per_byte(sources)
        record = {"validation_loss": mean, "validation_bits_per_byte": bits}
        if config.pack:
            record[PERPLEXITY] = _perplexity(mean)
        if len(sources) > 1:
            for source, loss in zip(sources, losses, strict=True):
                record[f"validation_loss/{source.name}"] = loss
                record[f"{PERPLEXITY}/{source.name}"] = _perplexity(loss)
        return record

    return evaluate


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # of what is larger there is no number
