"""Signal handlers that are delayed, and exceptions that are those of handlers."""

import contextlib
import functools
import os
import signal
import threading

import pytest
from support.interrupts import signal_at_line

from synkhronos._machine import interrupts
from synkhronos._machine.interrupts import (
    interrupts_held,
    interrupts_raised_later,
    is_of_handler,
    raised_by_handler,
    raised_here,
)

NUMBERS = signal.SIGINT, signal.SIGUSR1, signal.SIGALRM, signal.SIGRTMIN


class Stop(Exception):
    """What the handlers of these tests raise."""


def handlers():
    return [signal.getsignal(number) for number in NUMBERS]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Let a test set handlers of these signals, which are looked at as soon as it has done so."""
    monkeypatch.setattr(interrupts, "_SECONDS", 0)
    monkeypatch.setattr(interrupts, "_handled", interrupts._HandledSignals())
    before = handlers()
    yield
    for number, handler in zip(NUMBERS, before):
        signal.signal(number, handler)


@pytest.fixture
def came():
    """Set handlers that note the signals; return the list of these."""
    numbers = []
    for number in NUMBERS:
        signal.signal(number, lambda number, frame: numbers.append(number))
    return numbers


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def stop(number, frame):
    raise Stop(number)


def test_handlers_run_once_when_the_block_ends(came):
    before = handlers()
    with interrupts_held() as held:
        assert not held
        send(signal.SIGUSR1, signal.SIGINT, signal.SIGUSR1, signal.SIGRTMIN)
        assert came == []
        assert held
    assert came == [signal.SIGUSR1, signal.SIGINT, signal.SIGRTMIN]
    assert handlers() == before
    send(signal.SIGALRM)
    assert came[-1] == signal.SIGALRM


def test_all_handlers_run_and_the_last_exception_comes_out(came):
    signal.signal(signal.SIGUSR1, stop)
    signal.signal(signal.SIGALRM, stop)
    with pytest.raises(Stop) as caught, interrupts_held():
        send(signal.SIGUSR1, signal.SIGRTMIN, signal.SIGALRM, signal.SIGINT)
    assert came == [signal.SIGRTMIN, signal.SIGINT]
    assert caught.value.args == (signal.SIGALRM,)
    assert caught.value.__context__.args == (signal.SIGUSR1,)


def test_handlers_run_too_if_the_block_raises(came):
    before = handlers()
    with pytest.raises(ValueError), interrupts_held():
        send(signal.SIGUSR1)
        raise ValueError
    assert came == [signal.SIGUSR1]
    assert handlers() == before


def test_blocks_nest(came):
    with interrupts_held():
        with interrupts_held():
            send(signal.SIGUSR1)
        assert came == []
        with interrupts_raised_later():
            send(signal.SIGINT)
        assert came == []
    assert came == [signal.SIGUSR1, signal.SIGINT]


def test_a_handler_that_the_block_sets_stays(came):
    with interrupts_held():
        signal.signal(signal.SIGUSR1, stop)
    assert signal.getsignal(signal.SIGUSR1) is stop
    with contextlib.suppress(Stop):
        send(signal.SIGUSR1)
    assert came == []


def test_signals_without_a_handler_are_left_alone():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with interrupts_held():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        send(signal.SIGINT)


def test_another_thread_delays_nothing(came):
    def hold():
        with interrupts_held() as held:
            send_and_wait.wait(20)
            assert not held

    send_and_wait = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    send(signal.SIGUSR1)
    assert came == [signal.SIGUSR1]
    send_and_wait.set()
    thread.join()


def test_a_signal_is_written_once_to_the_wakeup_pipe(came):
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes)
    try:
        with interrupts_held():
            send(signal.SIGINT)
        assert os.read(reads, 10) == bytes([signal.SIGINT])
    finally:
        signal.set_wakeup_fd(before)
        os.close(reads)
        os.close(writes)
    assert came == [signal.SIGINT]


@pytest.mark.parametrize("at", range(2 * len(NUMBERS)))
def test_an_exception_while_handlers_are_replaced_or_set_again(came, monkeypatch, at):
    """Of a signal that comes in between: all handlers are there afterwards, and have run."""
    before, calls = handlers(), []
    original = interrupts._signal

    def set_handler(number, handler):
        calls.append(number)
        if len(calls) == at + 1:
            raise Stop
        return original(number, handler)

    monkeypatch.setattr(interrupts, "_signal", set_handler)
    with pytest.raises(Stop), interrupts_held():
        send(signal.SIGUSR1)
    assert came == ([signal.SIGUSR1] if at >= len(NUMBERS) else [])
    assert handlers() == before


def test_a_handler_that_was_set_a_moment_ago_leaves_no_signal_held(came, monkeypatch):
    """Its signal is not delayed yet: before each line of the block's begin it raises at once."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    interrupts._handled.numbers()
    monkeypatch.setattr(interrupts._handled, "_until", float("inf"))
    signal.signal(signal.SIGUSR1, stop)
    before, line, came_to_it = handlers(), 0, True
    while came_to_it:
        block = interrupts_held()
        try:
            came_to_it = signal_at_line(line, block.__enter__, signal.SIGUSR1)
        except Stop:
            assert handlers() == before
        else:
            block.__exit__(None, None, None)
        line += 1
    assert line > 15


