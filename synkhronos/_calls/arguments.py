"""Bind, check and cast the arguments of a call, and copy them to shared memory.

Besides inputs that are one array in each call, there are these kinds:

default     In(x, value=1.0)                    a call may leave it out
kept        In(x, value=1.0, update=x + 1)      a shared variable on each rank, with an update
            In(x, value=s.container)            the shared variable s itself
sparse      sparse.csr_matrix("x")              the arrays of its parts are sent
computed    data[rows(index, size)]             the master computes row numbers from other inputs
"""

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import partition
from synkhronos._arithmetic.selection import select_rows
from synkhronos._calls import collective, signature
from synkhronos._calls.parameters import Input
from synkhronos._machine.interrupts import raised_here
from synkhronos._session import commands
from synkhronos._session.staging import GrowingArray
from synkhronos._wording import count, nearest, sentence
from synkhronos.inputs import Data

_MISSING = object()
OPTIONS = "output_subset", "batch", "batch_s", "num_slices"  # of a call


class Inputs:
    """The inputs of one function, and shared memory for plain arrays, which all its calls use.

    `given` are the user's inputs, `computed` further ones, whose values `bind` appends. `variables`
    and positions are of the inputs that a call sends to the ranks, without those that they keep;
    only `get` and `set` take a position in `given`.
    """

    def __init__(self, given, owner, computed=()):
        self.given, self._owner = given, owner
        self._is_plain = all(each.is_plain for each in given)
        # A call with so many positional arguments, and no others, gives each input its value.
        self.n_plain = len(given) if self._is_plain and not computed else -1
        self._next = {}  # position of a given input with a default -> its value in the next call
        sent = [part for each in given for part in each.sent()]
        self._casts = (*(each.caster() for each in sent), *(np.asarray for _ in computed))
        self._n_bound = len(sent)
        sent += computed
        self.variables = tuple(each.variable for each in sent)
        self._names = tuple(each.name for each in sent)
        self.is_scattered = tuple(each.is_scattered for each in sent)
        self.axes = tuple(each.axis for each in sent)
        # Position of a scattered input -> its axis of rows.
        self.axes_of_rows = {i: each.axis for i, each in enumerate(sent) if each.is_scattered}
        self._dtypes = tuple(np.dtype(variable.dtype) for variable in self.variables)
        self._ndims = tuple(variable.ndim for variable in self.variables)
        self._has_fixed = tuple(bool({*_host.lengths(v)} - {None}) for v in self.variables)

    def join(self, session):
        """Use the shared memory of a session from now on."""
        self._session = session
        self._staged = {}  # position of an input -> a GrowingArray for plain values

    def bind(self, args, kwargs, here=False, ahead=False):
        """Return a value for each input that is sent; set the inputs that ranks keep.

        With `here` the call runs in the master alone, and sets them there alone. With `ahead` a
        call with the same arguments follows: it also uses the values that `set` has stored.
        """
        values = self._values_of(args, kwargs)
        bound = values if self._is_plain else self._bound(values, here)
        if not ahead:
            self._next.clear()
        return bound

    def bind_data(self, args, kwargs):
        """Return the value of each input, for its Data; refuse sparse inputs and kept ones."""
        if len(self.given) != self._n_bound:
            raise TypeError(
                f"build_inputs() makes no Data for {self._owner}, because some of its inputs are "
                "sparse, or kept by the ranks. Make others with synkhronos.data()."
            )
        return Inputs.bind(self, args, kwargs, here=True, ahead=True)

    def _bound(self, values, here):
        bound, kept = [], []
        for position, (entry, value) in enumerate(zip(self.given, values)):
            if value is _MISSING:
                if entry.is_required:
                    raise TypeError(
                        f"{self._owner} needs a value for {self._name(position)}. It takes: {self}."
                    )
                if entry.storage is not None:
                    continue
                value = self._next.get(position, entry.default)
            elif entry.is_implicit:
                raise TypeError(
                    f"{self._owner} takes no value for {self._name(position)}: it is implicit."
                )
            elif entry.storage is not None:
                kept.append((entry.storage, self._cast_given(position, value)))
                continue
            elif entry.parts:
                value = self._cast_given(position, value)
            if entry.parts:
                bound += _host.take_apart(value)
            else:
                bound.append(value)
        # Cast all values first: if one can't be cast, no variable may be set.
        if kept:
            for position, value in enumerate(bound):
                self.array(position, value)
            for variable, value in kept:
                if here:
                    variable.set_value(value)
                else:
                    self._keep(variable, value)
        return bound

    def _values_of(self, args, kwargs):
        """Return the value of each given input, _MISSING for those that were left out."""
        n_given, n_args = len(self.given), len(args) + len(kwargs)
        positions = {each.name: i for i, each in enumerate(self.given) if each.name is not None}
        for name in kwargs:
            if name not in positions:
                kind = TypeError if self._is_plain and n_args != n_given else ValueError
                raise kind(
                    f"{self._owner} has no input {name!r}. It takes: {self}."
                    f"{nearest(name, [*positions, *OPTIONS])}"
                )
        if self._is_plain and n_args != n_given:
            raise TypeError(
                f"{self._owner} takes {count(n_given, 'input')} ({self}), got {n_args}."
            )
        if len(args) > n_given:
            raise TypeError(
                f"{self._owner} takes at most {count(n_given, 'input')} ({self}), got {len(args)}."
            )
        values = [*args, *[_MISSING] * (n_given - len(args))]
        for name, value in kwargs.items():
            if values[positions[name]] is not _MISSING:
                raise ValueError(f"{self._owner} got input {name!r} twice: by position and name.")
            values[positions[name]] = value
        return values

    def get(self, position):
        """Return the value of an input between calls: None if it has no default."""
        entry = self.given[position]
        if entry.storage is not None:
            return entry.storage.get_value()
        return self._next.get(position, entry.default)

    def set(self, position, value):
        """Set an input that ranks keep on all of them; of any other, set the next call's value."""
        entry = self.given[position]
        if entry.is_required:
            raise TypeError(
                f"Input {entry.name or position!r} of {self._owner} has no value of its own: give "
                "it in the call, or make the function with In(variable, value=...)."
            )
        value = self._cast_given(position, value)
        if entry.storage is None:
            self._next[position] = value
            return
        with self._session.call("Function value"):
            self._keep(entry.storage, value)

    def _keep(self, variable, value):
        session = self._session
        [key] = session.registry.keys_of([variable])
        [value] = collective.copy_borrowed(session, [value])
        commands.assign(session.worker, key, value)
        session.run(commands.Broadcast((key,), session.master_rank))
        session.changes.note_equal([key])

    def _cast_given(self, position, value):
        entry = self.given[position]
        alone = Inputs([entry._replace(storage=None, parts=())], self._owner)
        return alone.cast(0, value) if entry.parts else alone.array(0, value)

    def _name(self, position):
        return f"input {self.given[position].name or position!r}"

    def stage(self, values, arrays):
        """Check all values, copy plain ones to shared memory, and return references to them.

        The list `arrays` gets the arrays. The next call overwrites the copies.
        """
        refs = []
        for position, value in enumerate(values):
            if type(value) is Data:
                contents = value._hold(self._session)
                self._check_data(position, value, contents.array)
            else:
                value = self.cast(position, value)
                staged, recorder = self._staged.get(position), self._session.worker.recorder
                if staged is None:
                    memory, dtype = self._session.comm.memory, self._dtypes[position]
                    staged = self._staged[position] = GrowingArray(memory, dtype, value.ndim)
                contents = staged.contents
                if contents.array.shape == value.shape and contents.ref and recorder is None:
                    contents.array[...] = value
                else:
                    contents = staged.put(value, recorder)
            refs.append(contents.ref)
            arrays.append(contents.array)
        return tuple(refs)

    def array(self, position, value):
        """Return the value of one input, checked and cast, for a call in the master alone."""
        if type(value) is not Data:
            return self.cast(position, value)
        array = value.data
        self._check_data(position, value, array)
        return array

    def cast(self, position, value):
        """Return a value as an array, cast as ``theano.function`` casts its inputs."""
        try:
            return self._casts[position](value)
        except raised_here(Exception) as error:
            begin = f"{self.label(position)} takes {self.variables[position].type}, got "
            if value is None:
                raise TypeError(f"{begin}None.") from None
            if isinstance(value, _host.Variable):
                raise TypeError(f"{begin}the variable {value} in place of a value.") from None
            # Theano's checks raise errors of many kinds for values that are no arrays.
            what = signature.describe_value(value)
            raise TypeError(f"{begin}{what}: {sentence(error)}") from error

    def _check_data(self, position, value, array):
        if array.dtype != self._dtypes[position] or array.ndim != self._ndims[position]:
            raise TypeError(
                f"{self.label(position)} takes {self.variables[position].type}, got {value}. A "
                "Data is never cast: make it with data(value, var=variable)."
            )
        if not self._has_fixed[position]:
            return
        lengths, shape = _host.lengths(self.variables[position]), array.shape
        wrong = {fixed for fixed, length in zip(lengths, shape) if fixed not in (None, length)}
        if wrong:
            what = f"has the shape {lengths} by its type"
            if 1 in wrong:
                pattern = _host.fixed_axes(self.variables[position])
                what = f"is broadcastable ({pattern}): it must have length 1 there"
            raise TypeError(f"{self.label(position)} {what}, got shape {shape}.")

    def release(self):
        """Give the shared memory of plain arrays back."""
        self._staged.clear()

    def name_of(self, position):
        """Return the name of an input, or its number."""
        return str(self._names[position] or f"input {position}")

    def label(self, position):
        """Return the first words of an error message about one input: its name and its function."""
        return f"Input {self._names[position] or position!r} of {self._owner}"

    def __str__(self):
        names = [str(each.name or f"input {i}") for i, each in enumerate(self.given)]
        return ", ".join(
            name if each.is_required else f"{name}=..." for name, each in zip(names, self.given)
        )


