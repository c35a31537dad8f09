"""Run a script in a session, as ``python script.py`` would; with --parallel on all ranks.

A script that calls synkhronos.fork() itself gets its own session; with --parallel it must not.
"""

import argparse
import builtins
import contextlib
import dataclasses
import functools
import io
import json
import logging
import os
import socket
import sys
import traceback
import types
from typing import Callable

import synkhronos as synk
from synkhronos import _host
from synkhronos._machine import heartbeats
from synkhronos._machine.devices import undo_binding
from synkhronos._machine.log import log, name_host
from synkhronos._session import leader
from synkhronos._session.current import Current
from synkhronos._wording import count, printable
from synkhronos.comm.mpi import secret
from synkhronos.comm.mpi.link import CarrierLink
from synkhronos.launch import INTERRUPTED, guard, where
from synkhronos.profiling.status import state_of

_MOST_CAUSES = 99  # of an exception that are followed: they may form a circle
_FORKS = synk.SessionError(
    "the script calls fork() itself: run it with plain python, without --parallel."
)

_FLAGS = {
    "--parallel": "let theano.function build functions for all ranks, also inside libraries",
    "--follow": "broadcast what the script sets with set_value; --parallel always does",
    "--check": "compare the first calls of each function with serial ones; --parallel always does",
    "--verbose": "print the traceback of a WorkerDied that ends the script, not only its line",
    "--no-report": "with --parallel: don't print at the end which functions ran on all ranks",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to a parser."""
    add = parser.add_argument
    for name, text in _FLAGS.items():
        add(name, action="store_true", help=text)
    add(
        "--report", metavar="FILE",
        help="with --parallel: write this report as JSON, for other programs",
    )  # fmt: skip
    add("-n", "--ranks", metavar="N", type=int, help="ranks, on each machine (default: as in fork)")
    add("--devices", metavar="LIST", help="the device of each rank, such as cpu,cpu or cuda0,cuda1")
    add("--threads-per-rank", metavar="N", type=int, help="threads of BLAS and OpenMP in each rank")
    add("script", metavar="SCRIPT", help="a file of Python, or - for standard input")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")


def main(options: argparse.Namespace, tell: Callable[[str, str], None] = guard.tell_nobody) -> int:
    """Fork, run the script, and return the exit status; tell a launcher what was lost."""
    undo_binding()
    Current.on_loss = functools.partial(tell, "lost")
    if where.n_processes() > 1:
        try:
            heartbeats.lost_seconds()
        except ValueError as error:
            return _refused(error)
        link = Current.link = CarrierLink()
        link.on_loss = Current.on_loss
        try:
            link.begin()  # waits for the network processes of all machines of the job
        except synk.WorkerDied:
            return _refused(f"MPI has not begun on {socket.gethostname()}: do all hosts reach it?")
        tell("begun", "")
        name_host(socket.gethostname())
        if link.n_machines == 1:
            link.end()
            return _refused(where.refusal(options.script))
        if link.machine:
            if options.verbose:
                log.addHandler(logging.StreamHandler())
                log.setLevel(logging.INFO)
            sys.path.insert(0, os.path.dirname(os.path.realpath(options.script)))
            try:
                return leader.serve(link)
            finally:
                link.end()  # for mpirun, an end before its network process is a failure
    secret.take()  # the script and its children don't need it
    try:
        code, file, folder = _compiled(options.script)
    except OSError as error:
        print(f"can't open {options.script!r}: {error.strerror}", file=sys.stderr)
        return 2
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        _print(error)
        return 1
    given = {
        "n_parallel": options.ranks,
        "devices": options.devices.split(",") if options.devices else None,
        "threads_per_rank": options.threads_per_rank,
        "follow": options.follow or options.parallel,
        "check": options.check or None,
    }
    try:
        synk.fork(**given)
    except (TypeError, ValueError, ImportError, RuntimeError) as error:  # a rank's, too
        return _refused(error)
    session = Current.session
    session.is_of_run, Current.of_run = not options.parallel, given
    session.no_fork = _FORKS if options.parallel else None
    status = 0  # of a script that ends by sys.exit(), too
    try:
        with synk.parallel() if options.parallel else contextlib.nullcontext():
            status = _run(code, file, folder, options, tell)
        if status == 0 and Current.session is session and not options.parallel:
            _tell_alone(options)
        return status
    finally:
        Current.of_run = None
        if options.parallel:
            _tell(synk.parallel_report(), options, status)
        if Current.session is not None and state_of(Current.session) == "open":
            synk.close()


def _refused(reason):
    print(printable(f"can't start the ranks: {reason}"), file=sys.stderr)
    return 2


def _tell_alone(options):
    """Say how many functions ran on ranks, if the script has compiled others."""
    now = synk.status()
    if now.n_alone and (now.n_distributed or not now.functions):  # else not called yet
        own = f"{_host.library.__name__}.function"
        advice = f": write synkhronos.function, or: synkhronos run --parallel {options.script}"
        print(
            f"synkhronos run: {count(now.n_distributed, 'function')} ran on the ranks, and "
            f"{now.n_alone} of {own} in one process alone{'' if now.n_distributed else advice}",
            file=sys.stderr,
        )


def _tell(report, options, status):
    """Print the report of `parallel`, and write it to a file, as the options say."""
    if not options.no_report and (report.functions or status == 0):
        print(f"\n{report}", file=sys.stderr)
    if options.report:
        try:
            with open(options.report, "w", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(report), file, indent=2)
        except OSError as error:
            print(f"can't write {options.report!r}: {error.strerror}", file=sys.stderr)


def _compiled(script):
    """Return the code of a script, its file, and the first folder to import from."""
    if script == "-":
        return compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), None, ""
    name = os.path.abspath(script) if sys.version_info >= (3, 9) else script  # as in Python
    with io.open_code(os.path.abspath(script)) as file:
        code = compile(file.read(), name, "exec", dont_inherit=True)
    return code, name, os.path.dirname(os.path.realpath(script))


def _run(code, file, folder, options, tell):
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __cached__=None)
    if file is not None:
        module.__file__ = file
    # These stay after the script: functions that run at the exit, and pickled objects, need them.
    sys.modules["__main__"] = module
    if sys.argv[0] == "-c" or getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)  # `module_command` put no folder there that this would replace
    else:
        sys.path[0] = folder
    sys.argv = [options.script, *options.arguments]
    try:
        _exec(code, module.__dict__, tell)
    except (KeyboardInterrupt, Exception) as error:
        if options.verbose or not (error is _FORKS or isinstance(error, synk.WorkerDied)):
            _print(error)
        else:  # the script is not wrong, so a traceback would not help
            at = next(traceback.walk_tb(_of_script(error)), (None, 0))[1]
            said = f"{options.script}, line {at}: {type(error).__name__}: {error}"
            print(printable(f"{said} --verbose shows the traceback."), file=sys.stderr)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exec(code, names, tell):
    """Run a script; tell the launcher of an exception that the loss of a session didn't cause."""
    try:
        exec(code, names)
    except BaseException as error:
        chain = [error]  # an exception in `except WorkerDied` is due to the loss, too
        while chain[-1] is not None and len(chain) < _MOST_CAUSES:
            chain.append(chain[-1].__cause__ or chain[-1].__context__)
        is_loss = any(isinstance(each, (synk.WorkerDied, synk.SessionError)) for each in chain)
        if not is_loss or error is _FORKS:
            tell("own", "")
        raise


def _of_script(error):
    """Return the traceback of an exception without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _print(error):
    """Print an exception as Python does, without the frames of this module."""
    error.__traceback__ = _of_script(error)
    sys.excepthook(type(error), error, error.__traceback__)
