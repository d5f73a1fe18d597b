"""How Sphinx makes the site of what pages.py lays out."""

import inspect
import types

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging
from sphinx.util.inspect import stringify_signature

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
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 90  # longer ones have a line for each argument
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


def _signature(app, what, name, obj, options, signature, returns):
    """Describe a layer by its ``__init__`` and what that hands on to the class it stands in for."""
    if what != "class" or "*args" not in (signature or ""):
        return signature, returns
    found = {}
    for base in obj.__mro__:
        own = inspect.signature(base.__init__).parameters
        found |= {name: p for name, p in own.items() if name not in found}
        if not any(p.kind is p.VAR_POSITIONAL for p in own.values()):
            break
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    shown = [p for name, p in found.items() if name != "self" and p.kind not in kinds]
    shown.sort(key=lambda p: (p.kind, p.name == "implementation"))
    shown = [p.replace(annotation=p.empty, default=_Named.of(p.default)) for p in shown]
    return stringify_signature(inspect.Signature(shown)), None


class _Named(str):
    """A function or class as a default, which reads as its name."""

    __repr__ = str.__str__

    @classmethod
    def of(cls, default):
        if isinstance(default, types.MappingProxyType):
            return {}
        return (
            cls(default.__name__)
            if callable(default) and default is not inspect.Parameter.empty
            else default
        )


def setup(app):
    app.connect("autodoc-process-signature", _signature)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
