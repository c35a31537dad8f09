"""The gate's protocol, explored: every interleaving of 2 and 3 ranks, with every mishap.

In each run the explorer visits all states, as many as the model says, and finds none that breaks a
property. With a mistake put into the model on purpose it finds one: so it can.

``PYTHONPATH=tests python -m support.gate_model --deep`` explores more, for minutes.
"""

import copy
import inspect
import os
import select
import textwrap
import types

import pytest
from support import gate_model
from support.explorer import CHOOSE, FENCE, NOTE, PEEK, POLL, READ, WAKE, WOKEN, WRITE, Violation
from support.gate_model import RUNS, Rank, Run, explore
from support.leaks import nothing_left

from synkhronos.comm import Aborted
from synkhronos.comm.shared import gate as _gate
from synkhronos.comm.shared import gate_memory
from synkhronos.comm.shared.gate import SharedGate as Gate


def in_its_tier(run):
    """Return a run as a parameter, which is slow if it explores very many states."""
    slow = pytest.mark.slow(f"explores {run.states:,} states")
    return pytest.param(run, id=str(run), marks=slow if run.states > 30_000 else ())


@pytest.mark.parametrize("run", [in_its_tier(run) for run in RUNS])
def test_no_state_breaks_a_property(run):
    explored = explore(run.n_ranks, run.commands, **run.mishaps)
    assert explored.states == run.states


