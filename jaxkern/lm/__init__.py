"""The main job: language models of Mamba blocks and attention, from the command line.

cli         subcommands by tyro, one-line errors
config      the configuration of a run, by flags, files of YAML and presets
sources     what --data names: files of documents, found and read
tokenizer   bytes, a tokenizer.json, a BPE of the data
data        a run's tokens on disk, and the batches that grain draws from them
model       the language model (flax.nnx) on jaxkern's ops
layers      attention and MLPs of hybrid models; embedding and loss, also split between devices
parallel    how devices share a model and its batches
step        one optimizer step and one evaluation, as pure functions
program     the compiled programs of a run, and where their arrays lie; `warm`
processes   the processes of a run, on one host or several
checkpoint  what a run directory holds; save, restore
hf          checkpoints in the layout of Hugging Face, and runs exported to it
hf_layouts  how transformers stores each kind of model
untrusted   reads files that a stranger may have written
report      metrics.jsonl, TensorBoard, Weights & Biases, a trace of steps, progress, loss.png
stop        ends a command on a signal, or when its output closes
train       a training run, begun or resumed: `Trainer`
sample      a trained model in Python: loaded, called, sampled from; `load`
doctor      what would run on this machine, and why
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkern.lm.sample import load as load
    from jaxkern.lm.train import Trainer as Trainer

_MODULES = {"load": "sample", "Trainer": "train"}


def __getattr__(name: str) -> Any:
    """`load` and `Trainer`, whose packages are imported where one is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
