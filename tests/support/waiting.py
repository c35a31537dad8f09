"""Waiting for a condition, and the end of a test that hangs."""

import faulthandler
import time

import pytest

TEST_SECONDS = 1800  # a test that takes longer, with its fixtures, counts as hung
LONG = 100  # seconds, for what should take one: so slow is no machine


def end_after(seconds):
    """Print tracebacks and end this process after some seconds; a new call replaces an old one."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=Watch.stderr)


class Watch:
    """Ends a test, or an example of the documentation, that hangs.

    pytest's `faulthandler_timeout` only prints tracebacks, and stops after an error of a test. A
    process has only one such timer.
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


def wait_until(condition, seconds=LONG, what=lambda: ""):
    """Wait until the condition holds and return the seconds, or fail with the message `what()`."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not within {seconds} s {what()}"
        time.sleep(0.005)
    return time.monotonic() - begin
