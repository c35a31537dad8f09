"""Give today's Python a Theano that imports, links a fast BLAS and runs ``scan``.

Theano 1.0.5 fails: it asks NumPy for its BLAS in a way that NumPy 1.22 and later don't answer. This
module gives Theano better defaults while it is imported, in memory only::

    interpreter start   synkhronos-import-support.pth -> install()   one finder on sys.meta_path
    import theano       theano.configparser           reads THEANO_FLAGS and .theanorc
                        set_defaults()                fills in the options that both left open
                        theano.configdefaults         takes the flags from there, as ever

It also mends the imports of three libraries: Lasagne 0.1, the release on PyPI, imports
``theano.tensor.signal.downsample``, which Theano 1.0 no longer has. Keras 2.3 and downhill 0.4 take
names from ``collections`` that Python 3.10 has moved to ``collections.abc``.

The .pth file imports an installed copy of this file, ``_synkhronos_import_support``. The copy runs
at the start of every interpreter of the environment, so it imports only ``sys`` at first. From
Python 3.12 on, where the host is PyTensor, it only gives ``import theano`` a better message.
"""

import sys


def install(has_theano=True):
    """Register the finder for this Python, once, whichever copy of this module comes first."""
    finder, place = (TheanoFinder, 0) if has_theano else (NoTheano, len(sys.meta_path))
    if not any(type(each).__name__ == finder.__name__ for each in sys.meta_path):
        sys.meta_path.insert(place, finder())


class NoTheano:
    """Gives ``import theano`` a better message in Pythons that have no Theano."""

    def find_spec(self, name, path=None, target=None):
        """Raise ModuleNotFoundError for an import of Theano that no other finder finds."""
        if name != "theano" or sys._getframe(2).f_code.co_name != "_find_and_load_unlocked":
            return None  # also if importlib.util.find_spec, which imports nothing, asks
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        if not any(each.find_spec(name, path, target) for each in others):
            raise ModuleNotFoundError(NO_THEANO, name=name)


class TheanoFinder:
    """Changes a few modules as they are imported: before or after their code runs."""

    def find_spec(self, name, path=None, target=None):
        """Return None for all but the modules in `PREPARERS` and `FINISHERS`."""
        prepare, finish = PREPARERS.get(name, _nothing), FINISHERS.get(name, _nothing)
        if prepare is finish:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                break
        else:
            return None
        if spec.loader is None:  # a folder without __init__.py
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            prepare(module)
            try:
                execute(module)
            except AttributeError:
                if name == "theano":
                    refuse_new_numpy(LIMITS["numpy"])
                raise
            finish(module)

        spec.loader.exec_module = exec_module
        return spec


def refuse_new_numpy(limit):
    """Raise ImportError, with what to install, if NumPy is this version or a later one."""
    import numpy

    if _minor(numpy.__version__) >= limit:
        raise ImportError(advice_of("numpy", numpy.__version__))


def advice_of(name, version):
    """Return what to install in place of a package that is too new for Theano; "" for others."""
    if _minor(version) < LIMITS[name]:
        return ""
    needed = "{}<{}.{}".format(name, *LIMITS[name])
    return f"Theano 1.0.5 needs {needed}, and this is {version}: pip install '{needed}'"


def warn_of_new_numpy():
    """Warn if Theano is still to be imported, and NumPy is too new for it; imports neither."""
    import warnings

    if "theano" in sys.modules or _installed_version("theano") != "1.0.5":
        return
    version = _installed_version("numpy")
    if version and advice_of("numpy", version):
        warnings.warn(advice_of("numpy", version), stacklevel=3)


def _installed_version(package):
    """Return the version that pip notes beside a package, or None; importlib.metadata is slower."""
    import os
    from importlib.util import find_spec

    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for entry in os.listdir(os.path.dirname(folder)):
            name, _, rest = entry.lower().partition("-")
            if name == package and rest.endswith(("dist-info", "egg-info")):
                return rest.rpartition(".")[0].partition("-")[0]
    return None


def _minor(version):
    return tuple(map(int, version.split(".")[:2]))


