"""Profiles: the time of each part of a call, on each rank, as a table, a picture or a trace."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, ContextManager, Optional, Union

import numpy as np

from synkhronos._machine.log import log
from synkhronos._session.current import current
from synkhronos._wording import one_line, sentence, whole_number
from synkhronos.errors import SessionError
from synkhronos.profiling.recording import Recording
from synkhronos.profiling.timeline import NAMES, REST, Timeline
from synkhronos.profiling.views import KINDS, SUFFIXES, View, check_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from synkhronos._session.session import Session

__all__ = ["Profile", "profile"]

_ROOM = 1 << 17  # spans of each rank
_CHARACTERS = 100  # that fit side by side in a picture


def profile(room: int = _ROOM) -> ContextManager["Profile"]:
    """Record the time of each part of a call, on each rank, in the block of a ``with``.

    Functions may be made before the block or in it. The recording ends with the block or with
    :func:`~synkhronos.close`, and the profile can be read after both. Calls outside of the block
    are not recorded, and cost nothing more.

    Parameters
    ----------
    room : int
        The number of parts of calls that each rank may record, at 40 bytes of shared memory for
        each part; a call has about ten. Parts that come after these are dropped and counted: see
        :attr:`Profile.dropped`.

    Returns
    -------
    context manager
        It gives a :class:`~synkhronos.profiling.Profile`, which can be read at any time, in the
        block too.

    Raises
    ------
    SessionError
        Before :func:`~synkhronos.fork`, while another profile is being recorded, and when the
        context is entered a second time.
    TypeError, ValueError
        When `room` is not an integer of at least 1.
    SharedMemoryFull
        When the shared memory is full.

    Examples
    --------
    >>> import numpy as np, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x = T.vector("x", "float64")
    >>> f = synk.function([x], (x.sum(), "sum"), name="total")
    >>> with synk.profile() as recorded:
    ...     for _ in range(3):
    ...         total = f(np.arange(5.0))
    >>> synk.close()
    >>> calls = recorded.calls[recorded.calls["name"] == "total"]
    >>> calls["rank"].tolist()
    [0, 1, 0, 1, 0, 1]
    >>> bool((calls["compute"] < calls["seconds"]).all())
    True
    >>> print(recorded.summary())
    4 calls on 2 ranks in ... s
    <BLANKLINE>
    milliseconds of a call (medians; of the ranks, the lowest and highest)
           calls  raised  total s  ms  stage  start  ...
    ...
    >>> [axes] = recorded.plot().axes
    >>> axes.get_xlabel()
    'ms'
    """
    room = whole_number("room", room, 1)
    return _Recorded(Recording(current("profile()"), room))


class _Recorded:
    """The context manager of a profile: begin to record, and end."""

    _recording: Any = None

    def __init__(self, recording):
        self._recording, self._was_entered = recording, False

    def __enter__(self):
        if self._was_entered:
            raise SessionError(
                "A profile was entered a second time: each records one with block. Call "
                "synkhronos.profile() again for another."
            )
        self._was_entered = True
        try:
            self._recording.begin()
            return Profile(self._recording)
        except BaseException:
            self._recording.give_up()
            raise

    def __exit__(self, *error):
        try:
            self._recording.end()
        finally:  # a Ctrl-C may have ended the first call before it did anything
            self._recording.end()

    def __del__(self):
        if self._recording is not None:  # a Ctrl-C may have come before the line that sets it
            self._recording.end()  # or before the first line of `__exit__`


def file_of_environment() -> Optional[Path]:
    """Return the path that SYNKHRONOS_PROFILE names, if any; raise if it can't be written."""
    file = os.environ.get("SYNKHRONOS_PROFILE")
    if not file:
        return None
    path = check_file("SYNKHRONOS_PROFILE", file, SUFFIXES, KINDS)
    folder = path.parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {str(folder)!r}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "you may not write there"
    else:
        return path.absolute()  # the script may change its working directory
    raise ValueError(
        f"SYNKHRONOS_PROFILE must be a file that can be written, got {str(path)!r}: {reason}."
    )


