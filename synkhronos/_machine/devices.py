"""Find the devices of this machine, and choose one for each rank.

GPUs are counted in a short-lived process, so that this one never opens a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import json
import logging
import math
import operator
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Mapping, Sequence

from synkhronos import _wording
from synkhronos._machine.interrupts import raised_here
from synkhronos._machine.log import log

_MOST_PROCESSES = 1 << 22  # the most that Linux allows
DEVICE_NAME = re.compile(r"cpu|cuda\d*|opencl\d+:\d+|jax:[a-z]+\d*")
# No "-" at the beginning: ssh would take the name for an option.
HOST_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?,?")  # of each node: "2(x3),1"
EXAMPLES = "such as 'cpu', 'cuda0', 'opencl0:0' or 'jax:cpu'"
VARIABLE = "SYNKHRONOS_DEVICES"
RANKS_VARIABLE = "SYNKHRONOS_RANKS_OF_MACHINES"
GNU = "libgomp.so.1"  # the OpenMP library of Theano's compiled functions
_SOFTLY = 1  # omp_pause_soft of omp.h
# glibc's highest limit. The memory of larger arrays still goes back to the system.
_LARGEST = 32 << 20
_KEPT = 512 << 20  # the most free memory that stays at the end of the heap
_ALLOCATOR = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h

# The OpenMP libraries that can't end their threads before a fork, and the forking process.
_lasting_threads = SimpleNamespace(paths=(), process=None)

_LEAVE_OUT = "import sys; sys.path[:] = filter(None, sys.path)"  # the working folder is ""
COUNT_DEVICES = """
import os, sys
from importlib.util import find_spec
kind = sys.argv[1]
if kind == "cuda" and find_spec("jax") and not find_spec("pygpu"):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    sys.exit(print(len(jax.devices(kind))))
from pygpu import gpuarray
platforms = 1 if kind == "cuda" else gpuarray.count_platforms(kind)
print(sum(gpuarray.count_devices(kind, platform) for platform in range(platforms)))
"""


def kind(device: str) -> str:
    """Return the kind of a device: ``"cpu"``, ``"cuda"``, ``"opencl"`` or ``"jax:platform"``.

    >>> kind("opencl0:1")
    'opencl'
    """
    return device.rstrip("0123456789:")


def usable_cores() -> int:
    """Return the number of cores that this process may use: its share of its job's on this machine.

    Affinity, CPU quota and Slurm's allocation limit the job. A process with cores of its own uses
    these.
    """
    cores, n_processes = len(os.sched_getaffinity(0)), processes_here()
    limits = [_cpu_quota(), float(cores * n_processes if _is_bound() else cores)]
    allocated = os.environ.get("SLURM_CPUS_ON_NODE", "")
    limits += [float(allocated)] if allocated.isdigit() else []
    return max(1, min(cores, math.ceil(min(limits)) // n_processes))


def _is_bound():
    """Return whether this process is bound to fewer cores than its parent may use."""
    try:
        return os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid())
    except OSError:
        return False


def processes_here(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes of a job that MPI or srun has started on this machine.

    >>> processes_here({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}), processes_here({})
    (4, 1)
    >>> processes_here({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"})
    1
    """
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if environment.get(name, "").isdigit():
            return max(int(environment[name]), 1)
    counts: list[int] = []
    for number, times in _TASKS.findall(environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(number)] * int(times or 1)
    node = environment.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 1


