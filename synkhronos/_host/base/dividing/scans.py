"""The rule of scans: each rank goes through all steps of its rows.

    sequence (time, rows) ──▶ step: (rows) ──▶ state (rows) ──▶ output (time, rows)
                                    dot(h.T, delta) (part) ──▶ state (part): a gradient

The graph of a step is divided as that of a function is, with the kinds of its sequences and states.
A state has one kind in all steps, that of its initial value. Initial zeros count as a part, until a
step makes another kind of them. Where a step needs the sum of all rows, the ranks reduce in it.
"""

import numpy as np

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.chosen_library import ancestors, tensor
from synkhronos._host.base.dividing import chosen_operations
from synkhronos._host.base.dividing.division import CannotDivide, Division, RowsOfRank, Value, rule
from synkhronos._host.base.functions import is_by, nodes_of, number
from synkhronos._host.base.kinds import LENGTH, PART, ROWS, SAME, SHAPE, STREAM, UNKNOWN
from synkhronos._host.base.rank_operations import AllReduce, has_inside


@rule(host.Scan, knows_times=True)
def _scan(division, node):
    loop = _Loop(division, node)
    while not loop.divide_once():
        pass
    return loop.outputs()


class _Loop:
    """A scan on the ranks: values of its inputs, and of the variables of its step."""

    def __init__(self, division, node):
        self.outer, self.node, self.op = division, node, chosen_operations.loop_of(node.op)
        self.inner_of = self.op.var_mappings["inner_inp_from_outer_inp"]
        self.results_of = self.op.var_mappings["inner_out_from_outer_inp"]
        n_timed = 1 + self.op.n_seqs + self.op.n_outs
        # The positions of inputs that have an item for each step along axis 0.
        self.timed = range(1, n_timed)
        self.states = range(1 + self.op.n_seqs, n_timed + self.op.n_shared_outs)
        self.values = {place: self._value(place) for place in range(len(node.inputs))}
        # All inputs with rows have equally many; for a step, these are its rows.
        rows = [each for i, each in enumerate(node.inputs) if self.values[i].kind == ROWS]
        self.times = division.times_of(node, rows)
        division.keep_equal(rows)
        rows.sort(key=lambda each: not division.of(each).exact)
        self.rows = division.of(rows[0]) if rows else None
        self.total = tensor.lscalar("n_rows")
        self.needed = set()  # variables of a step that are reduced there

    def _value(self, place):
        """Return the value of an input before the first step."""
        each = self.node.inputs[place]
        value = self.outer.of(each)
        if value.kind == ROWS and place in self.timed and value.axis == 0:
            self.outer.refuse_steps(self.node)
        if value.kind == ROWS and self.inner_of[place]:
            return value._replace(exact=True, times=None)
        if value.kind in (PART, STREAM) and self.inner_of[place]:
            return value
        whole = self._whole(place)
        is_zero = place in self.states and _starts_with_zeros(each)
        return whole._replace(kind=PART) if is_zero else whole

    def divide_once(self):
        """Divide a step; return whether its states have the kinds that were assumed."""
        self.inputs, values = list(self.op.inputs), {}
        for place, value in self.values.items():
            for i in self.inner_of[place]:
                mine = self.op.inputs[i].type()
                if value.kind == PART:
                    mine = mine.type.clone(dtype=value.variable.dtype)()
                self.inputs[i] = mine
                axis = value.axis - (place in self.timed)
                values[self.op.inputs[i]] = Value(mine, value.kind, axis, value.exact)
        self.step = Division(self.op.inputs, values, self.needed, self.outer.expansions, self.total)
        self.step.walk(self.op.inputs, self.op.outputs)
        before, needed = dict(self.values), self.needed
        for place in self.states:
            for i in self.results_of[place]:
                self.values[place] = self._joined(place, self.step.of(self.op.outputs[i]))
                if self.values[place].kind == SAME:
                    self.step.same(self.op.outputs[i])  # which adds it to `step.needed`
        for place, value in self.values.items():
            used = {self.op.inputs[i] for i in self.inner_of[place]}
            if value.kind == PART and used & self.step.needed:
                self.values[place] = self._whole(place)
        self.needed = self.step.needed
        is_same = all(_is_as(self.values[place], before[place]) for place in before)
        return is_same and self.needed == needed

    def _whole(self, place):
        """Return the value of an input as all ranks have it."""
        return Value(self.outer.same(self.node.inputs[place]))

    def _joined(self, place, result):
        """Return a state's value, given the value that a step computes for it; refuse a misfit."""
        state, name = self.values[place], f"state {place - self.op.n_seqs} of {self.op.name}"
        if result.kind == UNKNOWN:
            raise CannotDivide(result.reason)
        kinds = state.kind, SAME if result.kind in (LENGTH, SHAPE) else result.kind
        if kinds in ((SAME, SAME), (SAME, PART), (STREAM, STREAM)):
            return state
        if kinds == (ROWS, ROWS):
            if state.axis - (place in self.timed) == result.axis and result.times is None:
                return state._replace(exact=state.exact and result.exact)
            self.outer.refuse(self.node, f"rows that change their axis in {name}")
        if kinds == (PART, PART):
            dtype = np.promote_types(state.variable.dtype, result.variable.dtype).name
            return Value(tensor.cast(state.variable, dtype), PART)
        if state.kind == PART:
            self.values[place] = self._whole(place)
            return self._joined(place, result)
        if kinds == (SAME, ROWS):
            what = f"rows and the initial value of {name}, which has a fixed number of rows"
            self.outer.refuse(self.node, f"{what}: make it with x.shape[0] rows")
        self.outer.refuse(self.node, f"rows of which {name} is sometimes none")

    def outputs(self):
        """Return the values of the scan's outputs."""
        results = self._results()
        if self.step.remainders:
            self.outer.refuse(
                self.node,
                "rows that are reshaped or selected in each step",
                "Reshape to (x.shape[0], ...) in place of (-1, ...) in the step, or outside of it.",
            )
        if self.step.n_rows is not None:
            if not self.rows.exact or self.times is not None:
                self.outer.refuse(self.node, "rows, to a fixed number of rows")
            self.outer.require(self.step.n_rows)
        used, nodes = ancestors(results), nodes_of(results)
        if any(isinstance(node.op, RowsOfRank) for node in nodes):
            self.outer.refuse(self.node, "minibatches that its steps slice")
        ops = [node.op for node in nodes]
        reduces = any(isinstance(op, AllReduce) or has_inside(op, AllReduce) for op in ops)
        if reduces and self.op.as_while:
            what = "sums over all rows in each step, until a condition: give it n_steps"
            self.outer.refuse(self.node, what)
        if reduces and not chosen_operations.STEPS_REDUCE:
            self.outer.refuse(self.node, "sums over all rows in each step")
        inputs, mine = self.inputs, [self.values[i].variable for i in range(len(self.node.inputs))]
        if self.total in used:
            inputs = [*inputs, self.total]
            mine.append(self.outer.length(self.rows).total)
        scan = chosen_operations.scan_like(self.node.op, inputs, results, reduces)
        new = scan.make_node(*mine).outputs
        return [self._output(i, each) for i, each in enumerate(new)]

    def _results(self):
        """Return the results of a step on a rank, cast to the types of its states."""
        types = {}
        for place in self.states:
            for i in self.results_of[place]:
                types[i] = self.inputs[self.inner_of[place][0]].type
        results = []
        for i, each in enumerate(self.op.outputs):
            value = self.step.of(each)
            is_mine = value.kind in (ROWS, PART, STREAM)
            is_condition = self.op.as_while and each is self.op.outputs[-1]
            mine = value.variable if is_mine and not is_condition else self.step.same(each)
            if i in types and mine.type != types[i] and hasattr(mine.type, "broadcastable"):
                mine = chosen_operations.of_type(mine, types[i])
            results.append(mine)
        return results

    def _output(self, position, variable):
        [i, *_] = self.op.var_mappings["inner_out_from_outer_out"][position]
        value = self.step.of(self.op.outputs[i])
        place = self.op.var_mappings["outer_inp_from_outer_out"][position]
        if place in self.states:
            value = self.values[place]._replace(variable=variable)
        elif value.kind not in (ROWS, PART):
            value = Value(variable)
        elif value.times is not None:
            what = "rows that each step merges with other axes: reshape them behind the scan"
            self.outer.refuse(self.node, what)
        else:
            value = Value(variable, value.kind, value.axis + 1, value.exact)
        if value.kind != ROWS:
            return value
        return value._replace(exact=value.exact and self.rows.exact, times=self.times)


def _is_as(value, other):
    same = [each.variable.type for each in (value, other)]
    return value.kind == other.kind and value.exact == other.exact and same[0] == same[1]


def _starts_with_zeros(variable):
    """Return whether all initial values of a state are 0, in memory for all steps."""
    node = variable.owner
    if is_by(variable, host.IncSubtensor):
        is_new = is_by(node.inputs[0], host.AllocEmpty) and node.op.set_instead_of_inc
        return is_new and node.op.idx_list[0].start is None and _starts_with_zeros(node.inputs[1])
    if is_by(variable, host.DimShuffle, host.Retype):
        return _starts_with_zeros(node.inputs[0])
    kind = np.dtype(variable.dtype).kind
    return kind in "fciu" and variable.dtype != "float16" and number(variable) == 0
