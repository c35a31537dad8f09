"""Attempts of a run: which hosts each has, what is worth another one, and what is left of one."""

import os
import signal
import subprocess
import sys

import pytest
from support import launching
from support.waiting import wait_until

from synkhronos._machine.processes import life_of
from synkhronos.launch import CannotLaunch, attempts, leftovers, mpirun, where
from synkhronos.launch.attempts import Attempts, Limits
from synkhronos.parameter_server.group.children import Children

# Stands in for ssh: a host with a file of its name is down.
AGENT = '[ ! -e "$0-$1" ] || { echo "no route" >&2; exit 255; }; exec sh -c "$2"'
# Stands in for mpirun, which is asked to run something on one host: --host NAME:1.
MPIRUN = '#!/bin/sh\n[ ! -e "$0-${2%:1}" ]\n'


class Hosts:
    """Hosts that go and come, of which one process is the attempt."""

    def __init__(self, folder, *names):
        self.names, self.agent, self.seen, self.said = names, folder / "agent", [], []
        self.agent.write_text(AGENT)
        (folder / "mpirun").write_text(MPIRUN)
        (folder / "mpirun").chmod(0o755)

    def take_down(self, name, is_down=True, what="agent"):
        down = self.agent.with_name(f"{what}-{name}")
        down.touch() if is_down else down.unlink()

    def run(self, limits, *scripts):
        """Run attempts, of which each runs one of the scripts in a shell; return the status."""

        def begin(hosts, variables):
            self.seen.append([host.name for host in hosts])
            environment = {**os.environ, **variables}
            script = scripts[int(variables["SYNKHRONOS_RESTART"])]
            if script is None:
                return NotStarted()
            line = ["sh", "-c", script(self) or "exit 0" if callable(script) else script]
            return Children([line], names=["cpu"], environment=environment)

        def find():
            return where.find_hosts(",".join(self.names))

        options = mpirun.Options(f"sh {self.agent}", wait_answer=1.0)
        with pytest.MonkeyPatch.context() as patch:
            launching.allow_root(patch)
            patch.setattr(mpirun, "find", lambda: str(self.agent.with_name("mpirun")))
            return Attempts(limits, find, begin, self.said.append, options).run()[0]


class NotStarted:
    """An attempt of which mpirun starts nothing."""

    has_started, interrupted_by, hit = False, 0, ""

    def run(self):
        return 1


KILLED = "kill -9 $$"


def test_what_is_lost_is_left_out_and_what_comes_is_taken_in(tmp_path):
    hosts = Hosts(tmp_path, "a", "b", "c")

    def lose_a(these):
        these.take_down("a")
        return KILLED

    def find_more(these):
        these.take_down("a", False)
        these.names = "d", "a", "c"
        return KILLED

    assert hosts.run(Limits(2, 2, 5), lose_a, find_more, "exit 0") == 0
    assert hosts.seen == [["a", "b"], ["b", "c"], ["d", "a"]]
    assert hosts.said[0] == "attempt 1 of 6 on a, b."
    assert hosts.said[1].startswith("attempt 2 of 6 on b, c, without a (no route). Lost before: ")
    assert "was killed by SIGKILL" in hosts.said[1] and len(hosts.said) == 3


@pytest.mark.parametrize(
    ("scripts", "status", "n_attempts"),
    [
        (["exit 3", "exit 0"], 3, 1),  # it would do so again
        (["exit 0", "exit 3"], 0, 1),
        ([KILLED, "exit 4"], 4, 2),
        ([KILLED, "kill -SEGV $$", KILLED], 137, 3),
    ],
)
def test_only_a_loss_is_worth_another_attempt(tmp_path, scripts, status, n_attempts):
    hosts = Hosts(tmp_path, "a")
    assert hosts.run(Limits(restarts=2), *scripts) == status
    assert len(hosts.seen) == n_attempts
    assert hosts.said[-1].startswith("gave up after 3 attempts: ") == (n_attempts == 3)


def test_a_host_without_mpiruns_daemon_is_left_out_and_taken_in_again(tmp_path):
    """It was taken in again, its daemon did not report, and that ended the run."""
    hosts = Hosts(tmp_path, "a", "b", "c")
    hosts.take_down("b", what="mpirun")

    def mend(these):
        these.take_down("b", False, what="mpirun")
        return KILLED

    assert hosts.run(Limits(restarts=3), None, mend, "exit 0") == 0
    assert hosts.seen == [["a", "b", "c"], ["a", "c"], ["a", "b", "c"]]
    assert hosts.said[1] == (
        "attempt 2 of 4 on a, c, without b (mpirun's daemon does not answer). Lost before: nothing "
        "was started."
    )


