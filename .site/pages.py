"""Builds the site: ``python .site/pages.py``, what ``make docs`` runs.

The pages are the README, the guides, the docstrings, the notebooks and the benchmarks' tables,
which lie in several folders. `lay_out` copies them to build/pages, in the layout of the site and
with links that hold there; Sphinx makes build/site of it; `faults` finds links, anchors and files
of the built pages that are not there, and whatever a page would ask of another host.
"""

import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jaxkern

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"

PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE",
    "CITATION.cff": "CITATION.cff",
}
"""Files at the repository's top, and where they are among the pages."""

FOLDERS = (
    (".site", "**/*.rst"),
    (".site", "**/*.md"),
    ("bench", "*.md"),
    ("bench", "*.csv"),
    ("bench", "pictures/*.svg"),
    ("bench", "results/*.json"),
    ("notebooks", "*.ipynb"),
)
"""Folders of the repository, and which files of each are pages or parts of pages."""

_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(
    r"^#.*$"  # headings stay as they are
    r"|\[(?P<text>[^\]]*)\]\((?P<to>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)"
    r"|\[[^\]]*\]\([^)]*\)"  # a link elsewhere
    r"|(?<!`)`(?P<code>[\w.]+)`(?!`)",
    re.MULTILINE,
)

_STYLE_ASKS = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


def files() -> dict[Path, str]:
    """Every file that the pages are made of, with its place among them."""
    found = {ROOT / name: place for name, place in PLACES.items()}
    for folder, pattern in FOLDERS:
        for path in sorted((ROOT / folder).glob(pattern)):
            found[path] = path.relative_to(ROOT).as_posix().removeprefix(".site/")
    del found[ROOT / ".site" / "index.md"]  # what follows the README on the first page
    return found


def on_site(text: str, path: Path, places: dict[Path, str]) -> str:
    """The Markdown `text` of `path` for its place on the site.

    Links to files lead to their places, and the names of public functions to their descriptions.
    """

    def replaced(match: re.Match[str]) -> str:
        if code := match["code"]:
            name = f"jaxkern.{code}" if code in jaxkern.__all__ else code
            return f"{{py:obj}}`{code} <{name}>`" if name.startswith("jaxkern.") else match[0]
        if not match["to"]:
            return match[0]
        place = places.get(Path(os.path.normpath(path.parent / match["to"])))
        if place is None:
            raise ValueError(f"{path.relative_to(ROOT)} links to {match['to']}, which is no page")
        to = os.path.relpath(place, Path(places[path]).parent)
        return f"[{match['text']}]({to}{match['anchor'] or ''})"

    parts = _FENCE.split(text)
    return "".join(part if i % 2 else _INLINE.sub(replaced, part) for i, part in enumerate(parts))


def lay_out(pages: Path) -> None:
    """Writes the sources of all pages into the folder `pages`, which it empties first."""
    shutil.rmtree(pages, ignore_errors=True)
    places = files()
    for path, place in places.items():
        target = pages / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(on_site(path.read_text(), path, places))
        else:
            shutil.copy(path, target)
    with (pages / "index.md").open("a") as index:
        index.write("\n" + (ROOT / ".site" / "index.md").read_text())


class Page(HTMLParser):
    """The anchors of a page, and what it refers to: (tag, address)."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.references: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src", "data", "poster") and tag != "base":
                self.references.append((tag, value or ""))


def faults(site: Path) -> Iterator[str]:
    """A line for each reference of the pages in `site` that leads nowhere or to another host.

    A link may leave the site; scripts, styles and pictures may not.
    """
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        told = defaultdict(set)
        for tag, address in page.references:
            url = urlsplit(address)
            if url.scheme or url.netloc:
                if tag != "a" and url.scheme != "data":
                    told[address].add("asks another host")
                continue
            target = Path(os.path.normpath(path.parent / unquote(url.path))) if url.path else path
            anchors = pages[target].anchors if target in pages else None
            if not target.is_file():
                told[address].add("leads to no file")
            elif url.fragment and anchors is not None and unquote(url.fragment) not in anchors:
                told[address].add("leads to no anchor")
        for address, what in told.items():
            yield f"{path.relative_to(site)}: {address} {', '.join(sorted(what))}"
    for path in sorted(site.rglob("*.css")):
        for address in re.findall(
            r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)", path.read_text()
        ):
            yield f"{path.relative_to(site)}: {address} asks another host"


def main(arguments: list[str]) -> int:
    from sphinx.cmd.build import main as sphinx

    lay_out(PAGES)
    folders = [
        "-c",
        str(ROOT / ".site"),
        "-d",
        str(ROOT / "build" / "doctrees"),
        str(PAGES),
        str(SITE),
    ]
    if status := sphinx(["-q", "-W", "--keep-going", *arguments, *folders]):
        return status
    wrong = list(faults(SITE))
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
