"""Begin and end: the processes, and the one session that is current.

    fork()   none ──▶ OPEN ──▶ CLOSED   close(), or the end of the interpreter
                        └──▶ BROKEN ──▶ CLOSED   a worker died; then close()

Everything that needs workers goes through `Session.run`.
"""

import atexit
import contextlib
import enum
import functools
import os
import threading
import weakref
from typing import Optional, Sequence

from synkhronos import _commands, _devices, _gpuarrays
from synkhronos._checks import count, truth, whole_number
from synkhronos._garbage import Garbage
from synkhronos._gate import Gate
from synkhronos._log import log, name_rank
from synkhronos._process import ForkedProcess, interrupts_held, join_all, kill_all
from synkhronos._registry import Registry
from synkhronos._worker import Worker, be_worker
from synkhronos.errors import SessionError, WorkerDied

QUIT_SECONDS = 5.0  # how long an idle worker may take to end before it is made to
_MOST_THREADS = (1 << 31) - 1  # that BLAS and OpenMP can be told of


class State(enum.Enum):
    """What a session can do."""

    OPEN = "every call"
    BROKEN = "refuse, with the death of a worker as the reason; close"
    CLOSED = "refuse"


class Session:
    """The master's side of the workers, from fork to close."""

    def __init__(self, devices, threads, master_rank, profile_workers):
        self.state = State.OPEN
        self.devices = devices
        self.n_ranks = len(devices)
        self.master_rank = master_rank
        self.lock = threading.RLock()  # keeps other threads out of a call
        self.inside = threading.Lock()  # is taken in a call
        self._death = None
        self._processes = {}
        self.garbage = Garbage()
        self._answers = {}
        self.staged = {}  # shared memory that collectives keep for plain values
        self.recording = None  # of a profile
        self.registry = Registry(self)
        self.gate = Gate(self.n_ranks, master_rank, self.n_ranks <= _devices.usable_cores())
        self.worker = Worker(master_rank, self.gate, devices, threads, self._on_release)
        # Weak: a variable lives as long as the user's reference or a function of the user's.
        self.worker.variables = weakref.WeakValueDictionary()
        self.gate.on_answer = self._hear
        try:
            self._start_workers(threads, profile_workers)
        except BaseException:
            self.release()
            raise

    def begin(self) -> None:
        """Have all ranks take their devices."""
        self.run(_commands.Ready())
        self._connect_devices()
        log.info("ranks on %s; the master is rank %d", ", ".join(self.devices), self.master_rank)

    def _start_workers(self, threads, profile):
        for rank in range(self.n_ranks):
            if rank == self.master_rank:
                continue
            worker = functools.partial(be_worker, rank, self.gate, self.devices, threads, profile)
            process = self._processes[rank] = ForkedProcess(worker)
            self.gate.watch(rank, process)

    def _connect_devices(self):
        """Have the ranks' devices reduce with one another, where they can; else say so, once."""
        if set(self.devices) == {"cpu"}:
            return
        if self.comm.can_join:
            try:
                self.run(_commands.JoinClique(self.comm.make_clique_id()))
                return
            except Exception as error:
                log.warning("NCCL can't be used (see `synkhronos info`): %s", error)
                self.run(_commands.LeaveClique())
        log.info("arrays of devices travel between ranks through shared memory")

    # Calls.

    @property
    def segments(self):
        """The segments of shared memory that the master knows."""
        return self.worker.segments

    @property
    def worker_pids(self):
        """The process ids of the workers, in rank order."""
        return [process.pid for process in self._processes.values()]

    @property
    def comm(self):
        """The master's communicator."""
        return self.worker.comm

    def require_open(self) -> None:
        """Raise unless the session is open."""
        if self.state is State.BROKEN:
            raise WorkerDied(*self._death)
        if self.state is State.CLOSED:
            raise SessionError(
                "This object belongs to a Synkhronos session that was closed. Make it again after "
                "the next synkhronos.fork()."
            )

    def refuse_nesting(self) -> None:
        """Raise if this thread, which holds `lock`, is in a call already.

        Every call does ``with lock: refuse_nesting(); with inside: ...``. These are C locks in
        with statements: nothing else is both taken and given back whenever a Ctrl-C comes.
        """
        if self.inside.locked():
            raise SessionError(
                "Synkhronos was called while it was in the middle of another call, from a signal "
                "handler or a finalizer. Call it after that call has returned."
            )

    def settle(self) -> None:
        """Wait until the workers are out of a call that was interrupted.

        Before inputs are staged: a worker could still be reading those of that call.
        """
        if self.gate.is_open:
            try:
                self.gate.drain()
            except WorkerDied as death:
                self._break(death)
                raise

    def run(self, command):
        """Run one command on every rank, between the barriers; return the master's own answer."""
        self.require_open()
        try:
            if self.garbage:
                self.garbage.collect(self.gate, self.worker)
            with self.gate.call(command):
                return command.run(self.worker)
        except WorkerDied as death:
            self._break(death)
            raise
        except BaseException as error:
            self.comm.keep(())  # outputs may be views of what the caller wants to be rid of
            if isinstance(error, Exception):
                self.require_open()  # a signal handler may have closed it
            raise

    def ask(self, command) -> list:
        """Run one command on every rank; return the answers, None too, in rank order."""
        self._answers = {}
        self._answers[self.master_rank] = self.run(command)
        return [self._answers.get(rank) for rank in range(self.n_ranks)]

    def _hear(self, rank, answer):
        if not self.comm.take_note(rank, answer):
            self._answers[rank] = answer

    def _break(self, death):
        self.comm.keep(())
        if self.state is not State.OPEN:
            self.require_open()  # another thread has closed it: that is why workers are gone
        # Not the exception itself, here and in the log: its frames would keep the user's arrays.
        self.state, self._death = State.BROKEN, (str(death), death.rank, death.exitcode)
        log.error("%s", self._death[0])
        kill_all(self._processes.values(), 1)

    def _on_release(self, ref, give_back):
        if self.state is State.OPEN and self.gate.is_open:
            self.garbage.add("give_back", give_back)  # workers may be reading it
        else:
            give_back()
        self.garbage.add("segments", ref)

    # The end.

    def quit(self) -> None:
        """Refuse calls from now on; have idle workers end by themselves, and wait for that.

        Workers that are in a call are killed, and a thread that waits for them in there is waited
        for, so that it leaves before its descriptors do.
        """
        with interrupts_held():
            is_free = self.lock.acquire(blocking=False)  # else another thread is in a call
            is_idle = is_free and not self.inside.locked() and not self.gate.is_open
            is_idle = is_idle and self.state is State.OPEN
            self.state = State.CLOSED
            if is_idle:
                with contextlib.suppress(WorkerDied):
                    self.gate.start(_commands.Quit())
            if is_free:
                self.lock.release()
        if is_idle:
            join_all(self._processes.values(), QUIT_SECONDS)
        if not is_free:
            kill_all(self._processes.values(), QUIT_SECONDS)
            if self.lock.acquire(timeout=QUIT_SECONDS):
                self.lock.release()

    def release(self) -> None:
        """End the workers that are left, and give everything back; safe to call in any state."""
        self.state = State.CLOSED
        kill_all(self._processes.values(), QUIT_SECONDS)
        for process in self._processes.values():
            process.close()
        self.worker.unbind()
        self.worker.comm.close()
        self.worker.replicas.clear()
        self.registry.release()
        self.staged.clear()
        self.garbage.give_back()
        self.gate.close()

    def leave_in_child(self) -> None:
        """Give up the session in a process that the user forked from the master."""
        self.state = State.CLOSED
        name_rank(None)
        self.gate.close_in_child()


