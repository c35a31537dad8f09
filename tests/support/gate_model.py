"""A model of the gate, with every mishap that can befall it.

`Rank` does what `synkhronos.comm.shared.gate.SharedGate` does, method by method and in the same
order, but yields each access to a shared cell, a pipe or a process, so that the explorer can put
the steps of other ranks in between: see `explorer`. `be_master` makes a few calls and closes;
`be_worker` runs the commands until the master has ended.

In a call each rank may raise, leave without meeting the others, or meet them; a worker may fail to
read a new command. The master may be interrupted at every step, and any rank may die at every step.

`expect` states the properties, with notes that no real rank sees; so does `check_rest`.

``PYTHONPATH=tests python -m support.gate_model --ranks 3 --deep`` explores and prints the number of
states.
"""

import argparse
import functools
import time
from typing import NamedTuple

from support.explorer import (
    DEATHS,
    DIED,
    EMPTY_PIPE,
    ENDED,
    EXIT,
    FENCE,
    KILL,
    POLL,
    STEP,
    WAKE,
    WOKEN,
    Explorer,
    Violation,
    choose,
    note,
    peek,
    read,
    write,
)

MAX_SLOTS = 2
NO_REPLY, ANSWER, ERROR = range(3)


class Aborted(Exception):
    pass


class Raised(Exception):
    pass


class WorkerDied(Exception):
    pass


class WorkerError(Exception):
    pass


def expect(holds, what):
    if not holds:
        raise Violation(what)


def numbered(sequence, number):
    """Return a number for a meeting of a call, higher than those of all earlier ones."""
    return sequence * 16 + number


