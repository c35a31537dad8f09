"""``synkhronos info --hosts`` asks each machine what it has."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from support.running import run

from synkhronos.__main__ import main
from synkhronos.comm.mpi import job
from synkhronos.tools.info import machines


def info(hosts, names, *arguments, **variables):
    line = "-m", "synkhronos", "info", "--hosts", names, *hosts.reached_by, *arguments
    done = run(sys.executable, *line, env=hosts.environment(**variables))
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_machines_that_agree(two_hosts):
    names = ",".join(two_hosts.addresses)
    status, out, err = info(two_hosts, names, SYNKHRONOS_DEVICES="cpu,cpu,cpu")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0].split() == [
        "Theano" if each == "library" else each for each in machines._COLUMNS
    ]
    for number, line in enumerate(lines[1:3]):
        address, host, _, files, *_, numpy, python, _, count, kind = line.split()
        assert files == job.digest()
        assert (address, host) == (two_hosts.addresses[number], f"synk{two_hosts.net}-{number + 1}")
        assert (numpy, python) == (np.__version__, sys.version.split()[0])
        assert (count, kind) == ("3", "cpu")
    assert lines[3:] == ["All have the same versions."]
    assert two_hosts.is_empty()


def test_what_killed_daemons_have_left_keeps_no_machine_away(two_hosts, tmp_path):
    """A daemon with the number of a killed one could not start: numbers are low in containers."""
    agent = tmp_path / "agent"
    left = "$(seq -f /dev/shm/prted.%g/pmix.$(hostname).tool 99)"
    plain = two_hosts.reached_by[1]
    agent.write_text(f"#!/bin/sh\nhost=$1; shift\nexec {plain} $host 'mkdir -p {left};' \"$@\"\n")
    agent.chmod(0o755)
    name = two_hosts.addresses[0]
    assert info(two_hosts, name, "--agent", str(agent))[0] == 0
    assert two_hosts.is_empty()


@pytest.mark.slow("asks hosts twice")
def test_a_machine_that_cannot_be_reached_is_named(two_hosts):
    gone = f"10.{two_hosts.net}.0.9"
    status, out, _ = info(two_hosts, f"{two_hosts.addresses[0]},{gone}")
    assert status == 1
    assert f"synk{two_hosts.net}-1" in out
    assert f"{gone} (Cannot open network namespace" in out and "can't be reached. Try:" in out
    status, out, _ = info(two_hosts, gone, "--json")
    found = json.loads(out)
    assert status == 1 and not found["ok"] and found["machines"] == [] and gone in found["problems"]


def test_versions_that_differ():
    row = ["a", "n", "0.1", "e2", "Theano 1.0.5", "1.23.5", "3.11.7", "2", "2 cpu"]
    other = ["b", "m", "0.1", "e2", "Theano 1.0.5", "1.22.0", "3.10.1", "4", "4 cpu"]
    assert machines.agree([row, row]) and not machines.agree([row, other])
    assert "They differ in NumPy and Python: fork() needs" in machines.disagreement([row, other])


def test_a_source_tree_with_other_contents_differs(tmp_path):
    (tmp_path / "a.py").write_text("one = 1\n")
    (tmp_path / "__pycache__").mkdir()
    whole = Path(job.__file__).parents[2]
    digest = job.digest.__wrapped__  # not that of before
    assert job.digest() == job.digest(whole) == job.facts()[2]
    digests = [digest(tmp_path)]
    (tmp_path / "__pycache__" / "a.pyc").write_text("not compared")
    digests.append(digest(tmp_path))
    (tmp_path / "a.py").write_text("one = 2\n")
    digests.append(digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("libraries", "title", "shown"),
    [
        (["PyTensor 3.3.7", "PyTensor 3.2.0"], "PyTensor", ["3.3.7", "3.2.0"]),
        (["Theano 1.0.5", "PyTensor 3.3.7"], "library", ["Theano 1.0.5", "PyTensor 3.3.7"]),
    ],
)
def test_host_libraries_that_differ(libraries, title, shown):
    rows = [
        ["a", "n", "0.1", "e2", library, "2.5.5", "3.13.0", "2", "2 cpu"] for library in libraries
    ]
    assert machines.disagreement(rows).startswith(f"They differ in {title}: fork() needs")
    titles, *lines = machines.table(rows).splitlines()
    assert title in titles and all(each in line for each, line in zip(shown, lines))
    refused = job._disagreement([row[1:7] for row in rows])
    assert f"  {title}  " in refused and all(each in refused for each in shown)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--hosts=a b", "--hosts: 'a b' is not a machine: write names or addresses"),
        ("--hostfile=none", "can't read the hostfile 'none': No such file or directory"),
    ],
)
def test_wrong_names(given, message, capsys):
    assert main(["info", given]) == 2
    assert capsys.readouterr().err.startswith(f"can't ask the machines: {message}")
