"""Hosts and devices: by name, in files, in allocations of Slurm and PBS; those that are refused."""

import json
import re
import shlex
import socket

import pytest
from support.launching import allow_root, needs_mpirun

from synkhronos.__main__ import main
from synkhronos.launch import CannotLaunch, where
from synkhronos.launch.where import Host, RankPlace
from synkhronos.rules import request
from synkhronos.tools import tmlauncher


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
    assert where.find_places(devices, environment={}) == [RankPlace(*each) for each in expected]


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        (None, ValueError, "devices is empty: name a device for each rank"),
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
        where.find_places(devices)


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


SLURM = "SLURM_JOB_NODELIST=node[1-2]"
PBS = "PBS_NODEFILE=nodes"
RULE = "rule BSP {} --dry-run model.py Model"
LAUNCH = "launch {} --dry-run model.py"
TMLAUNCHER = "tmlauncher -rule=BSP -modelfile=model -modelclass=Model {} -dry-run"
WORKERS = "launch --servers 1 --workers 2 {} --dry-run model.py"
OF_ALL = (LAUNCH, RULE, TMLAUNCHER)
CPUS = {"a": "cpu cpu", "b": "cpu cpu"}
DEVICES = {"a": "cuda0 cuda1", "b": "cpu"}
NODES = {"node1": "cpu cpu", "node2": "cpu cpu"}