class _Current:
    """The only state of the package: the session that public functions use."""

    session: Optional[Session] = None
    lock = threading.RLock()  # is taken where one begins or ends


def current(caller: str) -> Session:
    """Return the open session, or raise SessionError, saying what `caller` needs."""
    session = _Current.session
    if session is None:
        raise SessionError(
            f"{caller} needs workers: call synkhronos.fork() first. There is no session now."
        )
    session.require_open()
    return session


def fork(
    n_parallel: Optional[int] = None,
    use_gpu: Optional[bool] = None,
    master_rank: int = 0,
    profile_workers: bool = False,
    max_n_var: int = 1000,
    max_dim: int = 16,
    *,
    devices: Optional[Sequence[str]] = None,
    threads_per_rank: Optional[int] = None,
) -> int:
    """Start the workers: one process for each rank but the master's own, which is this process.

    Parameters
    ----------
    n_parallel : int, optional
        The number of ranks, the master included; 1 and more than there are cores work. By default
        one for each CUDA device, or where there is none, for each core that this process may use.
    use_gpu : bool, optional
        True asks for CUDA devices, False for CPU cores.
    master_rank : int
        The rank of this process, from 0 to ``n_parallel - 1``.
    profile_workers : bool
        Each worker writes a cProfile, ``synk_worker_<rank>.prof``, into the working directory when
        the session is closed.
    max_n_var, max_dim : int
        Ignored: there is no limit on the number of variables or dimensions any more.
    devices : list of str, optional
        The device of each rank, such as ``["cpu"] * 4``, ``["cuda0", "cuda1"]`` or
        ``["opencl0:0"] * 2``; ranks may share one, and kinds may be mixed. The environment variable
        ``SYNKHRONOS_DEVICES=cpu,cpu`` does the same from outside.
    threads_per_rank : int, optional
        How many threads BLAS and OpenMP may use in each rank; by default the usable cores divided
        by the ranks, at least 1.

    Returns
    -------
    int
        The number of ranks.

    Raises
    ------
    SessionError
        When there is a session already, or this process has opened a device; a RuntimeError.
    TypeError, ValueError
        For arguments that are of the wrong kind or don't agree.
    ImportError
        For ranks on devices, without pygpu.
    WorkerError
        When a rank can't open its device.
    WorkerDied
        When a worker did not start.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> synk.close()
    """
    with _Current.lock:
        return _fork(devices, n_parallel, use_gpu, threads_per_rank, master_rank, profile_workers)


