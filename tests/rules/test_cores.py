"""The cores that ranks are bound to."""

import json
import os
import subprocess
import sys

import pytest
from support.cores import machine

from synkhronos.launch import mpirun
from synkhronos.rules import cores
from synkhronos.rules.compatible.lib import hwloc_utils
from synkhronos.rules.places import find_places


def test_a_range_of_one_number():
    """Theirs could not read a single number, and no range under Python 3."""
    assert hwloc_utils.range_to_list("3\n") == "3"
    assert hwloc_utils.range_to_list("0-1,4") == "0,1,4"


TWO_NODES = [[[0, 8], [1, 9], [2, 10], [3, 11]], [[4, 12], [5, 13], [6, 14], [7, 15]]]


@pytest.mark.parametrize(
    ("nodes", "near", "expected"),
    [
        ([[[0], [1]]], [None, None], [[0], [1]]),
        ([[[0], [1], [2]]], [None, None], [[0], [1, 2]]),
        ([[[0]]], [None] * 3, [[0]] * 3),
        ([[[0, 1]]], [None] * 2, [[0, 1]] * 2),
        (TWO_NODES, [None] * 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        (TWO_NODES, [1, 1, 0], [[4, 5, 12, 13], [6, 7, 14, 15], [0, 1, 2, 3, 8, 9, 10, 11]]),
        (TWO_NODES, [0, None], [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        (TWO_NODES, [None] * 4, [[0, 1, 8, 9], [4, 5, 12, 13], [2, 3, 10, 11], [6, 7, 14, 15]]),
    ],
)
def test_the_cores_of_ranks(nodes, near, expected):
    assert cores.share(nodes, near) == expected


def test_the_topology_of_a_machine(tmp_path, monkeypatch):
    siblings = [(0, 4), (1, 5), (2, 6), (3, 7)]
    gpus = [("0000:0a:00.0", 1), ("0000:0b:00.0", 0), ("0000:0c:00.0", -1)]
    machine(tmp_path, monkeypatch, ["0-1,4-5", "2-3,6-7"], siblings, range(8))
    for bus, node in gpus:
        (tmp_path / "nvidia" / bus.upper()).mkdir(parents=True)
        (tmp_path / "pci" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(cores, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(cores, "_PCI", tmp_path / "pci")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cores.cores_here(["cpu", "cpu"]) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert cores.cores_here(["cuda0", "cuda1"]) == [[2, 3, 6, 7], [0, 1, 4, 5]]
    assert cores.cores_here(["cuda0", "cuda2"]) == [[2, 3, 6, 7], [0, 1, 4, 5]]
    assert cores.cores_here(["cuda9"]) == [[0, 1, 4, 5]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert cores.cores_here(["cuda0", "cuda1"]) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 7})
    assert cores.cores_here(["cpu", "cpu"]) == [[2], [3, 7]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 9})
    assert cores.cores_here(["cpu", "cpu"]) == [[0], [9]]  # the kernel lists 9 in no node


def test_a_machine_without_nodes(tmp_path, monkeypatch):
    machine(tmp_path, monkeypatch, [], allowed=range(4))
    assert cores.cores_here(["cpu", "cuda0"]) == [[0, 1], [2, 3]]


def test_ranks_without_devices_are_refused():
    with pytest.raises(ValueError, match="devices is empty: name a device for each rank"):
        find_places(None, environment={})


def test_another_host_is_asked_by_the_command():
    command = [sys.executable, "-m", "synkhronos.rules.cores", "cpu,cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.partition(mpirun._ANSWER)[2])
    assert len(found) == 2 and {*found[0], *found[1]} <= os.sched_getaffinity(0)
