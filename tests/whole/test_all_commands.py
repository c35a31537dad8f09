"""All commands name hosts alike, take those of Slurm and PBS, and end at a Ctrl-C in imports."""

import json
import re
import shlex
import signal

import pytest
from support.launching import allow_root, needs_mpirun
from support.running import code

from synkhronos.__main__ import main
from synkhronos.launch import where
from synkhronos.rules import tmlauncher
from synkhronos.rules.places import RankPlace, find_places
from synkhronos.rules.request import Request

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
    found = Request.of("BSP", "cpu", "model.py", "Model")
    assert found.arguments()[1:5] == ["--devices", "node1:cpu", "--devices", "node2:cpu"]
    monkeypatch.setattr(where, "is_here", lambda name: name == "node1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    assert find_places("cpu") == [RankPlace(None, "cpu")]


SIGNALLING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "synkhronos.rules.options":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("module", ["synkhronos.__main__", "synkhronos.rules.tmlauncher"])
def test_a_ctrl_c_in_the_imports_of_a_command_leaves_no_traceback(module):
    done = code(SIGNALLING + f"import {module}\nprint('imported')")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
