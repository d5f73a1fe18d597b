"""What the tests of language models share: the model in float64, and a command."""

import numpy as np

from jaxkern.lm import cli
from tests.layers import KINDS, rms_float64


def logits_float64(config, params, tokens):
    """The model on one sequence of tokens (L,) in NumPy: (L, vocab_size)."""
    block, wide = config.block, lambda leaf: np.asarray(leaf, np.float64)
    x = wide(params["embedding"])[np.asarray(tokens)]  # (L, d_model)
    for i in range(config.n_layers):
        layer = {name: wide(value[i]) for name, value in params["blocks"].items()}
        normalised = rms_float64(x, layer.pop("norm"), config.eps)
        weights = block.weights_from(layer)
        x = x + KINDS[block.name].float64(weights, config.sizes, normalised)
    x = rms_float64(x, wide(params["norm"]), config.eps)
    return x @ wide(params["embedding"].T if config.tie_embeddings else params["head"])


def command(capsys, *argv, code=0):
    """What a command prints, or with a code its line on stderr."""
    returned = cli.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    assert returned == code, err
    return err if code else out
