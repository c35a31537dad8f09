"""Settings for the examples in docstrings, of the folder tests: see pyproject.toml."""

from support.examples import (
    collect_ignore,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    settings_of_examples,
)

__all__ = [
    "collect_ignore",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "settings_of_examples",
]
