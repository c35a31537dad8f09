"""Servers and workers on two hosts, whose processes share memory on each host only."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from support import hosts, nodes, store_cases
from support.waiting import LONG, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.slow("two hosts")]

SUMS = """
import sys, time
import numpy as np
from synkhronos import parameter_server as ps

store = ps.create(sys.argv[1])
if store.type == "dist_async":
    def add(key, gradient, weight):
        weight += gradient
    store.set_updater(add)
store.init(["small", "large"], [np.zeros(10, np.float32), np.zeros(300_000)])
for version in range(1, 6):
    arrays = [np.full(10, store.rank + 1, np.float32), np.arange(300_000) * (store.rank + 1.0)]
    store.pushpull(["small", "large"], [[each] for each in arrays]).wait(60)
    if store.type == "dist_sync":
        assert (arrays[0] == 3).all() and (arrays[1] == 3 * np.arange(300_000)).all()
store.barrier(60)
last = [int(each[1]) for each in store.pull(["small", "large"]).wait(60)]
print("worker", store.rank, store._link.hosts, store._link.server_hosts, last, flush=True)
store.barrier(60)
store.close()
"""

UNTIL_WARNED = "is ended by the test"  # how worker 1 ends


class Launched:
    """A run with a server and a worker on the first host, and a worker on the second."""

    def __init__(self, these, folder, script, *arguments):
        self.hosts, self.path = these, folder / "output"
        (folder / "script.py").write_text(script)
        names = f"{these.addresses[0]}:2,{these.addresses[1]}:1"
        line = these.launch("--workers", "2", folder / "script.py", *arguments, hosts=names)
        at = line.index("--mpirun-args") + 1
        line[at] = line[at].replace("tcp,self", "tcp,sm,self")
        with open(self.path, "wb") as output:
            self.process = subprocess.Popen(
                line,
                cwd=folder,
                env=these.environment(**hosts.IMPATIENT),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self):
        return self.path.read_text(errors="replace")

    def said(self, text):
        return sorted(line for line in self.output.splitlines() if line.startswith(text))

    def begin(self):
        wait_until(lambda: len(self.said("begun ")) == 2 or self.process.poll() is not None)
        assert len(self.said("begun ")) == 2, self.output

    def kill(self, host, part, rank=0):
        """Kill the process of a host that has a text in its command line, and a rank there."""
        found = []
        for pid, line in self.hosts.programs(host).items():
            if part in line and not re.search(r"synkhronos\.launch\.machine|mpirun| launch ", line):
                place = f'"rank": {rank}, "size"'
                if part != "remote.node" or place in Path(f"/proc/{pid}/environ").read_text():
                    found.append(pid)
        [pid] = found
        os.kill(pid, signal.SIGKILL)

    def wait(self, cut=None):
        try:
            self.process.wait(300)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(self.output) from None
        finally:
            if cut:
                self.hosts.mend(cut)  # its daemon could not be told before
        assert self.hosts.is_empty(), [self.hosts.programs(i + 1) for i in range(2)]
        return self.process.returncode


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_sums_on_two_hosts(two_hosts, tmp_path, kind):
    launched = Launched(two_hosts, tmp_path, SUMS, kind)
    assert launched.wait() == 0, launched.output
    first, second = (f"synk{two_hosts.net}-{number}" for number in (1, 2))
    times = 5 if kind == "dist_async" else 1
    said = f"{[first, second]} {[first]} [{3 * times}, {3 * times}]"
    assert launched.said("worker ") == [f"worker 0 {said}", f"worker 1 {said}"]


def lost(launched, kind, how):
    """Check that worker 0 is told how worker 1 is lost, or goes on without it."""
    worker, _, host, *_ = how.split()[1:]
    if kind == "dist_sync":
        assert launched.said(f"told 0 WorkerLost {worker} {host} {how}")
    else:
        assert launched.said("log: ") == [f"log: {how}; the others go on without it"]
        assert launched.said("closed ") == ["closed 0"]


@pytest.mark.parametrize(
    "name",
    ["a_schedule_of_each_step", "a_norm_of_columns", "memory_that_is_used_again"]
    + ["adam_counts_the_steps_of_each_key"],
)
def test_reported_cases_on_two_hosts(two_hosts, tmp_path, name):
    script = Path(store_cases.__file__).read_text()
    launched = Launched(two_hosts, tmp_path, script, name, "dist_sync")
    assert launched.process.wait(LONG) == 0, launched.output
    for rank in range(2):
        with np.load(tmp_path / f"found_{rank}.npz") as file:
            found = [file[each] for each in sorted(file.files)]
        for one, other in zip(found, store_cases.CASES[name].right(2)):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_killed_worker_on_another_host(two_hosts, tmp_path, kind):
    launched = Launched(two_hosts, tmp_path, nodes.ROUNDS, kind, UNTIL_WARNED)
    launched.begin()
    launched.kill(2, "-u " + str(tmp_path))
    assert launched.wait() == 137, launched.output
    how = f"worker 1 on synk{two_hosts.net}-2 was killed by SIGKILL (signal 9)"
    lost(launched, kind, how)
    assert f"{how}, as the first that has failed" in launched.output


def test_a_killed_mover_on_another_host(two_hosts, tmp_path):
    launched = Launched(two_hosts, tmp_path, nodes.ROUNDS, "dist_sync", UNTIL_WARNED)
    launched.begin()
    launched.kill(2, "remote.node")
    assert launched.wait() == 137, launched.output
    lost(
        launched, "dist_sync", f"worker 1 on synk{two_hosts.net}-2 has died with its mover: round "
    )


def test_a_killed_server(two_hosts, tmp_path):
    launched = Launched(two_hosts, tmp_path, nodes.ROUNDS, "dist_async", UNTIL_WARNED)
    launched.begin()
    launched.kill(1, "remote.node", rank=0)
    assert launched.wait() == 137, launched.output
    host = f"synk{two_hosts.net}-1"
    assert len(launched.said("told ")) == 2
    for line in launched.said("told "):
        assert f"ServerLost 0 {host} server 0 on {host} has died, and with it the weights" in line


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_worker_whose_cable_is_cut(two_hosts, tmp_path, kind):
    launched = Launched(two_hosts, tmp_path, nodes.ROUNDS, kind, UNTIL_WARNED)
    launched.begin()
    two_hosts.cut(2)
    began = time.monotonic()
    assert launched.wait(cut=2) == 1, launched.output
    assert time.monotonic() - began < LONG
    worker = f"worker 1 on synk{two_hosts.net}-2"
    lost(launched, kind, f"{worker} has not been heard of for 4 s")
    assert f"{worker} can't be reached any more, which has ended the run" in launched.output


def test_a_server_whose_cable_is_cut(two_hosts, tmp_path):
    launched = Launched(two_hosts, tmp_path, nodes.ROUNDS, "dist_sync", UNTIL_WARNED)
    launched.begin()
    two_hosts.cut(1)
    assert launched.wait(cut=1) == 1, launched.output
    host = f"synk{two_hosts.net}-1"
    how = f"server 0 on {host} has not been heard of for 4 s"
    assert launched.said(f"told 1 ServerLost 0 {host} {how}")
    assert f"server 0 on {host} and worker 0 on {host} can't be reached" in launched.output


def test_a_server_with_an_updater_that_takes_long_is_not_lost(two_hosts, tmp_path):
    script = nodes.ROUNDS.replace("    weight +=", "    time.sleep(6); weight +=")
    script = script.replace("10_000", "2")  # one round
    launched = Launched(two_hosts, tmp_path, script, "dist_sync", "updates")
    began = time.monotonic()
    assert launched.wait() == 0, launched.output
    assert time.monotonic() - began > 6
    assert launched.said("closed ") == ["closed 0", "closed 1"]


def test_a_late_round_of_high_priority_overtakes_on_a_slow_cable(two_hosts, tmp_path):
    """In mshadow-ps priorities of pulls were never used."""
    script = """
import time
import numpy as np
from synkhronos.parameter_server.remote.link import MoverLink

link = MoverLink.connect("dist_sync")
link.init_key(0, "large", (2_000_000,), "float32", "sum")
link.init_key(1, "small", (256,), "float32", "sum")
for version, pause in enumerate([0.2, 0.9], 1):  # while it is pushed, and while it is pulled
    link.barrier(60)
    link.push(0, version, 0)
    link.request(0, version, 0)
    time.sleep(pause)
    link.push(1, version, 1)
    link.request(1, version, 1)
    order = []
    while len(order) < 2:
        order += [number for number, _, _ in link.next(60)]
    print("order", link.rank, order, flush=True)
link.close(60)
"""
    for number in (1, 2):
        two_hosts.slow(number, "100mbit")
    launched = Launched(two_hosts, tmp_path, script)
    assert launched.wait() == 0, launched.output
    # Worker 0 is on the host of the server, where nothing is slow but the round.
    assert launched.said("order 1") == ["order 1 [1, 0]"] * 2
