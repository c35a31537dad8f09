"""Functions that recurse deep run in a thread with a large stack, with a high limit meanwhile."""

import contextvars
import os
import signal
import sys
import threading
import time

import pytest
from support.waiting import LONG, wait_until

from synkhronos._machine import deep_recursion
from synkhronos._machine.deep_recursion import recurses_deep

DEEPER = 5_000  # levels beyond the limit of this process
SMALL = 256 << 10  # bytes of a stack


@pytest.fixture(autouse=True)
def as_it_was():
    limits, threads = (sys.getrecursionlimit(), threading.stack_size()), threading.active_count()
    yield
    wait_until(lambda: threading.active_count() <= threads)  # one of an earlier test may end now
    assert (sys.getrecursionlimit(), threading.stack_size()) == limits


def count(levels):
    return 1 + count(levels - 1) if levels else 0


def deep_first(do):
    """Return a function that needs a large stack, and then calls another one."""

    @recurses_deep
    def run(*args):
        count(sys.getrecursionlimit() + DEEPER if not in_large_stack() else 0)
        return do(*args)

    return run


def in_large_stack():
    return deep_recursion._here.is_deep


def in_small_thread(do):
    """Return what a function returns in a thread with a small stack."""
    results, before = [], threading.stack_size(SMALL)
    thread = threading.Thread(target=lambda: results.append(do()))
    thread.start()
    threading.stack_size(before)
    thread.join()
    return results[0]


def test_a_shallow_call_stays_where_it_is():
    assert recurses_deep(threading.get_ident)() == threading.get_ident()
    assert recurses_deep(sys.getrecursionlimit)() == sys.getrecursionlimit()


def test_a_deep_call_gets_a_large_stack_and_a_high_limit():
    levels, before = sys.getrecursionlimit() + DEEPER, sys.getrecursionlimit()
    assert recurses_deep(count)(levels) == levels
    assert deep_first(sys.getrecursionlimit)() == max(deep_recursion.LEVELS, before)


def test_a_thread_with_a_small_stack_is_not_tried():
    assert in_small_thread(recurses_deep(in_large_stack))
    assert in_small_thread(lambda: recurses_deep(count)(20_000)) == 20_000


def test_calls_nest():
    inner = recurses_deep(lambda: (count(20_000), in_large_stack(), threading.active_count()))
    assert deep_first(inner)() == (20_000, True, threading.active_count() + 1)


def test_endless_recursion_is_an_error():
    class Endless:
        def __getattr__(self, name):
            return getattr(self, name + "x"[:0])

    before = threading.active_count()
    with pytest.raises(RecursionError):
        recurses_deep(lambda: Endless().name)()
    assert threading.active_count() == before


def test_errors_are_handed_over():
    def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        deep_first(fail)()
    assert caught.traceback[-1].name == "fail"
    assert caught.value.__context__ is None
    with pytest.raises(ValueError, match="other"):
        recurses_deep(lambda: int("other"))()


def test_an_error_that_came_of_the_depth_counts():
    def wrapping(levels):
        try:
            return count(levels)
        except RecursionError as error:
            raise ValueError("too deep") from error

    levels = sys.getrecursionlimit() + DEEPER
    assert recurses_deep(wrapping)(levels) == levels


def test_the_context_of_the_caller_holds():
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("given")
    assert deep_first(variable.get)() == "given"


def test_threads_raise_the_limit_together():
    first_is_in, second_is_out = threading.Event(), threading.Event()
    seen = []

    def first():
        first_is_in.set()
        second_is_out.wait(LONG)
        seen.append(sys.getrecursionlimit())

    thread = threading.Thread(target=deep_first(first))
    before = sys.getrecursionlimit()
    thread.start()
    first_is_in.wait(LONG)
    deep_first(seen.append)(1)
    second_is_out.set()
    thread.join()
    assert seen == [1, max(before, deep_recursion.LEVELS)]


def test_a_limit_that_the_script_sets_meanwhile_stays():
    before = sys.getrecursionlimit()
    try:
        deep_first(sys.setrecursionlimit)(before + 1)
        assert sys.getrecursionlimit() == before + 1
    finally:
        sys.setrecursionlimit(before)


def test_a_smaller_stack_where_addresses_are_scarce(monkeypatch):
    monkeypatch.setattr(deep_recursion, "STACK", 1 << 47)
    levels = sys.getrecursionlimit() + DEEPER
    assert recurses_deep(count)(levels) == levels


def interrupt_later(*seconds):
    def send():
        for each in seconds:
            time.sleep(each)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_ctrl_c_ends_the_call():
    left = []

    def compute():
        try:
            while True:
                time.sleep(0.001)
        finally:
            left.append(True)

    sender = interrupt_later(0.2)
    with pytest.raises(KeyboardInterrupt):
        deep_first(compute)()
    assert left == [True]
    sender.join()


def test_a_second_ctrl_c_ends_the_wait():
    may_end = threading.Event()
    sender = interrupt_later(0.2, 0.2)
    with pytest.raises(KeyboardInterrupt):
        deep_first(may_end.wait)(LONG)
    sender.join()
    may_end.set()