def test_handlers_that_run_at_once_and_raise_later(came):
    signal.signal(signal.SIGUSR1, stop)
    came_to = []
    with pytest.raises(Stop), interrupts_raised_later() as held:
        send(signal.SIGINT)
        assert came == [signal.SIGINT]
        assert not held
        send(signal.SIGUSR1)
        assert held
        with interrupts_held():
            send(signal.SIGRTMIN)
        assert came == [signal.SIGINT, signal.SIGRTMIN]
        came_to.append("the end of the block")
    assert came_to and signal.getsignal(signal.SIGUSR1) is stop


class Stopper:
    def __call__(self, number, frame):
        raise Stop


def stop_after_clean_up(number, frame):
    del number, frame
    raise Stop


def stop_later(*given):
    stop(*given)


def stop_of(name, number, frame=None):
    raise Stop(name)


HANDLERS = {
    "function": stop,
    "lambda": lambda *given: stop_of("lambda", 0),
    "object": Stopper(),
    "partial": functools.partial(stop_of, "partial"),
    "partial of a function without locals": functools.partial(stop_after_clean_up),
    "function without locals": stop_after_clean_up,
    "function that calls another": stop_later,
}


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("name", HANDLERS)
def test_exceptions_of_handlers_pass(name, is_set):
    """Also of one that is replaced before they are looked at, if it was seen, as by fork()."""
    handler = HANDLERS[name]
    signal.signal(signal.SIGUSR1, handler)
    with interrupts_held():
        pass
    with pytest.raises(Stop) as caught:
        try:
            send(signal.SIGUSR1)
        except Exception as error:
            if not is_set:
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            assert is_of_handler(error)
            assert raised_by_handler(error) is error
            try:
                raise
            except raised_here(OSError, Exception):
                raise AssertionError("not reached") from None
    assert not isinstance(caught.value, AssertionError)


def test_exceptions_that_no_handler_raised_are_caught():
    signal.signal(signal.SIGUSR1, stop)

    def fail(number, name):
        raise Stop

    for error in (Stop, OSError):
        with pytest.raises(ZeroDivisionError):
            try:
                if error is Stop:
                    fail(1, "a name")
                raise error
            except raised_here(Stop, OSError) as caught:
                assert not is_of_handler(caught)
                assert raised_by_handler(caught) is None
                raise ZeroDivisionError from None


@pytest.mark.parametrize(
    "another",
    [
        lambda error: Stop("longer").with_traceback(error.__traceback__),
        lambda error: UnboundLocalError("by mistake"),
    ],
    ids=["longer", "by mistake"],
)
def test_an_exception_that_stands_for_that_of_a_handler(another):
    signal.signal(signal.SIGUSR1, stop)
    with pytest.raises(Exception) as caught:
        try:
            send(signal.SIGUSR1)
        except Exception as error:
            first = error
            raise another(error)  # noqa: B904 as libraries do
    assert caught.value is not first
    assert raised_by_handler(caught.value) is first


@pytest.mark.parametrize("how", ["from", "in a call of a handler of the first"])
def test_an_exception_that_does_not_stand_for_that_of_a_handler(how):
    def fail():
        raise ValueError

    signal.signal(signal.SIGUSR1, stop)
    found = None
    try:
        send(signal.SIGUSR1)
    except Stop as first:
        try:
            if how == "from":
                raise ValueError from first
            fail()
        except ValueError as error:
            assert error.__context__ is first
            error.__traceback__ = error.__traceback__.tb_next or error.__traceback__
            found = error
    assert raised_by_handler(found) is None


def test_the_second_of_two_exceptions_of_handlers_stands_for_itself():
    signal.signal(signal.SIGUSR1, stop)
    with pytest.raises(Stop) as caught:
        try:
            send(signal.SIGUSR1)
        except Stop:
            send(signal.SIGUSR1)
    assert raised_by_handler(caught.value) is caught.value
