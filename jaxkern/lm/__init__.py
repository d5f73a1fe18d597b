"""The main job: a byte-level Mamba language model, from the command line.

cli         flags, subcommands, one-line errors
config      presets, the configuration of a run
data        text files -> a packed byte corpus -> batches
model       the Mamba language model (flax.nnx) on jaxkern's ops
step        one optimizer step and one evaluation, as pure functions
checkpoint  what a run directory holds; save, restore, resume
hf          checkpoints in the layout of Hugging Face
report      progress, metrics.jsonl, loss.png
memory      whether a step fits, before it runs
train       the training loop
sample      decoding from a run
doctor      what would run on this machine, and why
"""