class InputsWithRowNumbers(Inputs):
    """The inputs of a function: `given` by the user, and after these the row numbers.

    The master computes the row numbers at each call; ranks divide, select and slice them as they do
    other arrays.
    """

    def __init__(self, given, numbers, owner):
        super().__init__(given, owner, [Input(each.variable, "rows()", True) for each in numbers])
        self._numbers = numbers
        self._whole = [i for i in range(self._n_bound) if not self.is_scattered[i]]
        whole = [self.variables[i] for i in self._whole]
        self._readers = []
        for each in numbers:
            try:
                readers = [_host.compile_number(number, whole) for number in each.operands]
            except ValueError as error:
                raise ValueError(
                    f"rows() in {owner} {sentence(error)[:-1]}: its arguments must be integers, "
                    "shared variables, or expressions of inputs that each rank gets whole: those "
                    "without axes, and bcast_inputs."
                ) from None
            self._readers.append(readers)

    def bind(self, args, kwargs, here=False, ahead=False):
        """Return one value for each input: those given, and the row numbers."""
        values = super().bind(args, kwargs, here, ahead)
        whole = [self.array(position, values[position]) for position in self._whole]
        numbers = zip(self._numbers, self._readers)
        return [*values, *[self._compute(each, readers, whole) for each, readers in numbers]]

    def _compute(self, numbers, readers, whole):
        operands = [read(whole) for read in readers]
        try:
            rows = _host.numbers_of_rows(*operands)
        except ValueError as error:
            raise ValueError(f"{self._owner}: {sentence(error)}") from None
        for variable in numbers.indexed:
            length = _host.peek(variable).shape[0]
            if len(rows) and rows[-1] >= length:
                index, size = operands[:2]
                raise ValueError(
                    f"rows({index}, {size}) in {self._owner} ends at row {rows[-1]}, but "
                    f"{variable} has {count(length, 'row')}. For a last minibatch of fewer rows, "
                    f"write rows(index, size, length={length})."
                )
        return rows


