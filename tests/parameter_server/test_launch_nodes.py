"""``synkhronos launch --servers --workers``: options, places, and the environment of scripts."""

import argparse
import json
import shlex

import pytest
from support import nodes as runs
from support.launching import allow_root, needs_mpirun

from synkhronos.__main__ import main
from synkhronos.launch.mpirun import Options
from synkhronos.parameter_server.remote import node, nodes
from synkhronos.tools import launch


@pytest.fixture
def script(tmp_path, monkeypatch):
    allow_root(monkeypatch)
    path = tmp_path / "script.py"
    path.write_text("print(1)\n")
    return str(path)


def dry_run(capsys, *arguments):
    assert main(["launch", "--dry-run", *arguments]) == 0
    return shlex.split(capsys.readouterr().out)


@needs_mpirun
@pytest.mark.parametrize("hosts", [[], ["--hosts", "a:2,b:3"]])
def test_the_command_line(script, capsys, hosts):
    line = dry_run(capsys, "--servers", "2", "--workers", "3", *hosts, script, "--rate", "1")
    told = json.loads(line[-1])
    job = node.ServerJob(**(json.loads(told["line"][-1]) if hosts else told))
    assert (job.n_servers, job.n_workers) == (2, 3)
    assert job.command[1:] == ["-u", script, "--rate", "1"]


@needs_mpirun
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("a,b", [2, 1]), ("a:1,b:2", [1, 2]), ("a,b,c,d", [1, 1, 1]), ("a", [3])],
)
def test_processes_fill_hosts_in_order(script, capsys, hosts, expected):
    line = dry_run(capsys, "--workers", "2", "--hosts", hosts, script)
    assert json.loads(line[-1])["counts"] == expected
    assert line[line.index("--host") + 1] == ",".join(
        f"{name}:1" for name in "abc"[: len(expected)]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--servers", "1"], "--servers 1 needs workers too"),
        (["--workers", "0"], "--workers 0 must be a number of processes, at least 1"),
        (["--servers", "0", "--workers", "1"], "--servers 0 must be"),
        (["--workers", "2", "--parallel"], "--parallel is for the ranks of a session"),
        (["--workers", "2", "-n", "2"], "-n is for the ranks of a session"),
        (["--workers", "2", "--devices", "cpu"], "--devices is for the ranks of a session"),
        (["--workers", "2", "--hosts", "a:2,b:2"], "are 3 processes, but the hosts a:2,b:2 have 4"),
        (["--workers", "2", "--hosts", "a:2,b"], "b has no number of processes"),
    ],
)
def test_mistakes_are_told_in_a_sentence(script, capsys, arguments, message):
    assert main(["launch", *arguments, script]) == 2
    assert message in capsys.readouterr().err


def test_a_script_must_be_a_file(capsys):
    assert main(["launch", "--workers", "2", "-"]) == 2
    assert "can't read the script from standard input" in capsys.readouterr().err
    assert main(["launch", "--workers", "2", "/no/such/script.py"]) == 2
    assert "can't open '/no/such/script.py'" in capsys.readouterr().err


def test_names_of_processes():
    found = nodes.NodesOfMpirun(node.ServerJob(2, 2, []), [], [], Options(), environment={})
    found.ranks[3].host, found.ranks[3].pid = "node1", 77
    assert [found.name(rank) for rank in range(4)] == [
        "server 0",
        "server 1",
        "worker 0",
        "worker 1 on node1",
    ]
    found._take_mark(3, b"status", "5")
    found.ranks[3].last_lines.append("ValueError: a reason")
    assert found.failure_summary() == [
        "worker 1 on node1 has ended with exit status 5, as the first that has failed.",
        "Its last lines:\n    ValueError: a reason",
    ]


