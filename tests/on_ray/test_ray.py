"""Sessions on the machines of a Ray cluster, of which each test host is a node."""

import importlib.util
import subprocess
import sys
import time

import pytest
from support import hosts
from support.running import run

LINE = [sys.executable, "-m", "synkhronos.extensions.ray"]
SCRIPT = """
import numpy as np, theano.tensor as T, synkhronos as synk
n, x = synk.fork(2), T.dvector("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
print(n, f(np.arange(10.0)), len({each.host for each in synk.status().ranks}))
"""
RAY = f"{sys.executable} -m ray.scripts.scripts start --num-cpus 2 --disable-usage-stats"


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install():
    done = run(*LINE)
    assert done.returncode == 1
    assert done.stderr == "Ray is not installed: pip install 'synkhronos[ray]'\n"


@pytest.mark.mpi
@pytest.mark.slow("starts a Ray cluster on two hosts")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray")
@pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")
def test_a_script_on_the_machines_of_a_cluster(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    agent, (head, other) = " ".join(LINE), two_hosts.addresses
    launch = f"{sys.executable} -m synkhronos launch --discover '{agent}' --agent '{agent}' "
    launch += f"--mpirun-args '{two_hosts.reached_by[3]}' {tmp_path / 'script.py'}"
    nodes = [
        f"{RAY} --node-ip-address {address} --temp-dir {two_hosts.folder}/{name} "  # a short path
        for address, name in ((head, "0"), (other, "1"))
    ]
    # The driver must be in the namespace of its node: Ray looks for its processes.
    first = f"{nodes[0]} --head --port 6379 --include-dashboard false > /dev/null && "
    first += f"until [ $({agent} | wc -l) = 2 ]; do sleep 1; done && {launch}"
    in_host = [sys.executable, hosts.__file__]
    environment = two_hosts.environment(RAY_ADDRESS=f"{head}:6379")
    opened = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*in_host, head, first], text=True, **opened) as script:
        time.sleep(10)
        line = [*in_host, other, f"{nodes[1]} --address {head}:6379 --block"]
        with subprocess.Popen(line, **{**opened, "stdout": subprocess.DEVNULL}) as node:
            output, errors = script.communicate(timeout=200)
            node.terminate()
    assert output.splitlines()[-1:] == ["4 45.0 2"], errors
