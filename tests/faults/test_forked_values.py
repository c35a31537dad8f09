"""Values of shared variables in a process that the script forks: its own, as they were then."""

import contextlib
import json
import os
import subprocess

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.faults import BOUND, bounded
from support.helpers import function
from support.layouts import ON_DEVICES, Layout, forked
from support.threads import in_thread

import synkhronos as synk
from synkhronos._machine import private_copies
from synkhronos._machine.processes import ForkedProcess

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(ON_DEVICES, reason="values on a device can't be used in a child"),
]
ON_RANKS = pytest.mark.parametrize(
    "n, master", [(1, 0), (2, 0), pytest.param(3, 1, marks=pytest.mark.thorough)]
)


class Child:
    """A process by os.fork that waits for `go`, then runs `do` and sends what it returns."""

    def __init__(self, do):
        self._answers, send = os.pipe()
        wait, self._go = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._go)
                os.read(wait, 1)
                os.write(send, json.dumps(do()).encode())
            except BaseException as error:
                os.write(send, json.dumps(repr(error)).encode())
            finally:
                os._exit(0)
        os.close(send)
        os.close(wait)

    def go(self):
        """Let it run; return what it has sent."""
        os.close(self._go)
        answer = b"".join(iter(lambda: os.read(self._answers, 1 << 16), b""))
        os.close(self._answers)
        os.waitpid(self._pid, 0)
        return json.loads(answer)


@contextlib.contextmanager
def session(n=2, master=0):
    """Fork and close. Arrays that a test holds may keep memory, which `forked` would not allow."""
    synk.fork(n, master_rank=master)
    try:
        yield
    finally:
        synk.close()


def shared(n=5, value=1.0, name="w"):
    return theano.shared(np.full(n, value), name)


def adding(w):
    """Return a plain function that adds 1 to a variable, where it can in place."""
    return theano.function([], [], updates=[(w, w + 1)])


def values(*variables):
    return [w.get_value().tolist() for w in variables]


@ON_RANKS
def test_a_child_keeps_the_values_of_the_moment_of_the_fork(n, master):
    w, other = shared(), shared(3, 7.0, "other")
    with forked(Layout(n, master)):
        synk.all_reduce([w, other], op="sum")
        before = values(w, other)
        child = Child(lambda: values(w, other))
        for value in (50.0, 60.0):
            w.set_value(np.full(5, value))
            synk.broadcast([w, other])
            synk.all_reduce([w, other], op="sum")
        assert values(w, other) != before
        assert child.go() == before


@ON_RANKS
def test_what_a_child_writes_stays_there(n, master):
    w, other = shared(), shared(3, 7.0, "other")
    add = adding(w)
    with session(n, master):
        synk.all_reduce([w, other], op="avg")
        borrowed = other.get_value(borrow=True)

        def write():
            add()
            add()
            borrowed[...] = 9.0
            w.get_value(borrow=True)[0] = 5.0
            return values(w, other)

        assert Child(write).go() == [[5.0, 3.0, 3.0, 3.0, 3.0], [9.0] * 3]
        assert values(w, other) == [[1.0] * 5, [7.0] * 3]
        for rank in range(n):
            assert synk.get_value(rank, w).tolist() == [1.0] * 5
        add()
        synk.all_reduce([w], op="max")
        assert values(w, other) == [[2.0] * 5, [7.0] * 3]


@pytest.mark.parametrize("closed", [False, True])
def test_arrays_that_a_script_holds_are_copied_too(closed):
    """Those on one memory stay so in a child, also if the variable no longer has them."""
    w = shared()
    add = adding(w)
    with session():
        synk.all_reduce([w], op="avg")
        old = w.get_value(borrow=True)
        view = old[1:3]
        w.set_value(np.full(5, 2.0))
        synk.all_reduce([w], op="max")

        def write():
            old[...] = 6.0
            w.get_value(borrow=True)[...] = 3.0
            add()
            return [old.tolist(), view.tolist(), *values(w)]

        if closed:
            synk.close()
        assert Child(write).go() == [[6.0] * 5, [6.0] * 2, [4.0] * 5]
        assert old.tolist() == [1.0] * 5
        assert values(w) == [[2.0] * 5]


def test_values_that_ranks_gather_are_copied():
    w = shared(2)
    with forked(Layout(2)):
        for _ in range(3):
            w.set_value(np.ones(2))
            synk.broadcast([w])
            synk.all_gather(w)
        child = Child(lambda: values(w))
        synk.set_value(0, w, np.zeros(4))
        synk.broadcast([w])
        synk.all_reduce([w])
        assert child.go() == [[1.0] * 4]


def test_a_child_reads_its_values_after_the_end_of_the_session():
    """The parent frees the memory then, and reading it would end the child (SIGBUS)."""
    w = shared(100_000)
    with forked(Layout(2)):
        synk.all_reduce([w], op="avg")
        child = Child(lambda: float(w.get_value().sum()))
        synk.close()
        assert child.go() == 100_000.0


