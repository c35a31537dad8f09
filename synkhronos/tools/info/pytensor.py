"""Checks of PyTensor and what it compiles with, where it is the host library."""

from __future__ import annotations

import shutil
from pathlib import Path

from synkhronos import _systems
from synkhronos._host import pythons
from synkhronos._machine import devices as _devices
from synkhronos.tools.info.report import (
    BROKEN,
    MISSING,
    OK,
    Check,
    check_cache,
    check_versions,
    facts_of,
    installed_version,
    not_imported,
)

INSTALL = f"pip install '{pythons.REQUIREMENT}'"
# The default mode has the name "Mode", whatever it compiles with.
MODES = {"NumbaLinker": "NUMBA", "VMLinker": "CVM"}
REFUSED = {"JAXLinker": "JAX", "PytorchLinker": "PYTORCH", "MLXLinker": "MLX"}
PROBE = Path(pythons.__file__).with_name("pytensor") / "probe.py"


def checks() -> list[Check]:
    """Run the checks, which takes some seconds, and return them in the order of the table."""
    facts, error = probe()
    return [
        check_pytensor(facts, error),
        *check_versions(facts),
        check_numba(facts),
        check_compiler(facts),
        check_cache("PyTensor", facts),
        *(check_package(system) for system in _systems.there() if system.package),
    ]


def probe(timeout: float = 300.0) -> tuple[dict, str]:
    """Return the facts that a child process reports about PyTensor, and the error that ended it."""
    return facts_of(_devices.python_command(PROBE.read_text()), timeout)


def check_pytensor(facts: dict, error: str) -> Check:
    """Check that PyTensor imports, and is one of the versions that Synkhronos knows."""
    if "pytensor" not in facts:
        return not_imported("PyTensor", INSTALL, error)
    found = f"{facts['pytensor']} ({facts['path']})"
    advice = pythons.advice_of_release(facts["pytensor"])
    if advice:
        return Check("PyTensor", BROKEN, found, advice, essential=True)
    linker, mode = facts["linker"], facts["mode"]
    if mode == "Mode" or linker in REFUSED:
        mode = {**MODES, **REFUSED}.get(linker, mode)
    found += f", mode={mode}, floatX={facts['floatX']}"
    if linker in REFUSED:
        advice = "ranks can't run functions of this mode: PYTENSOR_FLAGS=mode=NUMBA"
        return Check("PyTensor", BROKEN, found, advice, essential=True)
    return Check("PyTensor", OK, found, essential=True)


def check_numba(facts: dict) -> Check:
    """Check that numba is there, which compiles in PyTensor's default mode."""
    version = facts.get("numba") or installed_version("numba")
    if version:
        return Check("numba", OK, version, essential=True)
    advice = "PyTensor's default mode compiles with it: pip install numba"
    return Check("numba", MISSING, "not installed", advice, essential=True)


def check_compiler(facts: dict) -> Check:
    """Name the compiler of PyTensor's C mode, which few functions need."""
    name = facts.get("cxx", "g++")
    path = shutil.which(name) if name else None
    if path is None:
        advice = "only functions in the mode CVM need one: apt-get install g++ (Debian, Ubuntu)"
        return Check("C++ compiler", MISSING, "no g++ on the PATH", advice)
    if not facts.get("ldflags"):
        advice = (
            "matrix products are slow in the mode CVM, not in the default one: name a BLAS with "
            "PYTENSOR_FLAGS=blas__ldflags=..."
        )
        return Check("C++ compiler", OK, f"{path}, with no BLAS", advice)
    return Check("C++ compiler", OK, f"{path}, with {facts['ldflags']}")


def check_package(system: _systems.SystemRow) -> Check:
    """Name the version of a package that only one system needs."""
    title, name = system.package or ("", "")
    version = installed_version(name)
    if version:
        return Check(title, OK, version)
    advice = f"only {system.module} needs it: {pythons.install(name)}"
    return Check(title, MISSING, "not installed", advice)
