"""The documents' examples: the code blocks of the README and of the guides."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / ".site" / "guide").glob("*.md"))]


def examples(path: Path, language: str = "python") -> list[str]:
    """The blocks of `language` in a document, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
