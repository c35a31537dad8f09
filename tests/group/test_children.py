"""Processes that a command starts itself: which ends it waits for."""

import os
import signal

import pytest

from synkhronos._machine.processes import life_of
from synkhronos.parameter_server.group.children import Children


class Held(Children):
    """Ranks of which the first is held stopped until the end of the second was noted."""

    title = "test"

    def _is_over(self):
        over = super()._is_over()
        if self.ranks[1].status is not None and life_of(self.ranks[0].pid) == "stopped":
            super()._is_over()
            self.deadline_of_held = self._deadline
            os.kill(self.ranks[0].pid, signal.SIGKILL)
        return over


@pytest.mark.parametrize(("given", "is_endless"), [("0", True), ("never", True), ("", False)])
def test_a_process_that_is_held_stopped_is_not_ended_without_a_limit(given, is_endless):
    lines = [["sh", "-c", "kill -STOP $$"], ["sh", "-c", "exit 3"]]
    environment = {**os.environ, "SYNKHRONOS_LOST_AFTER": given}
    run = Held(lines, names=["cpu", "cpu"], environment=environment, outlives=True)
    assert run.run() == 3
    assert (run.deadline_of_held == float("inf")) == is_endless
    assert [rank.status for rank in run.ranks] == [-signal.SIGKILL, 3]
