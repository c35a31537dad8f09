"""Settings for the examples in docstrings, of the folder tests: see pyproject.toml."""

from support.examples import *  # noqa: F403
