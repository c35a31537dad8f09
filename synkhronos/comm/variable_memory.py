"""Storage of shared variables' values: regions of shared memory, mapped by all ranks.

    own      key -> region    this rank's values; Theano computes with them where they are
    boards   rank -> log      the places of each rank's regions: written before a meeting,
                              read after it
    others   key -> arrays    views of the other ranks' values, in their regions

A variable gets its region with its first collective. Updates that run in place leave the value
there; if Theano or ``set_value`` has put another array into the variable, `store` copies it into
the region. Each collective copies the value of a variable on a device into its region, and back.

A rank writes to a region only if nothing but its variable may still use the memory. When an update
replaces a variable's array, Theano may hand out the old one: as an output, as the value of another
variable, or as a view in one of these. All of them refer to the array that was in the variable,
`_Region.value`. If it has such a reference, the region is given up (`_give_up_held`), and the
variable gets another one. An array that the user has borrowed (``get_value(borrow=True)``) shows
what is written to the variable, as in Theano, until the variable has another array.

Lifetimes: a region that this rank replaces stays readable until its next command, because other
ranks may still read it in this one: see `Storage.begin`. The memory of a segment is freed with the
last of its regions and views. Views of other ranks' regions are valid as long as `version` stays
the same. A process that the script forks has a copy of this rank's values.

A log holds the present places, not events: a rank that has missed an entry, because a call failed,
reads it in the next call.
"""

import pickle
import sys
import weakref
from typing import Hashable, NamedTuple, Tuple

import numpy as np

from synkhronos import _host
from synkhronos._machine.shared_memory import nbytes_of

_ALIGN = 64  # bytes of a cache line: no two ranks write to one of them
_LISTS = 64  # of keys whose cells are kept
_HEADER = 8  # bytes before each entry of a log, with its length


class ArrayPlace(NamedTuple):
    """The place of arrays in a segment: the dtype, shape and offset of each."""

    segment: Hashable  # stands for it in messages
    arrays: Tuple[Tuple[str, Tuple[int, ...], int], ...]
    spare: Hashable = None  # a segment that they alternate with: see `Storage.turn`


class _Region:
    """A part of a segment that this rank owns, and the arrays that are in it now."""

    def __init__(self, segment, begin, nbytes):
        # The regions that were made together share one segment, and keep its memory alive.
        self.segment, self.begin, self.nbytes = segment, begin, nbytes
        self.layout, self.arrays = None, [None]  # without a layout `arrays` must not be used
        self.value = None  # the variable's array, in the memory of the first of `arrays`
        self.shape = None  # of `value` when it was made; the script may assign to `value.shape`

    def lay_out(self, layout):
        """Divide the region into arrays of these dtypes and shapes, one after another."""
        places, offset = [], self.begin
        for dtype, shape in layout:
            places.append((dtype, shape, offset))
            offset += _round_up(nbytes_of(dtype, shape))
        arrays = [self.segment.array(*place) for place in places]
        self.layout = None  # a Ctrl-C before the last line leaves a region without a layout
        # Collectives work on regions side by side as on one array, gaps included: see `runs`.
        for dtype, shape, begin in places:
            end = begin + nbytes_of(dtype, shape)
            self.segment.array(np.uint8, (_round_up(end) - end,), end).fill(0)
        self.place, self.arrays = ArrayPlace(self.segment.ref, tuple(places)), arrays
        # Not the first of `arrays`: a view that Theano makes of `value` refers to it, so that its
        # references are counted apart from those of `arrays`.
        self.value = self.segment.array(*places[0])
        self.shape = self.value.shape
        self.layout = layout


class _Alone:
    value = np.empty(0)


_REFERENCES = sys.getrefcount(_Alone.value)  # what it returns for an array in one attribute


