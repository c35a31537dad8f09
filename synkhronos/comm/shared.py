"""Ranks of one machine: every rank works on the arrays of all others where they are.

    bring home, post ──▶ meet ──▶ hear ──▶ reduce or copy     ──▶ finish barrier of the call
    every rank its own            where    the rank's own share
                                  all are  of every rank's array

    inside a function:
    fill boxes, post ──▶ meet ──▶ hear ──▶ little: each rank reduces everything for itself
                                           much: its own share, to all ranks ──▶ meet

Nothing is sent: a value is read from the home of the rank that has it. See `homes` for where they
are, and `outboxes` for the outputs of functions.
"""

import numpy as np

from synkhronos import _blocks, _gpuarrays, _theano
from synkhronos.comm import Communicator
from synkhronos.comm.homes import Homes
from synkhronos.comm.outboxes import Outboxes

_PLANS = 64  # lists of views that are kept
# In a function each rank reduces everything for itself, up to so many ranks and bytes: it reads the
# arrays of all. For more, ranks share the work, which takes a second meeting.
_ALL_READ_ALL = 3
_LITTLE = 1 << 17


class SharedMemory(Outboxes, Communicator):
    """One rank's end: its homes and outboxes, and its views of all others'."""

    def __init__(self, worker):
        super().__init__(worker)
        self._gate = worker.gate
        self._homes = Homes(worker)
        self._has_devices = any(device != "cpu" for device in worker.devices)
        self._plans = {}
        self._exchanges = 0, 0  # the number of the call, and how many there were in it

    def close(self):
        """Drop everything; the variables that are left keep their values."""
        super().close()
        self._plans.clear()
        self._homes.close()

    def forget_variables(self, keys):
        """Drop what belongs to these variables."""
        self._plans.clear()
        self._homes.forget(keys)

    # Values of shared variables.

    def expose(self, keys):
        """Have the master see the values; it may do so after the finish barrier."""
        self._homes.begin()
        self._homes.bring_home(keys)
        self._homes.post()

    def values(self, key):
        """Return, on the master, what every rank has exposed, in rank order."""
        self._homes.hear()
        return self._homes.values(key)

    def value_of(self, rank, key):
        """Return, on the master, what one rank has exposed."""
        self._homes.hear()
        return self._homes.value_of(rank, key)

    def assign(self, key, array, rows=None):
        """Give this rank's variable a value, or some of its rows: a range or indices."""
        self._homes.begin()
        variable = self._worker.variables[key]
        if rows is None:
            self._give(key, array)
            return
        if _theano.lives_on_device(variable):
            _theano.replace(variable, _rows_of(array, rows))
            return
        target = self._homes.new_value(key, (len(rows), *array.shape[1:]))
        if isinstance(rows, range) and rows.step > 0:
            target[...] = array[rows.start : rows.stop : rows.step]
        else:
            if np.may_share_memory(array, target):
                array = array.copy()
            np.take(array, rows, axis=0, out=target, mode="clip")

    def _meet(self, keys):
        self.expose(keys)
        self._gate.meet()
        self._homes.hear()

    def all_reduce(self, keys, op, nccl=True):
        """Replace each variable, on all ranks, with the reduction of all."""
        self._meet(keys)
        return self._reduce(keys, op, None)

    def reduce(self, keys, op, root, nccl=True):
        """Replace each variable of the rank `root` with the reduction of all."""
        self._meet(keys)
        return self._reduce(keys, op, root)

    def _reduce(self, keys, op, root):
        plan = self._plans.get((keys, root))
        if plan is None or plan[0] != self._homes.version:
            values = [self._homes.values(key) for key in keys]
            unequal = _first_unequal(values)
            if unequal is not None:
                return unequal
            if plan or len(self._plans) >= _PLANS:
                self._plans.clear()  # views of what may be gone
            plan = self._homes.version, self._plan(values, root)
            self._plans[keys, root] = plan
        divisor = self._worker.n_ranks
        for sources, out, copies in plan[1]:
            _blocks.reduce_block(op, sources, out, divisor)
            for copy in copies:
                copy[...] = out
        if self._has_devices:
            self._gate.meet()
            self._homes.copy_back(keys if root in (None, self._worker.rank) else ())
        return None

    def _plan(self, values, root):
        """Return the blocks that this rank reduces: sources, where to, and who gets a copy."""
        buffers = {}
        blocks = []
        for _, sources in _blocks.cut(values, self._worker.n_ranks, self._worker.rank):
            if root is None:
                out, copies = sources[0], sources[1:]
            elif root == 0:
                out, copies = sources[0], []
            else:
                # The root's own value is needed until its turn comes.
                dtype = sources[0].dtype
                if dtype not in buffers:
                    buffers[dtype] = np.empty(_blocks.BLOCK, np.uint8).view(dtype)
                out, copies = buffers[dtype][: sources[0].size], [sources[root]]
            blocks.append((sources, out, copies))
        return blocks

    def reduce_to_new(self, key, op):
        """Return, on the master, the reduction of what all ranks have exposed, or a mismatch."""
        values = self.values(key)
        unequal = _first_unequal([values])
        if unequal is not None:
            return unequal
        result = np.empty(values[0].shape, values[0].dtype)
        _reduce_whole(op, values, result, len(values))
        return result

    def broadcast(self, keys, root, nccl=True):
        """Replace each variable with the value on rank `root`."""
        mine = self._worker.rank == root
        if mine:
            self.expose(keys)
        else:
            self._homes.begin()
        self._gate.meet()
        self._homes.hear()
        if mine:
            return
        for key in keys:
            self._give(key, self._homes.value_of(root, key))

    def _give(self, key, value):
        variable = self._worker.variables[key]
        if _theano.lives_on_device(variable):
            _theano.replace(variable, value)
        else:
            self._homes.new_value(key, value.shape)[...] = value

    def all_gather(self, keys, nccl=True):
        """Replace each variable with the values of all ranks, joined along axis 0."""
        self._meet(keys)
        values = [self._homes.values(key) for key in keys]
        for position, each in enumerate(values):
            if len({value.shape[1:] for value in each}) > 1:
                return _mismatch(position, each)
        for key, each in zip(keys, values):
            variable = self._worker.variables[key]
            if _theano.lives_on_device(variable):
                _theano.replace(variable, _gpuarrays.join(each, variable.dtype))
                continue
            rows = sum(len(value) for value in each)
            joined = self._homes.replace_home(key, (rows, *each[0].shape[1:]))
            np.concatenate(each, out=joined)
        # Who is done leaves its old home as it was: others may still read it.
        return None

    # Inside a function.

    def exchange(self, arrays, ops, weights, targets):
        """Reduce arrays that every rank has computed, into arrays of its own.

        Parameters
        ----------
        arrays : list of numpy.ndarray or pygpu.gpuarray.GpuArray
            Contiguous or not.
        ops : tuple of str
        weights : tuple of int
            How many rows each rank computed from. Who has none only takes part.
        targets : list of numpy.ndarray, pygpu.gpuarray.GpuArray or None
            A target may be its array. None asks for any array, valid until the next exchange.

        Returns
        -------
        list of numpy.ndarray or pygpu.gpuarray.GpuArray
            The targets. In place of None arrays that are valid until the next exchange.

        Raises
        ------
        ValueError
            On every rank, when shapes differ.
        """
        n_ranks = self._worker.n_ranks
        if n_ranks == 1 and not self._has_devices:
            return [_copy(array, target) for array, target in zip(arrays, targets)]
        weighing = [rank for rank, weight in enumerate(weights) if weight]
        equal = len({weights[rank] for rank in weighing}) == 1
        divisor = len(weighing) if equal else sum(weights)
        factor = 1 if equal else weights[self._worker.rank] or 1
        key = self._next_scratch()
        self._exchanges = self._gate.sequence, self._exchanges[1] + 1
        if self._exchanges[1] == 1:
            self._homes.begin()
        layout = tuple((_wide(a.dtype).str, a.shape) for a in arrays)
        home = self._homes.home_of(key)
        if home and home.layout != layout:
            # Others are going to lie where these have landed.
            arrays = [a.copy() if any(a is b for b in home.arrays) else a for a in arrays]
        boxes = self._homes.room_for(key, layout)
        in_shares = len(weighing) > _ALL_READ_ALL or sum(box.nbytes for box in boxes) > _LITTLE
        own = self._fill(arrays, ops, boxes, factor, in_shares)
        self._homes.post()
        self._gate.meet()
        self._homes.hear()
        if in_shares:
            plan = self._plan_of_shares(key, own, tuple(weighing))
            for position, box, blocks, others in plan:
                _blocks.reduce_block(ops[position], blocks, box, divisor)
                for other in others:
                    other[...] = box
            self._gate.meet()
            return [_copy(box, target) for box, target in zip(boxes, targets)]
        sources = zip(*[self._equal_boxes(key)[rank] for rank in weighing])
        return [
            _reduce_whole(op, each, np.empty_like(each[0]) if target is None else target, divisor)
            for op, each, target in zip(ops, sources, targets)
        ]

    def landing_place(self, position, shape, dtype):
        """Return an array to compute the one at a position of the next exchange in, or None.

        For functions of one exchange: in others the next might not be the one that is meant.
        """
        home = self._homes.home_of(self._next_scratch())
        # A Ctrl-C may have come before it was laid out.
        if home is None or home.layout is None or position >= len(home.arrays):
            return None
        box = home.arrays[position]
        return box if box.shape == shape and box.dtype == dtype else None

    def _next_scratch(self):
        """Return where the next exchange is; begin to count anew in a new call."""
        sequence, count = self._exchanges
        if sequence != self._gate.sequence:
            self._exchanges = self._gate.sequence, 0
            count = 0
        # In turns: who is ahead may fill one while others read the other.
        return f"scratch {count % 2}"

    def _fill(self, arrays, ops, boxes, factor, in_shares):
        """Put arrays into boxes, where all ranks see them; return where this rank has its own.

        In shares its own share of large arrays stays out, as it is read where it is.
        """
        own = list(boxes)
        for position, (array, op, box) in enumerate(zip(arrays, ops, boxes)):
            if _gpuarrays.is_on_device(array):
                _gpuarrays.read(array, box)
                array = box
            if op == "avg" and factor != 1:
                np.multiply(array, box.dtype.type(factor), box, dtype=box.dtype)
            elif array is box:
                pass  # it has landed there
            elif in_shares and _is_like(box, array) and box.nbytes > _LITTLE:
                own[position] = array
            else:
                box[...] = array
        if any(array is not box for array, box in zip(own, boxes)):
            pairs = list(zip(boxes, own))
            for rank in range(self._worker.n_ranks):
                if rank != self._worker.rank:
                    for position, (box, block) in _blocks.cut(pairs, self._worker.n_ranks, rank):
                        if own[position] is not boxes[position]:
                            box[...] = block
        return own

    def _equal_boxes(self, key):
        """Return the boxes of each rank; raise if their shapes differ."""
        everyone = self._homes.arrays(key)
        shapes = [[box.shape for box in each] for each in everyone]
        if any(each != shapes[0] for each in shapes):
            raise ValueError(
                f"all_reduce got arrays of different shapes on the ranks: in rank order, {shapes}."
            )
        return everyone

    def _plan_of_shares(self, key, own, weighing):
        """Return the blocks of this rank's share.

        Each with its position, where to reduce it to, from what, and who else gets a copy.
        """
        plan = self._plans.get((key, weighing))
        if plan is not None and plan[0] != self._homes.version:
            self._plans.clear()  # views of what may be gone
            plan = None
        if plan is not None and _are(own, plan[1]):
            return plan[2]
        everyone, me = self._equal_boxes(key), self._worker.rank
        others = [boxes for rank, boxes in enumerate(everyone) if rank != me]
        sources = [everyone[rank] for rank in weighing if rank != me]
        if me in weighing:
            sources.insert(0, own)  # first, as the result may lie where it is
        values = list(zip(everyone[me], *others, *sources))
        blocks = [
            (position, box, rest[len(others) :], rest[: len(others)])
            for position, (box, *rest) in _blocks.cut(values, self._worker.n_ranks, me)
        ]
        if _are(own, everyone[me]):  # these stay the same arrays
            if plan or len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key, weighing] = self._homes.version, own, blocks
        return blocks


