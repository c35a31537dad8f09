"""Hosts and devices: by name, in files, in allocations of Slurm and PBS; those that are refused."""

import socket

import pytest

from synkhronos.launch import CannotLaunch, where
from synkhronos.launch.where import Host


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [Host("a")]),
        ("a,b:2", [Host("a"), Host("b", 2)]),
        (" a , 10.0.0.1:12", [Host("a"), Host("10.0.0.1", 12)]),
        ("me@node-1.cluster", [Host("me@node-1.cluster")]),
        ("a:cuda0,a:cuda1,b:cpu", [Host("a", 2, ("cuda0", "cuda1")), Host("b", 1, ("cpu",))]),
        ("a:opencl0:1", [Host("a", 1, ("opencl0:1",))]),
        ("cuda1,cpu:2", [Host("cuda1"), Host("cpu", 2)]),  # each item begins with its host
    ],
)
def test_hosts_by_name(text, expected):
    assert where.find_hosts(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a machine: write names"),
        ("a,,b", "'' is not a machine"),
        ("a b", "'a b' is not a machine"),
        ("-x", "'-x' is not a machine"),
        ("-Fx@y", "'-Fx@y' is not a machine"),  # ssh would read its settings from a file
        ("a:", "of at least 1, or a device, behind the colon, such as a:2 or a:cuda0"),
        ("a:0", "at least 1"),
        ("a:two", "at least 1"),
        ("a:1:1", "at least 1"),
        ("a:cuda0,cuda1", "a:cuda0 has a device, but cuda1 has none"),
        ("a:2,b:cpu", "b:cpu has a device, but a has none: name a device for each rank"),
        ("a,b,a:2", "names a twice: put its ranks together"),
        ("a:cpu,b:cpu,a:cpu", "names a twice: put its ranks together.* a:2 or a:cuda0,a:cuda1"),
    ],
)
def test_hosts_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        where.find_hosts(text)


def test_a_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\na slots=2 max_slots=4\n\nb:3  # a comment\nc\n")
    expected = [Host("a", 2), Host("b", 3), Host("c")]
    assert where.find_hosts(hostfile=str(path)) == expected
    path.write_text("a:cuda0\na:cuda1 slots=1\nb:cpu\n")
    assert where.find_hosts(hostfile=str(path)) == where.find_hosts("a:cuda0,a:cuda1,b:cpu")
    for text, message in [
        ("a\nb cores=2\n", "line 2: 'cores=2' is not known; there is slots=2"),
        ("a slots=none\n", "line 1: 'slots=none' must have a number of ranks"),
        ("a slots=cuda0\n", "line 1: 'slots=cuda0' must have a number of ranks"),
        ("a:cpu slots=2\n", "line 1: a:cpu and slots=2 contradict"),
        ("# nothing\n", "names no machine"),
        ("a\na\n", "names a twice"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            where.find_hosts(hostfile=str(path))
    with pytest.raises(CannotLaunch, match="No such file"):
        where.find_hosts(hostfile=str(tmp_path / "none"))


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
    found = where.find_hosts(environment={"SLURM_JOB_NODELIST": text})
    assert found == [Host(name) for name in names]


@pytest.mark.parametrize("text", ["node[1-", "node[a-b]", "[]", ",", "node[1-2", "a b"])
def test_lists_of_slurm_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="can't be read: name them with --hosts"):
        where.expand_nodes(text)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PBS_NODEFILE", "a\na\nb\nb\n"),
        ("LSB_DJOB_HOSTFILE", "a\na\nb\n"),
        ("PE_HOSTFILE", "a 2 all.q@a UNDEFINED\nb 1 all.q@b UNDEFINED\n"),
    ],
)
def test_an_allocation_in_a_file_and_none(tmp_path, variable, text):
    (tmp_path / "nodes").write_text(text)
    variables = {variable: str(tmp_path / "nodes")}
    assert where.find_hosts(environment=variables) == [Host("a"), Host("b")]
    assert where.find_hosts("c", environment=variables) == [Host("c")]
    alone = {"SLURM_JOB_NODELIST": socket.gethostname()}
    for variables in {}, alone:
        assert where.find_hosts(environment=variables) == [Host(None)]
    with pytest.raises(CannotLaunch, match="name the machines with --hosts"):
        where.find_hosts(environment={variable: str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("cpu", [(None, "cpu")]),
        ("cuda0, cuda1", [(None, "cuda0"), (None, "cuda1")]),
        ("a: cuda0, b : cpu", [("a", "cuda0"), ("b", "cpu")]),
        (["cuda0", "cuda1"], [(None, "cuda0"), (None, "cuda1")]),
        (("cpu", "cpu"), [(None, "cpu"), (None, "cpu")]),
        ("opencl0:1,cpu", [(None, "opencl0:1"), (None, "cpu")]),
        ("node0:opencl0:1,cpu", [("node0", "opencl0:1"), ("node0", "cpu")]),
        ("me@10.0.0.1:cpu", [("me@10.0.0.1", "cpu")]),
        ("a:cpu;b:cpu,cuda", [("a", "cpu"), ("b", "cpu"), ("b", "cuda")]),
        (["a:cpu", "b:cuda0,cuda1"], [("a", "cpu"), ("b", "cuda0"), ("b", "cuda1")]),
        (["a:cpu", "a:cuda0"], [("a", "cpu"), ("a", "cuda0")]),
        ("a:cuda0,cuda1,b:cpu", [("a", "cuda0"), ("a", "cuda1"), ("b", "cpu")]),
        ("a:cuda0,a:cuda1,b:cpu", [("a", "cuda0"), ("a", "cuda1"), ("b", "cpu")]),
    ],
)
def test_devices(devices, expected):
    hosts = where.find_hosts(devices=devices, environment={})
    assert [(host.name, device) for host in hosts for device in host.devices] == expected


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        (2, TypeError, "got 2"),
        ([0, 1], TypeError, "devices must hold names.*, got 0"),
        ([], ValueError, "devices is empty: name a device for each rank"),
        ("", ValueError, "devices is empty"),
        (" ; ", ValueError, "devices is empty"),
        ("cpu,", ValueError, "'' in 'cpu,' is not the name of a device"),
        ("gpu0", ValueError, "'gpu0' in 'gpu0' is not the name of a device"),
        ("cuda0x", ValueError, "'cuda0x'"),  # theirs had an unanchored pattern, that took it
        ("node0:", ValueError, "'node0:' must have a number of ranks of at least 1, or a device"),
        ("node0:2", ValueError, "'2' in 'node0:2' is not the name of a device"),
        ("-x:cpu", ValueError, "'-x:cpu' is not a machine"),
        ("a:cpu;cpu", ValueError, "a:cpu has a host, but cpu has none"),
        ("cpu,a:cpu", ValueError, "a:cpu has a host, but cpu has none"),
        ("a:cpu;b:cpu;a:cpu", ValueError, "names a twice: put its ranks together"),
    ],
)
def test_devices_that_are_refused(devices, error, message):
    with pytest.raises(error, match=message):
        where.find_hosts(devices=devices, source="devices")


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
