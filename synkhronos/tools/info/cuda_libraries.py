"""Find the libraries of CUDA, and link them by the names that libgpuarray opens.

libgpuarray opens ``libcuda.so``, ``libnvrtc.so``, ``libcublas.so`` and ``libnccl.so``, and Theano
``libcudnn.so``. The wheels of PyPI and most drivers have only names with a version, such as
``libnvrtc.so.12``::

    LD_LIBRARY_PATH, wheels, the loader's cache, the usual folders
        |  find()    the file of each library
        v
    {"libnvrtc": .../libnvrtc.so.12, ...}
        |  link()    all names that it and its helpers need
        v
    a folder for LD_LIBRARY_PATH  --  probe() opens the names, in processes that end at once
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

# The libraries that libgpuarray and Theano open -> patterns of those that each of these opens.
HELPERS = {
    "libcuda": ("libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libnvidia-ml"),  # the last for NCCL
    "libnvrtc": ("libnvrtc-builtins",),
    "libcublas": ("libcublasLt",),
    "libnccl": (),
    "libcudnn": (r"libcudnn_\w+",),
}
NEEDED = ("libcuda", "libnvrtc", "libcublas")
NAME = re.compile(rf"({'|'.join([*HELPERS, *sum(HELPERS.values(), ())])})\.so((?:\.\d+)*)")

USUAL_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu")
DRIVER = "install the NVIDIA driver, or start the container with the GPUs (docker run --gpus all)"
WHEELS = {
    "libnvrtc": "nvidia-cuda-nvrtc-cu12",
    "libcublas": "nvidia-cublas-cu12",
    "libnccl": "nvidia-nccl-cu12",
    "libcudnn": "nvidia-cudnn-cu12",
}

KERNEL = b'extern "C" __global__ void add(float *x) { x[threadIdx.x] += 1; }'


class Opened(NamedTuple):
    """The result of opening ``<name>.so``: a file or an error, and CUDA's or cuDNN's version."""

    name: str
    path: str = ""
    error: str = ""
    version: tuple[int, ...] | None = None

    @property
    def absent(self) -> bool:
        """Whether no file has this name; a file that does not open is not absent."""
        return self.error.startswith(f"{self.name}.so: cannot open shared object file")


def probe(environment: Mapping[str, str] | None = None, timeout: float = 60.0) -> dict[str, Opened]:
    """Open each library by the name that libgpuarray uses, in a process of its own."""
    return {name: _probe_one(name, environment, timeout) for name in HELPERS}


def _probe_one(name: str, environment: Mapping[str, str] | None, timeout: float) -> Opened:
    from synkhronos._machine.devices import run_captured  # not above: the child runs this file

    # -I isolates: otherwise a json.py in the working folder would run in place of Python's.
    command = [sys.executable, "-I", "-c", Path(__file__).read_text(encoding="utf-8"), name]
    try:
        child = run_captured(command, env=environment, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Opened(name, error=f"no answer within {timeout:g} s")
    # A library may print as it is opened; the answer comes last.
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        return Opened(name, error=f"opening it ends a process with status {child.returncode}")
    answer = json.loads(lines[-1])
    version = tuple(answer.pop("version", None) or ()) or None
    return Opened(name, version=version, **answer)


def _open(name: str) -> dict:
    """Open a library in this process, and return the fields of `Opened`."""
    try:
        library = ctypes.CDLL(f"{name}.so")
        path = _mapped_file(name)
        if "stubs" in Path(path).parts:
            return {"path": path, "error": f"{path} is a stub to link with, not the driver"}
        ask = {"libcuda": _ask_driver, "libnvrtc": _ask_nvrtc, "libcudnn": _ask_cudnn}.get(name)
        # AttributeError: the file lacks a function that every library of this name has.
        return {"path": path, **(ask(library) if ask else {})}
    except (OSError, AttributeError) as error:
        return {"error": str(error)}


def _mapped_file(name: str) -> str:
    with open("/proc/self/maps") as maps:
        paths = (line.split(maxsplit=5)[-1].rstrip("\n") for line in maps)
        return next((path for path in paths if f"/{name}.so" in path), "")


def _ask_driver(library: ctypes.CDLL) -> dict:
    number = ctypes.c_int()
    # Works without a GPU, and before cuInit.
    status = library.cuDriverGetVersion(ctypes.byref(number))
    if status:
        return {"error": f"cuDriverGetVersion fails with CUDA error {status}"}
    return {"version": (number.value // 1000, number.value % 1000 // 10)}


def _ask_nvrtc(library: ctypes.CDLL) -> dict:
    """Return NVRTC's version, or an error if it can't compile, which needs libnvrtc-builtins."""
    major, minor, program = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    facts = {"version": (major.value, minor.value)}
    status = library.nvrtcCreateProgram(ctypes.byref(program), KERNEL, b"add.cu", 0, None, None)
    status = status or library.nvrtcCompileProgram(program, 0, None)
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        problem = library.nvrtcGetErrorString(status).decode()
        facts["error"] = f"cannot compile a kernel: {problem}"
    return facts


def _ask_cudnn(library: ctypes.CDLL) -> dict:
    """Return cuDNN's version; load its other libraries first, without which the process ends."""
    descriptor = ctypes.c_void_p()
    library.cudnnCreateTensorDescriptor(ctypes.byref(descriptor))
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return {"version": (library.cudnnGetVersion(),)}