def _rows_of(array, rows):
    if isinstance(rows, range) and rows.step > 0:
        return array[rows.start : rows.stop : rows.step]
    return np.take(array, rows, axis=0, mode="clip")


def _reduce_whole(op, sources, target, divisor):
    if _gpuarrays.is_on_device(target):
        whole = np.empty(target.shape, sources[0].dtype)
        _reduce_whole(op, sources, whole, divisor)
        _gpuarrays.write(target, whole.astype(target.dtype, copy=False))
        return target
    if not (target.flags.c_contiguous and target.dtype == sources[0].dtype):
        whole = np.empty(target.shape, sources[0].dtype)
        _reduce_whole(op, sources, whole, divisor)
        target[...] = whole
        return target
    for _, (out, *blocks) in _blocks.cut([[target, *sources]], 1, 0):
        _blocks.reduce_block(op, blocks, out, divisor)
    return target


def _is_like(box, array):
    return array.flags.c_contiguous and array.dtype == box.dtype


def _are(arrays, others):
    return all(array is other for array, other in zip(arrays, others))


def _copy(array, target):
    """Return the target, with the values of an array; or the array if there is no target."""
    if target is None or target is array:
        return array
    return _reduce_whole("sum", [array], target, 1)


def _wide(dtype):
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _first_unequal(values):
    for position, each in enumerate(values):
        shape = each[0].shape
        if any(value.shape != shape for value in each):
            return _mismatch(position, each)
    return None


def _mismatch(position, values):
    return position, [value.shape for value in values]