def _fork(devices, n_parallel, use_gpu, threads_per_rank, master_rank, profile_workers):
    if _Current.session is not None:
        raise SessionError(
            "fork() was called while a session is there: only fork once, or close() it before."
        )
    profile_file = os.environ.get("SYNKHRONOS_PROFILE")
    if profile_file:
        from synkhronos import profiling

        profiling.check_file(profile_file)
    names = _devices.resolve(n_parallel, use_gpu, devices)
    _gpuarrays.refuse_open_device()
    if set(names) != {"cpu"}:
        _gpuarrays.import_backend()
    threads = (
        _devices.default_threads(len(names))
        if threads_per_rank is None
        else whole_number("threads_per_rank", threads_per_rank, 1, _MOST_THREADS)
    )
    profile_workers = truth("profile_workers", profile_workers)
    master = whole_number("master_rank", master_rank, 0, len(names) - 1)
    try:
        with interrupts_held():
            _Current.session = Session(names, threads, master, profile_workers)
        _Current.session.begin()
    except BaseException as error:
        _end_current()
        if not isinstance(error, OSError):
            raise
        raise SessionError(
            f"fork() can't start {count(len(names), 'rank')} on this machine: {error}. Each "
            "takes a process and, of the master, four descriptors and two for each Data (see "
            "ulimit -n, ulimit -u)."
        ) from error
    if profile_file:
        profiling.record_until_close(profile_file)
    return len(names)


def close() -> None:
    """End the session: stop the workers, and give all shared memory back.

    After it :func:`fork` may be called again; objects of the closed session refuse to be used.
    Called at the end of the interpreter, too. Without a session it does nothing but say so, in the
    log.
    """
    session = _Current.session
    if session is None:
        log.warning("close() has no effect: there is no session.")
        return
    try:
        session.quit()
    finally:
        _end_current()
    log.info("the session is closed")


def _end_current():
    # A Ctrl-C that comes before leaves a session that can be closed.
    with interrupts_held(), _Current.lock:
        if _Current.session is not None:
            _Current.session.release()
        _Current.session = None


def _close_at_exit():
    if _Current.session is not None:
        close()


def _leave_in_child():
    session, _Current.session, _Current.lock = _Current.session, None, threading.RLock()
    if session is not None:
        session.leave_in_child()


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_leave_in_child)
