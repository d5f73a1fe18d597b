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

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkern.lm.sample import LanguageModel
    from jaxkern.lm.train import Trainer as Trainer


def __getattr__(name: str) -> Any:
    """`Trainer`, whose packages are imported where it is asked for."""
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxkern.lm.train import Trainer

    return Trainer


def load(folder: str | PathLike[str], *, step: int | None = None) -> "LanguageModel":
    """Load a trained language model: a run of ``jaxkern train``, or one of Hugging Face.

    Args:
      folder: the ``--out`` folder of a run, or one of config.json and model.safetensors, as
        :func:`jaxkern.lm.hf.load` takes it.
      step: which of a run's checkpoints; by default the newest. If that is damaged, the newest one
        that is whole, with a warning.

    Raises:
      ImportError: a package of the extras lm, hf or data is missing.
      RunError: the folder holds no run and no checkpoint, one of another version of jaxkern, or
        none that is whole.

    Example:
      >>> import jax.numpy as jnp, jaxkern.lm
      >>> model = jaxkern.lm.load("runs/tiny-20261122-120000")  # doctest: +SKIP
      >>> logits = model(jnp.array([model.encode("def f(x):")]))  # doctest: +SKIP
      >>> model.generate(["def ", "class Queue:"], length=200, temperature=0)  # doctest: +SKIP
    """
    from jaxkern.lm import sample

    return sample.load(Path(folder), step=step)
