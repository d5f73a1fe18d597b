"""Titles and columns of sections of bench/report.md that show the rows of a file as they are."""

TITLES = {
    "-precision": (
        "Losses of the language model, by precision",
        "Validation loss, in nats, after training with `--mixed-precision` and without it, by "
        "`python -m bench precision`.",
    ),
    "-curves": (
        "Loss curves",
        "![loss curves](pictures/curves.svg)\n\nThe loss in nats of `jaxkern train` by the kernels "
        "in bf16 and by plain JAX in fp32 with the same seed, by `python -m bench curves`. Of the "
        "means over 20 steps each: the first, the last, its *difference* from plain JAX's, and the "
        "*largest* difference. The loss is `linear_cross_entropy`.",
    ),
    "-checkpoints": (
        "What checkpoints cost",
        "Milliseconds a step of `jaxkern train` with a checkpoint every so many steps (True) and "
        "with none (False), by `python -m bench checkpoints`.",
    ),
    "-first-step": (
        "The first training step",
        "From the start of `jaxkern train`'s process to the end of its first step, by `python -m "
        "bench first_step`: with jaxkern's and XLA's caches empty, and with them as an earlier "
        "process left them. *Programs* is the part that lowering and compiling take.",
    ),
    "-devices": (
        "Several GPUs",
        "By `python -m bench devices`: training steps with as many sequences for each part of the "
        "batch as one GPU has, and ops, forward and backward, whose sequence is split. "
        "*Efficiency* is the tokens per second and GPU over those without a mesh, *error* that of "
        "what is split against one GPU.",
    ),
    "-copies": (
        "Kernels of other GPUs on an H200",
        "Those whose lanes copy, as where there is no TMA, and those for 99 KiB of shared memory a "
        "block. *Same bits*: as those of the H200.",
    ),
}
"""Title and explanation of a section, by how the name of its file ends."""

HEADS = {
    "first_step_s": "first step, s",
    "programs_s": "programs, s",
    "validation_loss": "validation loss, nats",
    "shared_memory": "shared memory, bytes",
    "forward_us": "forward, µs",
    "both_us": "forward and backward, µs",
    "tokens_per_second": "tokens/s",
    "peak_gib": "peak, GiB",
}
"""Columns of these sections whose key does not say their unit."""