def record_until_close(session: "Session", path: Path) -> None:
    """Record a session from now on; write the file when it is closed."""

    def save():
        try:
            Profile(recording).save(path)
        except Exception as error:  # close() goes on without the file
            log.error("the profile was not saved: %s", sentence(error))
        else:
            log.info("the profile is in %s", path)

    recording = Recording(session, _ROOM, save)
    recording.begin()


class Profile(View):
    """Times of the parts of calls; made by :func:`profile`.

    The parts of a call, on each rank:

    ===========  ===============================================================================
    part         what the rank does
    ===========  ===============================================================================
    ``stage``    the master copies arrays, lists and numbers into shared memory
    ``start``    a worker waits for the command, from the begin of the call on, while the master
                 checks and stages the arguments; the master sends the command
    ``rows``     the rank selects its rows of the inputs
    ``compute``  the rank runs the compiled function
    ``reduce``   the rank does its part of collectives, of ``ops.all_reduce`` inside functions,
                 and of the reduction of outputs
    ``meet``     the rank waits for other ranks in a reduction
    ``finish``   the rank waits for other ranks at the end of the call; a worker, until the call
                 has returned
    ``rest``     everything else
    ===========  ===============================================================================

    Attributes
    ----------
    n_ranks : int
    master_rank : int
    devices : tuple of str
        One for each rank.
    """

    # Waits are orange, and the rest of a call is grey, behind its parts.
    _colours: ClassVar = {
        "stage": "C9",
        "start": "#fdd0a2",
        "rows": "C4",
        "compute": "C0",
        "reduce": "C2",
        "meet": "#fd8d3c",
        "finish": "#fdae6b",
        REST: "0.85",
    }
    _inches = 0.6

    def __init__(self, recording):
        session = recording.session
        self.n_ranks, self.master_rank = session.n_ranks, session.master_rank
        self.devices = tuple(session.devices)
        self._recording = recording
        self._timeline = None

    def _read(self):
        """Return the timeline until now; keep it once the recording is over."""
        if self._timeline is not None:
            return self._timeline
        is_over = self._recording.is_over
        timeline = Timeline(self._recording.read()[0], self._recording.names, self.master_rank)
        if is_over:
            self._timeline = timeline
        return timeline

    @property
    def dropped(self) -> list:
        """For each rank, the number of parts of the last calls that it had no room for."""
        return self._recording.read()[1]

    @property
    def calls(self) -> np.ndarray:
        """The calls: one record for each call and rank, in the order of the calls.

        Fields: ``call``, its number; ``name``, of the function or collective, cut to 200 letters;
        ``function``, a number that tells functions of the same name apart; ``rank``; ``raised``,
        whether the call raised; ``begin``, in seconds of CLOCK_MONOTONIC; ``seconds``; the seconds
        of each part; and ``bytes``, the number that the rank copied or reduced. Sending a function
        to the workers is a call of its own, ``distribute()``. It may be inside another call, whose
        seconds do not include it.
        """
        return self._read().table()

    def summary(self) -> str:
        """Return a table of all functions and collectives, and one of all ranks, as text.

        The first table has the median milliseconds of a call; where ranks differ, the lowest and
        the highest median. The second table has sums over all calls. See the example of
        :func:`profile`.
        """
        return self._text()

    def _content(self):
        calls, ranks = self.calls, self._rank_names()
        columns, *functions = _lines_of_functions(calls, self.master_rank)
        title = "milliseconds of a call (medians; of the ranks, the lowest and highest)"
        of_ranks, *sums = _lines_of_ranks(calls, ranks)
        tables = [(title, columns, functions), ("seconds of all calls", of_ranks, sums)]
        return _headline(calls, len(ranks), self.dropped), tables if len(calls) else []

    def _rank_names(self):
        masters = [", master" if rank == self.master_rank else "" for rank in range(self.n_ranks)]
        return [f"rank {r} ({self.devices[r]}{masters[r]})" for r in range(self.n_ranks)]

    def _process(self):
        return 1, "synkhronos", {"dropped": self.dropped}

    def _bars(self):
        return dict(zip(self._rank_names(), self._read().bars))

    def plot(self, file: Optional[Union[str, os.PathLike]] = None, last: int = 5) -> "Figure":
        """Draw the parts of the last calls of each rank along an axis of time: see `profile`.

        Parameters
        ----------
        file : str or path, optional
            The file to write, in any format that Matplotlib knows: ``.png``, ``.svg``, ...
        last : int
            The number of calls; all, if fewer were recorded.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            Without Matplotlib.
        TypeError, ValueError
            When `file` is not a path, or its format is unknown to Matplotlib; when `last` is not an
            integer of at least 1.
        OSError
            When the file can't be written.
        """
        last = whole_number("last", last, 1)
        calls = self._read().outer_calls(self.master_rank)[-last:]
        begin = min((call.begin for call in calls), default=0)
        end = max((call.end for call in calls), default=0)
        marked = []
        for call in calls:
            room = _CHARACTERS * (call.end - call.begin) // (end - begin)
            label = one_line(call.label)[:room] if room > 3 else ""  # else names would overlap
            marked.append(call._replace(label=label))
        drawn = {
            rank: [bar for bar in bars if begin <= bar.begin < end]
            for rank, bars in self._bars().items()
        }
        return self._draw(file, drawn, marked)

    def __repr__(self):
        calls = len({*self.calls["call"].tolist()})
        state = "being recorded" if self._recording.is_on else "ended"
        return f"<Profile of {calls} calls on {self.n_ranks} ranks, {state}>"