def test_the_cause_is_not_a_worker_that_fails_because_another_has_died():
    found = nodes.NodesOfMpirun(node.ServerJob(1, 2, []), [], [], Options(), environment={})
    found.ranks[2].pid = 77
    found._take_mark(1, b"follows", "1")
    found._take_mark(1, b"status", "7")
    assert found.cause == 1
    found._take_mark(2, b"status", "-9")  # its word comes later
    assert found.cause == 2 and found.failure_summary()[0].startswith(
        "worker 1 was killed by SIGKILL"
    )


def test_a_process_of_which_the_guard_was_killed_is_named_before_those_that_follow():
    found = nodes.NodesOfMpirun(node.ServerJob(1, 2, []), [], [], Options(), environment={})
    for rank in range(3):
        found._take_mark(rank, b"start", f"77 node{rank}")
    for rank in (1, 2):
        found._take_mark(rank, b"follows", str(rank))
        found._take_mark(rank, b"status", "1")
    assert found.failure_summary() == ["server 0 on node0 is lost: its end was not reported."]
    found = nodes.NodesOfMpirun(node.ServerJob(1, 2, []), [], [], Options(), environment={})
    found._take_mark(2, b"status", "-15")  # a SIGTERM to a worker's script is no end by others
    found._take_mark(1, b"status", "1")
    assert found.cause == 2


def test_a_process_that_is_silent_is_named():
    found = nodes.NodesOfMpirun(node.ServerJob(1, 2, []), [], [], Options(), environment={})
    for rank in range(3):
        found._take_mark(rank, b"start", f"77 node{rank}")
    found._take_mark(2, b"lost", "")
    found._take_mark(1, b"status", "0")
    assert found._deadline == float("inf")  # the server has not ended
    found._take_mark(0, b"status", "0")
    assert found._deadline < float("inf")
    [sentence] = found.failure_summary()
    assert sentence == "worker 1 on node2 can't be reached any more, which has ended the run."


def test_help_says_where_processes_are(capsys):
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    assert "--servers S" in shown and "--workers W" in shown
    assert "Servers and then workers fill the machines in order" in shown


ENVIRONMENT = """
import os, subprocess, sys
import synkhronos.parameter_server.remote.link
of_mpi = [name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "PRTE_"))]
child = [sys.executable, "-c", "import os; print(*os.listdir('/proc/self/fd'))"]
fds = subprocess.run(child, capture_output=True, text=True).stdout.split()
print("found", of_mpi, os.environ["OMP_NUM_THREADS"], sys.argv[1:], sys.stdin.read() == "",
      len(fds), "mpi4py.MPI" in sys.modules, flush=True)
if "--ends" in sys.argv:
    sys.exit("a message")
"""


@pytest.mark.slow("starts several processes")
def test_the_environment_of_a_script(tmp_path):
    """A script is no process of MPI: a library that starts it must not take the mover's place."""
    run = runs.run(tmp_path, ENVIRONMENT, "a b", options=["--threads-per-rank", "3"])
    assert run.said("found") == ["found [] 3 ['a b'] True 4 False"] * 2


@pytest.mark.slow("starts several processes")
def test_the_exit_status_is_that_of_the_first_worker_that_failed(tmp_path):
    run = runs.run(tmp_path, ENVIRONMENT, "--ends", status=1)
    assert "has ended with exit status 1, as the first that has failed" in run.output
    assert "    a message" in run.output


AGAIN = """
import os, signal, synkhronos as synk
from synkhronos import parameter_server as ps

store = ps.create("dist_sync")
if synk.restart_count() == 0 and store.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
store.barrier()
print("again", store.rank, synk.restart_count(), flush=True)
store.close()
"""


@pytest.mark.slow("starts several processes twice")
def test_all_start_again_after_one_was_killed(tmp_path):
    run = runs.run(tmp_path, AGAIN, options=["--restarts", "1"])
    assert sorted(run.said("again ")) == ["again 0 1", "again 1 1"]
    assert "attempt 2 of 2 on localhost. Lost before: worker 1" in run.output
