"""Begin and end of the session: `fork` and `close`.

    none ── fork() ──▶ OPEN ── close(), or the end of the interpreter ──▶ CLOSED
                        └── a worker died ──▶ BROKEN ── close() ──▶ CLOSED

A process has at most one session at a time.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - a fork must take its lock after the one below
import contextlib
import functools
import os
import sys
import threading
from typing import Optional, Sequence, Union

from synkhronos import _host, profiling
from synkhronos._calls.check import number_of_calls, of_environment
from synkhronos._machine.devices import default_threads, resolve
from synkhronos._machine.interrupts import interrupts_held, is_of_handler
from synkhronos._machine.log import log
from synkhronos._machine.processes import take_standard_streams
from synkhronos._machine.shared_memory import check_sharing
from synkhronos._session.current import Current as _Current
from synkhronos._session.current import current
from synkhronos._session.session import Session
from synkhronos._tracebacks import show_short
from synkhronos._wording import advise, count, shown, truth, whole_number
from synkhronos.comm.mpi import job
from synkhronos.comm.transports import make_gate_of_machines
from synkhronos.errors import SessionError

# Import now: when status() is called, no free descriptor may be left to read a module.
from synkhronos.profiling import status as _status  # noqa: F401

_PATIENCE = 3.0  # seconds that a fork of the script waits for those of a session
_MOST_THREADS = (1 << 31) - 1  # BLAS and OpenMP take the number as a C int


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
    follow: bool = False,
    check: Optional[Union[bool, int, str]] = None,
    restart: bool = False,
    compress: Optional[str] = None,
    overlap: bool = True,
) -> int:
    """Start the workers: one process for each rank but the master's, which is this process.

    Parameters
    ----------
    n_parallel : int, optional
        The number of ranks, the master included; it may be 1, or more than there are cores. By
        default the number given to ``synkhronos run`` or ``launch``; else one for each CUDA device
        or, without any or with PyTensor, one for each core that this process may use.
    use_gpu : bool, optional
        True asks for CUDA devices, False for CPU cores.
    master_rank : int
        The rank of this process, from 0 to ``n_parallel - 1``.
    profile_workers : bool
        If true, each worker writes a cProfile, ``synk_worker_<rank>.prof``, when the session is
        closed, into the folder that was the working directory in ``fork()``.
    max_n_var, max_dim : int
        Ignored: there is no limit on the number of variables or dimensions any more.
    devices : list of str, optional
        The device of each rank, such as ``["cpu"] * 4`` or ``["cuda0", "cuda1"]``, with Theano
        ``["opencl0:0"] * 2``, and with PyTensor ``["jax:cpu"] * 2``; ranks may share one, and kinds
        may be mixed. By default the environment variable ``SYNKHRONOS_DEVICES=cpu,cpu`` names the
        devices, if it is set.
    threads_per_rank : int, optional
        The number of threads that BLAS and OpenMP may use in each rank; by default the usable cores
        divided by the ranks, at least 1.
    follow : bool
        If true, a value that the script gives a shared variable in the master (``set_value``,
        ``container.value =``, or a write to an array that the variable borrows, or that was
        borrowed from it) is broadcast before the next call, unless each rank was given a value of
        its own (``scatter``, ``set_value``). By default only the master has the new value, and the
        next call of a function that uses the variable warns, with a PortingWarning, if other ranks
        have another.
    check : {"first"}, bool or int, optional
        The default of the argument ``check`` of :func:`~synkhronos.function`. Without it, the
        environment variable ``SYNKHRONOS_CHECK`` gives it (0, 1, a number of calls, or first); else
        it is ``"first"``.
    restart : bool
        If true, the present session is closed first, so that a cell of a notebook can be run
        again. Functions of closed sessions then work in this one: their first call sends them to
        the workers, without compiling them again. Shared variables have the master's values. Data
        must be made again: their memory is freed.
    overlap : bool
        On several machines with ranks on CPU cores: if true, a function with several
        :func:`ops.all_reduce <synkhronos.ops.all_reduce>` begins each one as soon as its array is
        computed, and goes on computing meanwhile. The results are the same.
    compress : {None, "float16"}
        On several machines, "float16" sends the floats of reductions between them in half
        precision, which halves the bytes: each machine rounds the sum over its ranks, the sums are
        added in single precision, and the result is rounded. Numbers beyond 65504 become infinite.

    Returns
    -------
    int
        The number of ranks, of all machines.

    Raises
    ------
    SessionError
        If there is a session already and `restart` is false, if this process has opened a device,
        or if ranks can't share memory. It is a RuntimeError.
    TypeError, ValueError
        For arguments of the wrong kind, and arguments that contradict each other.
    ImportError
        For ranks on other devices than CPU cores, without pygpu, or JAX for PyTensor.
    WorkerError
        If a rank can't open its device.
    WorkerDied
        If a worker does not start.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> synk.close()
    """
    show_short()
    with _Current.lock:
        restart = truth("restart", restart)
        session = _Current.session
        if session is not None and not restart and not session.may_be_replaced:
            why = (
                "fork() was called while a session is there: only fork once, or close() it before."
            )
            if {*session.devices} == {"cpu"}:  # a process opens devices once
                why += " In a notebook write fork(restart=True)."
            raise session.no_fork or SessionError(why)
        of_run = _Current.of_run
        if of_run is not None:
            if n_parallel is None and use_gpu is None and devices is None:
                n_parallel, devices = of_run["n_parallel"], of_run["devices"]
            if threads_per_rank is None:
                threads_per_rank = of_run["threads_per_rank"]
            follow, check = follow or of_run["follow"], of_run["check"] if check is None else check
        profile_file = profiling.file_of_environment()
        names = resolve(n_parallel, use_gpu, devices)
        _host.refuse_open_device()
        n_here = len(names)
        if _runs_script_again():
            advise(
                "fork() is called at the top of a script that multiprocessing runs again in each "
                f"process that it starts: each begins a session of {count(n_here, 'rank')}. Write "
                'if __name__ == "__main__": before synkhronos.fork() and what follows.'
            )
        if n_here > 1 or _Current.link is not None:
            check_sharing()
        if set(names) != {"cpu"}:
            _host.import_device_backend(names)
        threads = default_threads(n_here)
        if threads_per_rank is not None:
            threads = whole_number("threads_per_rank", threads_per_rank, 1, _MOST_THREADS)
        profile_workers = truth("profile_workers", profile_workers)
        follow = truth("follow", follow)
        overlap = truth("overlap", overlap)
        if compress is not None and str(compress) != "float16":
            raise ValueError(f"compress must be 'float16' or None, got {shown(compress)}.")
        check = of_environment() if check is None else number_of_calls("check", check)
        master = whole_number("master_rank", master_rank, 0, len(names) - 1)
        if _Current.session is not None:
            close()
        link, plan = _Current.link, None
        if link is not None:
            devices = None if devices is None else tuple(devices)
            wish = job.Wish(link.next_session(), n_parallel, use_gpu, devices, job.facts())
            more = master, threads_per_rank, profile_workers, compress is not None
            plan = job.plan(link, wish, names, *more)
            names = plan.devices
            if set(names) != {"cpu"}:
                _host.import_device_backend(names)
        _host.overlap_reductions(overlap and plan is not None and set(names) == {"cpu"})
        begin(
            plan, n_here, names, threads=threads, master_rank=master, follow=follow, check=check,
            profile_workers=profile_workers, adopts=restart,
        )  # fmt: skip
        if profile_file is not None:
            try:
                profiling.record_until_close(current("a profile"), profile_file)
            except BaseException:
                close()
                raise
        return len(names)


def _runs_script_again():
    """Return whether multiprocessing runs the script, up to this call, in a process it started."""
    frame = sys._getframe() if "__mp_main__" in sys.modules else None
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


def begin(plan, n_here, devices, **options):
    """Begin the current session, with `n_here` ranks here, on the machines of the plan if any."""
    try:
        # Nothing is raised between a worker's start and the assignment, so close() finds it.
        with _Current.forking, interrupts_held():
            _release_closed()
            take_standard_streams()
            gate = None
            if plan is not None:
                _Current.link.tell(None, ("plan", plan))
                gate = make_gate_of_machines(plan, _Current.link)
            _Current.session = Session(devices, gate=gate, **options)
        _Current.session.on_loss = _Current.on_loss
        _Current.session.begin()
    except BaseException as error:
        _end_current()
        if not isinstance(error, OSError) or is_of_handler(error):
            raise
        raise SessionError(
            f"fork() can't start {count(n_here, 'rank')} on this machine: {error}. Each takes a "
            "process, and two descriptors of the master (see ulimit -n, ulimit -u)."
        ) from error


def restart_count() -> int:
    """Return how often ``synkhronos launch --restarts`` has started this script again: 0 at first.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If the environment variable ``SYNKHRONOS_RESTART`` is no number.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.restart_count()
    0
    """
    text = os.environ.get("SYNKHRONOS_RESTART", "0")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"SYNKHRONOS_RESTART must be a number, such as 0, got {text!r}.")
    return int(text)


def close() -> None:
    """End the session: stop the workers, and give all shared memory back.

    Afterwards :func:`fork` may be called again; objects of the closed session refuse to be used.
    The end of the interpreter closes the session, too. Without a session, ``close()`` only writes a
    warning to the log.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2), synk.close(), synk.fork(1), synk.close()
    (2, None, 1, None)
    """
    session = _Current.session
    if session is None:
        log.warning("close() has no effect: there is no session.")
        return _end_current()
    try:
        session.quit()
    finally:
        _end_current()
    log.info("the session is closed")


def _end_current():
    """End the current session, if any; give back all closed sessions that no call is in."""
    # A Ctrl-C before this line leaves a current session, which close() can end.
    with interrupts_held(), _Current.lock:
        if _Current.session is not None:
            _Current.session.end()
            _Current.parent = None
            _Current.closed.append(_Current.session)
        _Current.session = None
        _release_closed()


def _release_closed():
    """Give back the memory and descriptors of closed sessions, except while a call is in one.

    Such a call is in another thread, or was interrupted by a signal handler that called close().
    The next fork() or close(), or the end of the interpreter, gives its session back.
    """
    for session in list(_Current.closed):
        with session.held_if_unused() as is_free:
            if is_free:
                _Current.closed.remove(session)
                session.release()


def _close_at_exit():
    if _Current.session is not None:
        close()
    _end_current()
    link, _Current.link = _Current.link, None
    if link is not None:
        link.end()


def _leave_in_child():
    """Forget the session in a process that the user forked: its workers belong to the master."""
    with contextlib.suppress(RuntimeError):  # raised when it is not held any more
        while True:
            _Current.forking.release()
    session, _Current.session, _Current.lock = _Current.session, None, threading.RLock()
    _Current.closed, _Current.link = [], None
    if session is not None:
        _Current.parent = os.getppid()
        session.leave_in_child(_Current.parent)


atexit.register(_close_at_exit)
# Another thread's fork waits until the workers are forked: otherwise its child would keep the pipes
# open that report a death, and `_leave_in_child` would not know them. The wait has a limit, because
# the fork handler of another library may hold a lock that the thread in `begin` needs. The
# handlers are methods in C, so that no signal handler can raise in them.
os.register_at_fork(
    before=functools.partial(_Current.forking.acquire, timeout=_PATIENCE),
    after_in_parent=_Current.forking.release,
    after_in_child=_leave_in_child,
)
