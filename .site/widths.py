"""Checks the built site in a browser: ``make widths``, after ``make docs``.

At each width of a window no page is wider than it, and all text, code, tables and pictures lie
within the page or in a box that scrolls. At 1,300 pixels the first code of the front page and its
tables are seen whole. The browser is Qt's, which PySide6 brings; nothing is asked of the network.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
WIDTHS = (400, 1000, 1300, 1600)
WHOLE = 1300
"""The width at which nothing of the front page scrolls."""

_MEASURE = """(() => {
  const width = document.documentElement.clientWidth, found = [];
  const scrolls = e => { for (; e && e !== document.body; e = e.parentElement)
    if (/auto|scroll/.test(getComputedStyle(e).overflowX)) return true; return false; };
  if (document.documentElement.scrollWidth > width) found.push("the page");
  for (const e of document.querySelectorAll("article :is(pre, table, img, p, li, dt, h1, h2)"))
    if (e.getBoundingClientRect().right > width + 1 && !scrolls(e))
      found.push(e.tagName + " " + (e.innerText || e.src || "").slice(0, 50));
  const hidden = [...document.querySelectorAll("article :is(pre, .table-wrapper)")]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 50));
  return JSON.stringify([found, hidden]);
})()"""


def main() -> int:
    app = QApplication([])
    view = QWebEngineView()
    view.show()
    todo = [(w, page) for w in WIDTHS for page in sorted(SITE.rglob("*.html"))]
    todo = [(w, page) for w, page in todo if "_modules" not in page.parts]
    faults = []

    def load() -> None:
        if not todo:
            return app.quit()
        view.resize(todo[0][0], 1200)
        view.load(QUrl.fromLocalFile(str(todo[0][1])))

    def measured(text: str) -> None:
        width, page = todo.pop(0)
        found, hidden = json.loads(text)
        if width == WHOLE and page == SITE / "index.html":
            found += [f"not seen whole: {what}" for what in hidden]
        faults.extend(f"{page.relative_to(SITE)}, {width} pixels: {what!r}" for what in found)
        load()

    settle = lambda _: QTimer.singleShot(
        150, lambda: view.page().runJavaScript(_MEASURE, 0, measured)
    )
    view.loadFinished.connect(settle)
    load()
    app.exec()
    print(*faults or ["every page fits"], sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