# Mistakes: lines of the model, what stands there instead, and what goes wrong.
MISTAKES = {
    "a sleeper looks before its flag is seen": (
        """
        yield write(asleep, cell)
        yield (FENCE,)
        """,
        "yield write(asleep, cell)",
        "deadlock",
    ),
    "a sleeper sets its flag after it has looked": (
        """
        yield write(asleep, cell)
        yield (FENCE,)
        if (yield read(cell)) >= value:
            break
        """,
        """
        if (yield read(cell)) >= value:
            break
        yield write(asleep, cell)
        yield (FENCE,)
        """,
        "deadlock",
    ),
    "the pipe is emptied after the look": (
        """
        if (yield read("ABORT")) == abort:
            raise Aborted
        if abort is not None:
        """,
        """
        yield (EMPTY_PIPE,)
        if (yield read("ABORT")) == abort:
            raise Aborted
        if abort is not None:
        """,
        "deadlock",
    ),
    "who wakes reads flags before its write is seen": (
        """
        def wake(self, stored):
            yield (FENCE,)
        """,
        "def wake(self, stored):",
        "deadlock",
    ),
    "who aborts reads flags before its write is seen": (
        """
        def wake_all(self):
            yield (FENCE,)
        """,
        "def wake_all(self):",
        "deadlock",
    ),
    "who has finished reads the flag before its write is seen": (
        """
        yield (FENCE,)
        if (yield read(("ASLEEP", self.master))) in (("DONE", line), ("MET", line)):
        """,
        """if (yield read(("ASLEEP", self.master))) in (("DONE", line), ("MET", line)):""",
        "deadlock",
    ),
    "who has finished wakes before it writes": (
        """
        yield write(("DONE", line), self.sequence)
        yield (FENCE,)
        if (yield read(("ASLEEP", self.master))) in (("DONE", line), ("MET", line)):
            yield WAKE, self.master
        """,
        """
        if (yield read(("ASLEEP", self.master))) in (("DONE", line), ("MET", line)):
            yield WAKE, self.master
        yield write(("DONE", line), self.sequence)
        yield (FENCE,)
        """,
        "deadlock",
    ),
    "who has finished wakes for meetings only": (
        """if (yield read(("ASLEEP", self.master))) in (("DONE", line), ("MET", line)):""",
        """if (yield read(("ASLEEP", self.master))) == ("MET", line):""",
        "deadlock",
    ),
    "who starts wakes before it writes": (
        """
        yield write("SEQUENCE", sequence + 1)
        self.slots[command] = slot
        yield from self.wake("SEQUENCE")
        """,
        """
        yield from self.wake("SEQUENCE")
        yield write("SEQUENCE", sequence + 1)
        self.slots[command] = slot
        """,
        "deadlock",
    ),
    "who starts wakes nobody": (
        """
        self.slots[command] = slot
        yield from self.wake("SEQUENCE")
        """,
        "self.slots[command] = slot",
        "deadlock",
    ),
    "who comes to a meeting wakes nobody": (
        """
        yield write(mine, met)
        yield from self.wake(mine)
        """,
        "yield write(mine, met)",
        "deadlock",
    ),
    "who aborts wakes only those that wait for a call": (
        """
        yield write("ABORT", sequence)
        yield from self.wake_all()
        """,
        """
        yield write("ABORT", sequence)
        yield from self.wake("SEQUENCE")
        """,
        "deadlock",
    ),
    "who aborts wakes nobody": (
        """
        yield write("ABORT", sequence)
        yield from self.wake_all()
        """,
        """yield write("ABORT", sequence)""",
        "deadlock",
    ),
    "a sleeper does not look at ABORT": (
        """
        if (yield read("ABORT")) == abort:
            raise Aborted
        if abort is not None:
        """,
        "if abort is not None:",
        "deadlock",
    ),
    "a death does not end the wait": ("if ready & DIED:", "if False:", "livelock"),
    "a worker does not hear of the master's death": ("yield (EXIT,)", "return", "livelock"),
    "a slot is kept after an error": (
        """
        self.forget_slots()
        yield (STEP,)
        self.errors = tuple(sorted({*self.errors, rank}))
        """,
        "self.errors = tuple(sorted({*self.errors, rank}))",
        "does not know",
    ),
    "a slot is known before it was sent": (
        """yield write("SLOT", slot)""",
        """
        self.slots[command] = slot
        yield write("SLOT", slot)
        """,
        "does not know",
    ),
    "the table of slots is full and is not cleared": (
        """
        if len(self.slots) >= MAX_SLOTS:
            self.forget_slots()
            yield (STEP,)
        slot, length = len(self.slots), 1
        """,
        "slot, length = len(self.slots) % MAX_SLOTS, 1",
        "stale command",
    ),
    "the sequence is written before the slot": (
        """yield write("SLOT", slot)""",
        """
        sequence = yield read("SEQUENCE")
        yield write("SEQUENCE", sequence + 1)
        yield write("SLOT", slot)
        """,
        "does not know",
    ),
    "errors are kept after an interrupt": (
        """
        self.errors = ()
        yield (STEP,)
        length = 0
        """,
        "length = 0",
        "an error of another call",
    ),
    "a start does not wait for an interrupted call": (
        """
        if (yield from self.is_open()):
            yield from self.drain()
        """,
        "",
        "stale command",
    ),
    "a drain does not abort": (
        """
        yield from self.abort()
        yield from self.finish()
        """,
        "yield from self.finish()",
        "deadlock",
    ),
    "meetings are not numbered within the call": (
        "met = max(met, numbered(sequence, 0)) + 1",
        "met = max(met, numbered(1, 0)) + 1",
        "before all had come",
    ),
    "a rank does not wait for the last one to come": (
        """
        for rank in range(self.n_ranks):
            if rank != self.rank and (yield read(("MET", rank))) < met:
                yield from self.wait(("MET", rank), met, sequence)
        """,
        """
        for rank in range(self.n_ranks - 1):
            if rank != self.rank and (yield read(("MET", rank))) < met:
                yield from self.wait(("MET", rank), met, sequence)
        """,
        "before all had come",
    ),
    "who waits does not ask why another left": (
        """
        if (yield read("ABORT")) == sequence:
            raise Aborted
        """,
        "",
        "said to have left",
    ),
    "who left is looked at after whether it met": (
        """
        if (yield read(("DONE", rank))) < sequence:
            return
        if (yield read(cell)) >= value:
            return
        """,
        """
        if (yield read(cell)) >= value:
            return
        if (yield read(("DONE", rank))) < sequence:
            return
        """,
        "said to have left",
    ),
    "a worker is done before it replies": (
        """
        yield write(("REPLY", line), self.sequence)
        yield write(("KIND", line), ANSWER)
        """,
        """
        yield write(("DONE", line), self.sequence)
        yield write(("REPLY", line), self.sequence)
        yield write(("KIND", line), ANSWER)
        """,
        "had not run",
    ),
    "a reply is told of before it is written": (
        """
        yield write(("REPLY", line), self.sequence)
        yield write(("KIND", line), ANSWER)
        """,
        """
        yield write(("KIND", line), ANSWER)
        yield write(("DONE", line), self.sequence)
        yield write(("REPLY", line), self.sequence)
        """,
        "a reply of another call",
    ),
    "a reply that was taken stays": (
        """yield write(("KIND", rank), NO_REPLY)""",
        "",
        "a reply of another call",
    ),
    "a reply is crossed out before it is taken": (
        """
        if kind == ERROR:
            self.forget_slots()
        """,
        """
        yield write(("KIND", rank), NO_REPLY)
        yield (STEP,)
        if kind == ERROR:
            self.forget_slots()
        """,
        "a reply was lost",
    ),
    "a worker that raises does not abort": (
        """
        yield write(("KIND", line), ERROR)
        yield from self.abort()
        """,
        """yield write(("KIND", line), ERROR)""",
        "said to have left",
    ),
    "the master that raises does not abort": (
        """
        yield from self.abort()
        if isinstance(caught, (KeyboardInterrupt, WorkerDied)):
        """,
        "if isinstance(caught, (KeyboardInterrupt, WorkerDied)):",
        "said to have left",
    ),
}
TRIALS = [
    Run(2, ("a|", "a|"), {"errors": 1}),
    Run(2, ("a", "b", "c", "a"), {}),
    Run(2, ("a", "a"), {"crashes": 1}),
    Run(2, ("a|", "a"), {"interrupts": 1}),
    Run(2, ("a", "a"), {"errors": 1, "interrupts": 1}),
]


