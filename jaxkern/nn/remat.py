"""Policies of jax.checkpoint: what Mamba, Mamba-2, Gated DeltaNet and KDA blocks keep.

    layer = jax.checkpoint(layer, policy=jaxkern.nn.remat.CHEAP)

Without ``jax.checkpoint`` a Mamba block keeps, in units of its B · L · E inner elements in the
compute dtype, 4: what `in_proj` gives (2), the convolution and the step sizes; and the states of
the scan, in bf16 2 · N / 32 bytes an element. What `out_proj` multiplies the scan's backward gives
again, of the other blocks that of their gated norm; and so does a norm before a block, where the
block computes it (`norm`).

==========  =======================================================  ============================
policy      keeps                                                    computes again
==========  =======================================================  ============================
`CHEAP`     results of `in_proj`, `x_proj` and the scan, its states  step sizes, activations, casts;
            and of Mamba's convolution, of Mamba-2 that of B and C   other convolutions
`SCAN`      results of `in_proj` and `x_proj`                        these, all convolutions and the
                                                                     scan
``None``    nothing, which is the default of ``jax.checkpoint``      all, `in_proj`, too
==========  =======================================================  ============================

The names in them are ``mamba_in_proj`` and ``mamba_conv`` of Mamba and Mamba-2, ``mamba_x_proj`` of
Mamba, ``delta_in_proj`` of :mod:`jaxkern.nn.delta_net`, and the ops'.
The input of what is checkpointed is always kept. Of other layers inside of it these policies keep
nothing; ``jax.checkpoint_policies.save_from_both_policies`` joins one with a policy for those.
"""

import jax

_PRODUCTS = ("mamba_in_proj", "mamba_x_proj", "delta_in_proj")
_NORMS = ("rms_norm_linear",)  # the sum and the statistics that a norm before products keeps
_SCANS = ("selective_scan", "ssd", "gated_delta_rule")

SCAN = jax.checkpoint_policies.save_only_these_names(*_PRODUCTS, *_NORMS)
"""Keeps the products that a block begins with, and computes all else again."""

CHEAP = jax.checkpoint_policies.save_only_these_names(*_PRODUCTS, *_NORMS, *_SCANS, "mamba_conv")
"""Keeps these and the scan's results, and computes again what waits for memory alone."""