class Rank:
    """The gate of one rank, and the rank's life around it."""

    def __init__(self, rank, n_ranks, master, may_leave):
        self.rank, self.n_ranks, self.master, self.may_leave = rank, n_ranks, master, may_leave
        self.sequence = 0
        self.commands = {}
        self.slots = {}
        self.last = None
        self.finished = 0
        self.errors = ()
        self.heard = ()

    def wait(self, cell, value, abort=None):
        # One read stands for the whole spin: a rank may come to it at any time.
        if (yield read(cell)) >= value:
            return
        if (yield read("ABORT")) == abort:
            raise Aborted
        asleep = "ASLEEP", self.rank
        try:
            while True:
                yield write(asleep, cell)
                yield (FENCE,)
                if (yield read(cell)) >= value:
                    break
                if (yield read("ABORT")) == abort:
                    raise Aborted
                if abort is not None:
                    yield from self.check_not_left(cell, value, abort)
                yield from self.sleep(cell)
        except (
            Exception,
            KeyboardInterrupt,
        ) as error:  # a variable, so that it is a part of the state
            yield write(asleep, None)
            raise error
        yield write(asleep, None)

    def sleep(self, cell):
        ready = yield POLL, cell
        if ready & WOKEN:
            yield (EMPTY_PIPE,)
        if ready & DIED:
            if self.rank != self.master:
                yield (EXIT,)
            raise WorkerDied

    def wake(self, stored):
        yield (FENCE,)
        for rank in range(self.n_ranks):
            if rank != self.rank and (yield read(("ASLEEP", rank))) == stored:
                yield WAKE, rank

    def wake_all(self):
        yield (FENCE,)
        for rank in range(self.n_ranks):
            if rank != self.rank and (yield read(("ASLEEP", rank))):
                yield WAKE, rank

    def abort(self):
        sequence = yield read("SEQUENCE")
        yield write("ABORT", sequence)
        yield from self.wake_all()

    def meet(self, turn):
        sequence = yield read("SEQUENCE")
        yield note(("CAME", self.rank), numbered(sequence, turn))
        mine = "MET", self.rank
        met = yield read(mine)
        met = max(met, numbered(sequence, 0)) + 1
        yield write(mine, met)
        yield from self.wake(mine)
        for rank in range(self.n_ranks):
            if rank != self.rank and (yield read(("MET", rank))) < met:
                yield from self.wait(("MET", rank), met, sequence)
        for rank in range(self.n_ranks):
            came = yield peek(("CAME", rank))
            expect(came >= numbered(sequence, turn), "a meeting was left before all had come")

    def check_not_left(self, cell, value, sequence):
        rank = cell[1]
        if (yield read(("DONE", rank))) < sequence:
            return
        if (yield read(cell)) >= value:
            return
        if (yield read("ABORT")) == sequence:
            raise Aborted
        left = yield peek(("LEFT", rank))
        expect(left == sequence, "a rank that raised was said to have left")
        raise Raised

    def next_command(self):
        yield from self.wait("SEQUENCE", self.sequence + 1)
        self.sequence = yield read("SEQUENCE")
        slot = yield read("SLOT")
        length = yield read("LENGTH")
        if length:
            command = yield read("MAILBOX")
            if (yield choose("reads", "can't read")) == "can't read":
                raise Raised
            self.commands[slot] = command
        expect(slot in self.commands, "a worker was sent a slot that it does not know")
        command = self.commands[slot]
        started = yield peek("STARTED")
        expect(started == (self.sequence, command), "a stale command was run")
        return command

    def worker_finish(self, reply, error):
        line = self.rank
        if error:
            yield write(("REPLY", line), self.sequence)
            yield write(("KIND", line), ERROR)
            yield from self.abort()
        elif reply:
            yield write(("REPLY", line), self.sequence)
            yield write(("KIND", line), ANSWER)
            yield note(("ANSWERED", line), self.sequence)
        yield note(("RAN", line), self.sequence)
        yield write(("DONE", line), self.sequence)
        yield (FENCE,)
        if (yield read(("ASLEEP", self.master))) in (("DONE", line), ("MET", line)):
            yield WAKE, self.master

    def start(self, command):
        if (yield (DEATHS,)):
            raise WorkerDied
        if (yield from self.is_open()):
            yield from self.drain()
        self.errors = ()
        yield (STEP,)
        length = 0
        slot = self.slots.get(command)
        if slot is None:
            yield write("MAILBOX", command)
            if len(self.slots) >= MAX_SLOTS:
                self.forget_slots()
                yield (STEP,)
            slot, length = len(self.slots), 1
        yield write("SLOT", slot)
        yield write("LENGTH", length)
        self.heard = ()
        sequence = yield read("SEQUENCE")
        yield note("STARTED", (sequence + 1, command))
        yield write("SEQUENCE", sequence + 1)
        self.slots[command] = slot
        yield from self.wake("SEQUENCE")

    def forget_slots(self):
        self.slots.clear()

    def finish(self):
        sequence = yield read("SEQUENCE")
        yield write(("DONE", self.rank), sequence)
        for rank in range(self.n_ranks):
            if rank != self.rank:
                if (yield read(("DONE", rank))) < sequence:
                    yield from self.wait(("DONE", rank), sequence)
                kind = yield read(("KIND", rank))
                if kind != NO_REPLY:
                    yield from self.take_reply(rank, kind, sequence)
                yield from self.check_heard(rank, sequence)
        yield (STEP,)
        self.finished = sequence
        yield (STEP,)

    def take_reply(self, rank, kind, sequence):
        reply = yield read(("REPLY", rank))
        expect(reply == sequence, "a reply of another call was taken")
        if kind == ERROR:
            self.forget_slots()
            yield (STEP,)
            self.errors = tuple(sorted({*self.errors, rank}))
        else:
            self.heard = (*self.heard, rank)
        yield (STEP,)
        yield write(("KIND", rank), NO_REPLY)

    def check_heard(self, rank, sequence):
        answered = yield peek(("ANSWERED", rank))
        expect(answered != sequence or rank in self.heard, "a reply was lost")

    def drain(self):
        yield from self.abort()
        yield from self.finish()

    def is_open(self):
        sequence = yield read("SEQUENCE")
        return sequence != self.finished

    def call(self, command):
        yield from self.start(command)
        yield (STEP,)
        caught = None
        try:
            yield from self.body(command)
        except (Exception, KeyboardInterrupt) as error:
            caught = error
        if caught is None:
            yield from self.finish()
            if self.errors:
                yield from self.raise_errors(None)
            return
        yield from self.abort()
        if isinstance(caught, (KeyboardInterrupt, WorkerDied)):
            raise caught
        yield from self.finish()
        yield from self.raise_errors(None if isinstance(caught, Aborted) else caught)

    def raise_errors(self, own):
        errors, self.errors = self.errors, ()
        yield (STEP,)
        sequence, _ = yield peek("STARTED")
        for rank in errors:
            raised = yield peek(("RAISED", rank))
            expect(raised == sequence, "an error of another call was raised")
        expect(errors or own, "a call was aborted, but no rank said why")
        raise WorkerError

    def body(self, command):
        sequence, _ = yield peek("STARTED")
        for turn in range(1, command.count("|") + 1):
            what = yield choose("goes on", "raises", *(["leaves"] if self.may_leave else []))
            if what == "raises":
                raise Raised
            if what == "leaves":
                yield note(("LEFT", self.rank), sequence)
                return
            yield from self.meet(turn)

    def be_worker(self):
        while True:
            reply = error = False
            try:
                command = yield from self.next_command()
                yield from self.body(command)
                reply = True
            except Aborted:
                pass
            except Raised:
                yield note(("RAISED", self.rank), self.sequence)
                error = True
            command = None
            yield from self.worker_finish(reply, error)

    def be_master(self, commands):
        died = False
        for command in commands:
            try:
                yield from self.call(command)
            except (KeyboardInterrupt, WorkerError):
                continue
            except WorkerDied:
                died = True
                break
            yield from self.check_call()
        while True:
            try:
                yield from self.close(died)
                return
            except KeyboardInterrupt:
                continue

    def close(self, died):
        try:
            if not died and (yield from self.is_open()):
                yield from self.drain()
        except WorkerDied:
            died = True
        if died:
            yield (KILL,)

    def check_call(self):
        """Check that all workers have run a call that has returned."""
        sequence, _ = yield peek("STARTED")
        for rank in range(self.n_ranks):
            if rank != self.rank:
                ran = yield peek(("RAN", rank))
                expect(ran == sequence, "a call returned that a worker had not run")
                raised = yield peek(("RAISED", rank))
                expect(raised != sequence, "a call returned in which a worker had raised")
                expect(self.heard.count(rank) == 1, "a reply was not taken once")


