"""Variables of which ranks have different values: set in the master alone, or not reduced yet.

The script sets values in the master with ``set_value`` or ``container.value =``:

    w.set_value(v) ──▶ pending ──▶ the next call ──▶ follow=True: all ranks get the value
                                                 ──▶ else: a warning, if other ranks differ

A call without a change before it only tests whether `Changes.pending` is empty. A collective that
sets a variable on all ranks removes its change. Variables to which ``scatter`` or ``set_value`` has
given another value on each rank are ignored. Other threads may set variables at any moment.

The script can write to an array that it shares with a variable at any moment. With follow=True such
a variable stays pending as long as the script has the array, and each call compares the array with
the value of the ranks.
"""

import functools
import itertools
import math
import pickle
import weakref

import numpy as np

from synkhronos import _host, _systems
from synkhronos._session import commands
from synkhronos._session.staging import send_objects
from synkhronos._wording import advise, count

COMPARED_BYTES = 1 << 18  # of an array that the script shares, at most, are compared by a call
KEPT_BYTES = 1 << 26  # of a larger array, calls compare the same items each time
_NOTHING = None, None  # in place of an array and its snapshot


class Changes:
    """The changes of one session."""

    def __init__(self, session, follow):
        self._session = session
        self._is_updated = session.registry.is_updated
        self.follow = follow
        self.made = 0  # counts changes of variables, by calls and by the script
        # Key of a variable whose value the ranks may lack -> whether the script has set it; if not,
        # the script only shares its array or its cell.
        self.pending = {}
        # Key -> an array that the script shares, and the ArraySnapshot of the ranks' value; None in
        # its place for a variable that functions update, which is sent before each call.
        self.borrowed = {}
        self.unreduced = Unreduced()
        self._apart = set()  # keys of variables to which the script gave another value on each rank
        self._told = set()  # keys of variables that a warning was about
        self._told_of_items = set()  # likewise, of changes that calls may have missed
        self._read = {}  # key -> copy of a value that the script may have borrowed and written to
        self._taken = set()  # keys of variables of which the script has the cell
        self._unconcerned = weakref.WeakSet()  # recipes of functions that use no pending variable

    def watch(self, key, variable) -> None:
        """Note from now on when the script sets a variable that the workers have."""
        if self._session.n_ranks > 1:
            notes = [self._note]
            if self.follow:
                notes += [self._note_read, self._note_cell]
                self._note_borrowed(key)
            _host.watch(variable, *[functools.partial(note, key) for note in notes])
            kept = self.pending, self._read, self.borrowed, self.unreduced
            forgotten = weakref.finalize(variable, _forget, key, kept)
            forgotten.atexit = False
        elif self._session.devices != ("cpu",):
            _host.watch(variable, bool)  # it does nothing, but scripts read NumPy's arrays

    def follow_from_now(self) -> None:
        """Broadcast the script's changes from now on, also of variables that the workers have."""
        if not self.follow:
            self.follow = True
            watched = list(self._session.worker.variables.items())
            for _, variable in watched:  # all at first, because several may share a cell
                _host.unwatch(variable)
            for key, variable in watched:
                self.watch(key, variable)

    def note_equal(self, keys) -> None:
        """Note that a collective has set variables on all ranks."""
        self.made += 1
        if self.unreduced:
            self.unreduced.note_set(map(self._session.worker.variables.get, keys))
        if self.pending or self._read:
            for key in keys:
                if key not in self._taken:
                    self.pending.pop(key, None)
                self._read.pop(key, None)
                self.borrowed.pop(key, None)
        if self._apart:
            self._apart.difference_update(keys)

    def note_apart(self, keys) -> None:
        """Note that a collective has given each rank a value of its own."""
        self.note_equal(keys)
        self._apart.update(keys)

    def _note(self, key):
        self.made += 1
        self.unreduced.pop(key, None)
        if key not in self._apart:
            self.pending[key] = True
            self.borrowed.pop(key, None)
            self._unconcerned.clear()

    def _note_read(self, key, value):
        if key not in self._apart and isinstance(value, np.ndarray):
            if key not in self._read:
                self._read[key] = value.copy()
                variable = self._session.worker.variables[key]
                if self._session.comm.memory.holds(_host.peek(variable)):
                    # The script gets a copy, or the array that it has got before.
                    before, _ = self.borrowed.get(key, _NOTHING)
                    is_same = before is not None and not self._is_updated(variable)
                    _host.put(variable, before if is_same else value.copy())
            self.pending.setdefault(key, False)

    def _note_cell(self, key):
        self._taken.add(key)  # every call broadcasts the value of the cell
        self.borrowed.pop(key, None)
        self.pending.setdefault(key, False)

    def _note_borrowed(self, key):
        variable = self._session.worker.variables.get(key)
        if variable is None or key in self._apart or key in self._taken:
            return
        value = _host.peek(variable)
        # The script never shares an array in shared memory: reading the variable gives it a copy.
        is_own = _host.is_array_variable(variable) and not self._session.comm.memory.holds(value)
        if is_own and _host.borrows(variable, known=1):
            self.borrowed[key] = value, self._snapshot(variable, value)
            self.pending.setdefault(key, False)

    def _snapshot(self, variable, value):
        return None if self._is_updated(variable) else ArraySnapshot(value)

    def _is_changed(self, key, is_set):
        """Return whether ranks may lack the value of a variable."""
        read, is_written = self._read.pop(key, None), self._take_written(key)
        if is_set or is_written or key in self._taken:
            return True
        variable = self._session.worker.variables.get(key)
        is_there = variable is not None and read is not None
        return is_there and not _is_equal(_host.peek(variable), read)

    def _take_written(self, key):
        """Take the array that the script shares; return whether it may have written to it."""
        variable = self._session.worker.variables.get(key)
        value, before = self.borrowed.pop(key, _NOTHING)
        if value is None or variable is None:
            return False
        is_updated = self._is_updated(variable)
        if _host.peek(variable) is not value:
            if is_updated:
                return False  # the update gave the variable another array, as it does serially
            _host.put(variable, value)  # instead of its copy by a collective
        if _host.borrows(variable, known=1):
            self.borrowed[key] = value, before
        if is_updated or before is None:
            return True
        is_changed = before.differs_from(value)
        if is_changed and key not in self._told_of_items and before.has_equal_part(value):
            self._told_of_items.add(key)
            name = variable.name or "variable"
            advise(
                f"Some items of the array that {variable} borrows have changed. Each call compares "
                "another part of it, as it is large: calls before this one may have computed with "
                f"the old values. Write {name}.set_value(...) after such a change."
            )
        return is_changed

    def broadcast_or_warn(self, function=None, compiled=None) -> None:
        """Broadcast the pending changes, or warn of those that a call would compute with.

        `function` is the Recipe of a function, `compiled` its compiled form. Both are None before a
        collective: no warning then, because it may set the variable on all ranks.
        """
        if self.follow:
            self._broadcast()
        elif function is not None and function not in self._unconcerned:
            self._warn(function, compiled)

    def _broadcast(self):
        changes = {}
        while self.pending:  # one by one, so that none is lost that another thread adds now
            changes.update([self.pending.popitem()])
        try:
            changed = [key for key, is_set in changes.items() if self._is_changed(key, is_set)]
            for key in changes:
                if key not in self.borrowed:
                    self._note_borrowed(key)
            self._send(changed)
            for key in changes:
                if key in self.borrowed or key in self._taken:
                    self.pending.setdefault(key, False)
        except BaseException:  # so that the next call tries again
            self.pending.update(dict.fromkeys(changes, True))
            raise

    def _send(self, keys):
        """Send values to all ranks; afterwards restore the arrays that the script shares."""
        session = self._session
        # These references keep the variables while they are sent: the collector may run any time.
        variables = {key: session.worker.variables.get(key) for key in keys}
        variables = {key: each for key, each in variables.items() if each is not None}
        values = {
            key: _host.peek(each)
            for key, each in variables.items()
            if key in self.borrowed or key in self._taken
        }
        states = tuple(key for key, each in variables.items() if _host.is_random_state(each))
        arrays = tuple(key for key, each in variables.items() if _host.is_array_variable(each))
        objects = tuple(key for key in variables if key not in arrays)
        if arrays:
            session.run(commands.Broadcast(arrays, session.master_rank))
        if objects:
            send_objects(session, objects, [_host.peek(variables[key]) for key in objects])
        if states:
            session.run(commands.Spread(states))
        for key, value in values.items():
            _host.put(variables[key], value)
            if key in self.borrowed:
                self.borrowed[key] = value, self._snapshot(variables[key], value)

    def note_undone(self, keys) -> None:
        """Note that all ranks have the values, and borrow the arrays, of before a call again."""
        arrays = {key: self.borrowed.get(key, _NOTHING)[0] for key in keys}
        self.note_equal(keys)
        for key, array in arrays.items():
            variable = self._session.worker.variables.get(key)
            if variable is None or array is None:
                continue
            value = _host.peek(variable)
            if array.shape == value.shape:
                if not _is_equal(array, value):
                    array[...] = value
                _host.put(variable, array)
                self._note_borrowed(key)

    def put_back(self) -> None:
        """Restore the arrays that variables borrow, after a collective has moved their values."""
        for key in list(self.borrowed):
            variable = self._session.worker.variables.get(key)
            is_kept = variable is not None and not self._is_updated(variable)
            value, _ = self.borrowed.get(key, _NOTHING)  # none if another thread has set it
            if is_kept and value is not None:
                _host.put(variable, value)

    def _warn(self, function, compiled):
        # Add it first, because a variable that another thread sets meanwhile removes it again.
        self._unconcerned.add(function)
        # Don't warn of variables that the function only replaces: it gives them new values.
        used = set(compiled.get_shared())
        read = set(_host.variables_read(compiled))
        variables = self._session.worker.variables
        chosen = [key for key in list(self.pending) if variables.get(key) in used]
        for key in chosen:
            self.pending.pop(key, None)
        for key in chosen:
            variable = variables[key]
            if key in self._told or variable not in read or not self._differs(key):
                continue
            self._told.add(key)
            if _has_streams(variable):
                advise(
                    f"The random state {variable} was set in the master only: other ranks go on "
                    "with their streams. Seed before the first call or distribute(), or write "
                    "synk.fork(follow=True): then each rank gets a stream of the new seed."
                )
                continue
            name = variable.name or "variable"
            advise(
                f"The shared variable {variable} was set in the master only: other ranks compute "
                f"with another value. Write synk.broadcast({name}) after {name}.set_value(...), or "
                "synk.fork(follow=True), which broadcasts all such values."
            )

    def _differs(self, key):
        session, variable = self._session, self._session.worker.variables[key]
        if _has_streams(variable):
            return True
        if _host.is_array_variable(variable):
            session.run(commands.Expose((key,)))
            first, *others = session.comm.variables.values(key)
            return not all(_is_equal(first, other) for other in others)
        first, *others = session.ask(commands.GetObject(key))
        if _host.sparse_format(variable):
            first, *others = [pickle.loads(each) for each in (first, *others)]
            return any(first.shape != other.shape or (first != other).nnz for other in others)
        return any(first != other for other in others)


