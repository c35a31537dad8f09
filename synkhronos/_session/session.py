"""A session on the master, from fork to close.

Every command to the workers goes through `Session.run`, which first sends one to forget what the
script no longer needs; but the last, `Quit`, goes to the gate alone.
"""

import contextlib
import enum
import gc
import inspect
import sys
import threading
import weakref

from synkhronos._machine.devices import end_openmp_threads
from synkhronos._machine.instances import instances_of
from synkhronos._machine.interrupts import interrupts_held, raised_here
from synkhronos._machine.log import log, name_rank
from synkhronos._machine.processes import join_all, kill_all
from synkhronos._session import commands
from synkhronos._session.changes import Changes
from synkhronos._session.rank import Worker, start_workers
from synkhronos._session.registry import Garbage, Registry
from synkhronos._session.staging import StagedArrays
from synkhronos._tracebacks import show_short
from synkhronos.comm.transports import make_gate
from synkhronos.errors import SessionError, WorkerDied

_ASKED_AT_ONCE = 500  # shapes of 32 dimensions each: they fit into one answer of a worker
QUIT_SECONDS = 5.0  # an idle worker that has not ended by itself after this time is killed


class SessionState(enum.Enum):
    """The state of a session; the value says what each call does, or whether it is refused."""

    OPEN = "every call"
    BROKEN = "refuse, with the death of a worker as the reason; close"
    CLOSED = "refuse"
    LEFT = "refuse: it is open in the process from which this one was forked"