def set_defaults(configparser):
    """Add defaults to Theano's parsed .theanorc where neither files nor THEANO_FLAGS set a flag."""
    if sys.version_info >= (3, 11):
        # The C code of scan does not compile, and fails loudly; without it scan loops in Python.
        sys.modules["theano.scan_module.scan_perform_ext"] = None
    configparser.set_by_synkhronos = set()
    for name, value in default_flags().items():
        section, option = section_and_option(name)
        interpolated, raw = configparser.theano_cfg, configparser.theano_raw_cfg
        if name in configparser.THEANO_FLAGS_DICT or raw.has_option(section, option):
            continue
        configparser.set_by_synkhronos.add(name)
        for config, text in ((interpolated, value.replace("%", "%%")), (raw, value)):
            if not config.has_section(section):
                config.add_section(section)
            config.set(section, option, text)


def accept_new_cudnn(dnn):
    """Silence the warning of a cuDNN that is newer than Theano: ranks adapt to it or refuse it."""
    import warnings

    warnings.filterwarnings("ignore", "Your cuDNN version is more recent than Theano")


def split_like_a_shell(blas):
    """Allow quoted paths with spaces in ``blas.ldflags``: Theano would split them at the spaces."""
    import shlex

    class ShellWords(str):
        def split(self):
            return shlex.split(self)

    ldflags = blas._ldflags
    blas._ldflags = lambda ldflags_str, *args, **kwargs: ldflags(
        ShellWords(ldflags_str), *args, **kwargs
    )


def mend_lock(compilelock):
    """Mend the lock of Theano's compile cache: its waits are long and loud, and it has races.

    Ranks that compile at the same time wait for one another often, and mostly for less than a
    second: here they poll often, and print about it only after a while. If two processes see that
    the owner has gone, in Theano the slower one removes the lock of the faster, and a process that
    ends may remove a lock that another has just made. Here the operating system lets one process at
    a time take the lock, and each removes only its own.
    """
    import os
    import time

    original_lock, original_unlock = compilelock.lock, compilelock.Unlocker.unlock
    turns = []  # the open file that keeps the other processes waiting

    def end_turn():
        for turn in turns:
            turn.close()
        turns.clear()

    def lock(tmp_dir, **kwargs):
        end = time.monotonic() + QUIET_SECONDS
        end_turn()
        try:
            turns.extend(_open_turn(tmp_dir))
            while time.monotonic() < end and not (
                _owner(tmp_dir) in (None, os.getpid()) and all(map(_take_turn, turns))
            ):
                time.sleep(0.02)
            if time.monotonic() < end:  # free now, but a process without turns may take it first
                kwargs = {"min_wait": 0.02, "max_wait": 0.05, "verbosity": 0, **kwargs}
            return original_lock(tmp_dir, **kwargs)
        except BaseException:
            end_turn()
            raise

    def unlock(self, force=False):
        if force:
            original_unlock(self, force)
            return
        if _owner(self.tmp_dir) == os.getpid():
            original_unlock(self)
        end_turn()

    compilelock.lock, compilelock.Unlocker.unlock = lock, unlock


def _open_turn(tmp_dir):
    """Return, in a list, the file that the system locks; no file where none can be made."""
    import os

    try:
        os.makedirs(os.path.dirname(tmp_dir), exist_ok=True)
        return [open(f"{tmp_dir}.turn", "a")]
    except OSError:
        return []