def lines_of(text):
    return textwrap.dedent(text).strip("\n").splitlines()


def mistaken(old, new):
    """Return the class Rank of the model with some lines replaced."""
    source, old = inspect.getsource(gate_model).splitlines(), lines_of(old)
    stripped, wanted = [line.strip() for line in source], [line.strip() for line in old]
    [first] = [i for i in range(len(source)) if stripped[i : i + len(old)] == wanted]
    margin = source[first][: -len(stripped[first])]
    source[first : first + len(old)] = [margin + line for line in lines_of(new)]
    module = types.ModuleType("mistaken")
    exec(compile("\n".join(source), "mistaken", "exec"), vars(module))
    return module.Rank


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.sample(6)
def test_a_mistake_is_found(mistake):
    old, new, what = MISTAKES[mistake]
    rank = mistaken(old, new)
    with pytest.raises(Violation, match=what) as found:
        for run in TRIALS:
            explore(run.n_ranks, run.commands, rank=rank, **run.mishaps)
    print(str(found.value).splitlines()[0])


# That the model is one of the gate: both read and write the same cells in the same order.

CELLS = {gate_memory.SEQUENCE: "SEQUENCE", gate_memory.SLOT: "SLOT", gate_memory.LENGTH: "LENGTH"}
CELLS[gate_memory.ABORT] = "ABORT"
LINE = {
    gate_memory.DONE: "DONE",
    gate_memory.ASLEEP: "ASLEEP",
    gate_memory.REPLY_KIND: "KIND",
    gate_memory.MET: "MET",
}
for each_rank in range(2):
    CELLS.update({gate_memory.LINE * (each_rank + 1) + i: (n, each_rank) for i, n in LINE.items()})


class Steps:
    """What two ranks do, one after the other, written down; `do` is for the two kinds of them."""

    def __init__(self):
        self.log = []
        self._meanwhile = []

    def meanwhile(self, *step):
        """Have another rank take a step as soon as one is asleep."""
        self._meanwhile.append(step)

    def sleep(self, rank):
        self.write_down(rank, "sleeps")
        self.do(*self._meanwhile.pop(0))

    def write_down(self, rank, *what):
        # The gate looks twice at the kind of a reply, which nobody changes in between.
        if self.log[-1:] != [(rank, *what)]:
            self.log.append((rank, *what))


class RealCells:
    """The cells of a gate, each access written down."""

    def __init__(self, cells, rank, steps):
        self._cells, self._rank, self._steps = cells, rank, steps

    def __getitem__(self, number):
        if number in CELLS:
            self._steps.write_down(self._rank, "reads", CELLS[number])
        return self._cells[number]

    def __setitem__(self, number, value):
        self._cells[number] = value
        if number in CELLS:
            self._steps.write_down(self._rank, "writes", CELLS[number])


class RealFence:
    """A fence, each crossing written down."""

    def __init__(self, rank, steps):
        self._rank, self._steps = rank, steps

    def __enter__(self):
        self._steps.write_down(self._rank, "fences")

    def __exit__(self, *error):
        pass


class OneLook:
    """In place of Spinning: a rank looks once."""

    def __init__(self, cells):
        self._cells = cells

    def wait(self, cell, value, abort):
        if self._cells[cell] >= value:
            return True
        if self._cells[gate_memory.ABORT] == abort:
            raise Aborted
        return False

    def learn(self, cell):
        pass


