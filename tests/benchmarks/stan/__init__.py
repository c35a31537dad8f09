"""Stan's `reduce_sum`: programs of the models of ``bench pymc``, compiled by this machine.

httpstan from PyPI brings Stan's compiler, its headers and TBB; nothing of its Python is used.
`benchmarks.programs.stan_model` evaluates a program, with threads of Intel's TBB.

References
----------
Stan User's Guide, "Reduce-sum": parallel sums over slices of the rows, since Stan 2.23 (2020).
"""

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import groups
from synkhronos.tools.bench import frame

FLAGS = [
    *("-shared", "-fPIC", "-O3", "-march=native", "-std=c++17", "-w"),
    *("-DSTAN_THREADS", "-D_REENTRANT", "-DBOOST_DISABLE_ASSERTS"),
    *("-DBOOST_PHOENIX_NO_VARIADIC_EXPRESSION", "-D_GLIBCXX_USE_CXX11_ABI=0"),
]
LIBRARIES = ["sundials_cvodes", "sundials_idas", "sundials_nvecserial", "tbb"]


def compiled(program: str, cache: Path) -> Path:
    """Return the shared library of a program, compiled now (minutes) unless it is in the cache."""
    here, stan = Path(__file__).parent, installed()
    sources = [(here / name).read_bytes() for name in (f"{program}.stan", "evaluate.cpp")]
    key = hashlib.sha256(b"\0".join([*sources, str(stan).encode(), *map(str.encode, FLAGS)]))
    library = cache / f"{program}-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    code, made = cache / f"{program}-{os.getpid()}.cpp", library.with_suffix(f".{os.getpid()}")
    try:
        _run([stan / "stanc", "--O1", here / f"{program}.stan", f"--o={code}"])
        search = [f"-I{stan / 'include'}", f"-L{stan / 'lib'}", f"-Wl,-rpath,{stan / 'lib'}"]
        sources = [code, here / "evaluate.cpp"]
        linked = [f"-l{name}" for name in LIBRARIES]
        _run([os.environ.get("CXX", "g++"), *FLAGS, *sources, "-o", made, *search, *linked])
        made.rename(library)
    finally:
        code.unlink(missing_ok=True)
        made.unlink(missing_ok=True)
    return library


def installed() -> Path:
    """Return the folder with Stan's compiler and headers; raise frame.Failed without one."""
    spec = importlib.util.find_spec("httpstan")
    if spec is None or spec.origin is None:
        raise frame.Failed("Stan isn't installed: pip install httpstan")
    return Path(spec.origin).parent


def _run(command):
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    except OSError as error:
        raise frame.Failed(f"{command[0]} can't be run: {error}") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise frame.Failed(f"{Path(command[0]).name} failed: {last[0]}")


@contextlib.contextmanager
def running(library, data, threads):
    """Yield a process that evaluates a program on some rows, with so many threads.

    Parameters
    ----------
    library : Path
        From `compiled`.
    data : dict of str to array or int
        What the program declares, but for ``grain``; the rows are the items of ``y``.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.npz")
        np.savez(path, **data)
        given = library, path, threads
        settings = {"STAN_NUM_THREADS": str(threads)}
        with groups.program("Stan", sys.executable, "stan_model", *given, **settings) as program:
            yield program
