"""Checks of this machine, with advice, for ``synkhronos info``.

Each function `check_...` checks one part of the machine and returns a `Check`, or several. Checks
that may crash, or open a device, run in a child process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

from synkhronos import _systems
from synkhronos._host import choice, pythons
from synkhronos._host.pythons import installed_version
from synkhronos._host.theano import cudnn, import_support
from synkhronos._machine import cores
from synkhronos._machine import devices as _devices
from synkhronos._wording import count, printable
from synkhronos.tools.info import cuda_libraries
from synkhronos.tools.info.cuda_libraries import Opened

OK, MISSING, BROKEN = "ok", "missing", "broken"
COLOURS = {OK: "\033[32m", MISSING: "\033[33m", BROKEN: "\033[31m"}
REINSTALL = "reinstall it in this environment: pip install --force-reinstall synkhronos"
MIB = 2**20
SMALL_SHM = 256 * MIB

# PyTensor's default mode has the name "Mode", whatever it compiles with.
MODES = {"NumbaLinker": "NUMBA", "VMLinker": "CVM"}
REFUSED = {"JAXLinker": "JAX", "PytorchLinker": "PYTORCH", "MLXLinker": "MLX"}

INSTALL_PYGPU = (
    "only GPUs need it. Debian 12 has it for Python 3.11. In a checkout: make opencl. "
    "By hand: apt-get install python3-pygpu, ln -s /usr/lib/python3/dist-packages/pygpu {folder}, "
    "pip install mako"
)


class Check(NamedTuple):
    """One line of the table; the exit status is 1 if an essential check failed."""

    name: str
    status: str
    found: str
    advice: str = ""
    essential: bool = False

    @property
    def failed(self) -> bool:
        """Whether Synkhronos cannot work because of this check."""
        return self.essential and self.status != OK


def checks() -> list[Check]:
    """Run all checks, which takes some seconds, and return them in the order of the table."""
    host, error = host_of_checks()
    if error:
        check = Check("Host library", BROKEN, error, f"unset {choice.VARIABLE}", essential=True)
        return [check_python(), check, check_cores(), check_shm()]
    facts, error = probe(host)
    if host == "pytensor":
        return [
            check_python(),
            check_pytensor(facts, error),
            *check_versions(facts),
            check_numba(facts),
            check_optional_compiler(facts),
            check_cache("PyTensor", facts),
            check_jax(),
            *(check_package_of(system) for system in _systems.there() if system.package),
            check_cores(),
            check_shm(),
        ]
    return [
        check_python(),
        check_theano(facts, error),
        *check_versions(facts, import_support.advice_of),
        check_compiler(facts),
        check_blas(facts, error),
        check_cores(),
        check_shm(),
        check_cache("Theano", facts),
        *check_gpus(),
    ]


def host_of_checks() -> tuple[str, str]:
    """Return the name of the host library to check, installed or not, and what is wrong with it."""
    try:
        return choice.choose(), ""
    except ValueError as error:
        return "", str(error)
    except ImportError:  # the check of the library says so, with what to do
        asked = os.environ.get(choice.VARIABLE, "").strip().lower()
        return asked or ("theano" if pythons.is_for_theano() else "pytensor"), ""


def probe(host: str, timeout: float = 300.0) -> tuple[dict, str]:
    """Return the facts that a child process prints about a host library, and what ended it."""
    script = Path(pythons.__file__).with_name(host) / "probe.py"
    command = _devices.python_command(script.read_text(), import_support.__file__)
    try:
        child = _devices.run_captured(command, timeout=timeout)
        stdout, error = child.stdout, last_line(child.stderr) if child.returncode else ""
        if child.returncode and not error:
            error = f"the process ended with exit status {child.returncode}"
    except subprocess.TimeoutExpired as expired:
        stdout, error = expired.stdout or "", f"no answer within {timeout:g} s"
    facts: dict = {}
    for line in (stdout.decode() if isinstance(stdout, bytes) else stdout).splitlines():
        # Only lines with facts are JSON: Theano and g++ print on stdout if a compilation fails.
        if line.startswith("{"):
            facts.update(json.loads(line))
    return facts, error


def last_line(text: str) -> str:
    """Return the last line of a traceback that names the error, shortened."""
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    # Theano adds lines such as "Apply node that caused the error" after some errors.
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    line = (errors or lines or [""])[-1]
    return line if len(line) <= 300 else line[:300] + " ..."


def not_imported(host: str, install: str, error: str) -> Check:
    """Return the check of a host library that can't be imported."""
    if f"No module named {host.lower()!r}" in error:
        return Check(host, MISSING, error, pythons.advice(host, install), essential=True)
    advice = f"if {host.upper()}_FLAGS or .{host.lower()}rc are not the cause, {REINSTALL}"
    return Check(host, BROKEN, error, advice, essential=True)


