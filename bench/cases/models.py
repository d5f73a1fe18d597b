"""Models whose ops are timed, at 16384 tokens a step but where it says otherwise.

Their widths are those of GPT-2 (124 million parameters), Llama (https://arxiv.org/abs/2307.09288,
https://arxiv.org/abs/2407.21783) and Mamba (https://arxiv.org/abs/2312.00752).
"""

Ops = list[tuple[str, tuple[int, ...]]]
"""Names of cases with the sizes of their axes, in bfloat16."""


def _mamba(width: int, batch: int = 8, length: int = 2048) -> Ops:
    """The ops of a Mamba of this width, whose blocks are twice as wide inside."""
    rows, inside = (batch * length, width), (batch, length, 2 * width)
    return [
        ("rms_norm", rows),
        ("rms_norm, residual", rows),
        ("causal_conv1d", (*inside, 4)),
        ("selective_scan", (*inside, 16)),
    ]


def _llama(width: int, hidden: int) -> Ops:
    """The ops of a Llama's layer with a gated unit of `hidden` channels."""
    return [
        ("rms_norm", (16384, width)),
        ("rms_norm, residual", (16384, width)),
        ("linear", (16384, width, width)),
        ("gated_linear_unit", (8192, width, hidden)),
        ("swiglu", (16384, hidden)),
    ]


MODELS: dict[str, Ops] = {
    "gpt2": [
        ("layer_norm", (16384, 768)),
        ("layer_norm_linear", (16384, 768, 2304)),
        ("linear, gelu", (16384, 768, 3072)),
        ("dropout_add", (16384, 768)),
    ],
    "llama-2-7b": _llama(4096, 11008),
    "llama-3-8b": _llama(4096, 14336),
    "mamba-130m": _mamba(768),
    "mamba-370m": _mamba(1024),
    "mamba-1.4b": _mamba(2048),
    "mamba-2.8b": _mamba(2560, 4, 4096),
}
