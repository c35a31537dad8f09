"""Compile the modules of a function at the same time, each with a compiled header.

Theano compiles the modules of a function one after another, and each compiler first reads the
headers of Python and NumPy, which takes most of its time. Here compilers of the modules that come
next run beside the one that Theano waits for. Theano's cache, its keys and its lock stay as they
are::

    VM_Linker.make_all            the modules of a function, one after another
      ModuleCache.module_from_key    finds the module, or takes the lock of the cache and compiles
        GCC_compiler.compile_str     writes mod.cpp, and the command of the compiler
          Compilers.run              starts this compiler, and others for modules that come next,
                                     in a folder of their own; waits for this one only
        ModuleCache                  loads the module, writes its key, releases the lock

A module that another process has added to the cache in the meantime is taken from there. Where a
compiler fails, the command runs once more as Theano gave it, and Theano reports what that one says.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import threading
import time

from theano.gof import CLinker, Constant, FunctionGraph, Op, cc, cmodule, vm
from theano.gof.op import CLinkerOp

from synkhronos._host.theano.faster.compiled_header import Header, begins_as_most, compile_folder
from synkhronos._machine import devices
from synkhronos._machine.interrupts import interrupts_held, raised_here

AT_MOST = 8  # compilers at once, unless a number is given: each takes some 200 MB
PAUSE = 0.002  # seconds between two looks at the compilers
MODULES_PER_HEADER = 4  # so many modules save the time that compiling their header takes


def install(number) -> None:
    """Let Theano run its compilers by `Compilers`, `number` at once; None for that of the cores."""
    if hasattr(vm.VM_Linker.make_all, "__wrapped__"):
        return
    compilers = Compilers(number, cmodule.output_subprocess_Popen)
    cmodule.output_subprocess_Popen = compilers.run
    make_all = vm.VM_Linker.make_all

    @functools.wraps(make_all)
    def make_all_ahead(self, *args, **kwargs):
        with compilers.function(self):
            return make_all(self, *args, **kwargs)

    vm.VM_Linker.make_all = make_all_ahead


class Compilers:
    """The compilers of one process, for the functions that Theano is compiling now."""

    def __init__(self, number, run_as_theano):
        self._number = number
        self._run_as_theano = run_as_theano
        self._limit = 1
        self._headers = {}  # folder of compiled code, and arguments -> the header for them
        self._due = []  # headers to compile next
        self._building = {}  # header -> its compiler
        self._running = []  # all compilers
        self._functions = []  # the last is inside of the one before, as that of a scan is
        self._thread = None  # the thread that makes them

    @contextlib.contextmanager
    def function(self, linker):
        """Compile ahead within the block, in which this linker makes a function."""
        if self._functions and self._thread != threading.get_ident():
            yield  # other threads than the first compile as in Theano
            return
        self._thread = threading.get_ident()
        one = _FunctionModules(linker, self._count)
        try:
            self._functions.append(one)
            yield
            while self._due or self._building:
                self._start_next(None) or time.sleep(PAUSE)
        finally:
            with interrupts_held():
                self._functions = [each for each in self._functions if each is not one]
                for job in [*one.jobs.values(), *self._building.values()]:
                    job.stop()
                for job in self._building.values():
                    shutil.rmtree(os.path.dirname(job.library), ignore_errors=True)
                self._building.clear()
                self._due.clear()
                if one.folder:
                    shutil.rmtree(one.folder, ignore_errors=True)

    def run(self, command, **params):
        """Run a command as Theano's `output_subprocess_Popen`; return its outputs and status."""
        of_another = self._functions and self._thread != threading.get_ident()
        is_of_module = isinstance(command, list) and command[1:2] == ["-shared"] and "-o" in command
        if of_another or not is_of_module:
            return self._run_as_theano(command, **{"cwd": _working_folder(command), **params})
        if not self._functions:
            with self.function(None):
                return self.run(command, **params)
        function = self._functions[-1]
        if function.is_asking:
            raise _Asked(command)
        try:
            job = self._wait_for(_Command(command), function)
        except raised_here(OSError):  # no such compiler, or too many processes
            return self._run_as_theano(command, **params)
        messages = job.hand_over(_Command(command).library)
        if messages is not None:
            return b"", messages, 0
        outputs = self._run_as_theano(command, **params)
        if job.header and outputs[-1] == 0:
            job.header.withdraw()  # this compiler can't use its own header
        return outputs

    def _wait_for(self, command, function):
        """Start the compiler of a module, if it was not started ahead; return it after its end."""
        self._limit = self._number or min(AT_MOST, devices.usable_cores())
        if function.queue.pop(command.identity, None) is None:
            self._count(command)
        job = function.jobs.get(command.identity)
        if job and job.is_handed_over:  # another process has removed it from the cache since
            job = None
        while job is None or job.is_running():
            header_first = self._due and self._limit == 1
            if job is None and not header_first and self._has_room():
                job = self._start(command, function)
            elif not self._start_next(function):
                time.sleep(PAUSE)
        return job

    def _has_room(self):
        """Return whether one more compiler may run; publish headers that are ready."""
        for header, job in list(self._building.items()):
            if not job.is_running():
                job.stop()
                header.publish(os.path.dirname(job.library), job.succeeded())
                del self._building[header]
        self._running = [job for job in self._running if job.is_running()]
        return len(self._running) < self._limit

    def _start_next(self, function):
        """Do one step for modules that come later; return False if there is nothing to do."""
        if not self._has_room():
            return False
        if function and len(function.queue) < MODULES_PER_HEADER and function.look_ahead():
            pass
        elif self._due:
            self._build(self._due.pop())
        elif function and function.queue:
            self._start(function.queue.pop(next(iter(function.queue))), function)
        else:
            return False
        return True

    def _start(self, command, function):
        header = self._header_of(command)
        arguments = header.arguments() if header else []
        with interrupts_held():
            line = [*command.given[:2], *arguments, *command.rest]
            job = _Job(line, command.library, header)
            function.jobs[command.identity] = job
            self._running.append(job)
        return job

    def _header_of(self, command):
        """Return the header for a command, or None if its source does not begin as most do."""
        if not begins_as_most(command.source):
            return None
        key = compile_folder(), command.given[0], *command.arguments
        if key not in self._headers:
            self._headers[key] = Header(command.given[0], command.arguments)
        return self._headers[key]

    def _count(self, command):
        """Count a module that is to be compiled; a header that many have in common becomes due."""
        header = self._header_of(command)
        if header and not header.is_refused:
            header.wanted += 1
            is_new = header not in self._due and header not in self._building
            if header.wanted >= MODULES_PER_HEADER and is_new and not header.arguments():
                self._due.append(header)

    def _build(self, header):
        with interrupts_held():
            try:
                self._building[header] = job = _Job(*header.command())
            except OSError:
                header.is_refused = True  # the cache was cleared, or its disk is full
            else:
                self._running.append(job)


