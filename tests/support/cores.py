"""A machine whose cores, NUMA nodes and GPUs are those of a test."""

import os

from synkhronos._machine import cores


def machine(folder, monkeypatch, nodes, siblings=(), allowed=()):
    """Write what the kernel says of cores into a folder; `allowed` are those of this process."""
    for number, cpus in enumerate(nodes):
        (folder / "node" / f"node{number}").mkdir(parents=True)
        (folder / "node" / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    for each in siblings:
        for cpu in each:
            (folder / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
            path = folder / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
            path.write_text(",".join(map(str, each)) + "\n")
    monkeypatch.setattr(cores, "_NODES", folder / "node")
    monkeypatch.setattr(cores, "_CPUS", folder / "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*allowed})
