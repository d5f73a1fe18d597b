"""The site: the README, the docstrings, the notebooks and the benchmarks' tables. `make docs`."""

import jaxkern

project = "jaxkern"
author = "The jaxkern authors"
release = jaxkern.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # Google's sections: Args, Returns, Raises
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "myst_nb",  # Markdown and notebooks
]
html_theme = "furo"
html_title = f"jaxkern {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the shapes and dtypes in Args say more
napoleon_use_rtype = False
napoleon_use_ivar = True  # a class's own attributes are among its members
nb_execution_mode = "off"  # as they were committed; tests/test_notebooks.py runs them
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links of README to files that are no pages