def find(skip: Path | None = None) -> dict[str, Path]:
    """Return the file of each library that is found, of any version; ignore the folder `skip`."""
    folders = [f for f in _folders() if skip is None or f.resolve() != skip.resolve()]
    found = {}
    for name in HELPERS:
        path = next((file for folder in folders for file in _files(folder, name)), None)
        # Another folder of links may be deleted later. The files that its links name stay.
        while path is not None and _is_own_link(path):
            path = Path(os.readlink(path))
        if path is not None:
            found[name] = path
    return found


def _folders() -> list[Path]:
    """Return the folders to search: those that the user chose come first."""
    listed = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    wheels = importlib.util.find_spec("nvidia")
    places = list(wheels.submodule_search_locations or ()) if wheels else []
    # In reverse, cu13 comes after cuda_nvrtc, which has the older CUDA: more drivers can use it.
    folders = [folder for place in places for folder in Path(place).glob("*/lib")]
    installed = sorted(folders, reverse=True)
    toolkits = sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True)
    usual = [Path(folder) for folder in USUAL_FOLDERS]
    return list(dict.fromkeys([*listed, *installed, *_cached_folders(), *toolkits, *usual]))


def _cached_folders() -> list[Path]:
    """Return the folders in the loader's cache that have one of the libraries."""
    # The PATH of users often lacks the folders of root's commands.
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if ldconfig is None:
        return []
    cache = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
    paths = [Path(line.split(" => ")[1]) for line in cache.splitlines() if " => " in line]
    return [path.parent for path in paths if NAME.fullmatch(path.name)]


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of libraries in a folder, the best one to link first."""
    try:
        matches = filter(None, map(NAME.fullmatch, os.listdir(folder)))
    except OSError:
        return []
    ranked = [
        (_rank(match[2]), folder / match[0])
        for match in matches
        if re.fullmatch(pattern, match[1]) and _is_library(folder / match[0])
    ]
    return [path for _, path in sorted(ranked, reverse=True)]


def _rank(version: str) -> tuple:
    """Return a sort key: ".12" before ".12.4.127", which an upgrade removes, and "" last.

    >>> sorted(["", ".550.54", ".12", ".13"], key=_rank, reverse=True)
    ['.13', '.12', '.550.54', '']
    """
    numbers = tuple(int(number) for number in version.split(".")[1:])
    return (len(numbers) == 1, numbers)


def _is_library(path: Path) -> bool:
    """Return whether a file is a library of this architecture, no linker script and no stub."""
    if "stubs" in path.parts or "stubs" in path.resolve().parts:
        return False
    return _elf_kind(path) == _elf_kind(Path("/proc/self/exe"))


def _elf_kind(path: Path) -> bytes | None:
    """Return word size, byte order and machine of an ELF file; None for any other file."""
    try:
        with open(path, "rb") as file:
            header = file.read(20)
    except OSError:
        return None
    return header[4:6] + header[18:20] if header[:4] == b"\x7fELF" else None


def link(folder: Path, found: Mapping[str, Path]) -> dict[str, Path]:
    """Link these files in `folder`, remove the links of an earlier call, and return the links.

    Raise FileExistsError, and change nothing, if such a name is no link of an earlier call; raise
    PermissionError if other users can put libraries into the folder, which all programs would load.
    """
    links = _names(found)
    _refuse_folder_of_others(folder)
    names = list(filter(NAME.fullmatch, os.listdir(folder) if folder.exists() else []))
    others = sorted(name for name in names if not _is_own_link(folder / name))
    if others:
        raise FileExistsError(
            f"{folder} has {others[0]}, which is no link that `synkhronos info --link-cuda` made: "
            "name a folder that is empty or absent, or move that file away"
        )
    for name in names:
        if os.readlink(folder / name) != str(links.get(name)):
            os.unlink(folder / name)
    if links:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        _refuse_folder_of_others(folder)  # another user may have made it meanwhile
    for name, path in links.items():
        if not os.path.lexists(folder / name):
            os.symlink(path, folder / name)
    return links


def _refuse_folder_of_others(folder: Path) -> None:
    """Raise if another user can write to a folder, or put another one in its place."""
    for each in filter(Path.exists, [folder, *folder.parents]):
        status = each.stat()
        # In a folder such as /tmp others can't rename what is not theirs.
        is_sticky = each != folder and status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()) or (status.st_mode & 0o022 and not is_sticky):
            raise PermissionError(
                f"other users may write to {each}, and what they put there would run as you: name "
                "a folder that is yours, and that only you may write to (chmod go-w)"
            )


def _names(found: Mapping[str, Path]) -> dict[str, Path]:
    """Return every name to link: without a version for libgpuarray, and with one for libraries."""
    links = {}
    for name, path in found.items():
        links[f"{name}.so"] = path
        for folder in (path.parent, path.resolve().parent):
            for family in (name, *HELPERS[name]):
                for file in _files(folder, family):
                    links.setdefault(file.name, file)
    return links


def _is_own_link(path: Path) -> bool:
    """Return whether `link` made this link. Packages' links are relative, or to other names."""
    if not path.is_symlink():
        return False
    target = os.readlink(path)
    names = NAME.fullmatch(path.name), NAME.fullmatch(os.path.basename(target))
    return os.path.isabs(target) and all(names) and names[0][1] == names[1][1]


