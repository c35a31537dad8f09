"""A signal at every line of the master's code: in fork and close, a call, and a collective.

What comes is a Ctrl-C, or what a handler of the script raises, in turns.
"""

import numpy as np
import pytest
import theano
from support import faults
from support.faults import CALLS, begun, pids_by_rank
from support.interrupts import (
    SOME_AND_EVERY_LINE,
    OutOfTime,
    Preempted,
    Timeout,
    handler_that_raises,
    in_strides,
    interrupt_at_line,
    raise_at_line,
)
from support.leaks import nothing_left

import synkhronos as synk
from synkhronos import session

pytestmark = pytest.mark.faults


KINDS = [KeyboardInterrupt, Timeout, OutOfTime, Preempted]


def comes_to(line, do):
    """Call `do`, with a signal before a line, and see that it comes out; return whether it came."""
    kind = KINDS[line % len(KINDS)]
    if kind is KeyboardInterrupt:
        return interrupt_at_line(line, do)
    with handler_that_raises(kind) as raised:
        return raise_at_line(line, do, raised)


@in_strides(61)
def test_fork_and_close_leave_nothing(no_session, other_thread, stride):
    line = 0
    for interrupted, least in (("fork", 50), ("close", 30)):
        first, came_to_it = line, True
        while came_to_it:
            with nothing_left():
                if interrupted == "fork":
                    came_to_it = comes_to(line - first, lambda: synk.fork(2))
                else:
                    synk.fork(2)
                    call = CALLS["function"](2)
                    call()  # so that there is something to give back
                    came_to_it = comes_to(line - first, synk.close)
                    del call
                if session._Current.session is not None:
                    synk.close()
            line += stride
        assert line - first > least
    faults.use_a_new_session(2)


@SOME_AND_EVERY_LINE
def test_the_session_goes_on_with_right_results(no_session, other_thread, stride):
    call, _ = begun("function", 2)
    pids, line = pids_by_rank(), 0
    while comes_to(line, call):
        call()
        line += stride
    assert pids_by_rank() == pids
    assert line > 30


@SOME_AND_EVERY_LINE
def test_a_collective_of_a_variable_that_the_workers_were_being_told_of(
    no_session, other_thread, stride
):
    synk.fork(2)
    line, came_to_it = 0, True
    while came_to_it:
        s = theano.shared(np.zeros(3), "s")
        came_to_it = comes_to(line, lambda: synk.broadcast(s, np.ones(3)))  # noqa: B023
        synk.broadcast(s, np.full(3, 2.0))
        synk.all_reduce(s, "sum")
        np.testing.assert_array_equal(synk.get_value(1, s), np.full(3, 4.0))
        line += stride
    assert line > 100
