"""Hosts and devices: by name, in files, in allocations of Slurm and PBS; those that are refused."""

import json
import shlex
import socket
from argparse import Namespace

import pytest
from support.launching import FOR_ROOT, needs_mpirun

from synkhronos.__main__ import main
from synkhronos.launch import CannotLaunch, where
from synkhronos.launch.where import Host, Place
from synkhronos.rules import request


def options(**given):
    return Namespace(**{"hosts": None, "hostfile": None, **given})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [Host("a")]),
        ("a,b:2", [Host("a"), Host("b", 2)]),
        (" a , 10.0.0.1:12", [Host("a"), Host("10.0.0.1", 12)]),
        ("me@node-1.cluster", [Host("me@node-1.cluster")]),
    ],
)
def test_hosts_by_name(text, expected):
    assert where.find_hosts(options(hosts=text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a machine: write names"),
        ("a,,b", "'' is not a machine"),
        ("a b", "'a b' is not a machine"),
        ("-x", "'-x' is not a machine"),
        ("-Fx@y", "'-Fx@y' is not a machine"),  # ssh would read its settings from a file
        ("a:", "a number of ranks of at least 1 behind the colon, such as a:2"),
        ("a:0", "at least 1"),
        ("a:two", "at least 1"),
        ("a:1:1", "at least 1"),
        ("a,b,a:2", "names a twice: a:2 gives it two ranks"),
    ],
)
def test_hosts_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        where.find_hosts(options(hosts=text))


def test_a_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\na slots=2 max_slots=4\n\nb:3  # a comment\nc\n")
    expected = [Host("a", 2), Host("b", 3), Host("c")]
    assert where.find_hosts(options(hostfile=str(path))) == expected
    for text, message in [
        ("a\nb cores=2\n", "line 2: 'cores=2' is not known; there is slots=2"),
        ("a slots=none\n", "line 1: 'a:none' must have a number of ranks"),
        ("# nothing\n", "names no machine"),
        ("a\na\n", "names a twice"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            where.find_hosts(options(hostfile=str(path)))
    with pytest.raises(CannotLaunch, match="No such file"):
        where.find_hosts(options(hostfile=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[01-03,7],gpu-a", ["node01", "node02", "node03", "node7", "gpu-a"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
    ],
)
def test_lists_of_slurm(text, names):
    assert where.expand_nodes(text) == names
    found = where.find_hosts(options(), {"SLURM_JOB_NODELIST": text})
    assert found == [Host(name) for name in names]


@pytest.mark.parametrize("text", ["node[1-", "node[a-b]", "[]", ",", "node[1-2", "a b"])
def test_lists_of_slurm_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="can't be read: name them with --hosts"):
        where.expand_nodes(text)


def test_an_allocation_of_pbs_and_none(tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    variables = {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert where.find_hosts(options(), variables) == [Host("a"), Host("b")]
    assert where.find_hosts(options(hosts="c"), variables) == [Host("c")]
    assert where.find_hosts(options(), {}) is None
    assert where.find_hosts(options(), {"SLURM_JOB_NODELIST": socket.gethostname()}) is None
    with pytest.raises(CannotLaunch, match="name the machines with --hosts"):
        where.find_hosts(options(), {"PBS_NODEFILE": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("cpu", [(None, "cpu")]),
        ("cuda0, cuda1", [(None, "cuda0"), (None, "cuda1")]),
        (["cuda0", "cuda1"], [(None, "cuda0"), (None, "cuda1")]),
        (("cpu", "cpu"), [(None, "cpu"), (None, "cpu")]),
        ("opencl0:1,cpu", [(None, "opencl0:1"), (None, "cpu")]),
        ("node0:opencl0:1,cpu", [("node0", "opencl0:1"), ("node0", "cpu")]),
        ("me@10.0.0.1:cpu", [("me@10.0.0.1", "cpu")]),
        ("a:cpu;b:cpu,cuda", [("a", "cpu"), ("b", "cpu"), ("b", "cuda")]),
        (["a:cpu", "b:cuda0,cuda1"], [("a", "cpu"), ("b", "cuda0"), ("b", "cuda1")]),
        (["a:cpu", "a:cuda0"], [("a", "cpu"), ("a", "cuda0")]),
    ],
)
def test_devices(devices, expected):
    assert where.parse_devices(devices) == [Place(*each) for each in expected]


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        (None, TypeError, "devices must be a list of names, such as cpu,cpu or .*, got None"),
        (2, TypeError, "got 2"),
        ([0, 1], TypeError, "devices must hold names.*, got 0"),
        ([], ValueError, "devices is empty: name a device for each rank"),
        ("", ValueError, "devices is empty"),
        (" ; ", ValueError, "devices is empty"),
        ("cpu,", ValueError, "'' in 'cpu,' is not the name of a device"),
        ("gpu0", ValueError, "'gpu0' in 'gpu0' is not the name of a device"),
        ("cuda0x", ValueError, "'cuda0x'"),  # theirs had an unanchored pattern, that took it
        ("node0:", ValueError, "'' in 'node0:' is not the name"),
        ("-x:cpu", ValueError, "'-x' is not the name of a host"),
        ("node0:cpu,node1:cpu", ValueError, "'node1:cpu' in .* is not the name of a device"),
        ("a:cpu;cpu", ValueError, "a:cpu has a host, but cpu has none"),
        ("a:cpu;b:cpu;a:cpu", ValueError, "names a again after another host"),
    ],
)
def test_devices_that_are_refused(devices, error, message):
    with pytest.raises(error, match=message):
        where.parse_devices(devices)


OF_SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 2),
        ({"SLURM_STEP_NUM_TASKS": "1"}, 1),  # srun --pty bash
        ({"SLURM_STEP_ID": None, "SLURM_STEP_NUM_TASKS": None}, 1),  # a script of sbatch
        ({"SLURM_STEP_ID": str(0xFFFFFFFB)}, 1),  # the step of such a script
        ({"SLURM_STEP_ID": str(0xFFFFFFFA)}, 1),  # the shell of salloc
        ({"OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({"PMI_SIZE": "3"}, 3),
    ],
)
def test_the_number_of_processes(changes, number):
    assert where.n_processes({k: v for k, v in {**OF_SRUN, **changes}.items() if v}) == number