def _forget(key, kept):
    for each in kept:
        each.pop(key, None)


class ArraySnapshot:
    """The bytes of an array at one moment; a large one in several parts, compared in turn.

    Each part has items from all over the array. Beyond KEPT_BYTES only one part is kept.
    """

    def __init__(self, array):
        steps, lengths = [1] * array.ndim, list(array.shape)
        while math.prod(lengths) * array.itemsize > COMPARED_BYTES:
            axis = lengths.index(max(lengths))
            step = -(-math.prod(lengths) * array.itemsize // COMPARED_BYTES)
            steps[axis] *= min(step, lengths[axis])
            lengths[axis] = -(-array.shape[axis] // steps[axis])
        begins = itertools.product(*map(range, steps))
        parts = (tuple(map(slice, begin, array.shape, steps)) for begin in begins)
        if array.nbytes > KEPT_BYTES:
            parts = itertools.islice(parts, 1)
        self._parts = [(part, array[part].tobytes()) for part in parts]
        self._turn = 0

    def differs_from(self, array):
        """Return whether the next part of an array of this shape has other bytes."""
        part, before = self._parts[self._turn]
        self._turn = (self._turn + 1) % len(self._parts)
        return array[part].tobytes() != before

    def has_equal_part(self, array):
        return any(array[part].tobytes() == before for part, before in self._parts)


def _has_streams(variable):
    """Return whether a variable is a random state of which each rank has another stream."""
    return _host.is_random_state(variable) and not _host.is_state_equal(variable)


def _is_equal(value, other):
    if value.shape != other.shape:
        return False
    return bool(((value == other) | ((value != value) & (other != other))).all())


class Unreduced(dict):
    """The variables of a session that ranks have updated differently, and that are not reduced yet.

    f(x): w -= 0.1 * gradient of own rows ──▶ synk.all_reduce(w) ──▶ the next call: nothing
                                          └────────────────────────▶ the next call: a warning

    Only a call that computes with the variable warns: a script may collect each rank's totals in
    it. The dict maps a key to a weak reference to the variable, and the name of the function that
    updates it. Several variables may have one cell: Lasagne clones those with default updates.
    """

    def __init__(self):
        super().__init__()
        self._told = set()

    def note(self, pairs, owner):
        """Note that in a call each rank has updated variables, pairs (key, variable), by itself."""
        for key, variable in pairs:
            if key not in self._told:
                self[key] = weakref.ref(variable), owner

    def note_set(self, variables):
        """Note that a collective has set variables; those that are no more are None."""
        cells = {id(_host.cell(each)) for each in variables if each is not None}
        for key, (reference, _) in list(self.items()):
            variable = reference()
            if variable is None or id(_host.cell(variable)) in cells:
                self.pop(key, None)

    def mark_told(self, keys):
        """Note that a warning was about variables already."""
        self._told.update(keys)
        for key in keys:
            self.pop(key, None)

    def tell(self, recipe, compiled, owner):
        """Warn of the variables with which the function that is about to run computes."""
        read = {id(_host.cell(each)): each for each in _host.variables_read(compiled)}
        used = {}
        for key, (reference, updating) in list(self.items()):
            variable = reference()
            here = None if variable is None else read.get(id(_host.cell(variable)))
            if here is not None and recipe.computes_with(here):
                used[key] = variable, updating
        if not used:
            return
        self.mark_told(used)
        (variable, updating), *others = sorted(used.values(), key=lambda each: not each[0].name)
        advise(_about_update(variable, updating, owner, [each for each, _ in others]))


def _about_update(variable, updating, owner, others):
    name = variable.name or "variable"
    listed = [each.name for each in others if each.name][:3]
    if len(listed) < len(others):
        listed.append(count(len(others) - len(listed), "other variable"))
    also = f" The same is true of {', '.join(listed)}." if listed else ""
    return (
        f"The update of {variable} in {updating} is not what serial {_host.title} computes, and "
        f"{'the next call' if owner == updating else owner} uses it. Each rank updates with its "
        "own rows: reduce gradients over the ranks with synk.ops.all_reduce(g)"
        f"{_systems.advice('own rows')}{_systems.advice('running statistics')}; or call "
        f"synk.all_reduce({name}) after each call.{also}"
    )