class _FunctionModules:
    """The modules of one function that are compiled ahead."""

    def __init__(self, linker, count):
        self.queue = {}  # identity -> command, in the order in which Theano will ask for them
        self.jobs = {}  # identity -> its compiler
        self.is_asking = False  # whether `Compilers.run` is to raise commands, not to run them
        self.folder = None
        self._count = count
        self._commands = iter(()) if linker is None else self._commands_of(linker)

    def look_ahead(self):
        """Look at one more operation, and queue its module; return False after the last one."""
        for command in self._commands:
            if command is not None and command.identity not in self.jobs:
                self._count(command)
                self.queue[command.identity] = command
            return True
        return False

    def _commands_of(self, linker):
        """Yield the command of each module that a linker needs and the cache lacks, or None."""
        cache = cc.get_module_cache()
        seen = set()
        for number, node in enumerate(linker.schedule(linker.fgraph)):
            try:
                like = _like(node)
                if like in seen or not _has_own_module(node):
                    continue
                seen.add(like)
                yield self._command_of(node, number, cache)
            except raised_here(Exception):  # Theano raises it too, where it comes to this operation
                yield None

    def _command_of(self, node, number, cache):
        # As in `Op.make_c_thunk`, but without `prepare_node`, which may change the node. If it
        # changes the C code, this module is compiled in vain.
        graph = CLinker().accept(FunctionGraph(node.inputs, node.outputs), no_recycling=[])
        key = graph.cmodule_key()
        if key is None or key in cache.entry_from_key:
            return None
        module_hash = cmodule.get_module_hash(graph.get_src_code(), key)
        if module_hash in cache.module_hash_to_key_data:
            return None
        if self.folder is None:
            with interrupts_held():
                # Named as those of modules: Theano removes it later if this process is killed.
                self.folder = tempfile.mkdtemp(dir=compile_folder())
        folder = os.path.join(self.folder, str(number))
        os.mkdir(folder)
        self.is_asking = True
        try:
            graph.compile_cmodule(folder)
        except _Asked as asked:
            return _Command(*asked.args)
        finally:
            self.is_asking = False