MASTERS_CELLS = "SEQUENCE", "SLOT", "LENGTH", "MAILBOX"
RANKS_CELLS = "DONE", "ASLEEP", "MET", "REPLY"
NOTES = "CAME", "LEFT", "RAN", "RAISED", "ANSWERED"


def check_rest(requests, cells, master):
    """Return what is wrong in a state without a next step, such as a deadlock; else None."""
    if requests[master] is None:
        return "a worker has outlived the master" if any(requests) else None
    if requests[master][0] != ENDED:
        return "deadlock: the master waits for ever"
    for rank, request in enumerate(requests):
        if rank != master and request is not None:
            if request != (POLL, "SEQUENCE"):
                return "deadlock: a worker waits in a call for ever"
            if cells["DONE", rank] != cells["SEQUENCE"]:
                return "deadlock: a worker sleeps over a call"
    return None


def explore(n_ranks, commands, master=0, may_leave=False, rank=Rank, **mishaps):
    """Visit all states of `n_ranks` ranks, whose master makes a call with each command.

    A command is a name and a bar for each meeting of all ranks in it, such as "a||". `may_leave`,
    whether ranks may leave a call without meeting the others, needs a heartbeat: ranks that wait
    for them look by themselves. `Explorer` has the other mishaps. Returns the explorer, which has
    the counts.
    """
    cells = dict.fromkeys((*MASTERS_CELLS, "ABORT"), 0)
    cells["STARTED"] = 0, None
    owners = dict.fromkeys(MASTERS_CELLS, master)
    programs = []
    for number in range(n_ranks):
        cells.update(dict.fromkeys([(name, number) for name in (*RANKS_CELLS, "KIND", *NOTES)], 0))
        cells["ASLEEP", number] = None
        owners.update({(name, number): number for name in RANKS_CELLS})

        def program(number=number):
            one = rank(number, n_ranks, master, may_leave)
            return one.be_master(commands) if number == master else one.be_worker()

        programs.append(program)

    at_rest = functools.partial(check_rest, master=master)
    ends = n_ranks == 2  # more takes too much memory
    return Explorer(programs, cells, owners, master, at_rest, ends=ends, **mishaps).run()


