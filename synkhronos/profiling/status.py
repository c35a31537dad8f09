"""The status of a session: read from this process and from /proc, without asking a worker."""

import os
import sys
from dataclasses import dataclass
from typing import Dict, Hashable, Literal, Optional, Tuple, Union, overload

from synkhronos import _host, _systems
from synkhronos._machine.processes import life_and_memory_of
from synkhronos._session.current import Current, current
from synkhronos._session.session import SessionState
from synkhronos._wording import one_line, truth
from synkhronos.profiling.live import LiveStatus
from synkhronos.profiling.tables import Tables


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank.

    Attributes
    ----------
    rank : int
    device : str
    pid : int
    is_master : bool
    process : str
        "running", "sleeping" (waiting, for a command too), "waiting for the system", "stopped" (by
        a signal), "stopped by a debugger", "ended", "gone" (ended, and the master has collected its
        exit status), or "unknown" if the system did not tell.
    resident : int or None
        Bytes of memory that the process has in use, memory shared with other processes included;
        None if the system did not tell.
    shared : int or None
        Bytes of the session's shared memory that this rank has mapped, made by any rank; None if
        the system did not tell.
    host : str or None
        The name of the rank's machine, if that is another one than the master's. The system does
        not tell of processes there.
    """

    rank: int
    device: str
    pid: int
    is_master: bool
    process: str
    resident: Optional[int]
    shared: Optional[int]
    host: Optional[str] = None


@dataclass(frozen=True)
class FunctionStatus:
    """The status of one function: its name, whether workers have it, its shared variables."""

    name: str
    is_distributed: bool
    shared_variables: Tuple[str, ...]


@dataclass(frozen=True)
class ArrayStatus:
    """The status of one Data, or of the master's value of one shared variable.

    Attributes
    ----------
    name : str or None
    dtype : str
        The type of the variable, if it holds no array.
    shape : tuple of int or None
    nbytes : int
    home : str
        "shared memory", "private memory" or "device".
    """

    name: Optional[str]
    dtype: str
    shape: Optional[Tuple[int, ...]]
    nbytes: int
    home: str


@dataclass(frozen=True, repr=False)
class Status(Tables):
    """The status of a session at one moment; made by :func:`status`, and shown as tables.

    Attributes
    ----------
    state : str
        "no session", "open", "in a call", "interrupted" (the workers may still be in a call that
        the master has left), or "broken" (a worker died).
    master_rank : int or None
    commands : int
        The number of commands that were sent to the workers; a call sends one, or a few.
    shared : int or None
        Bytes of shared memory that the session has in use on this machine, counted once if several
        ranks have mapped them; None if the system did not tell it for a rank.
    ranks : tuple of RankStatus
    functions : tuple of FunctionStatus
    n_distributed : int
        The number of functions that were sent to ranks so far, including those deleted since.
    n_alone : int or None
        The number of functions that the script has made by ``theano.function`` or
        ``pytensor.function``: they run in this process alone. None with `parallel`, PyMC or a
        parameter server, where such functions may use ranks.
    data : tuple of ArrayStatus
    shared_variables : tuple of ArrayStatus
    """

    state: str
    master_rank: Optional[int] = None
    commands: int = 0
    shared: Optional[int] = 0
    ranks: Tuple[RankStatus, ...] = ()
    functions: Tuple[FunctionStatus, ...] = ()
    data: Tuple[ArrayStatus, ...] = ()
    shared_variables: Tuple[ArrayStatus, ...] = ()
    n_distributed: int = 0
    n_alone: Optional[int] = None

    def _headline(self):
        if not self.ranks:
            return f"Synkhronos: {self.state}"
        ranks = f"{len(self.ranks)} rank{'s' * (len(self.ranks) > 1)}"
        used = f"shared memory: {_amount(self.shared)}; commands sent: {self.commands:,}"
        if self.n_distributed or self.n_alone:
            alone = f", {self.n_alone} in this process alone" * bool(self.n_alone)
            used += f"; functions: {self.n_distributed} on ranks{alone}"
        return f"Synkhronos: {self.state}; {ranks}; {used}"

    def _tables(self):
        ranks = [
            (
                f"{each.rank}, master" if each.is_master else str(each.rank),
                each.device if each.host is None else f"{each.device} of {each.host}",
                str(each.pid),
                each.process,
                _amount(each.resident),
                _amount(each.shared),
            )
            for each in self.ranks
        ]
        functions = [
            (one_line(f.name), "yes" if f.is_distributed else "no", _list(f.shared_variables))
            for f in self.functions
        ]
        of_ranks = "rank", "device", "pid", "process", "resident", "shared"
        of_functions = "name", "workers have it", "shared variables"
        of_arrays = "name", "dtype", "shape", "size", "home"
        return [
            ("Ranks", of_ranks, ranks),
            ("Functions", of_functions, functions),
            ("Data", of_arrays, list(map(_cells, self.data))),
            ("Shared variables", of_arrays, list(map(_cells, self.shared_variables))),
        ]


@overload
def status(live: Literal[False] = False) -> Status: ...


@overload
def status(live: Literal[True]) -> LiveStatus: ...


def status(live: bool = False) -> Union[Status, LiveStatus]:
    """Return the status of the session: ranks, memory, functions, Data and shared variables.

    It reads the state of this process, and asks the system about the workers. It asks no worker and
    waits for none, so it can be called at any time: without a session, after a worker's death, and
    from another thread while a call is under way.

    Parameters
    ----------
    live : bool
        If true, return a context manager that shows a table of the ranks, which changes each
        second: the calls per second, and the part of the time that each rank computes and waits. A
        notebook shows it, or a terminal with rich; elsewhere the last table is printed.

    Returns
    -------
    Status
        It is shown as tables, in a notebook too; its attributes have the numbers.

    Raises
    ------
    SessionError, ImportError
        For `live` without a session, or in a terminal without rich.
    TypeError
        When `live` is not a truth value.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.status()
    Synkhronos: no session
    >>> synk.fork(2)
    2
    >>> d = synk.data([[1.0, 2.0]], name="d")
    >>> now = synk.status()
    >>> now.state, [rank.device for rank in now.ranks], now.data[0].shape
    ('open', ['cpu', 'cpu'], (1, 2))
    >>> now
    Synkhronos: open; 2 ranks; shared memory: 0.0 MB; commands sent: 1
    ...
    >>> synk.close()
    """
    if truth("live", live):
        current("a live status")
        return LiveStatus(status())
    session = Current.session
    if session is None:
        return Status("no session")
    segments: Dict[Hashable, int] = {}
    ranks = tuple([_rank(session, rank, segments) for rank in range(session.n_ranks)])
    is_told = all(rank.shared is not None or rank.host is not None for rank in ranks)
    functions = session.registry.functions()
    used = [variable for function in functions for variable in function.get_shared()]
    variables = dict.fromkeys([*used, *session.registry.variables()])
    return Status(
        state_of(session),
        session.master_rank,
        session.gate.sequence,
        sum(segments.values()) if is_told else None,
        ranks,
        tuple([_function(session, function) for function in functions]),
        tuple([_data(session, data) for data in session.registry.data()]),
        tuple([_variable(session, each) for each in variables]),
        session.registry.n_distributed,
        _count_alone(),
    )


def _count_alone():
    others = [each.compiles_in for each in _systems.there()]
    if Current.report is not None or any(map(sys.modules.get, others)):
        return None
    return _host.count_alone()


def state_of(session):
    """Return the state of a session, in words."""
    if session.state is SessionState.BROKEN:
        return "broken"
    if session.inside.locked():
        return "in a call"
    return "interrupted" if session.gate.is_in_call else "open"


def _rank(session, rank, segments):
    """Return the status of one rank; add the segments that it has mapped to `segments`."""
    pid, device = session.pids[rank] if session.pids else 0, session.devices[rank]
    host = session.gate.host_of(rank)
    if host is not None:
        return RankStatus(rank, device, pid, False, "unknown", None, None, host)
    process, resident = life_and_memory_of(pid, os.getpid())
    own = {} if process in ("ended", "gone") else session.comm.memory.mapped_by(pid)
    segments.update(own or {})
    shared, is_master = None if own is None else sum(own.values()), rank == session.master_rank
    return RankStatus(rank, device, pid, is_master, process, resident, shared)


def _function(session, function):
    used = tuple([_name(each) or str(each) for each in function.get_shared()])
    is_distributed = function._key not in session.registry.pending
    return FunctionStatus(str(function.name), is_distributed, used)


def _name(owner):
    return None if owner.name is None else str(owner.name)


def _data(session, data):
    array = data.data
    home = _home(session, array)
    return ArrayStatus(_name(data), array.dtype.name, array.shape, array.nbytes, home)


def _variable(session, variable):
    value = _host.peek(variable)
    if not _host.is_array_variable(variable):
        return ArrayStatus(_name(variable), str(variable.type), None, 0, "private memory")
    home = "device" if _host.lives_on_device(variable) else _home(session, value)
    nbytes = value.size * value.dtype.itemsize
    return ArrayStatus(_name(variable), variable.dtype, tuple(value.shape), nbytes, home)


def _home(session, array):
    return "shared memory" if session.comm.memory.holds(array) else "private memory"


def _cells(array):
    shape = "" if array.shape is None else str(array.shape)
    return one_line(array.name or ""), array.dtype, shape, _amount(array.nbytes), array.home


def _amount(nbytes):
    return "unknown" if nbytes is None else f"{1e-6 * nbytes:,.1f} MB"


def _list(names, most=4):
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(one_line, names[:most])) + more
