"""Pythons that run Synkhronos, and the host library that each of them has.

It imports nothing of the package, so that setup.py, and any Python, can run it.
"""

import sys

# The oldest and the newest. No Python has both libraries: Theano 1.0.5 needs NumPy 1.23 or older
# and distutils, which end with Python 3.11, and PyTensor needs Python 3.12.
THEANO = ((3, 8), (3, 11))
PYTENSOR = ((3, 12), (3, 14))


def check(version=sys.version_info):
    """Raise ImportError for a Python that has neither host library."""
    if not THEANO[0] <= tuple(version[:2]) <= PYTENSOR[1]:
        raise ImportError(
            "Synkhronos needs Python 3.8 to 3.11, with Theano, or 3.12 to 3.14, with PyTensor, but "
            "this is Python {}.{}. Make an environment with one of those, for example with "
            "python3.12 -m venv .venv".format(*version[:2])
        )


def is_for_theano(version=sys.version_info):
    """Return whether the host library of a Python is Theano."""
    return tuple(version[:2]) <= THEANO[1]


if __name__ == "__main__":
    if not is_for_theano():
        this = "This is Python {}.{}, but Theano needs 3.8 to 3.11.".format(*sys.version_info)
        sys.exit(f"{this} For PyTensor: make test-pytensor")
    try:
        check()
    except ImportError as error:
        sys.exit(str(error))