def check_python() -> Check:
    """Check that this version of Python has a host library."""
    found = f"{platform.python_version()} ({sys.executable})"
    try:
        pythons.check()
    except ImportError as error:
        return Check("Python", BROKEN, found, str(error), essential=True)
    return Check("Python", OK, found, essential=True)


def check_theano(facts: dict, error: str) -> Check:
    """Check that Theano imports."""
    if "theano" not in facts:
        if "Theano 1.0.5 needs numpy" in error:
            return Check("Theano", BROKEN, error, "see NumPy", essential=True)
        return not_imported("Theano", "pip install Theano==1.0.5", error)
    found = f"{facts['theano']} ({facts['theano_path']})"
    if facts["theano"] != "1.0.5":
        return Check("Theano", BROKEN, found, "pip install Theano==1.0.5", essential=True)
    flags = f", floatX={facts['floatX']}, device={facts['device']}"
    return Check("Theano", OK, found + flags, essential=True)


def check_pytensor(facts: dict, error: str) -> Check:
    """Check that PyTensor imports, and is one of the versions that Synkhronos knows."""
    if "pytensor" not in facts:
        return not_imported("PyTensor", f"pip install '{pythons.REQUIREMENT}'", error)
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
    advice = "PyTensor's default mode compiles with it: pip install numba"
    return check_package("numba", "numba", facts, advice, essential=True)


def check_optional_compiler(facts: dict) -> Check:
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


def check_jax() -> Check:
    """Name JAX, with which ranks on GPUs compute, and its devices."""
    code = "import jax; print(jax.__version__, *{each.device_kind for each in jax.devices()})"
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    child = _devices.run_captured(_devices.python_command(code), env=environment)
    if not child.returncode:
        return Check("JAX", OK, child.stdout.strip())
    is_there = installed_version("jax")
    found = last_line(child.stderr) if is_there else "not installed"
    advice = f"only GPUs need it: {pythons.install('jax-cuda')}"
    return Check("JAX", BROKEN if is_there else MISSING, found, advice)


def check_package(title: str, name: str, facts: dict, advice: str, essential=False) -> Check:
    """Name the version of a package that the host imports; without it, of the installed one."""
    version = facts.get(name) or installed_version(name)
    if version:
        return Check(title, OK, version, essential=essential)
    return Check(title, MISSING, "not installed", advice, essential)


def check_package_of(system: _systems.SystemRow) -> Check:
    """Name the version of a package that only one system needs."""
    title, name = system.package or ("", "")
    advice = f"only {system.module} needs it: {pythons.install(name)}"
    return check_package(title, name, {}, advice)


def check_compiler(facts: dict) -> Check:
    """Compile a file that includes Python.h, with the compiler that Theano calls."""
    name = facts.get("cxx", "g++")
    path = shutil.which(name)
    if path is None:
        no_gxx = shutil.which("g++") is None
        found = "no g++ on the PATH" if no_gxx else f"Theano's flag cxx is {name!r}"
        advice = "Theano is too slow to be of use without it: apt-get install g++ (Debian, Ubuntu)"
        return Check("C++ compiler", MISSING, found, advice, essential=True)
    version = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True).stdout
    found = f"{name} {version.strip()}"
    line = [path, "-I" + sysconfig.get_path("include"), "-x", "c++", "-fsyntax-only", "-"]
    child = subprocess.run(line, input="#include <Python.h>\n", capture_output=True, text=True)
    if child.returncode:
        error = next((line for line in child.stderr.splitlines() if "error" in line), "it failed")
        advice = "install Python's headers: apt-get install python3-dev (Debian, Ubuntu)"
        return Check("C++ compiler", BROKEN, f"{found}: {error}", advice, essential=True)
    return Check("C++ compiler", OK, found, essential=True)


def check_versions(facts: dict, too_new: Callable[[str, str], str] | None = None) -> list[Check]:
    """Check the NumPy and SciPy that the host imports; without it, those that are installed.

    `too_new(name, version)` returns what to install in place of a version that is too new, or "".
    """
    results = []
    for name, label in (("numpy", "NumPy"), ("scipy", "SciPy")):
        check = check_package(label, name, facts, REINSTALL, essential=True)
        advice = too_new(name, check.found) if too_new and check.status == OK else ""
        if advice:
            check = Check(label, BROKEN, check.found, advice, essential=name == "numpy")
        results.append(check)
    return results


