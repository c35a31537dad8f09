"""Stan's `reduce_sum`, timed beside PyMC: programs of the same models, compiled by this machine.

    Stan ──▶ a process: evaluate.cpp with one program, and threads of Intel's TBB
             ◀── the seconds of each evaluation of the log density and its gradient

httpstan from PyPI brings Stan's compiler, its headers and TBB; nothing of its Python is used.

References
----------
Stan User's Guide, "Reduce-sum": parallel sums over slices of the rows, since Stan 2.23 (2020).
"""

import ctypes
import hashlib
import importlib.util
import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import numpy as np

PROGRAMS = ("logistic", "hierarchical", "poisson", "student")
FLAGS = [
    *("-shared", "-fPIC", "-O3", "-march=native", "-std=c++17", "-w"),
    *("-DSTAN_THREADS", "-D_REENTRANT", "-DBOOST_DISABLE_ASSERTS"),
    *("-DBOOST_PHOENIX_NO_VARIADIC_EXPRESSION", "-D_GLIBCXX_USE_CXX11_ABI=0"),
]
LIBRARIES = ["sundials_cvodes", "sundials_idas", "sundials_nvecserial", "tbb"]
SLICES = 8  # of the rows, for each thread: Stan's guide advises several


class StanError(RuntimeError):
    """Stan isn't installed, or a program did not compile or run."""


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
    """Return the folder with Stan's compiler and headers; raise StanError without one."""
    spec = importlib.util.find_spec("httpstan")
    if spec is None or spec.origin is None:
        raise StanError("Stan isn't installed: pip install httpstan")
    return Path(spec.origin).parent


def _run(command):
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    except OSError as error:
        raise StanError(f"{command[0]} can't be run: {error}") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise StanError(f"{Path(command[0]).name} failed: {last[0]}")


class Stan:
    """A process that evaluates a program on some rows, from ``__enter__`` to ``__exit__``.

    Parameters
    ----------
    library : Path
        From `compiled`.
    data : dict of str to array or int
        What the program declares, but for ``grain``; the rows are the items of ``y``.
    threads : int
    """

    def __init__(self, library, data, threads):
        self._library, self._data, self._threads = library, data, threads

    def __enter__(self):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        given = str(self._library), self._data, self._threads, other
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        other.close()
        return self

    def __exit__(self, *exception):
        self._pipe.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()

    def evaluate(self, at):
        """Return the log density and its gradient at unconstrained parameters."""
        return self._ask("evaluate", at)

    def times(self, count):
        """Return the seconds of each of `count` evaluations, where all parameters are 0.01."""
        return self._ask("times", count)

    def _ask(self, *question):
        try:
            self._pipe.send(question)
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise StanError(f"Stan's process has ended: {self._process.exitcode}") from None


def _serve(library, data, threads, pipe):
    os.environ["STAN_NUM_THREADS"] = str(threads)
    model = _Model(ctypes.CDLL(library), data, threads)
    while True:
        try:
            what, *given = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(model, what)(*given))


class _Model:
    def __init__(self, library, data, threads):
        self._library = library
        library.make_model.restype = ctypes.c_void_p
        library.evaluate.restype = ctypes.c_double
        data = {**data, "grain": max(1, len(data["y"]) // (SLICES * threads))}
        arrays = {name: np.asarray(value) for name, value in data.items()}
        integers = {name: each for name, each in arrays.items() if each.dtype.kind in "iu"}
        reals = {name: each for name, each in arrays.items() if name not in integers}
        kinds = (reals, np.float64), (integers, np.intc)
        given = [part for kind in kinds for part in _arguments(*kind)]
        self._model = ctypes.c_void_p(library.make_model(threads, *given))
        self._size = library.number_of_parameters(self._model)

    def evaluate(self, at):
        at, gradient = np.ascontiguousarray(at, float), np.empty(self._size)
        if at.shape != gradient.shape:
            raise ValueError(f"expected {self._size} parameters, got an array of {at.shape}")
        addresses = [ctypes.c_void_p(each.ctypes.data) for each in (at, gradient)]
        return self._library.evaluate(self._model, self._size, *addresses), gradient

    def times(self, count):
        at, seconds = np.full(self._size, 0.01), []
        for _ in range(count):
            begin = time.perf_counter()
            self.evaluate(at)
            seconds.append(time.perf_counter() - begin)
        return seconds


def _arguments(arrays, dtype):
    """Return the arguments of C for arrays of one dtype, which they keep alive."""
    flat = [np.asarray(each, dtype).ravel(order="F") for each in arrays.values()]
    n, lengths = len(arrays), [length for each in arrays.values() for length in each.shape]
    names = (ctypes.c_char_p * n)(*[name.encode() for name in arrays])
    values = (ctypes.c_void_p * n)(*[each.ctypes.data for each in flat])
    values.kept = flat
    ndim = (ctypes.c_int * n)(*[each.ndim for each in arrays.values()])
    return n, names, values, ndim, (ctypes.c_size_t * max(len(lengths), 1))(*lengths)