def how_to_install(names: Sequence[str], driver: tuple[int, ...] | None = None) -> str:
    """Return how to install these libraries, for a driver that supports CUDA up to `driver`.

    >>> how_to_install(["libcublas", "libnccl"])
    'pip install nvidia-cublas-cu12 nvidia-nccl-cu12'
    >>> how_to_install(["libnvrtc"], driver=(12, 4))
    "pip install 'nvidia-cuda-nvrtc-cu12<12.5'"
    """
    wheels = [WHEELS[name] for name in names if name in WHEELS]
    if driver and driver[0] < 13 and "libnvrtc" in names:
        major, minor = driver
        wheels[wheels.index(WHEELS["libnvrtc"])] = (
            f"nvidia-cuda-nvrtc-cu{major}<{major}.{minor + 1}"
        )
    steps = [DRIVER] if "libcuda" in names else []
    if wheels:
        steps.append("pip install " + " ".join(map(shlex.quote, wheels)))
    return "; ".join(steps)


def newer_than_driver(opened: Mapping[str, Opened]) -> str:
    """Return a message if NVRTC is newer than the driver, which can't load its kernels then."""
    driver, nvrtc = opened["libcuda"].version, opened["libnvrtc"].version
    if driver is None or nvrtc is None or nvrtc <= driver:
        return ""
    versions = [f"{major}.{minor}" for major, minor in (nvrtc, driver)]
    return "libnvrtc.so is of CUDA {}, but the driver knows CUDA only up to {}".format(*versions)


def export_command(folder: Path) -> str:
    """Return the line for the shell, whose variable the loader reads when a process starts.

    >>> print(export_command(Path("/home/me/.venv/cuda-links")))
    export LD_LIBRARY_PATH=/home/me/.venv/cuda-links${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    """
    return (
        f"export LD_LIBRARY_PATH={shlex.quote(str(folder))}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
    )


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(_open(sys.argv[1])) + "\n")