class Storage:
    """The regions of one rank, and its views of the regions of all other ranks.

    `version` changes with every change of a region, of this rank or another. Views of regions, and
    plans with such views, are valid as long as it stays the same.
    """

    def __init__(self, worker, memory):
        self._worker, self._memory = worker, memory
        self._own = {}  # key -> region of this rank
        self._cells, self._cells_version = {}, 0  # the results of `cells_of`
        self._unposted = set()  # keys of regions whose places are not in the log yet
        self._retired = []  # regions that this command has replaced
        self._spares = {}  # key -> the region before the present one, see `turn`
        self._written = 0, 0  # the generation of this rank's log, and its length
        # rank -> key -> (segment, arrays, place), or the ArrayPlace until they are first asked for
        self._others = [{} for _ in range(worker.n_ranks)]
        self.heard = [0] * worker.n_ranks  # generation and length of each log, as far as read
        # rank -> key -> {segment: its map}, of the two segments that a variable alternates between.
        # Without it each rank would map one of them anew for each `turn` of another rank.
        self._turning = [{} for _ in range(worker.n_ranks)]
        # A segment stays mapped for as long as `_others` has an array in it.
        self._attached = weakref.WeakValueDictionary()
        self.version = 0

    def begin(self) -> None:
        """Begin a command: drop the regions that the last one replaced.

        Other ranks may have read them until the finish barrier of that command.
        """
        self._retired.clear()

    def store(self, keys) -> None:
        """Copy the values of these variables into their regions, if they aren't there."""
        variables, own = self._worker.variables, self._own
        moved, on_device = [], []
        for key in keys:
            value = _host.peek(variables[key])
            region = own.get(key)
            if _host.is_on_device(value):
                on_device.append(key)
            elif region is None or value is not region.value or value.shape != region.shape:
                moved.append(key)
        # A reference here would look like one of the script: see `_give_up_held`.
        value = region = None
        if moved:
            self._move_in(moved)
        if on_device:
            layouts = {key: (_layout(_host.peek(variables[key])),) for key in on_device}
            self._build(layouts)
            for key, layout in layouts.items():
                [array] = self.room_for(key, layout)
                _host.copy_from_device(_host.peek(variables[key]), array)

    def expose(self, keys) -> None:
        """Put these values where other ranks can read them, after all ranks have met."""
        if self._retired:
            self.begin()
        if not self.are_in_place(keys):
            self.store(keys)
        if self._unposted:
            self.post()

    def are_in_place(self, keys) -> bool:
        """Return whether it is certain that the values of these variables are in their regions."""
        cells, _ = self.cells_of(keys)
        for cell, region in cells:
            value = cell[0]
            if value is not region.value or value.shape != region.shape:
                return False
        return bool(cells)

    def cells_of(self, keys):
        """Return (cell of a variable, its region) for each key, and the bytes of their values.

        There are no pairs if not all variables have both.
        """
        if self._cells_version != self.version or len(self._cells) >= _LISTS:
            self._cells.clear()  # its regions would keep their memory
            self._cells_version = self.version
        cells = self._cells.get(keys)
        if cells is None:
            cells = self._cells[keys] = self._find_cells(keys)
        return cells

    def _find_cells(self, keys):
        variables, regions = self._worker.variables, [self._own.get(key) for key in keys]
        for key, region in zip(keys, regions):
            # A Ctrl-C can leave a region without a layout.
            if region is None or region.layout is None or _host.lives_on_device(variables[key]):
                return (), 0
        cells = [(_host.cell(variables[key]), region) for key, region in zip(keys, regions)]
        return cells, sum([region.value.nbytes for region in regions])

    def copy_back(self, keys) -> None:
        """Copy the regions of those variables that live on a device into the variables."""
        for key in keys:
            variable = self._worker.variables[key]
            if _host.lives_on_device(variable):
                _host.replace(variable, self._own[key].arrays[0])

    def _move_in(self, keys):
        variables = self._worker.variables
        keys = [key for key in keys if not self._is_view_of_own(key)]
        for key in keys:
            if key in self._own:
                self._give_up_held(key)
        layouts = {key: (_layout(_host.peek(variables[key])),) for key in keys}
        self._build(layouts)
        for key, layout in layouts.items():
            region = self._own[key]
            if region.layout != layout:
                self._use_layout(key, layout)
            # In this order: after a Ctrl-C in between, the variable still has its old array.
            region.arrays[0][...] = _host.peek(variables[key])
            _host.replace(variables[key], region.value)

    def _is_view_of_own(self, key):
        """Return whether a variable has its region's array, also if it has to be put back first.

        An op may have replaced it with another view of the same memory. It is not put back if
        anything else uses that memory, which the next collective would write to.
        """
        variable, region = self._worker.variables[key], self._own.get(key)
        if region is None or region.layout is None or region.value.shape != region.shape:
            return False
        value = _host.peek(variable)
        if value.base is not region.value or not value.flags.writeable:
            return False
        if value.__array_interface__ != region.value.__array_interface__:  # address, layout, dtype
            return False
        _host.replace(variable, region.value)
        del value
        if sys.getrefcount(region.value) > _REFERENCES + 1:  # beside the variable's
            _host.replace(variable, region.value.copy())
            return False
        return True

    def _give_up_held(self, key):
        """Give up a region if anything but its variable may use its memory: see the module."""
        region = self._own[key]
        if region.value is None:
            return  # `make_room` has made it
        expected = _REFERENCES + (_host.peek(self._worker.variables[key]) is region.value)
        if sys.getrefcount(region.value) > expected:
            self.version += 1
            self._retired.append(self._own.pop(key))

    def make_room(self, shapes):
        """Make the regions that `new_value` will need for values of these shapes, in one segment.

        A segment takes two descriptors of its owner. Without this each value would get its own.
        """
        layouts = {}
        for key, shape in shapes.items():
            variable, region = self._worker.variables[key], self._own.get(key)
            if region is not None:
                is_laid_out = region.layout is not None and region.value.shape == shape
                if is_laid_out and region.value is _host.peek(variable):
                    continue
                self._give_up_held(key)
            layouts[key] = ((np.dtype(variable.dtype).str, tuple(shape)),)
        self._build(layouts)

    def new_value(self, key, shape):
        """Give a variable an array of that shape in its region, uninitialized.

        Returns a view of it, to write to. The variable's present value may be in the same memory.
        """
        variable, region = self._worker.variables[key], self._own.get(key)
        if region is not None:
            if region.layout is not None and region.value is _host.peek(variable):
                [array] = region.arrays
                if array.shape == region.value.shape == shape:
                    return array
            self._give_up_held(key)
            is_laid_out = key in self._own and region.layout is not None
            if is_laid_out and region.value.shape != region.shape:  # assigned by the script
                region.layout = None  # so that the region gets another array
        layout = ((np.dtype(variable.dtype).str, tuple(shape)),)
        [array] = self.room_for(key, layout)
        _host.replace(variable, self._own[key].value)
        return array

    def turn(self, keys):
        """Let variables get their next values in other regions; the present ones stay readable."""
        # No rank reads the region before the present one any more. So a variable that is gathered
        # again and again alternates between two, without new memory that the system has to clear.
        for key in keys:
            old, spare = self._own.get(key), self._spares.get(key)
            self._spares[key] = old
            if spare is None or spare is old or sys.getrefcount(spare.value) > _REFERENCES:
                self._own.pop(key, None)
            else:
                spare.layout = None  # so that its place is posted again
                self._own[key] = spare

    def region_of(self, key):
        """Return this rank's region of a key, or None. Without a layout it has no arrays yet."""
        return self._own.get(key)

    def room_for(self, key, layout):
        """Return arrays of these dtypes and shapes in a key's region, uninitialized."""
        region = self._own.get(key)
        if region is None or region.layout != layout:
            self._build({key: layout})
            self._use_layout(key, layout)
        return self._own[key].arrays

    def _build(self, layouts):
        """Make new regions, all in one segment, for keys whose region is missing or too small."""
        sizes = {}
        for key, layout in layouts.items():
            needed = max(sum(_round_up(nbytes_of(*each)) for each in layout), _ALIGN)
            region = self._own.get(key)
            if region is None or region.nbytes < needed:
                sizes[key] = needed
                if region is not None:
                    self._retired.append(region)  # before `_own` loses it: others may read it
        if sizes:
            segment, begin = self._memory.create(sum(sizes.values())), 0
            if not sizes.keys().isdisjoint(self._worker.variables):
                segment.copy_for_children()
            for key, nbytes in sizes.items():
                self._own[key] = _Region(segment, begin, nbytes)
                begin += nbytes

    def _use_layout(self, key, layout):
        self._unposted.add(key)  # before the rest: after a Ctrl-C the next command posts the place
        self.version += 1
        self._own[key].lay_out(layout)

    def forget(self, keys) -> None:
        """Drop the regions and views of variables that are no more."""
        self.begin()
        self._cells.clear()
        for key in keys:
            self._own.pop(key, None)
            self._spares.pop(key, None)
            self._unposted.discard(key)
            for others in (*self._others, *self._turning):
                others.pop(key, None)
        self.version += 1

    def close(self) -> None:
        """Drop all regions and views; variables that are left get copies of their values."""
        self.begin()
        self._cells.clear()
        for variable in list(self._worker.variables.values()):
            value = _host.peek(variable)
            if self._memory.holds(value):
                _host.replace(variable, value.copy())
        self._own.clear()
        self._spares.clear()
        for others in (*self._others, *self._turning):
            others.clear()
        self.heard = [0] * len(self.heard)  # a worker that goes on reads all logs again
        self.version += 1

    def post(self) -> None:
        """Write the places of this rank's regions to its log, if they have changed; then meet."""
        if not self._unposted:
            return
        gate = self._worker.gate
        generation, end = self._written
        log = _log(gate.boards[self._worker.rank], generation)
        entry = self._entry(self._unposted)
        if end + len(entry) > len(log):
            # Begin a new log with all present places, in the other half of the board: a rank that
            # is late may still be reading the old log.
            entry = self._entry(self._own)
            generation, end = generation + 1, 0
            log = _log(gate.boards[self._worker.rank], generation)
            if len(entry) > len(log):
                raise ValueError(
                    f"{len(self._own)} shared variables are more than can be told to other ranks "
                    "at a time."
                )
        # In this order: the entry, then its announcement. After a Ctrl-C in between, the next
        # command writes the entry once more, because its keys are still in `_unposted`.
        log[end : end + len(entry)] = entry
        self._written = generation, end + len(entry)
        gate.post_news(generation << 32 | end + len(entry))
        self._unposted.clear()

    def _entry(self, keys):
        regions = [(key, self._own.get(key), self._spares.get(key)) for key in keys]
        places = {
            key: region.place._replace(spare=spare.segment.ref if spare else None)
            for key, region, spare in regions
            if region is not None and region.layout is not None
        }
        data = pickle.dumps(places, pickle.HIGHEST_PROTOCOL)
        return len(data).to_bytes(_HEADER, "little") + data

    def hear(self) -> None:
        """Read the new entries in the logs of the other ranks, after a meeting."""
        gate = self._worker.gate
        every = gate.news()
        if every == self.heard:
            return
        for rank, (news, heard) in enumerate(zip(every, self.heard)):
            if news != heard:
                if rank != self._worker.rank:
                    self.version += 1  # first: the entries invalidate views of this rank
                    self._read(rank, news, _log(gate.boards[rank], news >> 32))
                self.heard[rank] = news

    def _read(self, rank, news, log):
        generation, end = news >> 32, news & 0xFFFFFFFF
        heard = self.heard[rank]
        at = heard & 0xFFFFFFFF
        if heard >> 32 != generation:
            at = 0
            self._others[rank].clear()
        while at < end:
            length = int.from_bytes(log[at : at + _HEADER], "little")
            at += _HEADER
            # Segments are attached later: that of an old entry may have gone since.
            self._others[rank].update(pickle.loads(log[at : at + length]))
            at += length

    def arrays_of(self, rank, key):
        """Return the arrays of a key's region on one rank: views."""
        if rank == self._worker.rank:
            return self._own[key].arrays
        place = self._others[rank][key]
        if isinstance(place, ArrayPlace):
            segment = self._attached.get(place.segment)
            if segment is None:
                segment = self._attached[place.segment] = self._memory.open(place.segment)
            arrays = [segment.array(*array) for array in place.arrays]
            self._others[rank][key] = segment, arrays, place
            kept = self._turning[rank].pop(key, {})
            if place.spare is not None:
                memory = {place.segment: segment, place.spare: kept.get(place.spare)}
                self._turning[rank][key] = memory
        return self._others[rank][key][1]

    def places(self, rank, key) -> list:
        """Return the places of a key's arrays on one rank: (segment, dtype, shape, offset) each."""
        place = self._own[key].place if rank == self._worker.rank else self._others[rank][key]
        if not isinstance(place, ArrayPlace):
            place = place[2]
        return [(place.segment, *array) for array in place.arrays]

    def arrays(self, key):
        """Return the list of arrays of each rank, in rank order."""
        return [self.arrays_of(rank, key) for rank in range(self._worker.n_ranks)]

    def value_of(self, rank, key):
        """Return the value of a variable on one rank: a view."""
        return self.arrays_of(rank, key)[0]

    def values(self, key):
        """Return the value of a variable on each rank, in rank order: views."""
        return [arrays[0] for arrays in self.arrays(key)]

    def runs(self, keys, ranks) -> list:
        """Return flat arrays that span the values of all keys: lists with one for each rank.

        One array spans several values of one dtype whose regions lie side by side on all of these
        ranks: these were made together. Shapes must be equal on the ranks.
        """
        runs: list = []
        for key in keys:
            spans = [self._span(rank, key) for rank in ranks]
            if runs and all(
                segment is last[0] and dtype == last[1] and begin == _round_up(last[3])
                for (segment, dtype, begin, _), last in zip(spans, runs[-1])
            ):
                spans = [(*last[:3], end) for last, (_, _, _, end) in zip(runs[-1], spans)]
                runs[-1] = spans
            else:
                runs.append(spans)
        return [
            [
                segment.array(dtype, ((end - begin) // np.dtype(dtype).itemsize,), begin)
                for segment, dtype, begin, end in spans
            ]
            for spans in runs
        ]

    def _span(self, rank, key):
        """Return (segment, dtype, begin, end) of the first array of a key's region on one rank."""
        if rank == self._worker.rank:
            segment, place = self._own[key].segment, self._own[key].place
        else:
            self.arrays_of(rank, key)  # attaches its segment
            segment, _, place = self._others[rank][key]
        dtype, shape, begin = place.arrays[0]
        return segment, dtype, begin, begin + nbytes_of(dtype, shape)


def _log(board, generation):
    """Return the half of a board that a log of this generation is written to."""
    half = len(board) // 2
    return board[half:] if generation % 2 else board[:half]


def _layout(value):
    return value.dtype.str, value.shape


def _round_up(nbytes):
    return -(-nbytes // _ALIGN) * _ALIGN
