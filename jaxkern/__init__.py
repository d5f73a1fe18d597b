"""jaxkern: GPU training kernels for JAX.

Functions like those of ``jax.nn``. On an NVIDIA GPU a call runs a Pallas kernel forward and
backward; elsewhere the same call is plain JAX. The optimizers are Optax transformations, and
``apply`` does a step of one.

Dimensions, in every docstring: B batch, L length, D channels, W width of a convolution; of a scan
N states a channel, G groups of channels that share B and C, S segments that have a state of their
own; of SSD H heads of P channels; of the gated delta rule H heads, G groups of them with the same
keys, K channels of a key, V of a value; of a product M rows (all axes but the last, together), K
contracted, N columns; of a loss V classes; of a norm N elements of a row; of a gated unit H
outputs.
"""

# ruff: noqa: F403, F405

import importlib
import typing

if typing.TYPE_CHECKING:
    from jaxkern import lm as lm
    from jaxkern import nn as nn
    from jaxkern import optim as optim
    from jaxkern._public import *
else:

    def __getattr__(name: str) -> object:
        """Imports a name on its first use: `jaxkern --help` does not wait for JAX."""
        if name in ("lm", "nn"):
            return importlib.import_module(f"jaxkern.{name}")
        if not name.startswith("__"):
            public = importlib.import_module("jaxkern._public")
            globals().update({each: getattr(public, each) for each in __all__})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'jaxkern' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [  # noqa: RUF022, in the families of the documents
    # Norms
    "layer_norm",
    "rms_norm",
    # Scans and convolutions
    "selective_scan",
    "selective_scan_step",
    "ssd",
    "ssd_step",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "linear_scan",
    "causal_conv1d",
    "causal_conv1d_step",
    # Linear layers
    "linear",
    "gated_linear_unit",
    "accumulate_weight_grad",
    "layer_norm_linear",
    "rms_norm_linear",
    # Losses
    "cross_entropy",
    "linear_cross_entropy",
    # Activations and gates
    "swiglu",
    "geglu",
    "reglu",
    "glu",
    "silu_and_mul",
    "gelu_and_mul",
    "relu",
    "relu_squared",
    "silu",
    "gelu",
    "quick_gelu",
    "sigmoid",
    "tanh",
    # Dropout
    "dropout",
    "dropout_add",
    # Optimizers
    "fused_adamw",
    "fused_adam",
    "fused_sgd",
    "apply",
    "scale_gradients",
    "accumulate_gradients",
    # Kernels of your own
    "custom_op",
    "triton_call",
    # Dtypes, the implementation, and the GPU that a program is for
    "precision",
    "default_implementation",
    "lowering_for",
    "Gpu",
]
