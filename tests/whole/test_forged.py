"""Jobs whose processes are attacked at their start: they take nothing that is forged, and go on.

The secret, without which no right message can be made, is where only its user can read it.
"""

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
from support import hosts
from support.running import python_path
from support.waiting import wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.slow("two hosts")]

FORGING = Path(hosts.ROOT, "tests", "support", "forging")
AT_EACH_END = """
import os, subprocess, sys, time
assert "SYNKHRONOS_SECRET" not in os.environ
assert b"SYNKHRONOS_SECRET" not in subprocess.check_output(["env"])

def pause():
    print("begun", flush=True)
    while not os.path.exists(os.path.join(os.environ["FORGED"], "go")):
        time.sleep(0.01)
"""
SESSION = (
    AT_EACH_END
    + """
import numpy as np, theano, theano.tensor as T
import synkhronos as synk
theano.config.mode = "FAST_COMPILE"

n = synk.fork(1)
x, w = T.dmatrix("x"), theano.shared(np.arange(300_000.0), "w")
f = synk.function([x], [(x.sum(), "sum"), (x, "gather")])
rows = np.arange(400_000.0).reshape(4, -1)
pause()
for scale in (1, 2):
    total, gathered = f(scale * rows)
    assert total == scale * rows.sum() and np.array_equal(gathered, scale * rows)
    assert f(scale * np.ones((2, 2)))[0] == scale * 4
    synk.broadcast(w, scale * np.arange(300_000.0))
    synk.all_reduce(w, "sum")
    for rank in range(n):
        assert np.array_equal(synk.get_value(rank, w), n * scale * np.arange(300_000.0))
print("right", flush=True)
"""
)
STORE = (
    AT_EACH_END
    + """
import numpy as np
from synkhronos import parameter_server as ps

store = ps.create("dist_sync")
store.set_updater(Adds())
store.init(["small", "large"], [np.zeros(10), np.zeros(300_000)])
if store.rank == 0:
    pause()
for version in range(1, 4):
    arrays = [np.full(10, store.rank + 1.0), np.arange(300_000) * (store.rank + 1.0)]
    store.pushpull(["small", "large"], [[each] for each in arrays]).wait(60)
    assert (arrays[0] == 3 * version).all(), arrays[0]
    assert (arrays[1] == 3 * version * np.arange(300_000)).all()
store.barrier(60)
store.close()
print("right", flush=True)
"""
)
UPDATER = """
def Adds():
    def add(key, gradient, weight):
        weight += gradient
    return add
"""


def of_processes(name):
    """Return what a file of /proc says of each process of this machine."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.append(Path("/proc", pid, name).read_bytes())
    return found


@contextlib.contextmanager
def begun(two_hosts, folder, script, *options, **variables):
    """Run a script until it pauses; yield its process, and what returns what it has printed."""
    (folder / "script.py").write_text(script)
    with open(folder / "output", "wb") as out, subprocess.Popen(
        two_hosts.launch(*options, folder / "script.py"),
        env=two_hosts.environment(FORGED=str(folder), **variables),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        cwd=folder,
    ) as launched:

        def said():
            return (folder / "output").read_text(errors="replace")

        try:
            wait_until(lambda: "begun" in said() or launched.poll() is not None)
            assert launched.poll() is None, said()
            yield launched, said
        finally:
            launched.kill()


@pytest.mark.parametrize(
    ("script", "options", "rights"),
    [(SESSION, [], 1), (UPDATER + STORE, ["--servers", "1", "--workers", "2"], 2)],
    ids=["session", "parameter server"],
)
def test_a_job_goes_on_among_forged_messages(two_hosts, tmp_path, script, options, rights):
    forging = {"PYTHONPATH": python_path(FORGING)}
    with begun(two_hosts, tmp_path, script, *options, **forging) as (launched, said):
        pattern = rb"(?:^|\0)SYNKHRONOS_SECRET=([0-9a-f]{64})(?=\0|$)"
        secrets = {each for text in of_processes("environ") for each in re.findall(pattern, text)}
        assert secrets
        lines = of_processes("cmdline")
        assert any(b"-x\0SYNKHRONOS_SECRET\0" in line for line in lines)
        assert not any(each in line for each in secrets for line in lines)
        (tmp_path / "go").touch()
        assert launched.wait(300) == 0, said()
    output = said()
    assert output.count("right") == rights, output
    assert not (tmp_path / "unpickled").exists()
    forgers = list(tmp_path.glob("forger-*"))
    assert len(forgers) == 2 and all(int(each.read_text()) >= 5 for each in forgers)  # the carriers
    for path in tmp_path.rglob("*"):
        assert not any(each in path.read_bytes() for each in secrets if path.is_file())