class Run(NamedTuple):
    """Arguments of `explore`, and the number of states that it finds."""

    n_ranks: int
    commands: tuple
    mishaps: dict
    states: int = 0  # always the same: the order of exploration is fixed

    def __str__(self):
        mishaps = [name if n is True else f"{name} {n}" for name, n in self.mishaps.items()]
        return f"{self.n_ranks} ranks, {' '.join(self.commands)}, {', '.join(mishaps) or 'calm'}"


RUNS = [
    Run(2, ("a|", "b|", "a|"), {"stores": 4}, 10_132),
    Run(2, ("a", "b", "c", "a"), {"errors": 1}, 25_324),
    Run(2, ("a|", "a"), {"errors": 2, "crashes": 1}, 36_324),
    Run(2, ("a||", "b|"), {"errors": 1, "crashes": 1, "master": 1}, 56_285),
    Run(2, ("a|", "a"), {"errors": 1, "interrupts": 1, "crashes": 1}, 158_829),
    Run(2, ("a", "a"), {"errors": 1, "interrupts": 2}, 107_488),
    Run(2, ("a|", "a"), {"errors": 2, "heartbeat": True, "may_leave": True}, 44_765),
    Run(2, ("a|", "a"), {"errors": 1, "crashes": 1, "heartbeat": True, "may_leave": True}, 33_096),
    Run(3, ("a",), {"errors": 1}, 205_207),
    Run(3, ("a",), {"crashes": 1}, 120_886),
    Run(3, ("a",), {"crashes": 1, "heartbeat": True}, 132_760),
    Run(3, ("a",), {"interrupts": 1}, 388_399),
    Run(3, ("a|",), {}, 354_536),
]
DEEP = [
    Run(2, ("a|", "b|", "a"), {"errors": 1, "interrupts": 2, "crashes": 1}, 2_121_142),
    Run(3, ("a",), {"errors": 1, "crashes": 1}, 378_368),
    Run(3, ("a", "a"), {"master": 1}, 208_619),
    Run(3, ("a|",), {"crashes": 1}, 630_040),
    Run(3, ("a|",), {"crashes": 1, "heartbeat": True}, 649_571),
    Run(3, ("a|",), {"errors": 1}, 1_435_015),
    Run(3, ("a|",), {"errors": 1, "heartbeat": True, "may_leave": True}, 2_116_899),
    Run(3, ("a|",), {"interrupts": 1}, 2_347_018),
    Run(3, ("a|", "a"), {}, 515_365),
]


def main():
    parser = argparse.ArgumentParser(description="Explore the model of the gate.")
    parser.add_argument("--ranks", type=int, help="only runs of so many ranks")
    parser.add_argument("--deep", action="store_true", help="also the runs that take minutes")
    arguments = parser.parse_args()
    total = 0
    for run in RUNS + DEEP * arguments.deep:
        if arguments.ranks in (None, run.n_ranks):
            begin = time.monotonic()
            explored = explore(run.n_ranks, run.commands, **run.mishaps)
            seconds = time.monotonic() - begin
            total += explored.states
            print(f"{run}: {explored.states} states, {explored.steps} steps, {seconds:.0f} s")
            assert explored.states == run.states, f"there were {run.states}"
    print(f"{total} states in all; none breaks a property")


if __name__ == "__main__":
    main()
