"""What this machine has: nothing is compared, so a record says what it was made with."""

import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from scenarios import Skip, scenario

MIB = 2**20


@scenario()
def python(run):
    """The interpreter and its packages."""
    import numpy
    import scipy
    import theano

    import synkhronos

    checkout = Path(synkhronos.__file__).parents[1]
    run.figures.update(
        {
            "python": f"{platform.python_version()} ({sys.executable})",
            "synkhronos": f"{synkhronos.__version__}, {_commit(checkout)}",
            "theano": theano.__version__,
            "numpy": numpy.__version__,
            "scipy": scipy.__version__,
            "THEANO_FLAGS": os.environ.get("THEANO_FLAGS", ""),
            "C++ compiler": _first_line([theano.config.cxx, "--version"]),
            "C library": " ".join(platform.libc_ver()),
        }
    )


@scenario()
def pygpu(run):
    """The library of devices."""
    try:
        import pygpu
    except ImportError as error:
        raise Skip(f"{type(error).__name__}: {error}") from None
    major, minor = divmod(pygpu.gpuarray.api_version()[0], 100)
    run.figures["pygpu"] = pygpu.__version__
    run.figures["libgpuarray"] = f"API {major}.{minor}, ABI {pygpu.gpuarray.api_version()[1]}"
    run.figures["libgpuarray file"] = _file_of("libgpuarray")


@scenario()
def cuda(run):
    """NVIDIA's driver and libraries, by the names under which libgpuarray opens them."""
    if run.kind != "cuda":
        raise Skip("no CUDA device was named")
    kernel_module = Path("/proc/driver/nvidia/version")
    if kernel_module.exists():
        run.figures["kernel module"] = kernel_module.read_text().splitlines()[0]
    for name, ask in (
        ("libcuda", _cuda_version),
        ("libnvidia-ml", _driver_version),
        ("libnvrtc", _nvrtc_version),
        ("libcublas", _cublas_version),
        ("libnccl", _nccl_version),
        ("libcudnn", lambda library: library.cudnnGetVersion()),
    ):
        try:
            library = ctypes.CDLL(f"{name}.so.1" if name == "libnvidia-ml" else f"{name}.so")
            run.figures[name] = f"{ask(library)} ({_file_of(name)})"
        except (OSError, AttributeError) as error:
            run.figures[name] = f"{type(error).__name__}: {error}"


@scenario()
def devices(run):
    """Each device, opened as pygpu opens it."""
    names = sorted(set(run.devices) - {"cpu"})
    if not names:
        raise Skip("CPU ranks only")
    import pygpu

    for name in names:
        context = pygpu.init(name)
        description = context.devname
        if isinstance(description, bytes):
            description = description.decode()
        free, total = context.free_gmem // MIB, context.total_gmem // MIB
        run.figures[name] = f"{description.strip()}, {free} of {total} MiB free"


@scenario()
def kit(run):
    """What is in the kit, if this is one."""
    listing = Path(sys.prefix).parent / "KIT.txt"
    if not listing.exists():
        raise Skip("the Python of this machine, not of the kit")
    made, *files = listing.read_text().splitlines()
    run.figures["kit"] = made
    run.figures["packages"] = " ".join(
        re.sub(r"(-cp311.*|-py[23].*)?\.whl$|_(amd64|all)\.deb$", "", name) for name in files
    )


def _commit(checkout):
    commit = _first_line(["git", "-C", str(checkout), "describe", "--always", "--dirty"])
    return f"commit {commit}" if commit else "no git here to ask for the commit"


def _first_line(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return (done.stdout.splitlines() or [""])[0] if done.returncode == 0 else ""


def _file_of(name):
    """Return the file from which a library is mapped."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(rf"/\S*/{re.escape(name)}[.-]\S*", maps)
    return found.group() if found else "not mapped"


def _number(ask):
    number = ctypes.c_int()
    status = ask(ctypes.byref(number))
    return number.value if status == 0 else f"error {status}"


def _cuda_version(library):
    number = _number(library.cuDriverGetVersion)
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if isinstance(number, int) else number


def _driver_version(library):
    text = ctypes.create_string_buffer(81)
    status = library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, 81)
    return f"driver {text.value.decode()}" if status == 0 else f"error {status}"


def _nvrtc_version(library):
    major, minor = ctypes.c_int(), ctypes.c_int()
    status = library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}" if status == 0 else f"error {status}"


def _cublas_version(library):
    numbers = [ctypes.c_int() for _ in range(3)]
    for kind, number in enumerate(numbers):
        library.cublasGetProperty(kind, ctypes.byref(number))
    return ".".join(str(number.value) for number in numbers)


def _nccl_version(library):
    number = _number(library.ncclGetVersion)
    # 2.8 and before: 2804; from 2.9 on: 20905.
    if not isinstance(number, int):
        return number
    unit = 10000 if number >= 10000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"