def undo_binding() -> None:
    """Let this process use all cores of mpirun's daemon, which binds each process to one."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return
    with contextlib.suppress(OSError):  # the daemon is another user's, or has ended
        cores, allowed = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
        if cores < allowed:
            os.sched_setaffinity(0, allowed)
            log.info("mpirun has bound this process to %s; it uses all %d", cores, len(allowed))


def _cpu_quota(proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float:
    """Return the number of cores that the control groups (v2, v1) allow; infinity if unlimited."""
    quotas = []
    try:
        groups = dict(line.split(":", 2)[1:] for line in Path(proc).read_text().splitlines())
        # In a container the path may be the host's: folders that don't exist here are skipped.
        group = Path(root, groups.get("", "/").strip("/"))
        for folder in (group, *group.parents):
            if (folder / "cpu.max").exists():
                quotas.append((folder / "cpu.max").read_text().split())
        v1 = Path(root, "cpu")
        if (v1 / "cpu.cfs_quota_us").exists():
            quotas.append([(v1 / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")])
        limits = [int(quota) / int(period) for quota, period in quotas if quota != "max"]
    except raised_here(OSError, ValueError):
        return math.inf
    return min((limit for limit in limits if limit > 0), default=math.inf)


def default_threads(n_ranks: int) -> int:
    """Return the number of BLAS and OpenMP threads that each of `n_ranks` ranks gets."""
    return max(1, usable_cores() // n_ranks)


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code in another interpreter.

    The interpreter imports nothing from the working folder, which ``-c`` puts first on the path: a
    ``json.py`` there would run in place of Python's.
    """
    return [sys.executable, "-c", f"{_LEAVE_OUT}\n{code}", *arguments]


def module_command(module: str, *arguments: str, unbuffered: bool = False) -> list[str]:
    """Return the command that runs a module as ``python -m`` does, without the working folder.

    >>> subprocess.run(module_command("platform", "--terse"), capture_output=True).returncode
    0
    """
    code = f'{_LEAVE_OUT}; import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__")'
    return [sys.executable, *["-u"] * unbuffered, "-c", code, module, *arguments]