def check_cache(host: str, facts: dict) -> Check:
    """Check that a host library can write to its compile cache."""
    if "cache" not in facts:
        return Check("Compile cache", BROKEN, f"not known without {host}", f"see {host}")
    if not facts["cache_writable"]:
        advice = f"name a folder that can be written: {host.upper()}_FLAGS=base_compiledir=..."
        return Check("Compile cache", BROKEN, facts["cache"], advice, essential=True)
    return Check("Compile cache", OK, facts["cache"], essential=True)


def check_blas(facts: dict, error: str) -> Check:
    """Check the speed of Theano's matrix product; name its link flags and their origin."""
    if "ldflags" not in facts:
        return Check("BLAS", BROKEN, "not known without Theano", "see Theano", essential=True)
    flags = facts["ldflags"]
    found = f"{flags} (from {ldflags_origin(flags)})" if flags else "none"
    if "gflops" not in facts:
        advice = "check blas.ldflags in THEANO_FLAGS and .theanorc, and the C++ compiler above"
        return Check("BLAS", BROKEN, f"{error}; {found}", advice, essential=True)
    theano, numpy = facts["gflops"]["theano"], facts["gflops"]["numpy"]
    found = f"Theano {theano:.0f}, NumPy {numpy:.0f} GFLOP/s in float32; {found}"
    if not facts["cxx"]:
        return Check("BLAS", MISSING, f"not linked; {found}", "see C++ compiler")
    if not flags:
        advice = "Theano calls NumPy, which is slower: install SciPy as a wheel, with pip"
        return Check("BLAS", MISSING, found, advice)
    if theano < numpy / 2:
        advice = "should reach NumPy's speed: remove blas.ldflags from your flags, or try again"
        return Check("BLAS", BROKEN, found, advice, essential=True)
    return Check("BLAS", OK, found, essential=True)


def ldflags_origin(flags: str) -> str:
    """Return the name of the file or variable that these flags come from."""
    if "blas.ldflags=" in os.environ.get("THEANO_FLAGS", ""):
        return "THEANO_FLAGS"
    default, origin = import_support.find_blas()
    return origin if flags == default else ".theanorc"


def check_cores() -> Check:
    """Count the cores that this process may use, and their threads."""
    usable = _devices.usable_cores()
    threads = ", ".join(
        f"{name}={os.environ[name]}"
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        if name in os.environ
    )
    found = (
        f"{cores.described()}; {usable} of {os.cpu_count()} CPUs usable; "
        f"fork() takes {count(usable, 'rank')} without GPUs"
    )
    return Check("Cores", OK, found + (f"; {threads}" if threads else ""))