class Session:
    """The master's side of one session: its workers, its own rank, and its state."""

    def __init__(self, devices, threads, master_rank, profile_workers, follow, check, adopts, gate):
        self.state = SessionState.OPEN
        self.adopts = adopts  # whether functions of closed sessions join it when they are called
        self.devices = devices
        self.n_ranks = len(devices)
        self.check = check  # the default of function()'s argument `check`
        self.master_rank = master_rank
        self.lock = threading.RLock()  # held in a call; calls of other threads wait for it
        self.inside = threading.Lock()  # held in a call; a nested call of the thread finds it held
        self.is_of_run = False  # whether `synkhronos run` has begun it, before the script
        self.no_fork = None  # what fork() raises while it is open, if there is a better reason
        self._death = None
        self._has_failed = False  # whether a call has raised
        self.on_loss = lambda why: None  # called at the death of a worker
        self._processes = {}
        self.pids = []  # of all ranks, in rank order
        self.garbage = Garbage()
        self._answers = {}
        self.staged = StagedArrays(self)  # memory that collectives keep for plain values
        self.held = []  # Contents of Data that this call reads; other threads may resize the Data
        self.told_unequal = weakref.WeakSet()  # variables that `save` has warned about
        self.recording = None  # a Recording while a profile is on
        self.registry = Registry(self)
        self.changes = Changes(self, follow)
        show_short()
        if self.n_ranks > 1:
            end_openmp_threads(threads)
        self.gate = make_gate(self.n_ranks, master_rank) if gate is None else gate
        self.worker = Worker(master_rank, self.gate, devices, threads, self._on_release)
        self.comm = self.worker.comm
        self.comm.memory.has_data = self.registry.has_data
        self.repeated = commands.Repeated(self.comm.variables.storage)
        # Weak: the user's references and functions keep the variables alive.
        self.worker.variables = weakref.WeakValueDictionary()
        self.gate.on_answer = self._hear
        try:
            ranks = self.gate.ranks_here
            # Workers inherit the limits: if they set them, the BLAS would start threads there.
            self.worker.limit_threads()
            start_workers(self._processes, self.gate, ranks, devices, threads, profile_workers)
        except BaseException:
            self.end()
            self.release()
            raise

    def __reduce__(self):
        raise TypeError(
            "A session can't be pickled or copied: its workers are children of this process."
        )

    def begin(self) -> None:
        """Wait until all ranks have started and opened their devices."""
        self.pids = self.ask(commands.Ready())
        self._connect_devices()
        log.info("ranks on %s; the master is rank %d", ", ".join(self.devices), self.master_rank)

    def _connect_devices(self):
        """Connect the ranks' devices with one another, or log once that this fails."""
        if set(self.devices) == {"cpu"}:
            return
        if self.comm.devices is not None:
            try:
                self.run(commands.Join(self.comm.devices.introduction()))
                return
            except raised_here(Exception) as error:
                log.warning("NCCL can't be used (see `synkhronos info`): %s", error)
                self.run(commands.Join(None))
        log.info("arrays of devices travel between ranks through shared memory")

    @property
    def may_be_replaced(self):
        """Whether fork() may replace this session: `synkhronos run` made it, it is not used yet."""
        return self.is_of_run and not self.registry.functions() and not self.registry.data()

    @property
    def worker_pids(self):
        """The process ids of the workers, in rank order."""
        return [process.pid for process in self._processes.values()]

    def require_open(self) -> None:
        """Raise unless the session is open."""
        if self.state is SessionState.BROKEN:
            raise WorkerDied(*self._death)
        if self.state is SessionState.LEFT:
            raise SessionError(
                f"This object belongs to a Synkhronos session of process {self._parent}, from "
                "which this one was forked. Use it there; or call synkhronos.fork() here, and make "
                "it again."
            )
        if self.state is SessionState.CLOSED:
            raise SessionError(
                "This object belongs to a Synkhronos session that was closed. Make it again after "
                "the next synkhronos.fork()."
            )

    def refuse_nesting(self) -> None:
        """Raise if this thread, which holds `lock`, is in a call already.

        Every call does ``with lock: refuse_nesting(); with inside: ...``. Only ``with`` on a C lock
        can't be split by a KeyboardInterrupt, which would leave the lock held for ever.
        """
        if self.inside.locked():
            _Steps.leave_interrupted(self)
        if self.inside.locked():
            raise SessionError(
                "Synkhronos was called while it was in the middle of another call, from a signal "
                "handler or a finalizer. Call it after that call has returned."
            )

    def call(self, name: str, broadcasts: bool = True):
        """Return a context for a call, with this session; calls of other threads wait for its end.

        With `broadcasts` the ranks first get the values that the script has set in the master.
        """
        recording = self.recording
        if recording is None:
            return _Steps(self, self._enter(broadcasts))
        return _RecordedSteps(self, self._enter_recorded(recording, name, broadcasts))

    def _enter(self, broadcasts):
        if self.state is not SessionState.OPEN:
            self.require_open()  # before the lock: a call of a closed session may hold it
        with self.lock:
            if self.state is not SessionState.OPEN:
                self.require_open()
            if self.inside.locked():
                self.refuse_nesting()
            with self.inside:
                if self.gate.is_in_call:
                    self.drain()
                if broadcasts and self.changes.pending:
                    self.changes.broadcast_or_warn()
                yield self
                if self.held:
                    self.release_data()
                if self.changes.borrowed:
                    self.changes.put_back()

    def _enter_recorded(self, recording, name, broadcasts):
        with self.lock, recording.call(name):
            yield from self._enter(broadcasts)

    def release_data(self) -> None:
        """Release the contents of Data that the call has read, unless workers may still read."""
        if not self.gate.is_in_call:  # it is after a Ctrl-C
            self.held.clear()

    def drain(self) -> None:
        """Wait until the workers are out of a call that was interrupted.

        Call it before inputs are staged: a worker may still be reading the inputs of that call.
        """
        if self.gate.is_in_call:
            try:
                self.gate.drain()
            except WorkerDied as death:
                self._break(death)
                raise

    def run(self, command, *arguments):
        """Run one command on every rank, between the barriers; return the master's own answer.

        On the master, the command's `run` also gets `arguments`.
        """
        if self.state is not SessionState.OPEN:
            self.require_open()
        try:
            if self.garbage.released:
                self.garbage.collect(self.gate, run_on_all, self.worker)
            return run_on_all(self.gate, command, self.worker, *arguments)
        except WorkerDied as death:
            self._break(death)
            raise
        except BaseException:
            self._has_failed = True
            self.changes.made += 1  # some ranks may have changed variables
            raise

    def run_collective(self, command):
        """Run a command that sets variables on all ranks; note whether it leaves equal values.

        Return what the master's part returns: if it is not None, the command has set nothing.
        """
        if not command.leaves_equal:
            self.changes.note_apart(command.keys)  # first: it may fail when some ranks have values
        answer = self.run(command)
        if command.ends_on_master:
            answer = command.end(self.worker)
        if answer is None and command.leaves_equal:
            self.changes.note_equal(command.keys)
        return answer

    def repeat(self, options, shared_vars) -> bool:
        """Call a collective again whose arguments were checked; return whether that was done.

        It is not if `repeated`, which describes the arguments, has no such call, and if values of
        the variables have other shapes on other ranks: then nothing has changed.
        """
        command = self.repeated.find(options, shared_vars)
        if command is None:
            return False
        if self.recording or self.changes.follow or self.state is not SessionState.OPEN:
            with self.call(f"{options[0]}()"):
                return self.run_collective(command) is None
        with self.lock:  # the same with fewer calls of functions
            if self.inside.locked():
                self.refuse_nesting()
            with self.inside:
                if self.gate.is_in_call:
                    self.drain()
                if self.changes.pending:
                    self.changes.broadcast_or_warn()
                return self.run_collective(command) is None

    def ask(self, command) -> list:
        """Run one command on every rank; return the answers, some of them None, in rank order."""
        self._answers = {}
        self._answers[self.master_rank] = self.run(command)
        return [self._answers.get(rank) for rank in range(self.n_ranks)]

    def ask_of_each(self, command, variables) -> list:
        """Ask `command` of shared variables; return the answers of all ranks for each variable."""
        found, keys = [], self.registry.keys_of(variables)
        for begin in range(0, len(keys), _ASKED_AT_ONCE):
            answers = self.ask(command(keys[begin : begin + _ASKED_AT_ONCE]))
            found.extend(map(list, zip(*answers)))
        return found

    def _hear(self, rank, answer):
        if not self.comm.outputs.hear(rank, answer):
            self._answers[rank] = answer

    def _break(self, death):
        if self.state is not SessionState.OPEN:
            self.require_open()  # raises: another thread has closed it, and so ended the workers
        # Don't keep or log the exception itself: its frames would keep the user's arrays.
        self._has_failed = True
        self.state, self._death = SessionState.BROKEN, (str(death), death.rank, death.exitcode)
        log.info("%s", self._death[0])  # the exception tells the user
        self.on_loss(self._death[0])
        self.gate.dismiss()
        kill_all(self._processes.values(), 1)
        self.comm.abort()

    def _on_release(self, ref, give_back):
        # A finalizer calls this when the master's last view of a block is gone. Between calls no
        # worker reads the block: free it now. Workers drop their maps with the next command.
        if self.state is SessionState.OPEN and self.gate.is_in_call:
            self.garbage.add("give_back", give_back)  # workers may still be reading the block
        else:
            give_back()
        self.garbage.add("references", ref)

    @contextlib.contextmanager
    def held_if_unused(self):
        """Hold the session in a context, if no call is in it; yield whether it is held.

        The call may be in another thread, or in this one if a signal handler or a finalizer closes
        the session.
        """
        with interrupts_held():
            is_held = self.lock.acquire(blocking=False)
            try:
                yield is_held and not self.inside.locked()
            finally:
                if is_held:
                    self.lock.release()

    def quit(self) -> None:
        """Refuse calls from now on; make idle workers end, and wait for this.

        If a thread is in a call, kill the workers, and give the thread time to leave it. `end`
        kills those that are still in a call which Ctrl-C has interrupted.
        """
        with self.held_if_unused() as is_free:
            is_idle = is_free and self.state is SessionState.OPEN and not self.gate.is_in_call
            if is_idle and self.recording is not None:
                self.recording.fetch()
            self.state = SessionState.CLOSED
            if is_idle:
                with contextlib.suppress(WorkerDied):
                    self.gate.start(commands.Quit())
        if is_idle:
            join_all(self._processes.values(), QUIT_SECONDS)
        elif not is_free:
            kill_all(self._processes.values(), QUIT_SECONDS)
            if self.lock.acquire(timeout=QUIT_SECONDS):
                self.lock.release()

    def end(self) -> None:
        """Kill the workers that are left, and restore this process. Safe to call in any state."""
        self.state = SessionState.CLOSED
        self.gate.dismiss()
        kill_all(self._processes.values(), QUIT_SECONDS)
        if self.gate.is_in_call:
            self.comm.abort()  # a worker may have been killed in a round
        self.worker.unbind()
        self.registry.unwatch()
        if self.recording is not None:
            self.recording.close()

    def release(self) -> None:
        """Free all memory and descriptors, after `end`.

        No worker is left and no call is in the session, so nothing reads the memory any more.
        """
        for process in self._processes.values():
            process.close()
        self.comm.close()
        self.worker.replicas.clear()
        self.registry.release()
        self.staged.clear()
        self.held.clear()
        self.garbage.give_back()
        self.gate.close()
        if self._has_failed:
            gc.collect()  # tracebacks of Theano's errors are in cycles, with views of the memory

    def leave_in_child(self, parent) -> None:
        """Abandon the session in a process that the user forked from the master, which keeps it."""
        # Set the state first: the connection with other machines is the master's.
        self.state, self._parent = SessionState.LEFT, parent
        if self.recording is not None:
            self.recording.leave()
        name_rank(None)
        self.gate.close_in_child()