def run_captured(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without input to its end, and return what it has printed."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **more)


def why_failed(child: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a failed command's standard error, or else its exit status."""
    return (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]


def probe(kind: str, timeout: float = 60.0) -> tuple[int, str]:
    """Return the number of devices of `kind` ("cuda", "opencl"), of pygpu or JAX, and any error."""
    try:
        child = run_captured(python_command(COUNT_DEVICES, kind), timeout=timeout)
    except subprocess.TimeoutExpired:
        return 0, f"no answer within {timeout:g} s"
    return (0, why_failed(child)) if child.returncode else (int(child.stdout.split()[-1]), "")


def get_n_gpu() -> int:
    """Count the CUDA devices of this machine, without opening one in this process.

    Returns
    -------
    int
        The number of CUDA devices, 0 without a driver.

    Raises
    ------
    ImportError
        If neither pygpu, the GPU library of Theano, nor JAX, that of PyTensor, can be imported.

    Examples
    --------
    >>> import synkhronos as synk
    >>> from contextlib import suppress
    >>> n_gpu = 0
    >>> with suppress(ImportError):  # without pygpu
    ...     n_gpu = synk.get_n_gpu()
    >>> n_gpu >= 0
    True
    """
    n_gpu, problem = probe("cuda")
    if re.match(r"(ModuleNotFound|Import)Error", problem):
        raise ImportError(
            "get_n_gpu() asks pygpu, the GPU library of Theano, which cannot be imported here "
            f"({problem}), or for PyTensor JAX, which is not installed. `synkhronos info` says how "
            "to install them; CPU ranks work without them."
        )
    return n_gpu


def resolve(
    n_parallel: int | None = None, use_gpu: bool | None = None, devices: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the device of each rank of this machine.

    The first that is given decides: `devices`, the environment variable SYNKHRONOS_DEVICES (names
    with commas), `use_gpu`. Without any, all CUDA devices are used, or else all cores. The others
    must agree with it, and the number of ranks must be that of `synkhronos launch`.

    >>> resolve(devices=["cpu", "cpu"])
    ('cpu', 'cpu')
    >>> resolve(3, use_gpu=False)
    ('cpu', 'cpu', 'cpu')
    """
    n_parallel = _check_n_parallel(n_parallel)
    if use_gpu not in (None, True, False):
        raise TypeError(f"use_gpu must be True, False or None, got {use_gpu!r}.")
    n_launched = _ranks_of_machine()
    if n_launched is not None:
        n_asked = n_parallel if devices is None else len(_check_devices(devices))
        if n_asked not in (None, n_launched):
            raise ValueError(
                f"{'n_parallel' if devices is None else 'devices'} asks for "
                f"{_wording.count(n_asked, 'rank')} on each machine, but `synkhronos launch` was "
                f"told {n_launched} for this one ({RANKS_VARIABLE}={os.environ[RANKS_VARIABLE]}): "
                "leave the number out in one of the two."
            )
        n_parallel = n_launched
    if devices is not None:
        names, source = _check_devices(devices), "devices"
    elif text := _of_machine(VARIABLE, ";"):
        names, source = _check_names(text.split(","), VARIABLE), VARIABLE
    else:
        return _first_devices(n_parallel, use_gpu)
    if n_parallel not in (None, len(names)):
        raise ValueError(
            f"n_parallel={n_parallel}, but {source} names {len(names)} ({', '.join(names)}): "
            "give one of them, or the same number."
        )
    if use_gpu is not None and any((name != "cpu") != use_gpu for name in names):
        raise ValueError(f"use_gpu={use_gpu}, but {source} names {', '.join(names)}.")
    return names


def _of_machine(variable, separator):
    """Return the part of a variable that is for this machine; a single part is for all."""
    parts = os.environ.get(variable, "").split(separator)
    place = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    number = int(place) if place.isdigit() and len(parts) > 1 else 0
    return parts[number].strip() if number < len(parts) else ""


def _ranks_of_machine():
    """Return the number of ranks that `synkhronos launch` got for this machine, or None."""
    text = os.environ.get(RANKS_VARIABLE, "")
    if not re.fullmatch(r"\s*[0-9]*\s*(,\s*[0-9]*\s*)*", text):
        raise ValueError(
            f"{RANKS_VARIABLE}={text!r} must be a number of ranks for each machine, such as 2,1."
        )
    number = _of_machine(RANKS_VARIABLE, ",")
    return _check_n_parallel(int(number)) if number else None


def _first_devices(n_parallel: int | None, use_gpu: bool | None) -> tuple[str, ...]:
    """Return the first CUDA devices of this machine, or CPU cores if it has none."""
    if use_gpu:
        n_gpu = get_n_gpu()
        if n_gpu == 0:
            raise RuntimeError(
                "use_gpu=True, but this machine has no CUDA device that pygpu can use, or JAX: "
                f"{probe('cuda')[1] or 'it counts 0'}. `synkhronos info` says more; "
                "use_gpu=False runs on CPU cores."
            )
    else:
        n_gpu = 0 if use_gpu is False else _count_default_gpus()
    if n_gpu == 0:
        return ("cpu",) * (n_parallel or usable_cores())
    if n_parallel is not None and n_parallel > n_gpu:
        raise ValueError(
            f"n_parallel={n_parallel}, but this machine has "
            f"{_wording.count(n_gpu, 'CUDA device')}. "
            'For more ranks name their devices, such as devices=["cuda0", "cuda0"], or take CPU '
            "cores: use_gpu=False."
        )
    return tuple(f"cuda{rank}" for rank in range(n_parallel or n_gpu))


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver has made device files."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def _count_default_gpus() -> int:
    """Count the CUDA devices for Theano; ask pygpu only if there is a driver."""
    is_for_theano = "pytensor" not in sys.modules and importlib.util.find_spec("pygpu") is not None
    if not has_nvidia_driver() or not is_for_theano:
        if has_nvidia_driver() and importlib.util.find_spec("jax_plugins"):
            log.info('ranks run on CPU cores; fork(devices=["cuda0"]) takes the GPU, with PyTensor')
        return 0
    n_gpu, problem = probe("cuda")
    if n_gpu == 0:
        log.warning(
            "there is an NVIDIA GPU, but pygpu can't use it (%s): ranks run on CPU cores. "
            "`synkhronos info` says what is missing.",
            problem or "it counts none",
        )
    return n_gpu


def _check_n_parallel(n_parallel: object) -> int | None:
    if n_parallel is None:
        return None
    try:
        number = None if _wording.is_bool(n_parallel) else operator.index(n_parallel)
    except TypeError:
        number = None
    if number is None:
        hint = " Names of devices are given as devices=." if isinstance(n_parallel, list) else ""
        raise TypeError(f"n_parallel must be an integer or None, got {n_parallel!r}.{hint}")
    if number < 1:
        raise ValueError(f"n_parallel must be at least 1, the master's own rank, got {number}.")
    if number > _MOST_PROCESSES:
        raise ValueError(
            f"n_parallel must be at most {_MOST_PROCESSES}, the processes of a machine, got "
            f"{_wording.shown(number)}."
        )
    return number


def _check_devices(devices: object) -> tuple[str, ...]:
    if not isinstance(devices, (list, tuple)):
        names = devices.split(",") if isinstance(devices, str) else []
        if not names or not all(map(DEVICE_NAME.fullmatch, names)):
            names = ["cpu", "cpu"]
        raise TypeError(
            f"devices must be a list of names, such as {json.dumps(names)}, got {devices!r}."
        )
    for name in devices:
        if not isinstance(name, str):
            raise TypeError(f"devices must hold names {EXAMPLES}, got {name!r}.")
    return _check_names(devices, "devices")


def _check_names(names: Sequence[str], source: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in names)
    if not names:
        raise ValueError(f"{source} is empty: it needs the name of one device for each rank.")
    for name in names:
        if not DEVICE_NAME.fullmatch(name):
            raise ValueError(f"{source}: {name!r} is not the name of a device, {EXAMPLES}.")
    return names


def limit_threads(threads: int) -> Callable[[], None]:
    """Limit the BLAS and OpenMP threads of this process; return a function that restores them."""
    # NumPy and SciPy bring a BLAS each, and each kind of BLAS has a function of its own for it.
    from threadpoolctl import ThreadpoolController

    controller = ThreadpoolController()
    # Only the others: in a forked process OpenBLAS starts a thread for each core whenever a number
    # is set, even the same.
    others = [each.filepath for each in controller.lib_controllers if each.num_threads != threads]
    with _controlled_by_no_thread(controller):
        limits = controller.select(filepath=others).limit(limits=threads)
    if _lasting_threads.process not in (None, os.getpid()):
        for library in controller.lib_controllers:
            if library.filepath in _lasting_threads.paths:
                library.set_num_threads(1)

    def restore():
        with _controlled_by_no_thread(controller):
            limits.restore_original_limits()

    return restore


@contextlib.contextmanager
def _controlled_by_no_thread(controller):
    """Let any thread set the limits of OpenBLAS; threadpoolctl allows it to the first thread alone.

    threadpoolctl does not notice the end of a thread that Python has not started, such as one of
    nutpie, and raises RuntimeError in a process that is forked after that.
    """

    def clear():
        for library in controller.lib_controllers:
            if hasattr(library, "clear_controlling_thread"):  # in newer releases
                library.clear_controlling_thread(force=True)

    try:
        clear()
        yield
    finally:
        clear()


def end_openmp_threads(threads: int) -> None:
    """Let processes that this thread forks compute with OpenMP, with `threads` threads each.

    GNU's OpenMP keeps its threads, which a fork does not copy, so a child would wait for them for
    ever. They are ended here, and start again at the next computation. Other OpenMPs, and OpenBLAS,
    do that by themselves. A library that can't end its threads has one thread in children.
    """
    from threadpoolctl import threadpool_info

    gnu = [each["filepath"] for each in threadpool_info() if each["prefix"] == "libgomp"]
    lasting = [path for path in gnu if not _end_threads_of(path)]
    _lasting_threads.process, _lasting_threads.paths = os.getpid(), lasting
    for path in lasting if threads > 1 else ():
        # Copies in Python packages have other names; Theano's functions don't use them.
        log.log(
            logging.WARNING if os.path.basename(path) == GNU else logging.DEBUG,
            "OpenMP (%s) can't end its threads before the fork, so its functions compute with one "
            "thread in each worker, not %d. For more, call synk.fork() before the first function "
            "that uses OpenMP, or install a libgomp of GCC 9 or later.",
            path,
            threads,
        )


def _end_threads_of(path):
    """End the OpenMP threads of the calling thread in a library; return whether they have ended."""
    try:
        pause = ctypes.CDLL(path).omp_pause_resource_all
    except (OSError, AttributeError):  # the file was replaced, or is of an old version
        return False
    return pause(_SOFTLY) == 0


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, unless the environment has settings; return whether.

    A training step frees the results of its operations, and the next step allocates arrays of the
    same sizes. By default the C library returns the memory to the system, which clears each page
    before it gives it out again. That takes a fifth of the time of a step with convolutions.
    """
    if any(name in os.environ for name in _ALLOCATOR):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST) and set_option(_TRIM_THRESHOLD, _KEPT))