def test_a_child_is_told_that_the_session_belongs_to_its_parent():
    """It was told that the session was closed, or that there is none."""
    w, x = shared(), T.dvector("x")
    with session():
        f, d = function([x], x.sum()), synk.data(np.arange(4.0))
        objects = [lambda: f(np.ones(3)), lambda: d.set_length(9)]
        names = [lambda: synk.all_reduce([w], op="avg"), lambda: synk.data([1.0])]

        def told(calls):
            found = []
            for call in calls:
                with pytest.raises(synk.SessionError) as caught:
                    call()
                found.append(str(caught.value))
            return found

        def told_before_and_after_a_session():
            before = [told(objects), told(names)]
            synk.fork(1)
            synk.close()
            return [*before, told(objects), told(names)]

        def told_in_a_grandchild():
            return Child(lambda: told(names)).go()

        mine = f"of process {os.getpid()}, from which this one was forked."
        of_objects, of_names, later, without = Child(told_before_and_after_a_session).go()
        for text in (*of_objects, *later):
            assert f"belongs to a Synkhronos session {mine}" in text
        for text in (*of_names, *Child(told_in_a_grandchild).go()):
            assert f"call synkhronos.fork() first. The session is {mine}" in text
        assert all("There is no session now." in text for text in without)
        assert f(np.ones(2)) == 1
    assert all("session that was closed" in text for text in told(objects))


def test_a_session_of_the_child():
    w = shared()
    with forked(Layout(2)), bounded():
        synk.all_reduce([w], op="avg")

        def use():
            synk.fork(2)
            w.set_value(np.full(5, 2.0))
            synk.all_reduce([w], op="sum")
            w.set_value(np.full(5, 4.0))
            synk.broadcast([w])
            grandchild = Child(lambda: values(w))
            w.get_value(borrow=True)[...] = 8.0
            found = grandchild.go()
            synk.close()
            return [*found, *values(w)]

        assert Child(use).go() == [[4.0] * 5, [8.0] * 5]
        synk.all_reduce([w], op="avg")
        assert values(w) == [[1.0] * 5]


def test_a_fork_in_a_thread_beside_calls():
    w = shared(1000)
    with forked(Layout(2)), bounded():
        synk.all_reduce([w], op="avg")
        forking = in_thread(lambda: [Child(lambda: values(w)).go() for _ in range(10)])
        x = T.dvector("x")
        f = function([x], (x.sum(), "sum"))
        while not forking.done():
            assert f(np.ones(4)) == 4
            synk.all_reduce([w], op="avg")
        found = [each for forked in forking.result() for each in forked]
        # In the middle of an average the values are sums, which are not divided yet.
        assert len(found) == 10 and {value for each in found for value in each} <= {1.0, 2.0}


@pytest.fixture
def copied(monkeypatch):
    """The bytes of each copy that is made from now on, in this process."""
    found, call = [], private_copies._call

    def counted(name, *arguments):
        if name == "memmove":
            found.append(arguments[2])
        return call(name, *arguments)

    monkeypatch.setattr(private_copies, "_call", counted)
    return found


def test_copies_are_made_for_forks_of_the_script_only(copied):
    w = shared(1000)
    with session():
        x = T.dvector("x")
        f = function([x], (x.sum(), "sum"))
        d = synk.data(np.ones(100_000))
        f(d)
        Child(lambda: d.data.fill(2.0)).go()
        assert not copied  # inputs, outputs and Data are no values of variables: they stay shared
        assert f(d) == 200_000
        synk.all_reduce([w], op="avg")
        subprocess.run(["true"], check=True)
        process = ForkedProcess(lambda: None)
        assert process.join(BOUND)
        process.close()
        assert not copied
        Child(lambda: None).go()
        assert copied == [8000]
    Child(lambda: None).go()
    assert copied == [8000]


def mapped():
    """Return the bytes that this process has mapped."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_the_parent_keeps_no_copy():
    w = shared(1 << 20)
    with session():
        synk.all_reduce([w], op="avg")
        Child(lambda: None).go()
        before = mapped()
        for _ in range(5):
            Child(lambda: None).go()
        assert mapped() < before + w.get_value(borrow=True).nbytes


def test_without_memory_for_a_copy_the_fork_goes_on(monkeypatch, caplog):
    w = shared()
    call = private_copies._call
    with forked(Layout(2)):
        synk.all_reduce([w], op="avg")
        monkeypatch.setattr(
            private_copies, "_call", lambda name, *a: -1 if name == "mmap" else call(name, *a)
        )
        assert Child(lambda: values(w)).go() == [[1.0] * 5]
        [record] = caplog.records
        assert "no memory for a copy of 64 bytes" in record.getMessage()