def _take_turn(turn):
    """Return whether no other process has the turn."""
    import errno
    import fcntl

    try:
        fcntl.lockf(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a forked process does not have it
    except OSError as error:  # with another number, it is a disk without locks
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _owner(tmp_dir):
    """Return the id of the running process that holds a lock, as its file says; else None."""
    import os

    try:
        with open(os.path.join(tmp_dir, "lock")) as file:
            owner = int(file.read().split("_")[0])
        os.kill(owner, 0)
        return owner
    except (OSError, ValueError):
        return None


def restore_collections(module):
    """Restore the names of the abstract classes in ``collections``."""
    import collections
    from collections import abc

    for name in abc.__all__:
        if not hasattr(collections, name):
            setattr(collections, name, getattr(abc, name))


def add_downsample(signal):
    """Define pooling with the names of module, function and arguments that Lasagne 0.1 uses."""
    from types import ModuleType

    def max_pool_2d(input, ds, ignore_border=None, st=None, padding=(0, 0), mode="max"):
        from theano.tensor.signal import pool

        return pool.pool_2d(input, ds, ignore_border, stride=st, pad=padding, mode=mode)

    signal.downsample = ModuleType("theano.tensor.signal.downsample")
    signal.downsample.max_pool_2d = max_pool_2d
    sys.modules[signal.downsample.__name__] = signal.downsample


def hide_mpi(module):
    """Keep ``theano.tensor.io`` from starting MPI, as it does wherever mpi4py is installed.

    A process that has started MPI must not be forked, and in a job of mpirun it takes the place of
    the process that is to use MPI. If a script imports mpi4py's MPI itself, nothing is hidden.
    """
    if "mpi4py.MPI" not in sys.modules:
        sys.modules["mpi4py.MPI"] = None


def show_mpi(module):
    """Undo `hide_mpi`."""
    if sys.modules.get("mpi4py.MPI", module) is None:
        del sys.modules["mpi4py.MPI"]


def _nothing(module):
    pass


NO_THEANO = (
    "No module named 'theano': Theano needs Python 3.8 to 3.11, and this is {}.{}. In a new script "
    "write `from synkhronos.host import T, theano`, which is PyTensor here; for a script as it is "
    "make an environment with an older Python, such as python3.11 -m venv .venv"
).format(*sys.version_info)
# The first versions of packages that lack what Theano needs: pip must install older ones.
LIMITS = {
    "numpy": (1, 24),  # removed np.bool and its like; C code does not compile with NumPy 2
    "scipy": (1, 11),  # removed functions with which conv2d computes in Python
    "setuptools": (80, 9),  # pkg_resources, which theano.gpuarray imports, warns; 82 has none
}
PREPARERS = {
    "theano": lambda module: refuse_new_numpy((2, 0)),
    "downhill": restore_collections,
    "keras": restore_collections,
    "theano.gpuarray.dnn": accept_new_cudnn,
    "theano.tensor.io": hide_mpi,
}
FINISHERS = {
    "theano.tensor.io": show_mpi,
    "theano.configparser": set_defaults,
    "theano.gof.compilelock": mend_lock,
    "theano.tensor.blas": split_like_a_shell,
    "theano.tensor.signal": add_downsample,
}
QUIET_SECONDS = 30.0  # a wait for the lock prints nothing for this long


def section_and_option(name):
    """Return the section and option of a flag in a .theanorc, such as ("blas", "ldflags")."""
    section, _, option = name.rpartition(".")
    return section or "global", option


def default_flags():
    """Return the Theano flags, name to value, that fit this environment."""
    return {
        "blas.ldflags": find_blas()[0],
        # Importing Theano must not open a device: each rank opens its own.
        "device": "cpu",
        "force_device": "True",
        # Theano 1.0.5 knows cuDNN 5 to 7, and fails with newer ones, which it takes, too. Ranks
        # that open a CUDA device enable cuDNN by themselves.
        "dnn.enabled": "False",
        # Ranks that compile at the same time wait for one another: seconds between two polls.
        "compile.wait": "1",
    }


def find_blas():
    """Return the linker flags of the best BLAS here, and its origin.

    The first of: OpenBLAS inside SciPy's wheel, as fast as NumPy's own; a system OpenBLAS; any
    system BLAS. The flags are empty if there is none: Theano then calls NumPy.
    """
    import shlex
    from ctypes.util import find_library
    from importlib.machinery import PathFinder
    from pathlib import Path

    scipy = PathFinder.find_spec("scipy")
    for package in (scipy and scipy.submodule_search_locations) or ():
        # -l:file would do for g++, but Theano warns if it finds no file with that very name.
        for library in sorted(Path(package).with_name("scipy.libs").glob("libopenblas*.so")):
            flags = ["-L" + str(library.parent), "-l" + library.stem[len("lib") :]]
            return " ".join(map(shlex.quote, flags)), "SciPy's wheel"
    for name in ("openblas", "blas"):
        library = find_library(name)
        if library:
            # -lopenblas would need libopenblas.so, which comes with the development package.
            return ("-l:" + library if sys.platform == "linux" else "-l" + name), "the system"
    return "", "nowhere"
