"""Signals that a batch system sends to all processes: the script's handlers run in the master only.

In interpreters of their own, each with a process group of its own.
"""

import pytest

pytestmark = pytest.mark.faults

BEGIN = """
import faulthandler, os, signal, sys, threading, time
import numpy as np
import theano.tensor as T
from support.helpers import Call, function
from support.waiting import wait_until
import synkhronos as synk
from synkhronos.session import current

def checkpoint(signum, frame):
    with open("checkpoints", "a") as file:
        file.write(f"{signal.Signals(signum).name} {os.getpid()}\\n")

def stop(signum, frame):
    checkpoint(signum, frame)
    raise TimeoutError("the script's time is up")

def checkpoints():
    with open("checkpoints") as file:
        return file.read().split("\\n")[:-1]

def told_to_all(signum):
    before = checkpoints()
    os.killpg(0, signum)
    wait_until(lambda: len(checkpoints()) > len(before))
    call()
    time.sleep(0.05)
    new = checkpoints()[len(before):]
    assert new == [f"{signal.Signals(signum).name} {os.getpid()}"], new

open("checkpoints", "w").close()
naps = [0.0]
x = T.dvector("x")

def nap(rows):
    time.sleep(rows[0])
    return rows

def call(seconds=0.0):
    rows = np.full(6, seconds)
    np.testing.assert_array_equal(f(rows), rows)

def start():
    global f, pids
    synk.fork(3)
    f = function([x], (Call(nap)(x), "gather"))
    call()
    pids = current("this test").worker_pids

def end():
    assert current("this test").worker_pids == pids
    call()
    synk.close()
"""

AT_ANY_TIME = """
MANY = [signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM,
        signal.SIGTSTP, signal.SIGWINCH, signal.SIGRTMIN]
for signum in MANY:
    signal.signal(signum, checkpoint)
reads, writes = os.pipe()
os.set_blocking(reads, False)
os.set_blocking(writes, False)
signal.set_wakeup_fd(writes)
start()
for signum in MANY:
    told_to_all(signum)
assert os.read(reads, 1000) == bytes(MANY)
timer = threading.Timer(0.2, os.killpg, (0, signal.SIGUSR1))
timer.start()
call(0.5)
assert len(checkpoints()) == len(MANY) + 1
for signum in (signal.SIGUSR2, signal.SIGHUP):
    signal.signal(signum, checkpoint)  # after the fork
    told_to_all(signum)
signal.set_wakeup_fd(-1)
end()
"""

THAT_RAISES = """
signal.signal(signal.SIGUSR1, stop)
start()
try:
    os.killpg(0, signal.SIGUSR1)
    time.sleep(5)
except TimeoutError:
    pass
else:
    raise AssertionError("it did not raise")
for _ in range(3):
    call()
assert checkpoints() == [f"SIGUSR1 {os.getpid()}"]
end()
"""

DURING_FORK = """
signal.signal(signal.SIGUSR1, checkpoint)
fork, sent = os.fork, []

def signalled_fork():
    pid = fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    return pid

os.fork = signalled_fork
start()
os.fork = fork
end()
assert checkpoints() == []
"""

OF_CHILDREN = """
signal.signal(signal.SIGCHLD, checkpoint)
import subprocess

def status(rows):
    return rows + subprocess.call(["sh", "-c", "exit 3"])

start()
g = function([x], (Call(status)(x), "gather"))
np.testing.assert_array_equal(g(np.zeros(3)), [3, 3, 3])
assert {line.split()[1] for line in checkpoints()} == {str(os.getpid())}
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
end()
"""

FAULTHANDLER = """
file = open("traces", "w")
faulthandler.register(signal.SIGUSR2, file)
start()
os.kill(pids[0], signal.SIGUSR2)
wait_until(lambda: "_loop" in open("traces").read())
end()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "handlers",
    [AT_ANY_TIME, THAT_RAISES, DURING_FORK, OF_CHILDREN, FAULTHANDLER],
    ids=["many", "one that raises", "during fork", "SIGCHLD", "faulthandler"],
)
def test_handlers_run_in_the_master_only(script, handlers):
    done = script(BEGIN + handlers, start_new_session=True)
    assert "Error" not in done.stderr
