"""Settings of Sphinx; `make docs` builds."""

import runpy
import sys
from pathlib import Path

import synkhronos
import synkhronos.session  # which chooses Theano, before PyTensor is mocked
from synkhronos._arithmetic.operations import OPERATIONS, kinds_in_words

sys.path.insert(0, str(Path(__file__).parent))  # of the extension "figures"
BAD_INPUT = Path(__file__).parent.parent / "tests" / "support" / "bad_input.py"

project = "Synkhronos"
author = "Synkhronos developers"
copyright = author
version = release = synkhronos.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "figures",
    "formulas",
]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]
default_role = "code"

html_theme = "furo"
html_title = f"Synkhronos {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["widths.css"]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

autodoc_member_order = "bysource"
autodoc_mock_imports = [
    "llvmlite",
    "numba",
    "pymc",
    "pytensor",
    "xarray",
]  # which the environment of Theano lacks
autodoc_typehints = "none"  # the docstrings say the types
napoleon_google_docstring = False
napoleon_use_ivar = True  # properties have entries of their own
napoleon_use_rtype = False
trim_doctest_flags = True

# The few names that these pages use, from files beside them: a build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.txt"),
    "numpy": ("https://numpy.org/doc/1.23/", "inventories/numpy.txt"),
}

# A copy has neither prompts nor what they printed; blocks of output have no button.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"


def operations():
    """Return the table of the operations that reduce arrays."""
    rows = [
        f'   * - ``"{name}"``\n     - {row.title}\n     - {kinds_in_words(row.kinds)}\n'
        for name, row in OPERATIONS.items()
    ]
    head = "   * - op\n     - result\n     - of\n"
    return f".. list-table::\n   :header-rows: 1\n\n{head}{''.join(rows)}"


def add_tables(app, page, source):
    """Write the table of operations, and append what public names refuse to the page on these."""
    source[0] = source[0].replace(".. operations::\n", operations())
    if page != "bad_input":
        return
    if BAD_INPUT.exists():
        app.env.note_dependency(str(BAD_INPUT))
        added = runpy.run_path(str(BAD_INPUT))["tables"]()
    else:
        added = "The tables are missing: they come from the tests, which this copy does not have.\n"
    source[0] += f"\n\n{added}"


def setup(app):
    """Register the hook; Sphinx calls it with each page that it reads."""
    app.connect("source-read", add_tables)
