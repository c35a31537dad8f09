"""Groups whose ranks are forked processes of a test."""

import os
import pickle
import signal
import time
import traceback

from synkhronos.comm.shared import group as shared
from synkhronos.comm.single_group import SingleGroup

SECONDS = 60.0


class Crew:
    """Ranks of a `SharedGroup`, each of which runs a function of its group.

    >>> with Crew(2, lambda group: group.all_gather(group.rank)) as crew:
    ...     crew.results()
    [[0, 1], [0, 1]]
    """

    def __init__(self, size, function):
        founding = shared.Founding(size)
        self.pids, self._ends = [], []
        try:
            for rank in range(size):
                reader, writer = os.pipe()
                pid = os.fork()
                if pid == 0:
                    self._run(founding, rank, size, function, writer)
                self.pids.append(pid)
                self._ends.append(reader)
                os.close(writer)
        finally:
            founding.close()

    def _run(self, founding, rank, size, function, writer):
        status = 1
        try:
            signal.alarm(int(SECONDS))  # a rank that hangs ends
            value, kept = founding.place(rank)
            for other in range(size):
                for descriptor in founding.place(other)[1]:
                    if descriptor not in kept and _is_open(descriptor):
                        os.close(descriptor)
            for reader in self._ends:
                os.close(reader)
            group = shared.join(value)
            try:
                found = function(group)
            except BaseException as error:
                found = error
                error.__traceback__, error.__context__ = None, None
            group.close()
            with open(writer, "wb") as file:
                pickle.dump(found, file)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def results(self):
        """Return what each rank has returned or raised; None of one that was killed."""
        found = []
        for reader in self._ends:
            with open(reader, "rb") as file:
                data = file.read()
            found.append(pickle.loads(data) if data else None)
        self._ends = []
        return found

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for end in self._ends:
            os.close(end)
        limit = time.monotonic() + SECONDS
        for pid in self.pids:
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if error is not None or time.monotonic() > limit:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.002)


def _is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def run(size, function):
    """Return what a function of the group returns on each rank; raise what a rank raises."""
    if size == 1:
        return [function(SingleGroup())]
    with Crew(size, function) as crew:
        results = crew.results()
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results
