"""Settings of Sphinx; `make docs` builds."""

import synkhronos

project = "Synkhronos"
author = "Synkhronos developers"
copyright = author
version = release = synkhronos.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"

html_theme = "furo"
html_title = f"Synkhronos {release}"
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say the types
napoleon_google_docstring = False
napoleon_use_ivar = True  # properties have entries of their own
napoleon_use_rtype = False
trim_doctest_flags = True
