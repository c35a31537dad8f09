"""The time that a rank looks at a cell before it sleeps, with a clock of the test's own."""

import itertools
import types

import pytest

from synkhronos.comm import Aborted
from synkhronos.comm.shared import spinning
from synkhronos.comm.shared.gate_memory import ABORT, CROWDED, LINE, MET, PAUSE, SEQUENCE
from synkhronos.comm.shared.spinning import LONGEST, SHORTEST, Spinning

CELL = LINE + MET  # of rank 0
US, MS = 1_000, 1_000_000


class Machine:
    """A clock that goes on with each look at it, and the system's answers."""

    def __init__(self, monkeypatch):
        self.now, self.step, self.gaps = 10**15, 3 * US, []
        self.yields, self.switches = 0, itertools.count(1)
        monkeypatch.setattr(spinning, "_clock", self.clock)
        monkeypatch.setattr(spinning.os, "sched_yield", self.leave)
        monkeypatch.setattr(spinning.resource, "getrusage", self.usage)

    def clock(self):
        self.now += self.gaps.pop(0) if self.gaps else self.step
        return self.now

    def leave(self):
        self.yields += 1

    def usage(self, which):
        return types.SimpleNamespace(ru_nivcsw=next(self.switches))


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture
def cells():
    return [0] * 3 * LINE


def spun(machine, rank, cells):
    """Return for how long a rank spins in vain."""
    begin = machine.now
    assert not rank.wait(CELL, 1, 7)
    return machine.now - begin


def suspend(machine, rank, cells):
    """Have a rank spin while another process takes its core for 4 ms."""
    machine.now = max(machine.now, cells[CROWDED])
    machine.gaps = [0, 4 * MS]
    assert not rank.wait(CELL, 1, 7)


def test_a_rank_spins_until_the_cell_is_there(machine, cells):
    cells[CELL] = 5
    rank = Spinning(cells, True)
    assert rank.wait(CELL, 5, 7) and rank.wait(CELL, 4, 7)
    cells[CELL] = 0
    assert SHORTEST <= spun(machine, rank, cells) < 1.2 * SHORTEST
    assert not machine.yields
    cells[ABORT] = 7
    with pytest.raises(Aborted):
        rank.wait(CELL, 1, 7)
    assert not rank.wait(CELL, 1, None)


def test_a_rank_spins_as_long_as_the_last_wait_took(machine, cells):
    rank = Spinning(cells, True)
    for took, expected in [(300 * US, 600 * US), (1500 * US, LONGEST), (10 * US, SHORTEST)]:
        rank.wait(CELL, 1, 7)
        machine.now = rank._began + took
        rank.learn(CELL)
        assert expected <= spun(machine, rank, cells) < 1.2 * expected
    assert machine.yields  # beyond the shortest time other processes may have the core
    other_kind = LINE
    begin = machine.now
    rank.wait(other_kind, 1, 7)
    assert machine.now - begin < 1.2 * SHORTEST


def test_a_rank_that_waits_for_long_soon_spins_no_longer_than_others(machine, cells):
    rank = Spinning(cells, True)
    rank.wait(CELL, 1, 7)
    machine.now = rank._began + 1500 * US
    rank.learn(CELL)
    times = []
    for _ in range(6):
        times.append(spun(machine, rank, cells))
        machine.now += 5 * MS
        rank.learn(CELL)
    assert times == sorted(times, reverse=True)
    assert times[0] > LONGEST and times[-1] < 1.2 * SHORTEST


def test_no_rank_spins_after_one_was_suspended(machine, cells):
    ranks = [Spinning(cells, True) for _ in range(2)]
    suspend(machine, ranks[0], cells)
    for rank in ranks:
        assert spun(machine, rank, cells) < 10 * US
        rank.learn(CELL)
    machine.now = cells[CROWDED]
    for rank in ranks:
        assert SHORTEST <= spun(machine, rank, cells) < 1.2 * SHORTEST


def test_ranks_try_less_often_while_the_cores_stay_busy(machine, cells):
    rank = Spinning(cells, True)
    pauses = []
    for _ in range(9):
        suspend(machine, rank, cells)
        pauses.append(cells[PAUSE] // MS)
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 250, 250]
    machine.now = cells[CROWDED] + 600 * MS
    suspend(machine, rank, cells)
    assert cells[PAUSE] == 2 * MS


def test_a_rank_that_offers_its_core_sees_that_it_was_taken(machine, cells, monkeypatch):
    rank = Spinning(cells, True)
    rank.wait(CELL, 1, 7)
    machine.now = rank._began + 900 * US
    rank.learn(CELL)

    def taken():
        machine.now += 200 * US

    monkeypatch.setattr(spinning.os, "sched_yield", taken)
    assert SHORTEST < spun(machine, rank, cells) < 4 * SHORTEST
    assert cells[CROWDED] > machine.now


def test_between_calls_the_cores_are_the_scripts(machine, cells):
    """Its threads may suspend a rank that waits for the next call, which comes later."""
    rank = Spinning(cells, True)
    machine.gaps = [0, 4 * MS]
    assert not rank.wait(SEQUENCE, 1, None)
    assert cells[CROWDED] == 0


def test_a_call_that_began_while_a_rank_was_suspended(machine, cells, monkeypatch):
    rank = Spinning(cells, True)
    machine.gaps = [0, 4 * MS]
    clock = machine.clock

    def clock_of_a_call():
        if machine.gaps == [4 * MS]:
            cells[SEQUENCE] = 1
        return clock()

    monkeypatch.setattr(spinning, "_clock", clock_of_a_call)
    rank.wait(SEQUENCE, 1, None)
    assert cells[CROWDED] > machine.now


def test_a_thread_of_the_same_process_is_no_reason_to_stop(machine, cells):
    rank = Spinning(cells, True)
    machine.switches = itertools.repeat(0)
    suspend(machine, rank, cells)
    assert cells[CROWDED] == 0


def test_more_ranks_than_cores_leave_the_core_between_looks(machine, cells):
    rank = Spinning(cells, False)
    begin = machine.now
    assert not rank.wait(CELL, 1, 7)
    assert machine.yields == 20
    assert machine.now == begin
    cells[ABORT] = 7
    with pytest.raises(Aborted):
        rank.wait(CELL, 1, 7)
    cells[CELL] = 1
    assert rank.wait(CELL, 1, 7)