def _headline(calls, n_ranks, dropped):
    text = f"{len({*calls['call'].tolist()})} calls on {n_ranks} rank{'s' * (n_ranks > 1)}"
    if len(calls):
        seconds = (calls["begin"] + calls["seconds"]).max() - calls["begin"].min()
        text += f" in {seconds:.3f} s"
    if any(dropped):
        text += f"; {sum(dropped):,} more parts of later calls had no room"
    return text


def _lines_of_functions(calls, master_rank):
    """Return the cells of each function or collective, sorted by total time, longest first."""
    lines = [("", "calls", "raised", "total s", "ms", *NAMES, "MB")]
    of_master = calls[calls["rank"] == master_rank]
    numbers = {*calls["function"].tolist()}
    masters = [of_master[of_master["function"] == number] for number in numbers]
    for master in sorted(masters, key=lambda rows: -rows["seconds"].sum()):
        rows = calls[calls["function"] == master["function"][0]]
        ranks = [rows[rows["rank"] == rank] for rank in {*rows["rank"].tolist()}]
        parts = [_range([1e3 * np.median(rank[name]) for rank in ranks]) for name in NAMES]
        line = [one_line(master["name"][0]), len(master), master["raised"].sum()]
        line += [f"{master['seconds'].sum():.3f}", _digits(1e3 * np.median(master["seconds"]))]
        moved = sum(np.median(rank["bytes"]) for rank in ranks)
        lines.append((*line, *parts, _digits(1e-6 * moved)))
    return lines


def _lines_of_ranks(calls, names):
    lines: list = [("", "calls", *NAMES, "MB")]
    for rank, name in enumerate(names):
        rows = calls[calls["rank"] == rank]
        parts = [f"{rows[part].sum():.3f}" for part in NAMES]
        lines.append((one_line(name), len(rows), *parts, _digits(1e-6 * rows["bytes"].sum())))
    return lines


def _digits(number):
    return f"{number:.{3 if number < 1 else 2 if number < 100 else 0}f}"


def _range(numbers):
    lowest, highest = _digits(min(numbers)), _digits(max(numbers))
    return lowest if lowest == highest else f"{lowest}-{highest}"
