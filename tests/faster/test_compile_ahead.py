"""Modules of a function compile at the same time, with a compiled header; nothing else changes."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from support.waiting import wait_until
from theano.gof import cmodule, vm

import synkhronos._host.theano.compiling  # noqa: F401  replaces Theano's call of the compiler
from synkhronos._host.theano.faster import compile_ahead, compiled_header
from synkhronos._host.theano.faster.compile_ahead import Compilers
from synkhronos._host.theano.faster.switch import number_of_compilers

SOURCE = compiled_header.BEGIN + "int x;\n"

# Notes each call in a file. Writes an empty header, or the arguments as the library; fails where
# an argument contains the word that FAIL has, and takes as long as SECONDS says.
COMPILER = """#!/bin/sh
echo "$@" >> "$NOTES"
case "$*" in *"$FAIL"*) echo "can't" >&2; exit 1;; esac
sleep "${SECONDS_EACH:-0}"
while [ $# -gt 0 ]; do
  case $1 in
    -o) echo made > "$2";;
    -MF) echo "theano.h.gch: theano.h $0" > "$2";;
  esac
  shift
done
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Yield a function that makes the command of a module; the compiler is a script."""
    cache = tmp_path / "cache"
    cache.mkdir()
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("FAIL", "no such word")
    # Theano's `compiledir` can't be changed in a process that has used it.
    for module in compile_ahead, compiled_header:
        monkeypatch.setattr(module, "compile_folder", lambda: str(cache))

    def command(name, *arguments):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "mod.cpp").write_text(SOURCE)
        files = [str(folder / f"{name}.so"), str(folder / "mod.cpp")]
        return [str(compiler), "-shared", "-g", *arguments, "-L/lib", "-o", *files, "-lm"]

    return command


@pytest.fixture
def notes(tmp_path):
    return lambda: (tmp_path / "notes").read_text().splitlines()


def run_plainly(command, **params):
    done = subprocess.run(command, capture_output=True, **params)
    return done.stdout, done.stderr, done.returncode


def test_this_process_compiles_ahead():
    assert isinstance(cmodule.output_subprocess_Popen.__self__, Compilers)
    assert hasattr(vm.VM_Linker.make_all, "__wrapped__")
    assert cmodule.output_subprocess_Popen(["echo", "-shared"]) == (b"-shared\n", b"", 0)


@pytest.mark.parametrize("thread", ["first", "other"])
def test_no_library_of_the_working_folder_is_linked(tmp_path, monkeypatch, thread):
    """GNU's linker looks there first, and another user's would run when the module is loaded."""
    (tmp_path / "libgcc_s.so.1").write_text("no library")
    (tmp_path / "mod.cpp").write_text("int x;\n")
    files = [str(tmp_path / name) for name in ("mod.so", "mod.cpp")]
    command = ["g++", "-shared", "-g", "-fPIC", "-o", *files]
    monkeypatch.chdir(tmp_path)
    compilers = Compilers(1, run_plainly)
    if thread == "other":
        monkeypatch.setattr(compilers, "_functions", [None])
    assert compilers.run(command) == (b"", b"", 0)


def test_a_compiler_with_a_relative_path_runs_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "own.h").write_text("int x;\n")
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "mod.cpp").write_text('#include "own.h"\n')
    files = [str(tmp_path / "mod.so"), str(tmp_path / "sources" / "mod.cpp")]
    monkeypatch.chdir(tmp_path)
    failed = []
    compilers = Compilers(1, lambda *given, **_: failed.append(given))
    assert compilers.run(["g++", "-shared", "-g", "-fPIC", "-I.", "-o", *files]) == (b"", b"", 0)
    assert failed == []


def test_a_header_is_compiled_once_for_many_modules(fake, notes):
    compilers = Compilers(1, run_plainly)
    for name in "abcdef":
        assert compilers.run(fake(name, "-O3")) == (b"", b"", 0)
    headers = [line for line in notes() if "c++-header" in line]
    assert len(headers) == 1
    assert ["-include" in line for line in notes() if line not in headers] == [False] * 3 + [
        True
    ] * 3
    # Theano's own -g is left out; a -g of the user's flags stays.
    assert not any(" -g " in line for line in notes())
    assert compilers.run(fake("g", "-g", "-O3")) == (b"", b"", 0)
    assert " -g " in notes()[-1]
    assert "-include" not in notes()[-1]


def test_another_process_finds_the_header_unless_a_file_has_changed(fake, notes, tmp_path):
    first = Compilers(1, run_plainly)
    for name in "abcd":
        first.run(fake(name))
    Compilers(1, run_plainly).run(fake("e"))
    assert "-include" in notes()[-1]
    (tmp_path / "g++").write_text(COMPILER + "\n")  # the compiler, and a header that it names
    Compilers(1, run_plainly).run(fake("f"))
    assert "-include" not in notes()[-1]


@pytest.mark.parametrize("word", ["c++-header", "-include"])
def test_a_compiler_that_fails_for_headers_works_as_before(fake, notes, monkeypatch, word):
    monkeypatch.setenv("FAIL", word)
    compilers = Compilers(2, run_plainly)
    for name in "abcdef":
        assert compilers.run(fake(name)) == (b"", b"", 0)
    assert sum(word in line for line in notes()) == 1  # not tried again
    assert sum(" -g " in line for line in notes()) == (word == "-include")


def test_a_compiler_that_fails_runs_again_as_theano_wants_it(fake, notes, monkeypatch):
    monkeypatch.setenv("FAIL", "a.so")
    command = fake("a", "-O3")
    assert Compilers(2, run_plainly).run(command) == (b"", b"can't\n", 1)
    assert notes()[-1].split() == command[1:]


def test_a_cache_that_is_cleared_meanwhile(fake, tmp_path, monkeypatch):
    compilers = Compilers(1, run_plainly)
    for name in "abcd":
        compilers.run(fake(name))
    [folder] = (tmp_path / "cache" / compiled_header.FOLDER).iterdir()
    for each in folder.iterdir():
        each.unlink()
    monkeypatch.setenv("FAIL", str(folder))  # g++ does not find the header
    assert compilers.run(fake("e")) == (b"", b"", 0)


def test_a_module_that_the_cache_has_lost_is_compiled_again(fake, notes):
    compilers = Compilers(1, run_plainly)
    with compilers.function(None):
        assert compilers.run(fake("a")) == (b"", b"", 0)
        assert compilers.run(fake("a")) == (b"", b"", 0)
    assert len(notes()) == 2


def test_an_interrupt_ends_the_compilers(fake, notes, tmp_path, monkeypatch):
    monkeypatch.setenv("SECONDS_EACH", "200")
    compilers = Compilers(3, run_plainly)
    main = threading.main_thread().ident

    def interrupt():
        wait_until(lambda: (tmp_path / "notes").exists() and len(notes()) >= 3)
        signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), compilers.function(None):
        threading.Thread(target=interrupt).start()
        [function] = compilers._functions
        for name in "abcd":
            ahead = compile_ahead._Command(fake(name))
            function.queue[ahead.identity] = ahead
            compilers._count(ahead)
        compilers.run(fake("e"))
    assert compilers._functions == []
    assert len(compilers._running) == 3
    assert not any(job.is_running() for job in compilers._running)
    assert list((tmp_path / "cache" / compiled_header.FOLDER).iterdir()) == []


def test_the_number_of_compilers_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("SYNKHRONOS_COMPILERS", raising=False)
    assert number_of_compilers() is None
    monkeypatch.setenv("SYNKHRONOS_COMPILERS", " 3 ")
    assert number_of_compilers() == 3
    monkeypatch.setenv("SYNKHRONOS_COMPILERS", "-1")
    with pytest.raises(ValueError, match=r"SYNKHRONOS_COMPILERS is the number .* it is '-1'"):
        number_of_compilers()


SCRIPT = """
import os, sys
import numpy as np
import theano
import theano.tensor as T
from theano.gof import cmodule

