"""The process of mpirun beside each other one: how it ends, and that it leaves none."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from support.waiting import wait_until

from synkhronos._machine.processes import end_with_parent
from synkhronos.launch import guard


@pytest.mark.parametrize(
    ("code", "tolerance", "status"),
    [("0", "strict", 0), ("130", "strict", 0), ("3", "strict", 3), ("3", "tolerant", -9)],
)
@pytest.mark.parametrize("has_mpi", [True, False])
def test_the_guard_ends_as_others_need_it(code, tolerance, status, has_mpi):
    tell = "eval printf x '>&'$SYNKHRONOS_STARTED; " if has_mpi else ""
    line = guard.command("token", tolerance == "tolerant", ["bash", "-c", f"{tell}exit {code}"])
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == status
    early = " early" if tolerance == "tolerant" and not has_mpi else ""
    assert done.stderr.endswith(f"\0token 0 status {code}{early}\0\n")


def test_no_signal_kills_a_guard_while_python_shuts_down(tmp_path):
    """Its timer went off then, each 2 s, and a run that had succeeded was ended by SIGTERM."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGALRM):\n"
        "        kill(pid, number)\n"  # as late as the timer may
        "last = Last()\n"
    )
    line = guard.command("token", False, ["true"])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    assert subprocess.run(line, env=environment, timeout=300).returncode == 0


@pytest.mark.slow("waits for processes to end")
def test_a_guard_ends_its_rank_without_the_daemon_of_mpirun():
    """If launcher and mpirun are killed at once, no other process would end the ranks."""
    line = guard.command("token", False, ["sleep", "600"])
    code = f"import subprocess, time; print(subprocess.Popen({line!r}).pid, flush=True)"
    daemon = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(600)"],
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