@pytest.mark.parametrize("down", ["", "ab"])
def test_an_attempt_that_would_start_nothing_is_not_made(tmp_path, down):
    """On the same hosts, or where mpirun's daemon answers from none."""
    hosts = Hosts(tmp_path, "a", "b")
    for name in down:
        hosts.take_down(name, what="mpirun")
    assert hosts.run(Limits(restarts=3), None, "exit 0") == 1
    assert hosts.seen == [["a", "b"]]


def test_a_host_that_never_answers_is_left_out_and_its_agent_killed(tmp_path):
    hosts = Hosts(tmp_path, "a", "b")
    pid = tmp_path / "pid"
    hangs = f'[ $1 != b ] || {{ sh -c "echo \\$\\$ > {pid}; sleep 600"; }}; '
    hosts.agent.write_text(hangs + AGENT)
    assert hosts.run(Limits(), "exit 0") == 0
    late = "no answer within 1 s (--wait-answer 2 waits longer)"
    assert hosts.said == [f"attempt 1 of 1 on a, without b ({late})."]
    wait_until(lambda: life_of(int(pid.read_text())) in ("ended", "gone"))


def test_a_ctrl_c_is_the_end(tmp_path):
    hosts = Hosts(tmp_path, "a")
    interrupts = f"kill -INT {os.getpid()}; sleep 0.2; {KILLED}"
    assert hosts.run(Limits(restarts=2), interrupts, "exit 0") == 128 + signal.SIGINT


def test_too_few_hosts_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "_LOOK_SECONDS", 0.05)
    hosts = Hosts(tmp_path, "a", "b")
    hosts.take_down("b")
    assert hosts.run(Limits(2, wait_seconds=0.3), "exit 0") == 1 and not hosts.seen
    there = (
        "1 of at least 2 hosts answer, without b (no route): waited 0.3 s for more, and gave up."
    )
    assert hosts.said[-1] == there
    finding = hosts.names
    hosts.names = ("no", "such:x")  # as of a program that prints nonsense, for a while
    monkeypatch.setattr(attempts.time, "sleep", lambda _: setattr(hosts, "names", finding))
    hosts.take_down("b", False)
    assert hosts.run(Limits(2, wait_seconds=60), "exit 0") == 0
    assert hosts.seen == [["a", "b"]]
    assert "0 of at least 2 hosts answer (--hosts: 'such:x' must have" in hosts.said[-2]
    assert hosts.said[-2].endswith(": waiting up to 60 s for more.")


def test_what_an_attempt_has_left_is_ended_before_the_next(tmp_path):
    """Also a stopped process that has left its session."""
    hosts = Hosts(tmp_path, "a")
    pid = tmp_path / "pid"
    leaves = f"setsid sh -c 'echo $$ > {pid}.new; mv {pid}.new {pid}; kill -STOP $$' & "
    leaves += f"while [ ! -e {pid} ]; do sleep 0.01; done; {KILLED}"
    ended = f"! grep stopped /proc/$(cat {pid})/status"
    assert hosts.run(Limits(restarts=1), leaves, ended) == 0


def test_leftovers_of_another_run_stay():
    environment = {**os.environ, leftovers.VARIABLE: "one"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        wait_until(lambda: life_of(process.pid) == "sleeping")
        line = [sys.executable, "-I", leftovers.__file__]
        assert subprocess.run([*line, "other"], timeout=60).returncode == 0
        assert process.poll() is None
        assert subprocess.run([*line, "one"], timeout=60).returncode == 0
        assert process.wait() == -signal.SIGKILL


def test_a_program_prints_the_hosts(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a:2; echo '# and'; echo b slots=3\n")
    script.chmod(0o755)
    found = where.find_hosts(discovered=attempts.discover(str(script)))
    assert found == [where.Host("a", 2), where.Host("b", 3)]
    assert where.find_hosts(discovered="\n") == []
    with pytest.raises(ValueError, match="--discover, line 1: 'b:x' must have a number of ranks"):
        where.find_hosts(discovered="b:x")
    for command, message in {
        str(tmp_path / "none"): "can't tell the hosts: No such file",
        "sh -c 'exit 3'": "has ended with status 3",
        "": "--discover must name a program, got ''",
        "sh -c 'exit": "--discover .* is no command: No closing quotation",
    }.items():
        with pytest.raises(CannotLaunch, match=message):
            attempts.discover(command)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0,), "--min-hosts must be at least 1, got 0"),
        ((3, 2), "--max-hosts 2 is less than --min-hosts 3"),
        ((1, None, -1), "--restarts must be at least 0, got -1"),
    ],
)
def test_limits_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Limits(*given)
