"""The gate's protocol, explored: every interleaving of 2 and 3 ranks, with every mishap.

In each run the explorer visits all states and finds none that breaks a property; -s prints how many
there are. With a mistake put into the model on purpose it finds one: so it can.

``python tests/gate_model.py --deep`` explores more, for minutes.
"""

import inspect
import textwrap
import types

import gate_model
import pytest
from explorer import Violation
from gate_model import RUNS, Run, explore


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_no_state_breaks_a_property(run):
    explored = explore(run.n_ranks, run.commands, **run.mishaps)
    print(f"{run}: {explored.states} states, {explored.steps} steps")
    assert explored.states > 1000


# Mistakes: lines of the model, what stands there instead, and what goes wrong.
MISTAKES = {
    "a sleeper looks before its flag is seen": (
        """
        yield write(asleep, 1)
        yield (FENCE,)
        """,
        "yield write(asleep, 1)",
        "deadlock",
    ),
    "a sleeper sets its flag after it has looked": (
        """
        yield write(asleep, 1)
        yield (FENCE,)
        if (yield read(cell)) >= value:
            break
        """,
        """
        if (yield read(cell)) >= value:
            break
        yield write(asleep, 1)
        yield (FENCE,)
        """,
        "deadlock",
    ),
    "the pipe is emptied after the look": (
        """
        if abort is not None:
            if (yield read("ABORT")) == abort:
        """,
        """
        yield (EMPTY_PIPE,)
        if abort is not None:
            if (yield read("ABORT")) == abort:
        """,
        "deadlock",
    ),
    "who wakes all reads flags before its write is seen": (
        """
        yield (FENCE,)
        for rank in range(self.n_ranks):
        """,
        "for rank in range(self.n_ranks):",
        "deadlock",
    ),
    "who has finished reads the flag before its write is seen": (
        """
        yield (FENCE,)
        yield from self.wake(self.master)
        """,
        "yield from self.wake(self.master)",
        "deadlock",
    ),
    "who has finished wakes before it writes": (
        """
        yield write(("DONE", line), self.sequence)
        yield (FENCE,)
        yield from self.wake(self.master)
        """,
        """
        yield from self.wake(self.master)
        yield write(("DONE", line), self.sequence)
        yield (FENCE,)
        """,
        "deadlock",
    ),
    "who starts wakes before it writes": (
        """
        yield write("SEQUENCE", sequence + 1)
        self.slots[command] = slot
        yield from self.wake_all()
        """,
        """
        yield from self.wake_all()
        yield write("SEQUENCE", sequence + 1)
        self.slots[command] = slot
        """,
        "deadlock",
    ),
    "who starts wakes nobody": (
        """
        self.slots[command] = slot
        yield from self.wake_all()
        """,
        "self.slots[command] = slot",
        "deadlock",
    ),
    "who comes to a meeting wakes nobody": (
        """
        yield write(mine, met)
        yield from self.wake_all()
        """,
        "yield write(mine, met)",
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
        yield from self.check_not_left(cell, value, abort)
        """,
        "yield from self.check_not_left(cell, value, abort)",
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
            if rank != self.rank:
                yield from self.wait(("MET", rank), met, sequence)
        """,
        """
        for rank in range(self.n_ranks - 1):
            if rank != self.rank:
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
def test_a_mistake_is_found(mistake):
    old, new, what = MISTAKES[mistake]
    rank = mistaken(old, new)
    with pytest.raises(Violation, match=what) as found:
        for run in TRIALS:
            explore(run.n_ranks, run.commands, rank=rank, **run.mishaps)
    print(str(found.value).splitlines()[0])