def check_shm(path: str = "/dev/shm") -> Check:
    """Check that segments can be made, and that there is memory for data."""
    name = "Shared memory"
    try:
        with tempfile.TemporaryFile(dir=path, prefix="synkhronos-info-") as probe:
            probe.write(b"x")
            probe.flush()
        stat = os.statvfs(path)
    except OSError as error:
        advice = f"mount a tmpfs on {path} that this user may write to"
        return Check(name, BROKEN, f"{path}: {error}", advice, essential=True)
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{path}: {size // MIB} MiB, {free // MIB} MiB free"
    if free < SMALL_SHM:
        advice = (
            "all data of a session is there; in Docker, start the container with --shm-size=2g"
            if size < SMALL_SHM
            else f"all data of a session is there: delete files that others left in {path}"
        )
        return Check(name, MISSING, found + ", which is little", advice)
    return Check(name, OK, found, essential=True)


def check_gpus() -> list[Check]:
    """Check pygpu, the libraries that it opens, and the devices that it counts."""
    opened = cuda_libraries.probe()
    found = cuda_libraries.find()
    pygpu = check_pygpu()
    libraries = check_libraries("CUDA libraries", cuda_libraries.NEEDED, opened, found)
    nccl = check_libraries("NCCL", ["libnccl"], opened, found)
    cuda_advice = "see CUDA libraries" if libraries.advice else "no NVIDIA GPU is visible here"
    opencl_advice = (
        "in a checkout: make opencl. By hand: apt-get install pocl-opencl-icd "
        "ocl-icd-opencl-dev libclblast-dev (Debian)"
    )
    is_there = pygpu.status == OK
    devices = [
        check_devices("CUDA devices", "cuda", cuda_advice, is_there),
        check_devices("OpenCL devices", "opencl", opencl_advice, is_there),
    ]
    return [pygpu, libraries, *devices, nccl, check_cudnn(opened, found)]


def check_pygpu() -> Check:
    """Import pygpu in a child process: it may be built for another Python or NumPy, and crash."""
    install = INSTALL_PYGPU.format(folder=shlex.quote(sysconfig.get_path("purelib")))
    if importlib.util.find_spec("pygpu") is None:
        return Check("pygpu", MISSING, "not installed", install)
    # Theano imports the second one for GPUs.
    code = "import pygpu, pkg_resources; print(pygpu.__version__, pygpu.__file__)"
    child = _devices.run_captured(_devices.python_command(code))
    if child.returncode == 0:
        version, path = child.stdout.strip().split(maxsplit=1)
        return Check("pygpu", OK, f"{version} ({Path(path).parent})")
    problem = last_line(child.stderr) or f"importing it ends with status {child.returncode}"
    if "No module named 'mako'" in problem:
        return Check("pygpu", BROKEN, problem, "pygpu imports it: pip install mako")
    if "No module named 'pkg_resources'" in problem:
        return Check("pygpu", BROKEN, problem, "Theano imports it: pip install 'setuptools<80.9'")
    return Check("pygpu", BROKEN, problem, f"reinstall it: {install}")


def check_devices(name: str, kind: str, advice: str, has_pygpu: bool = True) -> Check:
    """Count the devices of one kind that pygpu sees."""
    if not has_pygpu:
        return Check(name, MISSING, "not known without pygpu", "see pygpu")
    number, problem = _devices.probe(kind)
    if number:
        return Check(name, OK, str(number))
    return Check(name, MISSING, problem or "0", advice)


def check_libraries(
    label: str, names: Sequence[str], opened: dict[str, Opened], found: dict[str, Path]
) -> Check:
    """Name the libraries that open by libgpuarray's names, and the files found of the others."""
    libraries = [opened[name] for name in names]
    newer = cuda_libraries.newer_than_driver(opened) if "libnvrtc" in names else ""
    states = [_library_state(library, found) for library in libraries] + ([newer] if newer else [])
    text = "; ".join(states)
    failed = [library for library in libraries if library.error]
    if not failed and not newer:
        return Check(label, OK, text)
    install = [library.name for library in failed if library.name not in found]
    if newer and "libnvrtc" not in install:
        install.append("libnvrtc")
    # In the virtual environment, else in the home.
    folder = Path(sys.prefix if sys.prefix != sys.base_prefix else Path.home(), "cuda-links")
    steps = [cuda_libraries.how_to_install(install, opened["libcuda"].version)] * bool(install)
    link = f"synkhronos info --link-cuda {shlex.quote(str(folder))}"
    advice = ", then ".join([*steps, link, cuda_libraries.export_command(folder)])
    if "libcuda" in install:
        advice = f"only NVIDIA GPUs need them: {advice}"
    elif "libcudnn" in install:
        advice = f"only convolutions on NVIDIA GPUs use it: {advice}"
    elif "libnccl" in install:
        advice = f"only several NVIDIA GPUs need it: {advice}"
    broken = newer or any(not library.absent for library in failed)
    return Check(label, BROKEN if broken else MISSING, text, advice)


def check_cudnn(opened: dict[str, Opened], found: dict[str, Path]) -> Check:
    """Check that ranks can use the cuDNN that opens, which is optional."""
    library = opened["libcudnn"]
    if library.error or library.version is None:
        return check_libraries("cuDNN", ["libcudnn"], opened, found)
    try:
        cudnn.check_version(library.path, library.version[0])
        cudnn.find_headers(library.path, library.version[0])
    except cudnn.UnusableError as problem:
        return Check("cuDNN", BROKEN, f"{problem}", cuda_libraries.how_to_install(["libcudnn"]))
    found_version = f"{cudnn.shown(library.version[0])} ({library.path})"
    return Check("cuDNN", OK, f"{found_version}: convolutions on GPUs use it")


def _library_state(library: Opened, found: dict[str, Path]) -> str:
    name = f"{library.name}.so"
    if not library.error:
        version = ".".join(map(str, library.version or ()))
        return f"{name} (CUDA {version})" if version else name
    if not library.absent:
        return f"{name} does not work: {library.error}"
    return f"no {name}, but {found[library.name]}" if library.name in found else f"no {name}"


def table(results: list[Check], colour: bool) -> str:
    """Return the checks as text, with the advice of a check indented below it.

    >>> print(table([Check("pygpu", MISSING, "not installed", "install it")], colour=False))
    pygpu           missing  not installed
                             -> install it
    """
    lines = []
    for check in results:
        status = f"{check.status:7}"
        if colour:
            status = f"{COLOURS[check.status]}{status}\033[0m"
        lines.append(f"{check.name:15} {status}  {printable(check.found)}")
        if check.advice:
            lines.append(f"{'':24} -> {printable(check.advice)}")
    return "\n".join(lines)


def as_json(results: list[Check]) -> str:
    """Return the checks as a JSON object."""
    ok = not any(check.failed for check in results)
    return json.dumps({"ok": ok, "checks": [check._asdict() for check in results]}, indent=2)
