"""The process of mpirun on each machine: what it tells of its ranks, and that it leaves none."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from support import launching
from support.running import python_path
from support.waiting import LONG, wait_until

from synkhronos._machine.processes import end_with_parent
from synkhronos.parameter_server.group import machine

pytestmark = pytest.mark.mpi


def started(*line, count=1, stderr=subprocess.PIPE, **variables):
    """Start the ranks of one machine, without mpirun."""
    return subprocess.Popen(
        machine.command("token", [count], line),
        env={**os.environ, **launching.FOR_ROOT, **variables},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def test_lines_and_ends_are_told_with_the_numbers_of_ranks():
    tell = "import json, os; print(json.loads(os.environ['SYNKHRONOS_GROUP'])['rank'])"
    out, err = started(sys.executable, "-u", "-c", f"{tell}; os._exit(3)", count=2).communicate()
    assert sorted(out.splitlines()) == ["\0token 0 line \x000", "\0token 1 line \x001"]
    for rank in (0, 1):
        assert f"\0token {rank} start " in err and f"\0token {rank} status 3\0" in err


def test_the_end_of_a_rank_is_told_after_its_last_lines():
    """Lines that came after it were lost to the sentences about its end."""
    code = "import os; os.write(1, b'a line\\n' * 9000); os.write(2, b'the last\\n'); os._exit(3)"
    for _ in range(5):
        process = started(sys.executable, "-c", code, stderr=subprocess.STDOUT)
        *lines, last = process.communicate(timeout=LONG)[0].splitlines()
        assert last == "\0token 0 status 3\0"
        assert lines.count("\0token 0 line \0a line") == 9000
        assert "\0token 0 line \0the last" in lines


def test_signals_are_passed_on_to_the_ranks():
    code = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))
print("begun", flush=True)
signal.pause()
"""
    process = started(sys.executable, "-c", code)
    assert process.stdout.readline() == "\0token 0 line \0begun\n"
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 0 and "\0token 0 status 9\0" in err


def test_without_mpi_a_machine_ends_and_says_why(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no libmpi here')")
    process = started("true", PYTHONPATH=python_path(tmp_path))
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 1 and "ImportError: no libmpi here" in err


@pytest.mark.slow("waits for processes to end")
def test_ranks_end_without_the_daemon_of_mpirun():
    """If launcher and mpirun are killed at once, no other process would end the ranks."""
    line = machine.command("token", [1], ["sleep", "600"])
    code = f"import subprocess, time; print(subprocess.Popen({line!r}).pid, flush=True)"
    daemon = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(600)"],
        env={**os.environ, **launching.FOR_ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process = psutil.Process(int(daemon.stdout.readline()))
    assert daemon.stderr.readline().startswith("\0token 0 start ")
    [sleeping] = process.children()
    daemon.kill()
    daemon.communicate(timeout=300)
    wait_until(lambda: not sleeping.is_running() and not process.is_running())


def test_mpirun_does_not_begin_without_its_launcher(monkeypatch):
    """A launcher that was killed before mpirun could ask for a signal left mpirun and its ranks."""
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    child = os.fork()
    if child == 0:
        try:
            end_with_parent(os.getppid())  # the parent is there
            end_with_parent(1 << 30)
        except SystemExit as error:
            os.kill(os.getpid(), signal.SIGKILL if error.code == 1 else signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