def make_inputs(given, numbers, owner):
    """Return the inputs of a function, whose name is `owner`."""
    return InputsWithRowNumbers(given, numbers, owner) if numbers else Inputs(given, owner)


def is_minibatch(value):
    """Return whether the value of an input holds just the rows that ``batch`` selects."""
    return getattr(value, "minibatch", False)


def selected(inputs, values, batch, axes):
    """Return the arrays of all inputs, with the rows that ``batch`` selects.

    `axes` maps the position of an input to its axis of rows.
    """
    arrays = list(map(inputs.array, range(len(values)), values))
    if axes and batch is not None:
        rows = select_rows("batch", batch, rows_there(axes, values, arrays))
        for i, axis in axes.items():
            chosen = range(len(rows)) if is_minibatch(values[i]) else rows
            arrays[i] = partition.take_rows(arrays[i], chosen, axis=axis)
    return arrays


def rows_there(axes, values, arrays):
    """Return the number of rows that ``batch`` selects from: those of the shortest input."""
    lengths = [(is_minibatch(values[i]), arrays[i].shape[axis]) for i, axis in axes.items()]
    # A minibatch has selected rows already, so it counts only if all inputs are minibatches.
    others = [length for is_batch, length in lengths if not is_batch]
    return min(others or [length for _, length in lengths])