def run_on_all(gate, command, *arguments):
    """Run a command on all ranks, between the barriers; return what it returns on the master.

    The master's part is ``command.run(*arguments)``. If that raises, the ranks still pass the
    finish barrier; then the errors of all ranks are raised as one WorkerError.
    """
    recorder = gate.recorder
    if recorder is None:
        gate.start(command)
    else:
        with recorder.span("start"):
            gate.start(command)
    try:
        answer = command.run(*arguments)
    except BaseException as error:
        gate.leave(error)
        raise
    if gate.recorder is None:
        gate.finish()
    else:
        gate.finish_recorded()
    if gate.errors:
        gate.raise_errors()
    return answer


class _Steps:
    """A context of a generator with one ``yield``, which runs to its end also after an exception.

    It takes a third of the time of ``contextlib.contextmanager``. A Ctrl-C before the block begins
    frees the generator, which then leaves its own with blocks. After a Ctrl-C before the first line
    of `__exit__`, the traceback keeps the generator and its locks: in a notebook, until the next
    exception. `leave_interrupted` releases them earlier.
    """

    __slots__ = ("_caller", "_session", "_steps")

    def __init__(self, session, steps):
        self._session, self._steps = session, steps

    def __enter__(self):
        self._caller = id(sys._getframe(1))  # not the frame: it would keep the user's arrays
        return next(self._steps)

    def __exit__(self, kind, error, trace):
        next(self._steps, None)

    @staticmethod
    def leave_interrupted(session):
        """Leave a call that this thread has made in a session, if its block was interrupted."""
        running, frame = set(), sys._getframe()
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        for each in instances_of(_Steps, _RecordedSteps):
            if each._is_left(session, running):
                each._steps.close()

    def _is_left(self, session, running):
        # A running generator belongs to another thread, which waits for the lock.
        steps = getattr(self, "_steps", None)
        is_entered = steps and inspect.getgeneratorstate(steps) == inspect.GEN_SUSPENDED
        return is_entered and self._session is session and self._caller not in running


class _RecordedSteps(_Steps):
    """The context of a recorded call: the generator gets the exception, for the record."""

    __slots__ = ()

    def __exit__(self, kind, error, trace):
        if kind is None:
            next(self._steps, None)
            return
        try:
            self._steps.throw(error)
        except BaseException as raised:
            if raised is not error:
                raise
            error.__traceback__ = trace  # without the lines of the generators