import synkhronos._host.theano.compiling

cmodule._logger.setLevel("ERROR")  # a compiler whose name is not g++ gets a warning
theano.config.cxx = os.environ.get("CXX_HERE", theano.config.cxx)
x, w = T.fmatrix("x"), theano.shared(np.linspace(-1, 1, 40).astype("float32").reshape(8, 5))
hidden = T.tanh(T.dot(x, w)) + float(sys.argv[1])
loss = (hidden**2).sum()
function = theano.function([x], [loss, T.grad(loss, w)], mode="FAST_RUN")
print(b"".join(np.asarray(each).tobytes() for each in function(np.ones((3, 8), "f") / 7)).hex())
names = os.listdir(theano.config.compiledir)
print(sorted(os.listdir(theano.config.compiledir + "/synkhronos_headers")) != []
      if "synkhronos_headers" in names else None)
print(sum(name.startswith("tmp") for name in names))
print(all(os.path.exists(f"{theano.config.compiledir}/{name}/key.pkl")
          for name in names if name.startswith("tmp")))
"""


def start(tmp_path, cache, argument="0.5", **environment):
    path = tmp_path / "script.py"
    if not path.exists():  # one that was started before may be about to read it
        path.write_text(SCRIPT)
    flags = f"base_compiledir={tmp_path / cache}"
    return subprocess.Popen(
        [sys.executable, str(path), argument],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "THEANO_FLAGS": flags, **environment},
    )


def output(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert not err
    return out.split()


@pytest.mark.slow("compiles the same functions three times")
def test_results_are_the_same_bit_by_bit(tmp_path):
    plain, header, modules, complete = output(start(tmp_path, "a", SYNKHRONOS_COMPILERS="0"))
    assert header == "None"
    assert output(start(tmp_path, "b")) == [plain, "True", modules, complete]
    broken = tmp_path / "broken" / "g++"  # which can't use headers: that it can't make one is above
    broken.parent.mkdir()
    broken.write_text('#!/bin/sh\ncase "$*" in *-include*) exit 1;; esac\nexec g++ "$@"\n')
    broken.chmod(0o755)
    done = output(start(tmp_path, "c", SYNKHRONOS_COMPILERS="1", CXX_HERE=str(broken)))
    assert done == [plain, "False", modules, "True"]


@pytest.mark.slow("compiles functions in three processes")
def test_processes_compile_at_the_same_time(tmp_path):
    started = [start(tmp_path, "a", argument) for argument in ("0.5", "0.5", "0.75")]
    one, two, other = [output(process) for process in started]
    assert one[0] == two[0] != other[0]
    assert output(start(tmp_path, "a", SYNKHRONOS_COMPILERS="0"))[0] == one[0]
