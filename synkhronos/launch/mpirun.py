"""mpirun: its command line, a check that it fits mpi4py, and why it has not started a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from types import MappingProxyType
from typing import Any, Mapping, Sequence

from synkhronos._host import pythons
from synkhronos._machine.devices import python_command, run_captured, why_failed
from synkhronos.comm.mpi import folders
from synkhronos.launch import CannotLaunch, guard, leftovers
from synkhronos.launch.where import Host, is_here

_EXPORTED = {"THEANO_FLAGS", "PYTENSOR_FLAGS", "PYTHONPATH", "OMP_NUM_THREADS"}
_ROOT = "ALLOW_RUN_AS_ROOT"
_CONNECT_SECONDS = 10  # for ssh
_TIMED_OUT = 124  # exit status, as of `timeout`
_ANSWER = "synkhronos-answer "  # begins the line that a host answers with
_INSTALL = pythons.install("mpi")
_OF_DAEMONS = re.compile(r"(?i)daemon|unable to reliably start|ORTE was unable|ssh:|did not begin")


@dataclass(frozen=True)
class Options:
    """How to reach machines, by the options of commands that use mpirun."""

    agent: str | None = None  # the program in place of ssh
    mpirun_args: str = ""
    wait_answer: float = 20.0  # seconds for a machine to answer a login
    wait_start: float = 120.0  # seconds for mpirun and MPI to begin on all machines
    lost_after: str | None = None


def find() -> str:
    """Return the path of mpirun: the one of this environment, or else the first on the PATH."""
    here = Path(sys.executable).parent / "mpirun"
    path = str(here) if os.access(here, os.X_OK) else shutil.which("mpirun")
    if path is None:
        raise CannotLaunch(f"there is no mpirun: {_INSTALL}, or load the MPI of this cluster.")
    return path


def line(
    hosts: Sequence[Host],
    options: Any,
    command: Sequence[str],
    variables: Mapping[str, str],
    counts: Sequence[int] | None = None,
) -> list[str]:
    """Return the command line that runs a command on each machine: once, or `counts` times.

    `options` has those of `Options`. mpirun would notice a machine that is cut off after 3 to 8
    minutes, and then end all without a message. Synkhronos' own processes report it before.
    """
    try:
        arguments = shlex.split(options.mpirun_args)
    except ValueError as error:
        message = f"--mpirun-args {options.mpirun_args!r} can't be taken apart: {error}."
        raise ValueError(message) from None
    _check_root(arguments)
    line = [find()]
    slots = [1] * len(hosts) if counts is None else counts
    line += ["--host", ",".join(f"{host.name}:{count}" for host, count in zip(hosts, slots))]
    mapping = "ppr:1:node" if counts is None else "slot"
    line += ["-n", str(sum(slots)), "--map-by", mapping, "--bind-to", "none"]
    if options.agent:
        line += ["--mca", "plm", "ssh", "--mca", "plm_rsh_agent", options.agent]
    run = variables.get(leftovers.VARIABLE)
    named = f"{leftovers.VARIABLE}={run}" if run else ""
    line += folders.daemon_arguments(Path(line[0]).with_name("prted"), named)
    for name in sorted(os.environ):
        is_ours = name.startswith("SYNKHRONOS_") and name != guard.VARIABLE
        if (name in _EXPORTED or is_ours) and name not in variables:
            line += ["-x", name]
    for name, value in variables.items():
        line += ["-x", f"{name}={value}"]
    return [*line, *arguments, *command]


def new_token() -> str:
    """Return a random token to begin the marks of a run's processes with."""
    return secrets.token_hex(16)


def _check_root(arguments):
    if os.geteuid() or "--allow-run-as-root" in arguments:
        return
    for name in ("OMPI", "PRTE"):
        if f"{name}_{_ROOT}" in os.environ and f"{name}_{_ROOT}_CONFIRM" in os.environ:
            return
    raise CannotLaunch(
        "Open MPI refuses to run as root: run as another user, or set "
        f"OMPI_{_ROOT}=1 and OMPI_{_ROOT}_CONFIRM=1."
    )


