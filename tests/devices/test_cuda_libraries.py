"""The libraries of CUDA are found and linked: small ones that a compiler makes, with its names."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import python, run

from synkhronos.__main__ import main
from synkhronos.tools.info import cuda_libraries as cuda

# Opening one ends the process where CRASH is set; NVRTC compiles where STATUS is 0.
SOURCE = """
#include <stdlib.h>
#ifdef CRASH
__attribute__((constructor)) void crash(void) { abort(); }
#endif
#ifdef DRIVER
int cuDriverGetVersion(int *version) { *version = DRIVER; return 0; }
#endif
#ifdef MINOR
int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = MINOR; return 0; }
int nvrtcCreateProgram() { return 0; }
int nvrtcCompileProgram() { return STATUS; }
const char *nvrtcGetErrorString(int status) { return "NVRTC_ERROR_OF_THE_TEST"; }
#endif
#ifdef CUDNN
unsigned long cudnnGetVersion(void) { return CUDNN; }
int cudnnCreateTensorDescriptor(void **made) { *made = 0; return 0; }
#endif
#ifdef LIGHT
int light(void);
int heavy(void) { return light(); }
#else
int light(void) { return 7; }
#endif
"""


WHEELS = "cuda_nvrtc", "cublas", "nccl", "cudnn"


def compiled(folder, name, *flags):
    """Make a library with this file name as its soname."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-x", "c", "-", "-x", "none", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
    subprocess.run(
        [*command, *flags, "-o", str(folder / name)], input=SOURCE, text=True, check=True
    )
    return folder / name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a driver's and wheels' libraries, of CUDA 12.4; tests only read it."""
    root = tmp_path_factory.mktemp("made")
    compiled(root / "driver", "libcuda.so.1", "-DDRIVER=12040")
    wheels = root / "site" / "nvidia"
    compiled(wheels / "cuda_nvrtc" / "lib", "libnvrtc.so.12", "-DMINOR=4", "-DSTATUS=0")
    compiled(wheels / "cuda_nvrtc" / "lib", "libnvrtc-builtins.so.12.4")
    light = compiled(wheels / "cublas" / "lib", "libcublasLt.so.12")
    rpath = "-Wl,-rpath,$ORIGIN"
    compiled(light.parent, "libcublas.so.12", "-DLIGHT", str(light), rpath)
    compiled(wheels / "nccl" / "lib", "libnccl.so.2")
    compiled(wheels / "cudnn" / "lib", "libcudnn.so.9", "-DCUDNN=92800")
    compiled(wheels / "cudnn" / "lib", "libcudnn_engines_new.so.9")
    return root


@pytest.fixture
def alone(monkeypatch):
    """Return a function that lets only some folders be searched, whatever this machine has."""
    return lambda *folders: monkeypatch.setattr(cuda, "_folders", lambda: list(folders))


def environment(made, *first):
    """Return the variables by which `made` is found; the names with versions only."""
    path = ":".join(map(str, [*first, made / "driver"]))
    return {**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": str(made / "site")}


def link_cuda(made, folder, **variables):
    """Run ``synkhronos info --link-cuda`` in a process of its own."""
    line = "-m", "synkhronos", "info", "--link-cuda", folder
    return python(*line, cwd=Path(cuda.__file__).parents[1], **{**environment(made), **variables})


def wheel_folders(made):
    return [made / "site" / "nvidia" / name / "lib" for name in WHEELS]


def test_names_without_versions_are_made(made, tmp_path):
    folder = tmp_path / "a" / "b"
    child = link_cuda(made, folder)
    assert (child.returncode, child.stderr) == (0, "")
    nvrtc, cublas, nccl, cudnn = wheel_folders(made)
    expected = {
        "libcuda.so": made / "driver" / "libcuda.so.1",
        "libcuda.so.1": made / "driver" / "libcuda.so.1",
        "libnvrtc.so": nvrtc / "libnvrtc.so.12",
        "libnvrtc.so.12": nvrtc / "libnvrtc.so.12",
        "libnvrtc-builtins.so.12.4": nvrtc / "libnvrtc-builtins.so.12.4",
        "libcublas.so": cublas / "libcublas.so.12",
        "libcublas.so.12": cublas / "libcublas.so.12",
        "libcublasLt.so.12": cublas / "libcublasLt.so.12",
        "libnccl.so": nccl / "libnccl.so.2",
        "libnccl.so.2": nccl / "libnccl.so.2",
        "libcudnn.so": cudnn / "libcudnn.so.9",
        "libcudnn.so.9": cudnn / "libcudnn.so.9",
        "libcudnn_engines_new.so.9": cudnn / "libcudnn_engines_new.so.9",
    }
    assert {each.name: os.readlink(each) for each in folder.iterdir()} == {
        name: str(path) for name, path in expected.items()
    }
    shown = [line for line in child.stdout.splitlines() if " -> " in line]
    assert shown == [f"{folder / name} -> {path}" for name, path in expected.items()]
    assert "not found" not in child.stdout


def test_the_printed_line_lets_them_open(made, tmp_path):
    folder = tmp_path / "with a space"
    export = link_cuda(made, folder).stdout.splitlines()[-1].strip()
    assert export.startswith("export ")
    code = "import ctypes; print(ctypes.CDLL('libcublas.so').heavy())"
    for before in ({}, {"LD_LIBRARY_PATH": "/nowhere"}):
        line = f'{export}; {sys.executable} -c "{code}"; echo $LD_LIBRARY_PATH'
        child = run("bash", "-c", line, env={"PATH": os.environ["PATH"], **before})
        assert child.stderr == ""
        assert child.stdout == f"7\n{':'.join([str(folder), *before.values()])}\n"


def test_links_of_an_earlier_call_are_replaced(made, tmp_path, alone):
    folder, old = tmp_path / "links", compiled(tmp_path / "old", "libnvrtc.so.11.2")
    alone(old.parent)
    cuda.link(folder, cuda.find())
    assert sorted(os.listdir(folder)) == ["libnvrtc.so", "libnvrtc.so.11.2"]
    (folder / "notes").write_text("not a library")
    # The folder itself is on LD_LIBRARY_PATH by now, and is not where to look.
    alone(folder, wheel_folders(made)[0], old.parent)
    cuda.link(folder, cuda.find(skip=folder))
    names = ["libnvrtc-builtins.so.12.4", "libnvrtc.so", "libnvrtc.so.12", "notes"]
    assert sorted(os.listdir(folder)) == names
    assert os.readlink(folder / "libnvrtc.so").endswith("libnvrtc.so.12")


def test_links_to_links_outlive_the_folder_between(made, tmp_path, alone):
    alone(wheel_folders(made)[2])
    cuda.link(tmp_path / "first", cuda.find())
    alone(tmp_path / "first")
    cuda.link(tmp_path / "second", cuda.find())
    target = os.readlink(tmp_path / "second" / "libnccl.so")
    assert target == str(wheel_folders(made)[2] / "libnccl.so.2")


@pytest.mark.parametrize("kind", ["file", "folder", "relative link", "link to another name"])
def test_what_others_made_is_refused(made, tmp_path, alone, capsys, kind):
    alone(made / "driver", *wheel_folders(made))
    mine = tmp_path / "libcublas.so.12"
    if kind == "file":
        mine.write_text("precious")
    elif kind == "folder":
        mine.mkdir()
    else:
        mine.symlink_to("libcublas.so.12.4" if kind == "relative link" else "/etc/alternatives/x")
    assert main(["info", "--link-cuda", str(tmp_path)]) == 2
    assert "libcublas.so.12" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["libcublas.so.12"]
    if kind == "file":
        assert mine.read_text() == "precious"
        assert main(["info", "--link-cuda", str(mine)]) == 2
        assert "cannot make the links" in capsys.readouterr().err


def test_what_is_missing_is_named(made, tmp_path, alone, capsys):
    alone(made / "driver")
    assert main(["info", "--link-cuda", str(tmp_path)]) == 1
    wheels = "nvidia-cublas-cu12 nvidia-nccl-cu12 nvidia-cudnn-cu12"
    out = capsys.readouterr().out
    assert "not found: libnvrtc, libcublas, libnccl, libcudnn: pip install" in out and wheels in out
    alone(*wheel_folders(made))
    assert main(["info", "--link-cuda", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "not found: libcuda: install the NVIDIA driver" in out and wheels not in out
    alone()
    assert main(["info", "--link-cuda", str(tmp_path)]) == 1
    assert "export" not in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
    alone(made / "driver", *wheel_folders(made)[:2])  # NCCL and cuDNN are not needed
    assert main(["info", "--link-cuda", str(tmp_path)]) == 0
    optional = "not found: libnccl, libcudnn: pip install nvidia-nccl-cu12 nvidia-cudnn-cu12"
    assert optional in capsys.readouterr().out


def test_what_is_linked_but_does_not_open_is_told(made, tmp_path, alone, capsys):
    # Without the library that it was linked with.
    lone = tmp_path / "lone" / "libcublas.so.12"
    lone.parent.mkdir()
    lone.write_bytes((wheel_folders(made)[1] / "libcublas.so.12").read_bytes())
    alone(made / "driver", *wheel_folders(made)[:1], lone.parent)
    assert main(["info", "--link-cuda", str(tmp_path / "links")]) == 1
    out = capsys.readouterr().out
    assert "libcublas.so does not work: libcublasLt.so.12: cannot open" in out


def test_nvrtc_newer_than_the_driver_is_told(made, tmp_path, alone, capsys):
    new = compiled(tmp_path / "new", "libnvrtc.so.12", "-DMINOR=6", "-DSTATUS=0").parent
    alone(made / "driver", new, *wheel_folders(made)[1:])
    main(["info", "--link-cuda", str(tmp_path / "links")])
    out = capsys.readouterr().out
    assert "is of CUDA 12.6, but the driver knows CUDA only up to 12.4" in out
    assert "pip install 'nvidia-cuda-nvrtc-cu12<12.5'" in out


def test_probe_tells_files_and_versions(made, tmp_path, alone):
    alone(made / "driver", *wheel_folders(made))
    cuda.link(tmp_path, cuda.find())
    opened = cuda.probe(environment(made, tmp_path))
    assert list(opened) == ["libcuda", "libnvrtc", "libcublas", "libnccl", "libcudnn"]
    assert not any(library.error for library in opened.values())
    assert opened["libcuda"].version == opened["libnvrtc"].version == (12, 4)
    assert opened["libcudnn"].version == (92800,)
    assert opened["libcuda"].path == str(made / "driver" / "libcuda.so.1")
    assert cuda.newer_than_driver(opened) == ""


def test_probe_tells_a_name_that_only_has_a_version(made):
    try:
        ctypes.CDLL("libcublas.so")
        pytest.skip("this machine has a libcublas.so")
    except OSError:
        pass
    library = cuda.probe(environment(made, *wheel_folders(made)))["libcublas"]
    assert library.absent and library.error


def test_probe_tells_what_does_not_work(made, tmp_path):
    stubs = tmp_path / "cuda" / "stubs"
    stubs.mkdir(parents=True)
    (stubs / "libcuda.so").write_bytes((made / "driver" / "libcuda.so.1").read_bytes())
    compiled(tmp_path, "libnvrtc.so", "-DMINOR=4", "-DSTATUS=7")
    (tmp_path / "libcublas.so").write_text("/* for the linker */ INPUT(libcublas.so.12)" * 2)
    compiled(tmp_path, "libnccl.so", "-DCRASH")
    compiled(tmp_path, "libcudnn.so")
    other = compiled(tmp_path / "other", "libcuda.so").parent
    opened = cuda.probe(environment(made, other))
    assert "undefined symbol: cuDriverGetVersion" in opened["libcuda"].error
    opened = cuda.probe(environment(made, stubs, tmp_path))
    assert not any(library.absent for library in opened.values())
    assert "stub" in opened["libcuda"].error
    assert "NVRTC_ERROR_OF_THE_TEST" in opened["libnvrtc"].error
    assert opened["libnvrtc"].version == (12, 4)
    assert "invalid ELF header" in opened["libcublas"].error
    assert "status -6" in opened["libnccl"].error
    assert "undefined symbol: cudnnCreateTensorDescriptor" in opened["libcudnn"].error


def test_stubs_scripts_and_other_machines_are_not_found(made, tmp_path, alone):
    library = (made / "driver" / "libcuda.so.1").read_bytes()
    stubs = tmp_path / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    (stubs / "libcuda.so").write_bytes(library)
    folder = tmp_path / "links to stubs"
    folder.mkdir()
    (folder / "libcuda.so").symlink_to(stubs / "libcuda.so")
    (folder / "libcublas.so.12").write_text("INPUT(libcublas.so.12.4)")
    (folder / "libnvrtc.so.12").write_bytes(library[:18] + b"\0\0" + library[20:])
    (folder / "libnccl.so.2").symlink_to(tmp_path / "absent")
    alone(stubs, folder, tmp_path / "absent")
    assert cuda.find() == {}


def test_wheels_are_found_and_the_older_cuda_comes_first(made, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    newer = compiled(tmp_path / "nvidia" / "cu13" / "lib", "libnvrtc.so.13")
    assert cuda.find()["libnvrtc"] == newer
    older = compiled(tmp_path / "nvidia" / "cuda_nvrtc" / "lib", "libnvrtc.so.12")
    assert cuda.find()["libnvrtc"] == older
    chosen = compiled(tmp_path / "chosen", "libnvrtc.so.13")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(chosen.parent))
    assert cuda.find()["libnvrtc"] == chosen


def test_the_cache_of_the_loader_is_searched(made, tmp_path, monkeypatch):
    ldconfig = tmp_path / "ldconfig"
    driver = made / "driver" / "libcuda.so.1"
    ldconfig.write_text(f"#!/bin/sh\nprintf '1 libs\\n\\tlibcuda.so.1 (libc6) => {driver}\\n'\n")
    ldconfig.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    assert cuda.find()["libcuda"] == driver


def test_a_link_that_upgrades_keep_is_preferred(made, tmp_path, alone):
    compiled(tmp_path, "libcuda.so.550.54").rename(tmp_path / "libcuda.so.550.54.14")
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.550.54.14")
    (tmp_path / "libcuda.so").symlink_to("libcuda.so.1")
    alone(tmp_path)
    assert cuda.find() == {"libcuda": tmp_path / "libcuda.so.1"}
