"""Arrays in shared memory, which functions scatter without copying.

    data(value) ──▶ Data ──▶ a segment, mapped by every rank that uses it

All ranks see a write to a Data at once, because it is the same memory. The Data owns the segment;
a view keeps it alive, too.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.array_operators import Operators, plain
from synkhronos._arithmetic.conversion import as_array, check_dtype, check_kind, condition
from synkhronos._hints import ArrayLike, Variable
from synkhronos._host.choice import advice
from synkhronos._session.current import current
from synkhronos._session.session import SessionState
from synkhronos._session.staging import GrowingArray
from synkhronos._wording import MAX_DIMENSIONS, count, is_bool, shape_of, shown, truth, whole_number

__all__ = ["Data", "data"]


class Data(Operators):
    """An array in shared memory, of fixed dtype and number of dimensions, that can grow.

    :func:`data` and :meth:`~synkhronos.functions.Function.build_inputs` make it. It can be indexed,
    compared, computed with and converted like the NumPy array :attr:`data` that it holds: ``d + 1``
    and ``d == 1`` are arrays, and ``d += 1`` writes to the shared memory. The memory is freed when
    the Data and the last view of it are gone.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> d = synk.data([1.0, 2.0, 3.0], name="d")
    >>> d.set_value([7, 8])
    >>> d.set_length(3)  # in the same memory
    >>> d, d.data
    (<Data 'd' of float64, shape (3,)>, array([7., 8., 3.]))
    >>> d.set_shape((4,), oversize=1.5)
    >>> d.name, d.dtype, d.ndim, d.shape, d.size, d.alloc_size, d.minibatch
    ('d', 'float64', 1, (4,), 4, 6, False)
    >>> d[d == 7] = 1
    >>> d += 1
    >>> (10 * d).tolist()
    [20.0, 90.0, 40.0, 10.0]
    >>> d.condition_data([True, 2])
    array([1., 2.])
    >>> d.free_memory()
    >>> d.shape
    (0,)
    >>> synk.close()
    """

    def __init__(self, session, dtype, ndim, minibatch=False, name=None):
        self._session = session
        self._store = GrowingArray(session.comm.memory, dtype, ndim)
        self._minibatch = truth("minibatch", minibatch)
        self._name = name
        session.registry.add_data(self)

    @property
    def data(self) -> np.ndarray:
        """The array, a view of the shared memory.

        After a change of shape take a new view. An older view stays readable, but if the memory was
        allocated anew, writes to the older view don't reach the ranks. Items can be changed in
        place, as in ``d.data += 1``; to store another array call :meth:`set_value`.
        """
        return self._store.array

    @data.setter
    def data(self, value):
        # After changing the array in place, ``d.data += 1`` assigns the same array.
        if value is not self._store.array:
            raise AttributeError(
                f"The memory of {self._what()} can't be replaced. To change the contents write "
                "d[...] = values, or d.set_value(values) for another shape."
            )

    @property
    def dtype(self) -> str:
        """The name of the dtype, such as ``"float32"``."""
        return self._store.array.dtype.name

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._store.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._store.array.shape

    @property
    def size(self) -> int:
        """The number of items."""
        return self._store.array.size

    @property
    def alloc_size(self) -> int:
        """The number of items that fit into the allocated memory."""
        return self._store.contents.allocated

    @property
    def name(self) -> str | None:
        """The name for error messages; by default that of the variable it was made for, or None."""
        return self._name

    @property
    def minibatch(self) -> bool:
        """Whether the Data holds just a batch: its first row is the first of the selection."""
        return self._minibatch

    def __len__(self):
        return len(self._store.array)

    def __getitem__(self, key):
        return self._store.array[plain(key)]

    def __setitem__(self, key, value):
        self._store.array[plain(key)] = value

    def __iter__(self):
        return iter(self._store.array)

    def __contains__(self, item):
        return plain(item) in self._store.array

    def __array__(self, dtype=None, copy=None):
        array = self._store.array
        if dtype is None:
            return array.copy() if copy else array
        if copy is not False:
            return array.astype(dtype)
        if dtype != array.dtype:  # as NumPy 2 does
            raise ValueError(f"Data of dtype {array.dtype} can't be {dtype} without a copy.")
        return array

    def __repr__(self):
        name = f" {self._name!r}" if self._name else ""
        batch = ", minibatch" if self._minibatch else ""
        return f"<Data{name} of {self.dtype}, shape {self.shape}{batch}>"

    def condition_data(self, input_data: ArrayLike, force_cast: bool = False) -> np.ndarray:
        """Return the array that :meth:`set_value` would store, without storing it.

        Raises
        ------
        TypeError
            If the dtype can't be cast up to the dtype of the Data, or the number of dimensions
            differs.
        """
        value = self._condition(input_data, force_cast)
        return value.astype(self._store.array.dtype, copy=False)

    def _condition(self, input_data, force_cast):
        """Return an array whose dtype can be cast; storing it casts it."""
        dtype = self._store.array.dtype
        return condition(plain(input_data), dtype, self.ndim, force_cast, self._what())

    def set_value(
        self, input_data: ArrayLike, force_cast: bool = False, oversize: float = 1
    ) -> None:
        """Store an array, of any shape; the memory is used again if it is large enough.

        Parameters
        ----------
        input_data : array_like
            Its number of dimensions must be that of the Data, and its dtype one that can be cast
            up to the dtype of the Data: uint8 to int32 or float32, float32 to float64. Python lists
            and scalars only have to hold values that the dtype can represent.
        force_cast : bool
            Cast any dtype, as ``numpy.ndarray.astype`` does.
        oversize : float
            From 1 to 2: new memory gets room for so many times the items.

        Raises
        ------
        SessionError
            After :func:`~synkhronos.close`.
        TypeError
            For a value that does not fit, and an `oversize` that is not a number.
        ValueError
            For an `oversize` that is not from 1 to 2.
        SharedMemoryFull
            If the shared memory is full.
        """
        oversize = _oversize(oversize)
        value = self._condition(input_data, force_cast)
        self._resize(value.shape, oversize, keep=False, value=value)

    def set_length(self, length: int, oversize: float = 1) -> None:
        """Change the length of axis 0, to at least 1; the memory keeps its items.

        Raises
        ------
        TypeError
            For a length that is not an integer, and a Data without axes.
        ValueError
            For a length below 1.
        SessionError, SharedMemoryFull
            As :meth:`set_value`, which describes `oversize` too.
        """
        if self.ndim == 0:
            raise TypeError(f"{self._what()} has no axis 0 whose length could be set.")
        length = whole_number("length", length, 1)
        self._resize((length, *self.shape[1:]), _oversize(oversize))

    def set_shape(self, shape: Sequence[int], oversize: float = 1) -> None:
        """Change the shape, with the same number of dimensions; the items stay in flat order.

        Raises
        ------
        TypeError
            For anything but a sequence of integers.
        ValueError
            For another number of dimensions, and a negative length.
        SessionError, SharedMemoryFull
            As :meth:`set_value`, which describes `oversize` too.
        """
        new = shape_of(shape)
        if len(new) != self.ndim or min(new, default=0) < 0:
            raise ValueError(
                f"{self._what()} has {count(self.ndim, 'dimension')}: its shape can't be "
                f"{shown(new)}."
            )
        self._resize(new, _oversize(oversize))

    def free_memory(self) -> None:
        """Make the Data empty; its memory is freed when no view of it is left.

        If another thread is in a call with the Data, the call still uses the old contents, and the
        memory is freed when the call ends.
        """
        self._store.free()

    def _resize(self, shape, oversize, keep=True, value=None):
        if self._session.state is not SessionState.OPEN:
            self._session.require_open()
        self._store.resize(shape, oversize, keep, value)

    def __reduce__(self):
        raise TypeError(
            f"{self._what()} can't be pickled or copied: it is shared memory of this session. "
            "Pickle or copy its values, numpy.array(d)."
        )

    def _what(self):
        return f"Data {self._name!r}" if self._name else "This Data"

    def _hold(self, session):
        """Return the contents for the current call of `session`, which holds them until its end.

        If other threads or signal handlers resize or free the Data meanwhile, the ranks still fetch
        the array that was checked.
        """
        if self._session is not session:
            self._session.require_open()
        contents = self._store.contents
        if contents.ref is None:
            contents = self._store.empty()
        elif contents.array.shape != contents.ref.shape:
            # The user has assigned ``d.data.shape = shape``.
            if len(contents.shape) != self.ndim:
                raise ValueError(
                    f"The array of {self._what()} was given the shape {contents.shape} in place, "
                    f"but has {count(self.ndim, 'dimension')}: assign a shape of as many to its "
                    "data.shape."
                )
            contents = contents.with_assigned_shape()
        session.held.append(contents)
        return contents


def data(
    value: ArrayLike | None = None,
    var: Variable | None = None,
    dtype: str | type | np.dtype | None = None,
    ndim: int | None = None,
    shape: Sequence[int] | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
) -> Data:
    """Make an array in shared memory, for use as an input of functions.

    Parameters
    ----------
    value : array_like, optional
        The first value. Without it the Data holds zeros of shape `shape`, or is empty.
    var : theano variable, optional
        A variable that gives the Data its dtype, ndim and name.
    dtype : str or numpy.dtype, optional
        By default the dtype of `value`. If both are given, `value` is cast up to `dtype`.
    ndim : int, optional
        The number of dimensions; by default ``value.ndim`` or ``len(shape)``.
    shape : tuple of int, optional
        The first shape, if there is no value.
    minibatch : bool
        Whether the Data will hold just a batch; see the argument ``batch`` of functions.
    force_cast : bool
        Cast `value` even if that loses precision.
    oversize : float
        From 1 to 2: the memory gets room for so many times the items.
    name : str, optional
        Used in error messages.

    Raises
    ------
    SessionError
        Before :func:`~synkhronos.fork`.
    TypeError
        If dtype or ndim is missing, or the value does not fit them.
    ValueError
        For an `oversize` that is not from 1 to 2, and negative lengths.
    SharedMemoryFull
        If the shared memory is full.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> d = synk.data(np.ones((3, 2), "float32"))
    >>> d[0] = 5
    >>> d.data.sum()
    14.0
    >>> synk.close()
    """
    session = current("data()")
    if var is not None:
        dtype, ndim = _like(var, dtype, ndim)
    name = getattr(var, "name", None) if name is None else name
    name = None if name is None else str(name)
    if dtype is not None:
        dtype = check_dtype(dtype)
    if shape is not None:
        shape = shape_of(shape)
    force_cast = truth("force_cast", force_cast)
    what = f"Data {name!r}" if name else "This Data"
    initial: Any = plain(value)
    if isinstance(initial, np.ndarray):
        check_kind(initial, initial, what)
    elif initial is not None:
        initial = as_array(initial, dtype, force_cast, what)
    if initial is not None:
        dtype = initial.dtype if dtype is None else dtype
        ndim = initial.ndim if ndim is None else ndim
    elif shape is not None and ndim is None:
        ndim = len(shape)
    if dtype is None or ndim is None:
        raise TypeError(
            "data() needs a dtype and a number of dimensions: give a variable (var=), or a value, "
            f"or dtype= and one of ndim= and shape=. Got dtype={dtype!r}, ndim={ndim!r}."
        )
    dtype = check_dtype(dtype)
    ndim = whole_number("ndim", ndim, 0, MAX_DIMENSIONS)
    oversize = _oversize(oversize)
    if initial is not None:
        # Check before memory is allocated, so that an error leaves none behind.
        initial = condition(initial, dtype, ndim, force_cast, what)
        if shape not in (None, initial.shape):
            raise ValueError(
                f"shape={shown(shape)} was given beside a value of shape {initial.shape}, which "
                "says it already: leave shape out, or reshape the value."
            )
    with session.lock:
        session.refuse_nesting()
        with session.inside:
            new = Data(session, dtype, ndim, minibatch, name)
            if initial is not None:
                new.set_value(initial, force_cast=True, oversize=oversize)
            elif shape is not None:
                new.set_shape(shape, oversize)
    return new


def _like(var, dtype, ndim):
    """Return the dtype and ndim of a variable; raise TypeError if those given differ."""
    if not isinstance(var, _host.Variable) or not _host.is_array_variable(var):
        raise TypeError(
            f"var must be a {_host.title} tensor variable, got {shown(var)}."
            f"{advice(var, _host.title)}"
        )
    if dtype is not None and check_dtype(dtype) != var.dtype:
        raise TypeError(f"dtype={shown(dtype)} was given beside var={var}, of dtype {var.dtype}.")
    if ndim is not None and whole_number("ndim", ndim, 0, MAX_DIMENSIONS) != var.ndim:
        raise TypeError(
            f"ndim={shown(ndim)} was given beside var={var}, of {count(var.ndim, 'dimension')}."
        )
    return var.dtype, var.ndim


def _oversize(oversize):
    """Return an argument `oversize` as a float from 1 to 2."""
    try:
        if is_bool(oversize) or isinstance(oversize, (str, bytes)):
            raise TypeError
        number = float(oversize)
    except (TypeError, ValueError):
        raise TypeError(f"oversize must be a number from 1 to 2, got {shown(oversize)}.") from None
    except OverflowError:
        number = float("inf")
    if not 1 <= number <= 2:
        raise ValueError(f"oversize must be from 1 to 2, got {shown(oversize)}.")
    return number
