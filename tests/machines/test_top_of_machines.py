"""``synkhronos top --hosts`` shows a session of several machines as one."""

import json
import subprocess
import sys

import pytest
from support.running import run

SCRIPT = """
import sys, time
import theano.tensor as T
import synkhronos as synk
synk.fork()
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
f([1.0, 2.0, 3.0, 4.0])
print("ready", flush=True)
for line in sys.stdin:
    pass
"""
# In place of ssh: into the first of the namespaces of processes that run on a host. The agent of
# the tests makes new ones for each command.
AGENT = """#!/bin/sh
net=$(echo "$1" | cut -d. -f2)
number=$(echo "$1" | cut -d. -f4)
shift
for pid in $(ip netns pids synk$net-$number); do
    if head -c 200 /proc/$pid/cmdline | grep -aq "python.*synkhronos"; then
        exec nsenter --target $pid --all env TMPDIR=/dev/shm sh -c "$*"
    fi
done
echo no process on $net $number >&2
exit 255
"""


@pytest.mark.slow("starts a session on two hosts, and asks them twice")
def test_a_session_of_two_machines(two_hosts, tmp_path):
    (tmp_path / "session.py").write_text(SCRIPT)
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    names, environment = ",".join(two_hosts.addresses), two_hosts.environment()
    line = two_hosts.launch("-n", "2", tmp_path / "session.py")
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env=environment, **given) as launched:
        assert launched.stdout.readline() == "ready\n"
        top = [sys.executable, "-m", "synkhronos", "top", "--hosts", names, *two_hosts.reached_by]
        top += ["--agent", str(agent)]
        as_json = run(*top, "--once", "--json", env=environment)
        table = run(*top, "--once", env=environment)
        launched.stdin.close()
        assert launched.wait(60) == 0
    assert as_json.returncode == 0, as_json.stderr
    one, other = json.loads(as_json.stdout)["sessions"]
    assert one["id"] == other["id"] and one["calls"] == other["calls"]
    title, _, *ranks = table.stdout.splitlines()[2:]
    assert "session.py: 4 ranks, " in title
    assert [each.split()[0] for each in ranks[:4]] == ["0,", "1", "2", "3"]
    assert [two_hosts.addresses[at // 2] in ranks[at] for at in range(4)] == [True] * 4
    assert two_hosts.is_empty()