def _has_own_module(node):
    """Return whether Theano compiles this operation alone, as C code."""
    kind = type(node.op)
    return (
        isinstance(node.op, Op)
        and kind.make_thunk is Op.make_thunk
        and kind.make_c_thunk is Op.make_c_thunk
        and kind.c_code is not CLinkerOp.c_code
        and not any(getattr(v.type, "dtype", "") == "float16" for v in node.inputs + node.outputs)
    )


def _like(node):
    """Return a key that is the same for operations that have the same module."""
    inputs = node.inputs
    given = [each.signature() if isinstance(each, Constant) else None for each in inputs]
    same = [inputs.index(each) for each in inputs]
    types = [each.type for each in inputs + node.outputs]
    return node.op, tuple(given), tuple(same), tuple(types)


class _Asked(BaseException):
    """Carries a command out of Theano's functions, which catch and print every Exception."""


class _Command:
    """The command that compiles and links a module, as Theano has written it."""

    def __init__(self, given):
        self.given = given
        at = given.index("-o")
        self.library, self.source = given[at + 1 : at + 3]
        # Without "-g" a module compiles in a tenth less time, and is as fast.
        options = given[2 + (given[2] == "-g") : at]
        self.arguments = [each for each in options if not each.startswith("-L")]
        self.rest = options + given[at:]  # behind the arguments that let it use a header
        # The name of the library is a hash of its C code, so that the same module has the same
        # identity in any folder.
        name = os.path.basename(self.library)
        self.identity = (name, *options, *given[at + 3 :])


def _working_folder(command):
    """Return the working folder of a compiler, or None for the present one.

    GNU's linker first looks in its working folder for ``libgcc_s.so.1``: in the present one that
    may be another user's file. If a path in the command is relative, the folder must not change.
    """
    paths = [each[2:] for each in command if each[:2] in ("-I", "-L")]
    if "-o" in command:
        paths.append(command[command.index("-o") + 1])
    return "/" if all(map(os.path.isabs, paths)) else None


class _Job:
    """A compiler that runs."""

    def __init__(self, command, library, header=None):
        self.library = library
        self.header = header
        self.is_handed_over = False
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 closed by `stop`
        nothing = subprocess.DEVNULL
        files = {"stdin": nothing, "stdout": nothing, "stderr": self._messages}
        try:
            self._process = subprocess.Popen(command, cwd=_working_folder(command), **files)
        except OSError:
            self._messages.close()
            raise

    def is_running(self):
        return self._process.poll() is None

    def hand_over(self, library):
        """Move the library to where Theano looks for it; return messages, or None if this fails."""
        self.is_handed_over = True
        with self._messages:
            if not self.succeeded():
                return None
            try:
                if library != self.library:
                    os.replace(self.library, library)
            except raised_here(OSError):
                return None
            self._messages.seek(0)
            return self._messages.read()

    def succeeded(self):
        return self._process.returncode == 0

    def stop(self):
        """End the compiler, if it still runs, and wait for its end."""
        if self.is_running():
            self._process.kill()
            self._process.wait()
        self._messages.close()