def check() -> None:
    """Raise unless mpirun belongs to the MPI that mpi4py loads."""
    path = find()
    code = (
        "import os, mpi4py; mpi4py.rc.initialize = False; os.chdir('/')\n"  # as mpi_library does
        "from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    with ThreadPoolExecutor(2) as pool:
        installed, loaded = pool.map(run_captured, ([path, "--version"], python_command(code)))
    if loaded.returncode:
        raise CannotLaunch(f"mpi4py can't be imported ({why_failed(loaded)}): {_INSTALL}.")
    own, wanted = _kind(installed.stdout + installed.stderr), _kind(loaded.stdout)
    if own != wanted:
        raise CannotLaunch(
            f"{path} belongs to {own}, but mpi4py loads {wanted}: put the mpirun of "
            f"that MPI first on the PATH, or {_INSTALL}."
        )
    if not own.startswith("Open MPI"):
        raise CannotLaunch(
            f"{path} belongs to {own}, of which the options are not known here. Write the "
            "line by hand: one process of `synkhronos run SCRIPT` on each machine."
        )


def _kind(text) -> str:
    r"""Return the name of an MPI and its first number.

    >>> _kind("mpirun (Open MPI) 5.0.11"), _kind("HYDRA build details:\\nVersion: 4.1")
    ('Open MPI 5', 'MPICH 4')
    """
    names = ("Open MPI", "Open MPI"), ("Intel", "Intel MPI"), ("MPICH", "MPICH"), ("HYDRA", "MPICH")
    for mark, name in names:
        if mark.lower() in text.lower():
            number = re.search(r"(\d+)\.\d", text)
            return f"{name} {number[1]}" if number else name
    return text.strip().split("\n")[0][:60] or "an unknown MPI"


def ask(lines: Sequence[Sequence[str]], seconds: float) -> list[CompletedProcess]:
    """Run command lines at once, as mpirun runs; the status of one that is late is `_TIMED_OUT`."""
    end = time.monotonic() + seconds
    with folders.of_mpirun(os.environ) as environment, contextlib.ExitStack() as stack:
        children = [_begin(line, environment, stack) for line in lines]
        return [_result(child, end) for child in children]


def _begin(line, environment, stack):
    """Start a command in a session of its own, or return the error that keeps it from starting."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "errors": "replace"}
    given = {"env": environment, "stdin": subprocess.DEVNULL, "start_new_session": True, **pipes}
    try:
        child = stack.enter_context(subprocess.Popen(line, **given))
    except OSError as error:
        return error
    # Also an agent that hangs: it would outlive its mpirun.
    stack.callback(lambda: child.poll() is None and leftovers.kill_session(child.pid))
    return child


def _result(child, end):
    if isinstance(child, FileNotFoundError):
        return CompletedProcess([], 127, "", f"there is no {child.filename}")
    if isinstance(child, OSError):
        return CompletedProcess([], 127, "", str(child))
    try:
        out, err = child.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return CompletedProcess(child.args, _TIMED_OUT, "", "no answer")
    return CompletedProcess(child.args, child.returncode, out, err)


def answer(line: Sequence[str], host: Host, options: Any) -> Any:
    """Return the object that a host answers to `line`, by `tell`; raise CannotLaunch if none."""
    [done] = ask([line], options.wait_start)
    if done.returncode == _TIMED_OUT:
        late = within(options.wait_start, "--wait-start")
        raise CannotLaunch(f"{host.name} gives no answer {late}.")
    for text in done.stdout.splitlines():
        if text.startswith(_ANSWER):
            return json.loads(text[len(_ANSWER) :])
    printed = done.stderr + done.stdout
    if "Traceback" in printed or "can't open" in printed or "No module" in printed:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise CannotLaunch(
            f"{host.name} can be reached, but does not run Synkhronos ({last[0]}): is this "
            f"environment at the same path there? {shlex.quote(sys.executable)}"
        )
    raise CannotLaunch(why_not_started(printed, [host], options))


def tell(answer: Any) -> None:
    """Print the answer to another host, in one write because outputs of several hosts may mix."""
    os.write(1, f"\n{_ANSWER}{json.dumps(answer)}\n".encode())


def why_not_started(printed: str, hosts: Sequence[Host], options: Any) -> str:
    """Return a sentence about an mpirun that has ended before it started anything."""
    details = "\n".join(f"    {line}" for line in printed.strip().splitlines()[-25:])
    if _OF_DAEMONS.search(printed):
        lost = ask_all(hosts, options, "true")
        if lost:
            line = _line_on(next(iter(lost)), options.agent, "true")
            return f"{listed(lost)} can't be reached. Try: {shlex.join(line)}"
        # PRRTE's message may name another machine than the one that lacks the daemon.
        daemon = Path(find()).with_name("prted")
        programs = [sys.executable, str(daemon)] if daemon.exists() else [sys.executable]
        without = ask_all(hosts, options, f"ls -d {shlex.join(programs)}")
        if without:
            return (
                f"{listed(without)} can be reached, but mpirun's daemon can't start "
                "there: is this environment at the same path there?"
            )
        silent = ask_daemons(hosts, options)
        return (
            f"{listed(silent) or 'all machines'} can be reached, but mpirun's daemon does not "
            "answer from there: does a firewall keep the machine from reaching this one?\n"
            + details
        )
    return f"mpirun has ended before it started anything. It printed:\n{details}"


def listed(problems: Mapping[str, str]) -> str:
    """Return the result of `ask_all` in words."""
    return " and ".join(f"{name} ({problem})" for name, problem in problems.items())


def ask_all(hosts: Sequence[Host], options: Any, command: str) -> dict[str, str]:
    """Run a command on each machine; return {name: problem} of those where it fails."""
    lines = [
        ["sh", "-c", command] if is_here(host.name) else _line_on(host.name, options.agent, command)
        for host in hosts
    ]
    late = f"no answer {within(options.wait_answer, '--wait-answer')}"
    return _problems(hosts, ask(lines, options.wait_answer), late, why_failed)


def ask_daemons(
    hosts: Sequence[Host], options: Any, variables: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Start mpirun's daemon on each other machine by itself; return {name: problem}.

    A login may reach a machine that the network of mpirun and MPI does not reach.
    """
    away = [host for host in hosts if not is_here(host.name)]
    # With `true`, which may end before its start is noted, mpirun hung in 7 of 18 cases.
    lines = [line([host], options, ["sleep", "1"], variables) for host in away]
    silent = "mpirun's daemon does not answer"
    late = f"{silent} {within(options.wait_start, '--wait-start')}"
    return _problems(away, ask(lines, options.wait_start), late, lambda _: silent)


def _problems(hosts, all_done, late, why):
    """Return {name: problem} of the hosts with a command that has failed, or was too `late`."""
    return {
        host.name or "localhost": late if done.returncode == _TIMED_OUT else why(done)
        for host, done in zip(hosts, all_done)
        if done.returncode
    }


def within(seconds: float, option: str) -> str:
    """Say how long was waited, and how to wait longer.

    >>> within(20.0, "--wait-answer")
    'within 20 s (--wait-answer 40 waits longer)'
    """
    return f"within {seconds:g} s ({option} {2 * seconds:g} waits longer)"


def leave_nothing(run: str) -> str:
    """Return the command for `ask_all` that kills what processes a run has left on a machine."""
    return shlex.join([sys.executable, "-I", str(Path(leftovers.__file__).resolve()), run])


def _line_on(name, agent, command):
    """Return the line that runs a command on a machine as mpirun starts its daemon there.

    >>> _line_on("b", "my ssh", "a command")
    ['my', 'ssh', 'b', 'a command']
    """
    if agent:
        return [*shlex.split(agent), name, command]
    if "SLURM_JOB_ID" in os.environ:
        # Without --quiet the last line of its errors is "Job step aborted".
        step = ["--quiet", "--mpi=none", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
        return ["srun", *step, "-w", name, "sh", "-c", command]
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
    return ["ssh", *options, name, command]
