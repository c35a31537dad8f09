"""Waiting for a condition, and the end of a test that hangs."""

import faulthandler
import time

import pytest

TEST_SECONDS = 600  # that a test may take with its fixtures, or it hangs


def end_after(seconds):
    """End this process in so many seconds, saying where its threads are; once more: put it off."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=Watch.stderr)


class Watch:
    """Sees to it that no test hangs for ever, nor do the examples of the documentation.

    In place of pytest's `faulthandler_timeout`, which goes on waiting, and does not watch what
    comes after an error of a test. There is only one timer.
    """

    stderr = 2

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self):
        end_after(TEST_SECONDS)
        yield
        faulthandler.cancel_dump_traceback_later()

    def pytest_exception_interact(self, node):
        if isinstance(node, pytest.Item):
            end_after(TEST_SECONDS)  # pytest has just stopped the timer


def wait_until(condition, seconds, what=lambda: ""):
    """Wait until the condition holds; return how long it took, or fail, saying what there is."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not within {seconds} s {what()}"
        time.sleep(0.005)
    return time.monotonic() - begin
