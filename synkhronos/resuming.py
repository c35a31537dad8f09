"""`resume`: save a loop as it runs; after its process was killed, go on from the last file.

    resume    run.npz, or the newest older file that is not damaged ──▶ all ranks, step and epoch
    tick      a step is done ──▶ every so often: values copied ──▶ a thread writes them ──▶ run.npz
                                                                   run.npz ──▶ run.1.npz ──▶ ...

A file always holds the state right after a tick, never that of a step that was interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import threading
import time
import weakref
from collections import UserDict
from typing import Any, Iterator, Sequence, Union

import numpy as np

from synkhronos import _host, checkpoints
from synkhronos._machine.archives import damage_told, reading, writing
from synkhronos._machine.files import followed, held, new_file, npz_path, shift
from synkhronos._machine.log import log
from synkhronos._machine.plain_values import decode, encode, names_of
from synkhronos._machine.shared_memory import is_in_a_segment
from synkhronos._session import commands
from synkhronos._session.current import Current, call, current
from synkhronos._session.session import SessionState
from synkhronos._wording import advise, count, seconds, sentence, shown, truth, whole_number
from synkhronos.errors import WorkerDied
from synkhronos.session import restart_count

__all__ = ["RunState", "resume"]

# What to do with variables of different values on the ranks, random states apart.
UNEQUAL = ("refuse", "keep", "average")
_PATIENCE = 5.0  # seconds to wait until a script that was killed has released its file
_AFTER_LOSS = 120.0  # the same after a restart: NFS holds locks of a lost machine for 90 s

_RANDOMS = np.random.RandomState, np.random.Generator
NumPyRandom = Union[np.random.RandomState, np.random.Generator]
Resumed = Union[checkpoints.Saved, NumPyRandom]


def resume(
    path: str | os.PathLike[str],
    functions_or_variables: Resumed | Sequence[Resumed],
    *,
    every: float = 60.0,
    keep: int = 3,
    unequal: str = "refuse",
    preemptible: bool = False,
) -> RunState:
    """Return a context in which a loop is saved as it runs, and goes on if it was interrupted.

    At the begin of the block the newest file is loaded, if there is one: on as many ranks as before
    the run continues with the same bits, on another number as :func:`load` says. A thread writes
    the file while the script goes on, as :func:`save` does: a kill at any moment leaves a complete
    file. It loses at most `every` seconds of work, the time of writing, and a step.

    Parameters
    ----------
    path : str or path
        It ends with ``.npz``. If the script may start again on another machine, it must be on
        storage that all of them see. One script at a time can have it.
    functions_or_variables : Function, shared variable, random state, or list of these
        Functions and shared variables as for :func:`save`; and ``numpy.random.RandomState`` and
        ``Generator`` objects of the script, which are set in place. The order counts.
    every : float
        Seconds from the begin of one file to the begin of the next. The first tick always saves, so
        that mistakes show at once. With 0 each tick saves, and waits until the file is on the disk.
    keep : int
        The number of files, with the older ones: ``run.npz``, ``run.1.npz``, ``run.2.npz``. If the
        newest is damaged, the run goes on from the one before, with a warning.
    unequal : {"refuse", "keep", "average"}
        What to do with a variable of different values on the ranks, random states apart. "refuse"
        raises ValueError when it is saved or loaded. With "keep" each rank gets its own
        value back, and another number of ranks is refused. "average" does the same on as many
        ranks; others get the mean, of floats.
    preemptible : bool
        If true, a SIGTERM to the script makes the next tick, or the end of the block, save and end
        the script, with exit status 143. Workers ignore it in the block. Only in the main thread.

    Returns
    -------
    RunState
        For a ``with`` block.

    Raises
    ------
    SessionError
        Before :func:`~synkhronos.fork`.
    TypeError, ValueError
        As :func:`load`, at the begin of the block, and for arguments that don't fit. ValueError if
        all files are damaged, and for values that `unequal` refuses.
    OSError
        When a file can't be read; BlockingIOError while another script has the path; and from
        ``tick()`` or the end of the block, naming the file, when it can't be written.

    Warns
    -----
    PortingWarning
        If an older file is loaded; and if a script that was started again finds none: see
        :func:`restart_count`.

    Examples
    --------
    >>> import os, tempfile, numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x, w = T.dvector("x"), theano.shared(0.0, "w")
    >>> train = synk.function([x], x.mean(), updates=[(w, w + 1)])
    >>> path = os.path.join(tempfile.mkdtemp(), "run.npz")
    >>> def go_on(until):
    ...     with synk.resume(path, [train], every=60.0) as state:
    ...         for step in range(state.step, until):
    ...             _ = train(np.ones(4))
    ...             state["best"] = min(step, state.get("best", np.inf))
    ...             state.tick()
    ...     return state
    >>> state = go_on(until=4)
    >>> w.set_value(0.0)  # as in a new process
    >>> state = go_on(until=6)
    >>> state.restored, state.step, state["best"], synk.gather(w).tolist()
    (True, 6, 0, [6.0, 6.0])
    >>> synk.close()
    """
    current("resume()")
    path = npz_path(path)
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "there is no such folder for the path", folder)
    sources = functions_or_variables
    sources = list(sources) if isinstance(sources, (list, tuple)) else [sources]
    randoms = [each for each in sources if isinstance(each, _RANDOMS)]
    for each in randoms:
        encode(each, {}, "")  # it raises TypeError if a file can't hold it
    others = [each for each in sources if not isinstance(each, _RANDOMS)]
    variables = checkpoints.variables_of("resume", others)
    interval = seconds("every", every)
    if interval is None:
        raise TypeError("every must be a number of seconds, got None.")
    keep = whole_number("keep", keep, 1)
    if not isinstance(unequal, str) or unequal not in UNEQUAL:
        kind = ValueError if isinstance(unequal, str) else TypeError
        raise kind(f"unequal must be one of {', '.join(UNEQUAL)}, got {shown(unequal)}.")
    preemptible = truth("preemptible", preemptible)
    return RunState(path, variables, randoms, interval, keep, unequal, preemptible)


class RunState(UserDict):
    """The progress of a run, and values of the script that are saved with it; see :func:`resume`.

    It is a dict of such values, ``state["best"] = 0.5``: numbers, texts, None, lists, tuples and
    dicts of these, arrays of numbers, and random states of NumPy. Nothing is unpickled.

    Attributes
    ----------
    restored : bool
        Whether there was a file.
    step : int
        The number of ticks, in all processes of the run together.
    epoch : int
        The epoch of the loop over :meth:`epochs`, from 0.
    """

    restored = False
    callback: Any = None  # of a library that trains in a loop of its own

    def __init__(self, path, variables, randoms, every, keep, unequal, preemptible):
        super().__init__()
        self._path = followed(path)
        stem = self._path[: -len(".npz")]
        self._older = [f"{stem}.{number}.npz" for number in range(1, keep)]
        self._variables, self._randoms = variables, randoms
        self._every, self._unequal, self._preemptible = every, unequal, preemptible
        self.step = self.epoch = 0
        self._batch = self._done = 0  # of this epoch: batches that were begun, and done at a tick
        self._division = None  # of the rows of this epoch: the arguments of `batches`
        self._is_divided = False  # whether `batches` was called in this epoch
        self._is_in_epoch = False  # whether the body of a loop over `epochs` runs
        self._block = None  # what the end of the with block undoes
        self._due = 0.0  # when the next file is begun
        self._is_ending = False  # a SIGTERM has come
        # What the script could change after the last tick; None if a file has that state.
        self._mark = None
        self._writer = None  # the thread that writes a file
        self._error = None  # what the thread has raised

    def __setitem__(self, key, value):
        if not isinstance(key, str):
            raise TypeError(f"The key of a value must be a text, got {shown(key)}.")
        try:
            encode(value, {}, "")
        except TypeError as error:
            raise TypeError(
                f"state[{key!r}] can't be saved: {sentence(error)} It takes numbers, texts, None, "
                "lists, tuples and dicts of these, arrays of numbers, and random states."
            ) from None
        super().__setitem__(key, value)

    def __enter__(self) -> RunState:
        if self._block is not None:
            raise RuntimeError("This state is in its with block already: call resume() again.")
        with contextlib.ExitStack() as block:
            block.enter_context(held(self._path, _AFTER_LOSS if restart_count() else _PATIENCE))
            self._load()
            if self._preemptible:
                self._is_ending = False
                with call("resume()") as session:
                    session.run(commands.SetSigterm(signal.SIG_IGN))
                before = signal.signal(signal.SIGTERM, self._end_at_tick) or signal.SIG_DFL
                block.callback(self._leave_sigterm, before)
            self._block = block.pop_all()
        return self

    def __exit__(self, kind, error, trace):
        with self._block:
            try:
                if kind is None and self._mark is not None:
                    if self._is_as_marked():
                        self._begin()
                    else:
                        log.info("not saved: the script has changed something since tick()")
                self._finish()
            except Exception as failure:
                if kind is None:
                    raise
                log.error("the last file was not written: %s", sentence(failure))
            finally:
                self._block = None
        if kind is None and self._is_ending:  # after the last tick
            raise SystemExit(128 + signal.SIGTERM)

    def tick(self) -> None:
        """Say that a step is done, after all changes of the step, and before any of the next.

        It takes microseconds, unless it saves; then it raises what went wrong with the file. In a
        loop over :meth:`epochs` or :meth:`batches`, the step has done the minibatches taken since
        the last tick: take them as they are needed, and not in a list.
        """
        if (self._is_in_epoch or self._is_divided) and self._batch == self._done:
            raise RuntimeError(
                "tick() without a new minibatch: a run that goes on could not tell which part of "
                f"epoch {self.epoch} is done. Call it in the loop over state.batches() alone, and "
                "don't take batches ahead; for steps without batches write "
                "`for step in range(state.step, number)` in place of state.epochs()."
            )
        self.step += 1
        self._done = self._batch
        self._save_if_due()

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, up to `number` - 1.

        In an epoch that is resumed, the loop's body runs again from its begin. What it does after
        its batches, such as a validation, is saved when the next epoch begins.
        """
        return self._epochs(whole_number("number", number, 0))

    def _epochs(self, number):
        while self.epoch < number:
            self._is_in_epoch = True
            try:
                yield self.epoch
            finally:
                self._is_in_epoch = False
            self.epoch += 1
            self._batch = self._done = 0
            self._division, self._is_divided = None, False
            self._save_if_due()

    def batches(self, rows: int, size: int, seed: int | None = None) -> Iterator[Any]:
        """Yield the rows of the minibatches that are left of this epoch, for the argument `batch`.

        Call :meth:`tick` for each. After a restart they are those of the run that was interrupted.

        Parameters
        ----------
        rows : int
            The number of rows of the data.
        size : int
            That of a minibatch; the last one may have fewer.
        seed : int, optional
            Shuffle all rows in an order that depends on the seed and the epoch alone. Without it
            they come in order.

        Yields
        ------
        slice, or array of int with `seed`

        Examples
        --------
        >>> import os, tempfile, theano
        >>> import synkhronos as synk
        >>> synk.fork(1)
        1
        >>> path = os.path.join(tempfile.mkdtemp(), "run.npz")
        >>> with synk.resume(path, theano.shared(0.0, "w")) as state:
        ...     for epoch in state.epochs(2):
        ...         for batch in state.batches(rows=5, size=3, seed=1):
        ...             print(epoch, batch)
        ...             state.tick()
        0 [4 1 3]
        0 [0 2]
        1 [2 0 3]
        1 [4 1]
        >>> synk.close()
        """
        division = _division(rows, size, seed)
        if self._is_divided:
            raise RuntimeError(
                f"batches() was called for epoch {self.epoch} already: loop over state.epochs(), "
                "and call it once in each."
            )
        if self._done and division != self._division:
            before, now = (
                ", ".join(map("{}={}".format, ("rows", "size", "seed"), each))
                for each in (self._division or [], division)
            )
            raise ValueError(
                f"batches() can't go on after minibatch {self._done} of epoch {self.epoch} with "
                f"{now}: {self._path!r} has {before or 'none'}."
            )
        self._division, self._is_divided = division, True
        return self._batches(*division)

    def _batches(self, rows, size, seed):
        order = None
        if seed is not None:
            # A RandomState: its numbers are the same in all versions of NumPy.
            bits = np.random.MT19937(np.random.SeedSequence([seed, self.epoch]))
            order = np.random.RandomState(bits).permutation(rows)
        for number in range(self._done, -(-rows // size)):
            self._batch = number + 1
            part = slice(number * size, min((number + 1) * size, rows))
            yield part if order is None else order[part]

    def _save_if_due(self):
        """Note that the state may be saved; save it when it is time."""
        if self._block is None:
            raise RuntimeError("tick() and epochs() are for the block of `with synk.resume(...)`.")
        self._mark = self._marked()
        if self._error is not None:
            self._finish()
        if self._is_ending:
            self._begin()
            self._finish()
            raise SystemExit(128 + signal.SIGTERM)
        is_due, waits = time.monotonic() >= self._due, not self._every
        if is_due and (waits or self._writer is None or not self._writer.is_alive()):
            self._begin()
            if waits:
                self._finish()

    def _marked(self):
        session, arrays = Current.session, {}
        states = [encode(each, arrays, str(n)) for n, each in enumerate(self._randoms)]
        keys = [array.tobytes() for array in arrays.values()]
        # `changes` does not count changes of variables that workers don't have.
        cells = [_reference(_host.peek(each)) for each in self._variables]
        return session, session and session.changes.made, states, keys, cells, self.data.copy()

    def _is_as_marked(self):
        """Return whether the script has changed nothing since the last tick."""
        *before, cells, values = self._mark
        *now, _, values_now = self._marked()
        is_same = all(values.get(key, self) is value for key, value in values_now.items())
        if before != now or len(values) != len(values_now) or not is_same:
            return False
        here = map(_host.peek, self._variables)
        # A collective that only reads may have moved a value into shared memory.
        return all(cell() is value or is_in_a_segment(value) for cell, value in zip(cells, here))

    def _begin(self):
        """Copy the state in the format of the file; start a thread that writes it, after others."""
        self._finish()
        copy, entries, progress = io.BytesIO(), [], {}
        table = {"variables": entries, "progress": progress}
        with call("tick()") as session, writing(copy, checkpoints.WHAT, **table) as arrays:
            for variable, entry in checkpoints.describe(session, self._variables, arrays):
                if self._unequal == "refuse" and checkpoints.are_unequal(variable, entry):
                    raise checkpoints.refusal("tick() can't save", variable)
                entries.append(entry._asdict())
            randoms, values = enumerate(self._randoms), enumerate(self.items())
            progress.update(
                step=self.step,
                epoch=self.epoch,
                done=self._done,
                division=self._division,
                random=[encode(each, arrays, f"random/{number}") for number, each in randoms],
                values=[[key, encode(each, arrays, f"value/{at}")] for at, (key, each) in values],
            )
        self._due = time.monotonic() + self._every
        self._mark = None
        self._writer = threading.Thread(None, self._write, "resume()", (copy,), daemon=True)
        self._writer.start()

    # Few system calls: after each the thread waits for Python's lock, which the host library holds
    # while it computes.
    def _write(self, copy):
        try:
            with new_file(self._path) as file, copy.getbuffer() as data:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                if self._older:
                    shift(self._path, self._older)
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = self._path
            self._error = error

    def _finish(self):
        """Wait until the file is written; raise what went wrong."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _load(self):
        with call("resume()") as session:
            file = self._read()
            if file is not None:
                path, entries, arrays, progress = file
                plan = checkpoints.LoadPlan(
                    session, path, entries, self._variables, arrays, self._unequal
                )
                self._restore(path, progress, arrays, plan)
            elif restart_count():
                advise(
                    f"The script was started again, but there is no {self._path!r}: it begins from "
                    "nothing. The path must be on storage that the machines of all attempts see, "
                    "the same for all."
                )

    def _read(self):
        """Return the newest file that is not damaged, and what is in it; None if there is none."""
        damage = None  # the error of the newest file that is damaged
        for path in [self._path, *self._older]:
            try:
                with reading(path, checkpoints.WHAT) as (table, arrays):
                    entries = [checkpoints.CheckpointEntry(**each) for each in table["variables"]]
                    named = [each.values for each in entries]
                    named += [table.get("progress", {}).get(key) for key in ("random", "values")]
                    arrays = {name: arrays[name] for name in names_of(named)}
            except FileNotFoundError:
                continue
            except ValueError as error:
                damage = damage or error
                continue
            if "progress" not in table:
                raise ValueError(
                    f"{path!r} was written by save(), which keeps no step: write synkhronos.load() "
                    "before resume(), and give it another path."
                )
            if path != self._path:
                why = sentence(damage) if damage else f"{self._path!r} is not there."
                also = "" if damage else " To begin anew, remove the older files, too."
                advise(f"resume() goes on from the older file {path!r}: {why}{also}")
            return path, entries, arrays, table["progress"]
        if damage is not None:
            raise damage
        return None

    def _restore(self, path, progress, arrays, plan):
        with damage_told(repr(path), checkpoints.WHAT):
            step, epoch, done = (
                whole_number(name, progress[name], 0) for name in ("step", "epoch", "done")
            )
            randoms = [decode(each, arrays) for each in progress["random"]]
            values = {str(key): decode(each, arrays) for key, each in progress["values"]}
            division = progress["division"] and _division(*progress["division"])
        here, there = (", ".join(map(_kind, each)) or "none" for each in (self._randoms, randoms))
        if here != there:
            raise ValueError(
                f"functions_or_variables has {here} of NumPy's random states, but {path!r} holds "
                f"{there}."
            )
        plan.carry_out()
        for random, saved in zip(self._randoms, randoms):
            if isinstance(random, np.random.Generator):
                random.bit_generator.state = saved.bit_generator.state
            else:
                random.set_state(saved.get_state(legacy=False))
        self.step, self.epoch, self._batch, self._done = step, epoch, done, done
        self._division, self.restored = division, True
        self.data.update(values)
        log.info("going on from %s, after %s", path, count(step, "step"))

    def _leave_sigterm(self, before):
        """Restore the handler of SIGTERM; let workers end by a SIGTERM if they did before."""
        signal.signal(signal.SIGTERM, before)
        session = Current.session
        is_idle = session and session.state is SessionState.OPEN and not session.gate.is_in_call
        if is_idle and before is signal.SIG_DFL and not self._is_ending:
            with contextlib.suppress(WorkerDied), call("resume()") as session:
                session.run(commands.SetSigterm(signal.SIG_DFL))

    def _end_at_tick(self, number, frame):
        self._is_ending = True


def _division(rows, size, seed):
    """Return the arguments of `batches`, checked."""
    seed = None if seed is None else whole_number("seed", seed, 0)
    return [whole_number("rows", rows, 1), whole_number("size", size, 1), seed]


def _reference(value):
    """Return a weak reference, if the type has them, so that a replaced value is freed at once."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _kind(random):
    bits = getattr(random, "bit_generator", None)
    return type(random).__name__ if bits is None else f"Generator({type(bits).__name__})"