class RealSteps(Steps):
    """Two ranks of the gate, in one process."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.gate = Gate(2, 0, spin=False)
        ends = [write_end for _, write_end in self.gate._wake_pipes]
        self.ranks = []
        for rank in range(2):
            gate = copy.copy(self.gate)
            gate.rank, gate._sequence, gate._commands = rank, 0, {}
            gate._take_place()
            gate._cells = RealCells(self.gate._cells, rank, self)
            gate._spinning = OneLook(gate._cells)
            gate._fence = RealFence(rank, self)
            gate._poll = types.SimpleNamespace(poll=lambda timeout, rank=rank: self._poll(rank))
            self.ranks.append(gate)
        write = os.write

        def spy(end, data):
            if end in ends:
                self.write_down("wakes", ends.index(end))
            return write(end, data)

        monkeypatch.setattr(_gate.os, "write", spy)

    def _poll(self, rank):
        self.sleep(rank)
        return [(self.gate._wake_pipes[rank][0], select.POLLIN)]

    def do(self, rank, method, *arguments):
        if method == "worker_finish":
            reply, error = arguments
            arguments = reply or None, ValueError("no value") if error else None
        try:
            getattr(self.ranks[rank], method)(*arguments)
        except Exception as error:
            self.write_down(rank, "raises", type(error).__name__)


class ModelSteps(Steps):
    """Two ranks of the model."""

    def __init__(self):
        super().__init__()
        self.ranks = [Rank(rank, 2, 0, True) for rank in range(2)]
        self._memory = {}

    def do(self, rank, method, *arguments):
        if method == "meet":
            arguments = (1,)
        steps, response = getattr(self.ranks[rank], method)(*arguments), None
        try:
            while True:
                response = self._take(rank, *steps.send(response))
        except StopIteration:
            pass
        except Exception as error:
            kind = type(error).__name__
            self.write_down(rank, "raises", {"Raised": "SessionError"}.get(kind, kind))

    def _take(self, rank, kind, *arguments):
        if kind == CHOOSE:
            return arguments[0][0]
        if kind in (READ, PEEK, WRITE, NOTE):
            cell = arguments[0]
            if kind in (WRITE, NOTE):
                self._memory[cell] = arguments[1]
            if kind in (READ, WRITE) and cell in CELLS.values():
                self.write_down(rank, "reads" if kind == READ else "writes", cell)
            return self._memory.get(cell, 0)
        if kind == FENCE:
            self.write_down(rank, "fences")
        elif kind == WAKE:
            self.write_down("wakes", arguments[0])
        elif kind == POLL:
            self.sleep(rank)
            return WOKEN
        return None


def calls(steps):
    for command in ("a", "b", "a"):
        steps.do(0, "start", command)
        steps.do(1, "next_command")
        steps.do(1, "worker_finish", True, False)
        steps.do(0, "finish")


def asleep(steps):
    steps.meanwhile(0, "start", "a")
    steps.do(1, "next_command")
    steps.meanwhile(1, "worker_finish", False, False)
    steps.do(0, "finish")


def meetings(steps):
    steps.do(0, "start", "a")
    steps.do(1, "next_command")
    for first in (0, 1):
        steps.meanwhile(1 - first, "meet")
        steps.do(first, "meet")
    steps.meanwhile(1, "worker_finish", True, False)
    steps.do(0, "finish")


def errors(steps):
    for _ in range(2):
        steps.do(0, "start", "a")
        steps.do(1, "next_command")
        steps.meanwhile(1, "worker_finish", False, True)
        steps.do(0, "meet")
        steps.do(0, "abort")
        steps.do(0, "finish")
        steps.do(0, "raise_errors", None)


def leaving(steps):
    steps.do(0, "start", "a")
    steps.do(1, "next_command")
    steps.meanwhile(1, "worker_finish", False, False)
    steps.do(0, "meet")


def interrupted(steps):
    steps.do(0, "start", "a")
    steps.do(1, "next_command")
    steps.meanwhile(1, "worker_finish", True, False)
    steps.do(0, "start", "a")
    steps.do(1, "next_command")


@pytest.mark.parametrize(
    "scenario", [calls, asleep, meetings, errors, leaving, interrupted], ids=lambda f: f.__name__
)
def test_the_gate_takes_the_steps_of_its_model(monkeypatch, scenario):
    monkeypatch.setattr(gate_model, "expect", lambda holds, what: None)  # of notes not made here
    with nothing_left():
        real, model = RealSteps(monkeypatch), ModelSteps()
        scenario(real)
        scenario(model)
        assert real.log == model.log
        assert len(real.log) > 20
        real.gate.close()
