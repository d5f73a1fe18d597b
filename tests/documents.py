"""The documents' examples: the code of the README and the guides, and that of docstrings."""

import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import jaxkern

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / ".site" / "guide").glob("*.md"))]
RUN = "runs/first"
"""The folder of a run of ``jaxkern train`` that the examples expect."""


def examples(path: Path, language: str = "python") -> list[str]:
    """The blocks of `language` in a document, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def modules() -> list[str]:
    """The modules of jaxkern whose docstrings have examples."""
    folder = Path(jaxkern.__file__).parent
    found = (path for path in sorted(folder.rglob("*.py")) if ">>> " in path.read_text())
    return [".".join(path.relative_to(folder.parent).with_suffix("").parts) for path in found]


def docstrings(module: str) -> Iterator[doctest.DocTest]:
    """The examples in the docstrings of a module."""
    module = module.removesuffix(".__init__")
    found = doctest.DocTestFinder().find(importlib.import_module(module), module)
    return (test for test in found if test.examples)
