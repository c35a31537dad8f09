"""The headers that all modules of Theano begin with, compiled once for many modules.

g++ writes what it has read of Python's and NumPy's headers to a file of some 40 MB in Theano's
compile cache, and reads that file instead, in a tenth of the time, where a module is compiled with
the same arguments. The machine code of the modules is the same. g++ itself compares its version,
arguments and macros with those of the file; that no header has changed is compared here.
"""

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import tempfile
import time

import numpy as np
import theano

from synkhronos._machine.interrupts import raised_here

FOLDER = "synkhronos_headers"  # in Theano's compile cache
# Modules of arrays begin with these lines. Those of operations item by item go on with two more,
# which come after all macros that the first ones could see.
BEGIN = """\
#include <Python.h>
#include <iostream>
#include "theano_mod_helper.h"
#include <math.h>
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
"""
ALL = BEGIN + "#include <vector>\n#include <algorithm>\n"
DAYS = 30  # an old header is removed if no process has used it for so long
# Variables that add folders to those where g++ looks for headers.
VARIABLES = "CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH"


def compile_folder():
    """Return Theano's folder of compiled code, which tests replace."""
    return theano.config.compiledir


def begins_as_most(source):
    """Return whether a module begins with the headers that most of them begin with."""
    try:
        with open(source) as file:
            return file.read(len(BEGIN)) == BEGIN
    except raised_here(OSError):
        return False  # the cache was cleared: the compiler will fail


class Header:
    """A compiled header for one list of arguments, in a folder that all processes share."""

    def __init__(self, compiler, arguments):
        self.wanted = 0  # modules that this process compiles with these arguments
        self.is_refused = False  # whether this compiler can't make it, or can't use it
        self._begin = [compiler, *arguments]
        self._parent = os.path.join(compile_folder(), FOLDER)
        self._folder = os.path.join(self._parent, _digest(compiler, arguments))
        self._is_fresh = False

    def arguments(self):
        """Return the arguments that let a compiler use it; none if it is not there."""
        if self.is_refused or not self._check():
            return []
        return ["-include", os.path.join(self._folder, "theano.h")]

    def _check(self):
        if not self._is_fresh:
            try:
                with open(os.path.join(self._folder, "files.json")) as file:
                    self._is_fresh = all(_stamp(each[0]) == each for each in json.load(file))
                os.utime(self._folder)
            except raised_here(OSError, ValueError):
                return False
        return self._is_fresh

    def command(self):
        """Return (command that compiles the header in a new folder, the file that it makes)."""
        os.makedirs(self._parent, exist_ok=True)
        folder = tempfile.mkdtemp(dir=self._parent)
        path = os.path.join(folder, "theano.h")
        with open(path, "w") as file:
            file.write(ALL)
        made = f"{path}.gch"
        files = ["-MD", "-MF", os.path.join(folder, "files.d")]
        return [*self._begin, *files, "-x", "c++-header", path, "-o", made], made

    def withdraw(self):
        """Let no process use this header any more."""
        self.is_refused = True
        self._remove(self._folder)

    def publish(self, folder, is_whole):
        """Let all processes use what the command has made in this folder, if it is whole."""
        try:
            stamps = [_stamp(path) for path in _read_dependencies(os.path.join(folder, "files.d"))]
            if is_whole and not self._check():
                with open(os.path.join(folder, "files.json"), "w") as file:
                    json.dump(stamps, file)
                self._remove(self._folder)  # a header has changed since
                os.rename(folder, self._folder)
        except raised_here(OSError):
            pass  # another process was faster, the cache was cleared, or the compiler failed
        self.is_refused = not self._check()
        if os.path.exists(folder):
            self._remove(folder)
        self._remove_old()

    def _remove(self, folder):
        # Renamed in one step, so that no process finds it without some of its files.
        with contextlib.suppress(OSError):
            away = tempfile.mkdtemp(dir=self._parent)
            with contextlib.suppress(OSError):
                os.rename(folder, away)
            shutil.rmtree(away, ignore_errors=True)

    def _remove_old(self):
        with contextlib.suppress(OSError):
            for name in os.listdir(self._parent):
                path = os.path.join(self._parent, name)
                if os.path.getmtime(path) < time.time() - DAYS * 24 * 3600:
                    self._remove(path)


def _digest(compiler, arguments):
    """Return a name made of all that the compiled header depends on, except the headers."""
    path = shutil.which(compiler)
    versions = platform.python_version(), np.__version__, theano.__version__
    folders = [os.environ.get(name) for name in VARIABLES]
    parts = [ALL, compiler, path and _stamp(path), arguments, versions, folders]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _stamp(path):
    """Return [path, time of its last change, size] of a file, to see if it has changed."""
    status = os.stat(path)
    return [path, status.st_mtime_ns, status.st_size]


def _read_dependencies(path):
    """Return the files that a rule of make names after its colon, but for the first."""
    with open(path) as file:
        _, _, files = file.read().replace("\\\n", " ").partition(": ")
    # The first one includes the others; the name of its folder will change.
    return shlex.split(files)[1:]
