"""The Pythons that Synkhronos runs on, the host library of each, and how pip installs it.

This file imports nothing of the package, so that setup.py and any Python 3 can run it.
"""

import re
import sys
from importlib.util import find_spec

# The oldest and the newest. No Python has both libraries: Theano 1.0.5 needs NumPy 1.23 or older
# and distutils, which end with Python 3.11, and PyTensor needs Python 3.12.
THEANO = ((3, 8), (3, 11))
PYTENSOR = ((3, 12), (3, 14))

# The oldest and the newest minor release of PyTensor. Each may change functions that Synkhronos
# calls: `make test-pytensor PYTENSOR=3.1` tests with one of them.
RELEASES = ((3, 1), (3, 3))


def numbers(version):
    """Return a version as text.

    >>> numbers((3, 12))
    '3.12'
    """
    return ".".join(map(str, version))


def span(versions):
    """Return the oldest and the newest version as text.

    >>> span(THEANO)
    '3.8 to 3.11'
    """
    return " to ".join(map(numbers, versions))


def after(versions):
    """Return the minor version that follows the newest one as text.

    >>> after(PYTENSOR)
    '3.15'
    """
    major, minor = versions[1]
    return numbers((major, minor + 1))


def installed_version(package):
    """Return the version of a package of this environment, or None."""
    from importlib import metadata  # Python 3.7 has none

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# The requirement of pip for PyTensor.
REQUIREMENT = f"pytensor>={numbers(RELEASES[0])},<{after(RELEASES)}"


def advice_of_release(version):
    """Return what to install in place of a release of PyTensor; "" if Synkhronos knows it.

    >>> print(advice_of_release("2.38.1"))
    Synkhronos needs PyTensor 3.1 to 3.3, and this is 2.38.1: pip install 'pytensor>=3.1,<3.4'
    """
    minor = re.match(r"(\d+)\.(\d+)", str(version))  # None if Sphinx imitates PyTensor
    if minor is None or RELEASES[0] <= tuple(map(int, minor.groups())) <= RELEASES[1]:
        return ""
    needed = f"Synkhronos needs PyTensor {span(RELEASES)}, and this is {version}"
    return f"{needed}: pip install '{REQUIREMENT}'"


def install(extra):
    """Return the command that installs Synkhronos with one of its extras.

    >>> print(install("mpi"))
    pip install 'synkhronos[mpi]'
    """
    return f"pip install 'synkhronos[{extra}]'"


def advice(title, command, version=sys.version_info):
    """Return how to get a library that is missing.

    >>> print(advice("PyTensor", "pip install pytensor", (3, 11)))
    PyTensor needs Python 3.12 to 3.14, and this is 3.11
    >>> print(advice("Theano", "pip install Theano==1.0.5", (3, 11)))
    pip install Theano==1.0.5; or, with the NumPy and SciPy that fit, pip install synkhronos
    """
    versions = THEANO if title == "Theano" else PYTENSOR
    this = tuple(version[:2])
    if not versions[0] <= this <= versions[1]:
        return f"{title} needs Python {span(versions)}, and this is {numbers(this)}"
    return f"{command}; or, with the NumPy and SciPy that fit, pip install synkhronos"


def check(version=sys.version_info, platform=sys.platform):
    """Raise ImportError for a Python that has neither host library, or is not on Linux."""
    if platform != "linux":
        this = {"darwin": "macOS", "win32": "Windows"}.get(platform, platform)
        raise ImportError(
            f"Synkhronos needs Linux, and this is {this}: run it in a virtual machine or a "
            "container of Linux, such as Docker's, or in WSL on Windows"
        )
    if not THEANO[0] <= tuple(version[:2]) <= PYTENSOR[1]:
        raise ImportError(
            f"Synkhronos needs Python {span(THEANO)}, with Theano, or {span(PYTENSOR)}, with "
            f"PyTensor, but this is Python {numbers(version[:2])}. Make an environment with one of "
            "those, for example with python3.12 -m venv .venv"
        )


def check_packages(names=("posix_ipc", "threadpoolctl", "cloudpickle")):
    """Raise ImportError if one of the packages that pip installs with Synkhronos is missing.

    >>> check_packages(["sys", "absent"])
    Traceback (most recent call last):
    ImportError: Synkhronos needs packages that are not installed here: pip install absent
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        needed = "Synkhronos needs packages that are not installed here"
        raise ImportError(f"{needed}: pip install {' '.join(missing)}")


def is_for_theano(version=sys.version_info):
    """Return whether the host library of a Python is Theano."""
    return tuple(version[:2]) <= THEANO[1]


if __name__ == "__main__":
    try:
        check()
    except ImportError as error:
        sys.exit(str(error))
    print(
        f"Making .venv with Python {numbers(sys.version_info[:2])}, for "
        f"{'Theano' if is_for_theano() else 'PyTensor'}. pip downloads some 120 packages, which "
        "takes a few minutes."
    )
