"""The barriers by themselves: messages of any kind, sleep, abort, errors, deaths, interrupts."""

import contextlib
import functools
import itertools
import mmap
import os
import pickle
import signal
import threading
import time
from dataclasses import dataclass

import psutil
import pytest
from support.leaks import nothing_left
from support.waiting import LONG, wait_until

from synkhronos._machine.processes import ForkedProcess
from synkhronos._session.session import run_on_all
from synkhronos.comm import Aborted, reports
from synkhronos.comm.shared import gate as _gate
from synkhronos.comm.shared.gate import SharedGate as Gate
from synkhronos.comm.shared.gate_memory import ABORT, ASLEEP, DONE, LINE, MET, SEQUENCE, SLOT
from synkhronos.errors import RemoteTraceback, SessionError, WorkerDied, WorkerError


class Rank:
    """As little of a worker as can run a message."""

    def __init__(self, rank, gate):
        self.rank, self.gate, self.running, self.total = rank, gate, True, 0

    def main(self):
        self.gate.become_worker(self.rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while self.running:
            reply = error = None
            try:
                reply = self.gate.next_command().run(self)
            except Aborted:
                pass
            except BaseException as caught:
                error = caught
            try:
                self.gate.worker_finish(reply, error)
            except Exception as unsent:
                self.gate.worker_finish(error=unsent)


@dataclass(frozen=True)
class Message:
    name: str
    argument: object = None

    def run(self, rank):
        return getattr(self, self.name)(rank)

    def add(self, rank):
        rank.total += self.argument
        return (rank.rank, rank.total)

    def nothing(self, rank):
        return None

    def answer(self, rank):
        return self.argument

    def long_answer(self, rank):
        return bytes(self.argument)

    def fail(self, rank):
        if rank.rank in self.argument:
            raise KeyError(f"on {rank.rank}")

    def fail_while_others_wait(self, rank):
        if rank.rank == self.argument:
            raise ValueError("no value")
        # A peer that never comes: only the abort can end this wait.
        rank.gate._wait(rank.gate._line(rank.rank) + 7, 1, call=rank.gate._cells[0])

    def meet(self, rank):
        # What each rank writes before a meeting all others see after it.
        gate = rank.gate
        seen = []
        for turn in range(self.argument):
            if rank.rank == turn % gate.n_ranks:
                time.sleep(0.001)
            gate.boards[rank.rank][0] = turn % 256
            gate.meet()
            seen.append([gate.boards[other][0] for other in range(gate.n_ranks)])
            gate.meet()
        return seen

    def meet_late(self, rank):
        if rank.rank == self.argument:
            time.sleep(0.002)
        rank.gate.meet()

    def meet_or(self, rank):
        what, which = self.argument
        if rank.rank != which:
            return rank.gate.meet() and None
        if what == "raise":
            raise ValueError("no value")
        return None

    def raise_while_another_looks(self, rank):
        """Raise in the moment between another's look at ABORT and its look at who has left."""
        gate, other = rank.gate, 1 - rank.rank
        is_looking = gate.boards[other if rank.rank == self.argument else rank.rank]
        if rank.rank == self.argument:
            wait_until(lambda: is_looking[0])
            raise ValueError("no value")
        look = gate._check_not_left

        def look_late(cell, value, sequence):
            is_looking[0] = 1
            wait_until(lambda: gate._cells[gate._line(other) + DONE] >= sequence)
            look(cell, value, sequence)

        gate._check_not_left = look_late
        try:
            gate.meet()
        finally:
            gate._check_not_left = look
            is_looking[0] = 0

    def meet_or_die(self, rank):
        self.die(rank)
        rank.gate.meet()

    def wait_for(self, rank):
        if rank.rank != rank.gate.master_rank:
            wait_until(self.argument.exists)

    def quit(self, rank):
        rank.running = False

    def die(self, rank):
        if rank.rank == self.argument:
            os._exit(3)


@dataclass(frozen=True)
class Unreadable:
    """Pickles, but can't be unpickled."""

    number: int

    def __reduce__(self):
        return functools.partial(int, "no number"), ()

    def run(self, rank):
        return None


class Interrupted:
    """In place of the master's rank: a Ctrl-C comes when its part begins."""

    @property
    def rank(self):
        raise KeyboardInterrupt


class Team:
    def __init__(self, n, master, spin, prepare=None):
        self.gate = Gate(n, master, spin)
        if prepare:
            prepare(self.gate)
        self.heard = []
        self.gate.on_answer = lambda rank, answer: self.heard.append((rank, answer))
        self.own = Rank(master, self.gate)
        self.processes = {}
        for rank in range(n):
            if rank != master:
                process = ForkedProcess(Rank(rank, self.gate).main, self.gate.descriptors)
                self.processes[rank] = process
                self.gate.watch(rank, process)

    def run(self, *message):
        command = message[0] if isinstance(message[0], Unreadable) else Message(*message)
        return run_on_all(self.gate, command, self.own)

    def close(self):
        with contextlib.suppress(WorkerDied):
            self.gate.start(Message("quit"))
        told = all(process.is_alive() for process in self.processes.values())
        for process in self.processes.values():
            process.join(LONG if told else 0)
            process.send(signal.SIGKILL)
            assert process.join(LONG)
            process.close()
        self.gate.close()


@pytest.fixture(params=[(3, 0, True), (3, 1, False), (1, 0, True)], ids=["spin", "sleep", "alone"])
def team(request):
    with nothing_left():
        made = Team(*request.param)
        yield made
        made.close()
        del made


@pytest.fixture
def no_looks(monkeypatch):
    """Have no sleeper look by itself each second: only what wakes it ends its wait."""
    monkeypatch.setattr(_gate, "HEARTBEAT_MS", None)


@pytest.fixture
def pair():
    with nothing_left():
        made = Team(2, 0, False)
        yield made
        made.close()


def workers(team):
    return [r for r in range(team.gate.n_ranks) if r != team.gate.master_rank]


def test_every_rank_runs_every_message_once(team):
    for step in range(1, 200):
        own = team.run("add", 2)
        assert own == (team.gate.master_rank, 2 * step)
        assert sorted(team.heard) == [(r, (r, 2 * step)) for r in workers(team)]
        team.heard.clear()
    assert team.gate.sequence == 199
    assert not team.gate.is_in_call


def test_a_message_is_pickled_once(pair, monkeypatch):
    dumped = []
    real = pickle.dumps
    monkeypatch.setattr(
        _gate.pickle, "dumps", lambda obj, *args: dumped.append(obj) or real(obj, *args)
    )
    for _ in range(3):
        pair.run("nothing", "a")
        pair.run("nothing", "b")
    assert dumped == [Message("nothing", "a"), Message("nothing", "b")]


def test_more_messages_than_slots(pair, monkeypatch):
    monkeypatch.setattr(_gate, "MAX_SLOTS", 3)
    for turn in range(20):
        pair.run("answer", turn % 5)
        assert pair.heard.pop() == (1, turn % 5)


def test_a_message_too_long_is_refused_before_launch(pair):
    before = pair.gate.sequence
    with pytest.raises(SessionError, match="too long to send"):
        pair.run("answer", b"x" * (_gate.at.MAILBOX + 1))
    assert pair.gate.sequence == before
    pair.run("answer", 4)
    assert pair.heard == [(1, 4)]


def test_an_answer_too_long_is_an_error_of_the_rank(pair):
    with pytest.raises(WorkerError, match="too long for a worker to send") as caught:
        pair.run("long_answer", _gate.at.REPLY + 1)
    assert caught.value.rank == 1
    pair.run("answer", 4)
    assert pair.heard == [(1, 4)]


@pytest.mark.parametrize("team", [(3, 0, True), (3, 1, False)], indirect=True)
def test_an_error_names_the_lowest_rank_and_mentions_the_others(team):
    for failing in ([2], [0, 2], [0], [0, 1, 2]):
        with pytest.raises(WorkerError) as caught:
            team.run("fail", tuple(failing))
        error = caught.value
        assert (error.rank, error.remote_type, error.host) == (
            failing[0],
            "KeyError",
            os.uname().nodename,
        )
        assert f"Rank {failing[0]} of 3" in str(error)
        assert f"on {failing[0]}" in str(error)
        for other in failing[1:]:
            assert f"rank {other} KeyError" in str(error)
        assert "in fail" in error.remote_traceback
        if failing[0] == team.gate.master_rank:
            assert isinstance(error.__cause__, KeyError)
        else:
            assert isinstance(error.__cause__, RemoteTraceback)
            assert "in fail" in str(error.__cause__)
        team.heard.clear()
        team.run("answer", 7)
        assert sorted(team.heard) == [(r, 7) for r in workers(team)]


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_raise_frees_peers_that_wait(failing):
    with nothing_left():
        team = Team(3, 0, True)
        with pytest.raises(WorkerError, match="no value") as caught:
            team.run("fail_while_others_wait", failing)
        assert caught.value.rank == failing
        team.run("answer", 1)
        assert sorted(team.heard) == [(1, 1), (2, 1)]
        team.close()


def test_a_message_that_cant_be_read_is_an_error_and_the_next_is_read(pair):
    for _ in range(2):  # the second time it must not be taken for known
        with pytest.raises(WorkerError) as caught:
            pair.run(Unreadable(3))
        assert (caught.value.rank, caught.value.remote_type) == (1, "ValueError")
    pair.run("answer", 5)
    assert pair.heard == [(1, 5)]


def test_leaving_by_ctrl_c_is_at_once_and_the_next_start_waits(pair, tmp_path):
    may_end = tmp_path / "may_end"
    with pytest.raises(KeyboardInterrupt):
        run_on_all(pair.gate, Message("wait_for", may_end), Interrupted())
    assert pair.gate.is_in_call
    threading.Timer(0.2, may_end.touch).start()
    pair.run("answer", 1)
    assert may_end.exists()
    assert pair.heard == [(1, 1)]
    assert not pair.gate.is_in_call


def test_an_error_of_an_interrupted_call_is_not_of_the_next(pair):
    with pytest.raises(KeyboardInterrupt):
        run_on_all(pair.gate, Message("fail", (1,)), Interrupted())
    pair.run("answer", 1)
    assert pair.heard == [(1, 1)]


@pytest.mark.parametrize(
    "message, kind", [(("fail", (1,)), "KeyError"), ((Unreadable(3),), "ValueError")]
)
def test_ctrl_c_just_before_an_error_is_raised(pair, monkeypatch, message, kind):
    def interrupted(own=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pair.gate, "raise_errors", interrupted)
        pair.run(*message)
    pair.run("answer", 5)  # and raises nothing that is of the other call
    assert pair.heard == [(1, 5)]
    with pytest.raises(WorkerError) as caught:
        pair.run(*message)
    # What could not be read was sent again: else its slot would not be known.
    assert caught.value.remote_type == kind


def test_rows_are_told(team):
    team.gate.report_rows(5)
    assert team.gate.rows()[team.gate.master_rank] == 5
    team.gate.report_rows(-1)
    assert team.gate.rows()[team.gate.master_rank] == -1


def test_meetings_are_in_order(team):
    for turns in (1, 20, 3):
        expected = [[turn] * team.gate.n_ranks for turn in range(turns)]
        assert team.run("meet", turns) == expected
        assert sorted(team.heard) == [(r, expected) for r in workers(team)]
        team.heard.clear()


@pytest.mark.parametrize("team", [(3, 0, True), (3, 1, False)], indirect=True)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_rank_that_raises_does_not_come_to_a_meeting(no_looks, team, which):
    with pytest.raises(WorkerError, match="no value") as caught:
        team.run("meet_or", ("raise", which))
    assert caught.value.rank == which
    # Nothing is left of the meeting that some came to.
    assert team.run("meet", 5) == [[turn] * 3 for turn in range(5)]


@pytest.mark.parametrize("team", [(3, 0, True), (3, 1, False)], indirect=True)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_rank_that_leaves_does_not_come_to_a_meeting(team, which):
    with pytest.raises(WorkerError, match=f"Rank {which} has left a call") as caught:
        team.run("meet_or", ("leave", which))
    assert caught.value.remote_type == "SessionError"
    team.heard.clear()
    # Nothing is left of the meeting that some came to.
    assert team.run("meet", 5) == [[turn] * 3 for turn in range(5)]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_raises_is_not_said_to_have_left(pair, which):
    with pytest.raises(WorkerError, match="no value") as caught:
        pair.run("raise_while_another_looks", which)
    assert caught.value.rank == which
    assert "SessionError" not in str(caught.value)


@pytest.mark.faults
def test_a_death_ends_a_meeting(no_looks):
    with nothing_left():
        team = Team(3, 0, False)
        with pytest.raises(WorkerDied, match="exit status 3") as caught:
            team.run("meet_or_die", 2)
        assert caught.value.rank == 2
        team.close()


@pytest.mark.faults
@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_death_ends_the_wait(no_looks, when):
    with nothing_left():
        team = Team(3, 0, False)
        if when == "idle":
            os.kill(team.processes[2].pid, signal.SIGKILL)
            gone = psutil.Process(team.processes[2].pid)
            wait_until(lambda: gone.status() == psutil.STATUS_ZOMBIE)
            sequence = team.gate.sequence
            with pytest.raises(WorkerDied, match="SIGKILL") as caught:
                team.run("nothing")
            assert team.gate.sequence == sequence
            assert (caught.value.rank, caught.value.exitcode) == (2, -9)
        else:
            with pytest.raises(WorkerDied, match="exit status 3") as caught:
                team.run("die", 1)
            assert (caught.value.rank, caught.value.exitcode) == (1, 3)
        team.close()


@pytest.mark.parametrize("spin", [False, True])
def test_workers_use_no_cpu_when_the_calls_have_ended(spin):
    with nothing_left():
        team = Team(2, 0, spin)
        for _ in range(20):
            team.run("nothing")
            time.sleep(0.001)  # so that the worker spins for longer
        wait_until(lambda: team.gate._cells[team.gate._line(1) + ASLEEP] == SEQUENCE + 1)
        process = psutil.Process(team.processes[1].pid)
        before = process.cpu_times()
        time.sleep(0.5)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.1
        team.close()


# One rank stops before each of its loads and stores of shared cells in turn.


class Armed:
    """What the processes of a test share: the rank that stops, and what was seen to be wrong."""

    _PID, _LEFT, _LOST, _UNFENCED = range(4)

    def __init__(self):
        self._cells = memoryview(mmap.mmap(-1, 32)).cast("q")

    def arm(self, pid, number):
        """Have a process stop before its access of this number, from 0."""
        self._cells[self._LEFT], self._cells[self._PID] = number, pid

    def count(self, stop):
        """Count an access; call `stop` before the one that is armed."""
        if self._cells[self._PID] == os.getpid():
            self._cells[self._LEFT] -= 1
            if self._cells[self._LEFT] == -1:
                self._cells[self._PID] = 0
                stop()

    def see(self, is_woken=True, is_fenced=True):
        self._cells[self._LOST] |= not is_woken
        self._cells[self._UNFENCED] |= not is_fenced

    def came_to_it(self):
        """Return whether the process came so far; fail if something was wrong."""
        self._cells[self._PID] = 0
        assert not self._cells[self._LOST], "a rank slept on: its wake-up was lost"
        assert not self._cells[self._UNFENCED], "no fence between a store and a load that needs it"
        return self._cells[self._LEFT] < 0


class Cells:
    """The cells and the fence of a gate: accesses are counted, and their order is looked at."""

    def __init__(self, gate, armed, stop, slow=None):
        self.cells, self._fence, self._armed, self._stop = gate._cells, gate._fence, armed, stop
        self._slow = slow  # a cell before whose load each rank waits for a moment
        self._stored = None  # the cell that was stored since the fence, if a load depends on it
        gate._cells = gate._fence = self

    def __enter__(self):
        self._fence.acquire()
        self._stored = None

    def __exit__(self, *error):
        self._fence.release()
        self._armed.count(self._stop)

    def __getitem__(self, number):
        self._armed.count(self._stop)
        if number == self._slow:
            time.sleep(0.001)
        # A rank that announces loads flags then, and one that has set its flag loads any cell.
        if self._stored is not None and ASLEEP in (kind(number), kind(self._stored)):
            self._armed.see(is_fenced=False)
        return self.cells[number]

    def __setitem__(self, number, value):
        self._armed.count(self._stop)
        self.cells[number] = value
        if number in (SEQUENCE, ABORT) or kind(number) in (DONE, MET):
            self._stored = number
        elif kind(number) == ASLEEP:
            self._stored = number if value else None


def kind(number):
    """Return which of a rank's cells this is; None for one of the master's."""
    return number % LINE if number >= LINE else None


@pytest.fixture
def armed(monkeypatch):
    """Cells of gates that are made later, by `Armed`; few slots, and no sleeper looks by itself."""
    found, sleep = Armed(), Gate._sleep

    def sleep_until_woken(gate):
        is_woken = sleep(gate)
        found.see(is_woken=is_woken)
        return is_woken

    monkeypatch.setattr(_gate, "MAX_SLOTS", 2)
    monkeypatch.setattr(_gate, "HEARTBEAT_MS", 10_000)
    monkeypatch.setattr(Gate, "_sleep", sleep_until_woken)
    return found


def answered(team, number):
    team.run("answer", number)
    assert team.heard[-1] == (1, number)


def failed(team, message, said, rank):
    with pytest.raises(WorkerError, match=said) as caught:
        team.run(*message)
    assert caught.value.rank == rank and "SessionError" not in str(caught.value)


def silent(team):
    if team.gate.is_in_call:
        team.gate.drain()
    team.heard.clear()
    team.run("nothing")
    assert team.heard == []


CALLS = [
    lambda team: answered(team, 5),
    silent,
    lambda team: answered(team, 6),
    lambda team: answered(team, 5),  # in a slot that the worker knows
    lambda team: answered(team, 7),  # beyond the slots
    lambda team: failed(team, ("fail", (1,)), "on 1", 1),
    lambda team: answered(team, 5),
    lambda team: failed(team, ("meet_or", ("raise", 1)), "no value", 1),
    lambda team: failed(team, ("meet_or", ("raise", 0)), "no value", 0),
    lambda team: team.run("meet", 2) == [[0, 0], [1, 1]] or pytest.fail("not met"),
    lambda team: team.run("meet_late", 0),
    lambda team: team.run("meet_late", 1),
    lambda team: answered(team, 8),
]
AT_SOME_AND_EVERY_STEP = pytest.mark.parametrize(
    "stride",
    [
        pytest.param(3, id="some steps"),
        pytest.param(1, id="every step", marks=pytest.mark.slow("stops a rank at each step")),
    ],
)


@AT_SOME_AND_EVERY_STEP
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_late_at_any_step(armed, rank, stride):
    """The other one goes ahead and falls asleep, and has to be woken."""
    with nothing_left():
        team = Team(2, 0, False, lambda gate: Cells(gate, armed, lambda: time.sleep(0.005)))
        pid = [os.getpid(), team.processes[1].pid][rank]
        for number in itertools.count(0, stride):
            armed.arm(pid, number)
            for call in CALLS:
                call(team)
            if not armed.came_to_it():
                break
        team.close()
    assert number > 80


@AT_SOME_AND_EVERY_STEP
def test_ctrl_c_at_any_step_of_the_master(armed, stride):
    """No command, answer or error of a call that was left is one of a later call."""
    with nothing_left():
        interrupt = functools.partial(signal.raise_signal, signal.SIGINT)
        team = Team(2, 0, False, lambda gate: Cells(gate, armed, interrupt))
        for number in itertools.count(0, stride):
            armed.arm(os.getpid(), number)
            for call in CALLS:
                try:
                    call(team)
                except KeyboardInterrupt:
                    call(team)
            if not armed.came_to_it():
                break
        team.close()
    assert number > 80


@AT_SOME_AND_EVERY_STEP
def test_a_command_that_was_started_is_run_once_and_its_answer_heard(armed, stride):
    """Also by a worker that is slow to read it, while a Ctrl-C has the master go on."""
    with nothing_left():
        interrupt = functools.partial(signal.raise_signal, signal.SIGINT)
        team, total = Team(2, 0, False, lambda gate: Cells(gate, armed, interrupt, SLOT)), 0
        cells = team.gate._cells.cells
        for number in itertools.count(0, stride):
            expected = []
            team.heard.clear()
            armed.arm(os.getpid(), number)
            for more in (1, 10, 100, 1):
                before = cells[SEQUENCE]
                with contextlib.suppress(KeyboardInterrupt):
                    team.run("add", more)
                if cells[SEQUENCE] > before:
                    total += more
                    expected.append((1, (1, total)))
            came_to_it = armed.came_to_it()
            team.run("nothing")
            assert sorted({*team.heard}) == expected
            if not came_to_it:
                break
        team.close()
    assert number > 30


@pytest.mark.faults
@AT_SOME_AND_EVERY_STEP
def test_the_death_of_a_worker_at_any_step(armed, stride):
    def steps(number):
        """Return whether the worker came to this step, and so has died."""
        team = Team(2, 0, False, lambda gate: Cells(gate, armed, lambda: os._exit(3)))
        armed.arm(team.processes[1].pid, number)
        with contextlib.suppress(WorkerDied):
            for call in CALLS:
                call(team)
        has_died = armed.came_to_it()
        if has_died:
            wait_until(lambda: not team.processes[1].is_alive())
            with pytest.raises(WorkerDied, match="exit status 3"):
                team.run("nothing")
        team.close()
        return has_died

    with nothing_left():
        number = next(n for n in itertools.count(0, stride) if not steps(n))
    assert number > 80


def test_reports_fit_whatever_is_raised():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    for error in (ValueError("\N{SNOWMAN}" * 10**6), Silent(), KeyboardInterrupt(), ValueError()):
        described = reports.describe(error, 1 << 16)
        assert len(described) <= 1 << 16
        assert pickle.loads(described)["type"] == type(error).__name__
    assert pickle.loads(reports.describe(Silent(), 1 << 16))["message"]


@pytest.mark.parametrize(
    "exitcode, words",
    [
        (-9, "memory ran out"),
        (-11, "crash in compiled code"),
        (-7, "SIGBUS"),
        (-15, "SIGTERM"),
        (-50, "signal"),
        (0, "by itself with exit status 0"),
        (None, "is gone"),
    ],
)
def test_how_it_ended_is_told(exitcode, words):
    class Process:
        pid = 4321

    Process.exitcode = exitcode
    died = reports.worker_died(2, Process)
    assert words in str(died) and "rank 2" in str(died) and "4321" in str(died)
    assert (died.rank, died.exitcode) == (2, exitcode)
