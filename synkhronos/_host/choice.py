"""Choose the host library: Theano or PyTensor, once for a process.

    SYNKHRONOS_HOST  ──▶  the library that is imported  ──▶  the one that is installed

If both are imported, it is Theano; if both are installed, it is the one that supports this Python.
Nothing here imports a library.
"""

import importlib.util
import os
import sys

from synkhronos._host import pythons

VARIABLE = "SYNKHRONOS_HOST"
TITLES = {"theano": "Theano", "pytensor": "PyTensor"}

TO_INSTALL = (
    "`pip install synkhronos` installs PyTensor on Python "
    f"{pythons.span(pythons.PYTENSOR)}, and Theano on Python {pythons.span(pythons.THEANO)}. "
    f"Either can be installed alone: `pip install '{pythons.REQUIREMENT}'`, or `pip install "
    "Theano==1.0.5 'numpy<1.24'`"
)


def choose(environment=os.environ, modules=sys.modules, is_installed=None, version=None) -> str:
    """Return the name of the host, "theano" or "pytensor", or raise ValueError or ImportError."""
    installed = is_installed or _is_installed
    version = version or sys.version_info[:2]
    asked = environment.get(VARIABLE, "").strip().lower()
    if asked:
        if asked not in TITLES:
            raise ValueError(
                f"{VARIABLE} must be 'theano' or 'pytensor', or not be set, got "
                f"{environment[VARIABLE]!r}."
            )
        if modules.get(asked) is None and not installed(asked):
            raise ImportError(
                f"{VARIABLE}={asked} asks for {TITLES[asked]}, which is not installed in this "
                f"Python {pythons.numbers(version)}: {TO_INSTALL}."
            )
        return asked
    for name in TITLES:
        if modules.get(name) is not None:
            return name
    # This Python may be too new for the Theano that is installed.
    for name in TITLES if pythons.is_for_theano(version) else reversed(TITLES):
        if installed(name):
            return name
    raise ImportError(
        "Synkhronos needs Theano or PyTensor, with which graphs are written. Neither is "
        f"installed in this Python {pythons.numbers(version)}: {TO_INSTALL}."
    )


def is_imported() -> bool:
    """Return whether this process has imported a host library: else it has no graphs either."""
    return any(name in sys.modules for name in TITLES)


def _is_installed(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, or None in its place
        return sys.modules.get(name) is not None


def needs_cures() -> bool:
    """Return whether `theano.import_support` is to prepare Theano: unless PyTensor is the host."""
    try:
        return choose() == "theano"
    except (ImportError, ValueError):  # the first use of a name of `_host` raises it
        return pythons.is_for_theano()


def library_of(value) -> str:
    """Return the name of the host library that a value's class is from; "" for any other value."""
    for kind in type(value).__mro__:
        name = kind.__module__.partition(".")[0]
        if name in TITLES:
            return name
    return ""


def advice(value, title: str) -> str:
    """Return a sentence, after a space, about a value of another library than the host's, or ""."""
    other = library_of(value)
    if other in ("", title.lower()):
        return ""
    return (
        f" It is of {TITLES[other]}, but the host library of this process is {title}: write the "
        f"graph with {title}, or set {VARIABLE}={other} before Synkhronos is imported."
    )
