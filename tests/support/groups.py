"""Groups whose ranks are processes of a test: of one machine, or of several that are this one."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import ClassVar

import cloudpickle

from support.launching import FOR_ROOT, MPIRUN
from support.leaks import runs
from support.waiting import wait_until
from synkhronos.launch.leftovers import kill_session
from synkhronos.parameter_server.group import one_machine as shared
from synkhronos.parameter_server.group.interface import SingleGroup

SECONDS = 120.0


def outcome(function, group):
    """Return what a function of a group returns or raises, after it has left the group."""
    try:
        found = function(group)
    except BaseException as error:
        found = error
        error.__traceback__, error.__context__ = None, None
    group.close()
    return found


class Crew:
    """Ranks of a `SharedGroup`, each of which runs a function of its group.

    >>> with Crew(2, lambda group: group.all_gather(group.rank)) as crew:
    ...     crew.results()
    [[0, 1], [0, 1]]
    """

    def __init__(self, size, function):
        setup = shared.GroupSetup(size)
        self.pids, self._ends = [], []
        try:
            for rank in range(size):
                reader, writer = os.pipe()
                pid = os.fork()
                if pid == 0:
                    self._run(setup, rank, size, function, writer)
                self.pids.append(pid)
                self._ends.append(reader)
                os.close(writer)
        finally:
            setup.close()

    def _run(self, setup, rank, size, function, writer):
        status = 1
        try:
            signal.alarm(int(SECONDS))  # a rank that hangs ends
            value, kept = setup.place(rank)
            for other in range(size):
                for descriptor in setup.place(other)[1]:
                    if descriptor not in kept and _is_open(descriptor):
                        os.close(descriptor)
            for reader in self._ends:
                os.close(reader)
            group = shared.join(json.loads(value))
            found = outcome(function, group)
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


class Machines(int):
    """A size of a group: the ranks on each machine, all of which are this one.

    >>> Machines([[0, 2], [1]]) + 0
    3
    """

    def __new__(cls, ranks):
        size = super().__new__(cls, sum(map(len, ranks)))
        size.ranks = ranks
        return size

    def __reduce__(self):
        return Machines, (self.ranks,)

    def __repr__(self):
        return "+".join("".join(map(str, each)) for each in self.ranks)


class MachinesJob:
    """A process of mpirun for each machine, which together run one crew after another."""

    _running: ClassVar[dict] = {}  # number of machines -> its job

    def __init__(self, n_machines):
        self._folder, self._n_crews = tempfile.TemporaryDirectory(), 0
        line = [MPIRUN, "--oversubscribe", "-n", str(n_machines), sys.executable, "-m"]
        self.process = subprocess.Popen(
            [*line, "support.group_on_machines", self._folder.name],
            env={**os.environ, **FOR_ROOT, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )

    @classmethod
    def of(cls, n_machines):
        """Return the job of so many machines, which is started if there is none."""
        job = cls._running.get(n_machines)
        if job is None or job.process.poll() is not None:
            job = cls._running[n_machines] = cls(n_machines)
        return job

    def begin(self, work):
        """Let the machines run a crew; return the folder for its files."""
        self._n_crews += 1
        folder = Path(self._folder.name, str(self._n_crews))
        folder.mkdir()
        (folder / "new").write_bytes(cloudpickle.dumps(work))
        (folder / "new").rename(folder / "work")
        return folder

    @classmethod
    def end_all(cls):
        """End all jobs, and wait for them."""
        while cls._running:
            _, job = cls._running.popitem()
            Path(job._folder.name, "end").touch()
            job.process.wait(SECONDS)
            job._folder.cleanup()


class CrewOnMachines:
    """Ranks of a `MachinesGroup`, as `Crew` has them; each machine is a process of mpirun."""

    def __init__(self, size, function):
        self._size, self._job = size, MachinesJob.of(len(size.ranks))
        self._folder = self._job.begin((size.ranks, function))

    @property
    def pids(self):
        """The process of each rank."""
        paths = [self._folder / f"pid{rank}" for rank in range(self._size)]
        wait_until(lambda: all(path.exists() for path in paths))
        return [int(path.read_text()) for path in paths]

    def _has_ended(self):
        return len([*self._folder.glob("ended*")]) == len(self._size.ranks)

    def results(self):
        """Return what each rank has returned or raised; None of one that was killed."""
        wait_until(lambda: self._has_ended() or self._job.process.poll() is not None, SECONDS)
        found = []
        for rank in range(self._size):
            try:
                found.append(cloudpickle.loads((self._folder / f"result{rank}").read_bytes()))
            except FileNotFoundError:
                found.append(None)
        return found

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if not self._has_ended():
            kill_session(self._job.process.pid)
            self._job.process.wait()


def has_ended(pid):
    """Return whether a process has ended."""
    return not runs(pid)


def crew_of(size, function):
    """Return the ranks of a group, which run a function."""
    return (CrewOnMachines if isinstance(size, Machines) else Crew)(size, function)


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
    with crew_of(size, function) as crew:
        results = crew.results()
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results
