"""How Sphinx makes the site of what pages.py lays out."""

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

import jaxkern

project = "jaxkern"
author = copyright = "The jaxkern authors"
release = jaxkern.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # Google's sections: Args, Returns, Raises
    "sphinx.ext.viewcode",
    "myst_nb",  # Markdown and notebooks
]
html_theme = "furo"
html_title = f"jaxkern {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the shapes and dtypes in Args say more
napoleon_use_rtype = False
napoleon_use_ivar = True  # a class's own attributes are among its members
nb_execution_mode = "off"  # as they were committed; tests/test_notebooks.py runs them
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3


def _mathml(node, latex, block):
    """MathML, which browsers draw by themselves: no script, no other host."""
    try:
        return tex2mathml(latex, as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s: %s", latex, error, location=node)
        return ""


def _inline(self, node):
    self.body.append(_mathml(node, node.astext(), block=False))
    raise nodes.SkipNode


def _block(self, node):
    latex = node.astext()
    if r"\\" in latex:
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(_mathml(node, latex, block=True))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