@needs_mpirun
@pytest.mark.parametrize(
    ("given", "commands", "expected"),
    [
        ("--hosts a,b --devices cpu,cpu", OF_ALL, CPUS),
        ("--hosts a:2,b --devices cpu,cpu", OF_ALL, CPUS),
        ("--hostfile ab --devices cpu,cpu", OF_ALL, CPUS),
        ("--hosts a:cuda0,a:cuda1,b:cpu", OF_ALL, DEVICES),
        ("--hostfile devices", OF_ALL, DEVICES),
        ("--devices a:cuda0,a:cuda1,b:cpu", OF_ALL, DEVICES),
        ("--devices a:cuda0,cuda1;b:cpu", OF_ALL, DEVICES),
        ("--devices a:cuda0,cuda1 --devices b:cpu", [RULE], DEVICES),
        (f"{SLURM} --devices cpu,cpu", OF_ALL, NODES),
        (f"{PBS} --devices cpu,cpu", OF_ALL, NODES),
        (f"{SLURM} --devices b:cpu,cpu", OF_ALL, {"b": "cpu cpu"}),
        (f"{SLURM} --hosts b --devices cpu,cpu", OF_ALL, {"b": "cpu cpu"}),
        ("--hosts a:2,b", [LAUNCH], {"a": "2", "b": ""}),
        ("--hosts a,b", [LAUNCH], {"a": "", "b": ""}),
        ("--hosts a:1,b:2", [WORKERS], {"a": "1", "b": "2"}),
        ("--hosts a,b", [WORKERS], {"a": "2", "b": "1"}),
        ("--hostfile ab", [WORKERS], {"a": "2", "b": "1"}),
        (SLURM, [WORKERS], {"node1": "2", "node2": "1"}),
        (PBS, [WORKERS], {"node1": "2", "node2": "1"}),
        # mistakes
        ("--hosts a --hostfile ab", [TMLAUNCHER], "hosts 'a' and the hostfile 'ab' are given"),
        ("SYNKHRONOS_LOST_AFTER=1 --hosts a:cpu,b:cpu", OF_ALL, "AFTER must be a number of sec"),
        ("--hosts a:x --devices cpu", OF_ALL, "--hosts: 'a:x' must have a number of ranks"),
        ("--hosts a:3 --devices cpu,cpu", OF_ALL, "a is to have 3 ranks, but .* names 2: give"),
        ("--hosts a --devices b:cpu", OF_ALL, "names hosts, and so does --hosts: give one"),
        ("--hosts a:cpu --devices cpu", OF_ALL, "names devices, and so does --hosts: give one"),
        ("--hostfile none --devices cpu", OF_ALL, "can't read the hostfile 'none': No such file"),
        ("--hosts a,b,a --devices cpu", OF_ALL, "--hosts names a twice: put its ranks together"),
        ("--hosts a:2,b", [RULE, TMLAUNCHER], "is empty: name a device for each rank"),
        ("--hosts a:cpu,b:cpu", [WORKERS], "a device is for the ranks of a session"),
        ("--hosts a:2,b", [WORKERS], "b has no number of processes"),
    ],
)
def test_all_commands_name_the_same_hosts(given, commands, expected, tmp_path, monkeypatch, capsys):
    for name, text in {
        "nodes": "node1\nnode1\nnode2\n",
        "ab": "a  # slots\nb\n",
        "devices": "a:cuda0\na:cuda1\nb:cpu\n",
        "model.py": "class Model: pass\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "DEVICES"):
        monkeypatch.delenv(name, raising=False)
    allow_root(monkeypatch)
    words = given.split()
    if "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("="))
    for command in commands:
        name, *line = command.format("{}").split()
        at = line.index("{}")
        if name == "tmlauncher":
            pairs = zip(words[::2], words[1::2])
            line[at : at + 1] = [f"{option[1:]}={value}" for option, value in pairs]
            status = tmlauncher.main(line)
        else:
            line[at : at + 1] = words
            status = main([name, *line])
        out, err = capsys.readouterr()
        if isinstance(expected, str):
            assert status in (1, 2) and not out and re.search(expected, err), (command, err)
        else:
            assert status == 0, (command, err)
            assert _told(shlex.split(out)) == expected, command


@needs_mpirun
@pytest.mark.parametrize("command", [*OF_ALL, WORKERS])
def test_all_commands_say_after_how_long_a_machine_is_lost(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    allow_root(monkeypatch)
    (tmp_path / "model.py").write_text("class Model: pass\n")
    hosts = "--hosts a,b" if command == WORKERS else "--devices a:cpu,b:cpu"
    for given in "60", "0", "soon":
        options = f"{hosts} --lost-after {given}"
        if command == TMLAUNCHER:
            options = f"-devices=a:cpu,b:cpu -lost_after={given}"
        name, *line = command.format(options).split()
        status = tmlauncher.main(line) if command == TMLAUNCHER else main([name, *line])
        out, err = capsys.readouterr()
        if given == "soon":
            assert status in (1, 2) and "--lost-after must be a number of seconds" in err
        else:
            assert status == 0 and f"SYNKHRONOS_LOST_AFTER={given}" in shlex.split(out)


def _told(line):
    """Return the devices, or else the number of ranks, of each host that a line names."""
    hosts = [each.partition(":")[0] for each in line[line.index("--host") + 1].split(",")]
    variables = dict(word.partition("=")[::2] for word in line if word.startswith("SYNKHRONOS_"))
    if "model.py" in line:  # of sessions
        ranks = variables.get("SYNKHRONOS_RANKS_OF_MACHINES", "," * (len(hosts) - 1)).split(",")
        found = variables.get("SYNKHRONOS_DEVICES", "").replace(",", " ").split(";")
        found = found * len(hosts) if len(found) == 1 else found
        counts = (each.split() and str(len(each.split())) for each in found)
        assert all(not one or not number or one == number for one, number in zip(counts, ranks))
        return dict(zip(hosts, [each or number for each, number in zip(found, ranks)]))
    told = json.loads(line[-1])
    devices = json.loads(told["line"][-1]).get("devices")
    if devices is None:
        return dict(zip(hosts, map(str, told["counts"])))
    return {
        host: " ".join(devices.pop(0) for _ in range(n)) for host, n in zip(hosts, told["counts"])
    }


def test_a_request_names_its_hosts_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("class Model: pass\n")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    found = request.make("BSP", "cpu", "model.py", "Model")
    assert found.arguments()[1:5] == ["--devices", "node1:cpu", "--devices", "node2:cpu"]
    monkeypatch.setattr(where, "is_here", lambda name: name == "node1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    assert where.find_places("cpu") == [RankPlace(None, "cpu")]
