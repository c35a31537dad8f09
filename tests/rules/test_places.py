"""Lists of devices with hosts, and the cores that ranks are bound to."""

import json
import os
import subprocess
import sys

import pytest

from synkhronos.rules import places
from synkhronos.rules.places import Place


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
    assert places.parse(devices) == [Place(*each) for each in expected]


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
        places.parse(devices)


def test_a_range_of_one_number():
    """Theirs could not read a single number, and no range under Python 3."""
    assert places.parse_range("3\n") == [3]
    assert places.parse_range("0-1,4,6-7") == [0, 1, 4, 6, 7]
    assert places.parse_range("") == []


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
    assert places.share(nodes, near) == expected


def machine(folder, monkeypatch, nodes, siblings=(), gpus=()):
    """Write what the kernel says of a machine into a folder."""
    for name in ("node", "cpu", "nvidia", "pci"):
        (folder / name).mkdir()
    for number, cpus in enumerate(nodes):
        (folder / "node" / f"node{number}").mkdir()
        (folder / "node" / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    for each in siblings:
        for cpu in each:
            (folder / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
            path = folder / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
            path.write_text(",".join(map(str, each)))
    for bus, node in gpus:
        (folder / "nvidia" / bus.upper()).mkdir()
        (folder / "pci" / bus.lower()).mkdir()
        (folder / "pci" / bus.lower() / "numa_node").write_text(f"{node}\n")
    for name in ("node", "cpu", "nvidia", "pci"):
        constant = {"node": "_NODES", "cpu": "_CPUS", "nvidia": "_NVIDIA", "pci": "_PCI"}[name]
        monkeypatch.setattr(places, constant, folder / name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_topology_of_a_machine(tmp_path, monkeypatch):
    siblings = [(0, 4), (1, 5), (2, 6), (3, 7)]
    gpus = [("0000:0a:00.0", 1), ("0000:0b:00.0", 0), ("0000:0c:00.0", -1)]
    machine(tmp_path, monkeypatch, ["0-1,4-5", "2-3,6-7"], siblings, gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert places.cores_here(["cpu", "cpu"]) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert places.cores_here(["cuda0", "cuda1"]) == [[2, 3, 6, 7], [0, 1, 4, 5]]
    assert places.cores_here(["cuda0", "cuda2"]) == [[2, 3, 6, 7], [0, 1, 4, 5]]
    assert places.cores_here(["cuda9"]) == [[0, 1, 4, 5]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert places.cores_here(["cuda0", "cuda1"]) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 7})
    assert places.cores_here(["cpu", "cpu"]) == [[2], [3, 7]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 9})
    assert places.cores_here(["cpu", "cpu"]) == [[0], [9]]  # the kernel lists 9 in no node


def test_a_machine_without_nodes(tmp_path, monkeypatch):
    machine(tmp_path, monkeypatch, [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert places.cores_here(["cpu", "cuda0"]) == [[0, 1], [2, 3]]


def test_another_host_is_asked_by_the_command():
    command = [sys.executable, "-m", "synkhronos.rules.places", "cpu,cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) == 2 and {*found[0], *found[1]} <= os.sched_getaffinity(0)