@needs_mpirun
@pytest.mark.parametrize("batch_system", ["Slurm", "PBS"])
def test_launch_and_rule_name_the_hosts_of_an_allocation(
    batch_system, tmp_path, monkeypatch, capsys
):
    (tmp_path / "nodes").write_text("node1\nnode1\nnode2\n")
    (tmp_path / "model.py").write_text("class Model: pass\n")
    monkeypatch.chdir(tmp_path)
    allocation = {
        "Slurm": {"SLURM_JOB_NODELIST": "node[1-2]"},
        "PBS": {"PBS_NODEFILE": str(tmp_path / "nodes")},
    }
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**FOR_ROOT, **allocation[batch_system]}.items():
        monkeypatch.setenv(name, value)

    def hosts_of(command):
        assert main([*command.split(), "--dry-run", "model.py", "Model"]) == 0
        line = shlex.split(capsys.readouterr().out)
        return line[line.index("--host") + 1], line[-1]

    here = "node1:1,node2:1"
    assert hosts_of("launch --devices cpu,cpu")[0] == here
    named, told = hosts_of("launch --workers 3")
    assert named == here and json.loads(told)["counts"] == [2, 2]
    named, told = hosts_of("rule BSP --devices cpu,cpu")
    assert named == here and json.loads(told)["counts"] == [2, 2]
    assert json.loads(json.loads(told)["line"][-1])["devices"] == ["cpu"] * 4
    assert hosts_of("rule BSP --devices node3:cpu,cpu")[0] == "node3:1"
    found = request.make("BSP", "cpu", "model.py", "Model")
    assert found.arguments()[1:5] == ["--devices", "node1:cpu", "--devices", "node2:cpu"]
    monkeypatch.setattr(where, "is_here", lambda name: name == "node1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    assert where.find_places("cpu") == [Place(None, "cpu")]
