"""Rows in graphs: which outputs have an item for each row, and what is sliced by an input."""

from theano.compile.ops import DeepCopyOp, ViewOp
from theano.compile.sharedvalue import SharedVariable
from theano.gof import Constant, Variable
from theano.gof.graph import ancestors
from theano.tensor.opt import Shape_i
from theano.tensor.subtensor import Subtensor, get_idx_list

_COPIES = (DeepCopyOp, ViewOp)


def axes_of_rows(function, rows_of):
    """Return for each output of a compiled function its axes that grow with the rows.

    `rows_of` has the positions of inputs, or shared variables, each with its axis of rows. The
    answer comes from the shapes that Theano has inferred: an axis that depends on more than shapes,
    or whose shape it could not infer, does not count.
    """
    fgraph = function.maker.fgraph
    shapes = getattr(fgraph, "shape_feature", None)
    if shapes is None:  # a mode without optimizations
        return [() for _ in fgraph.outputs]
    axis_of = {}
    for position, (given, variable) in enumerate(zip(function.maker.inputs, fgraph.inputs)):
        for key in (position, given.variable):
            if key in rows_of:
                axis_of[variable] = rows_of[key]
    # The last operation of an output may be a copy, which has no inferred shape.
    computed = [
        output.owner.inputs[0] if isinstance(getattr(output.owner, "op", None), _COPIES) else output
        for output in fgraph.outputs
    ]
    return [
        tuple(
            axis
            for axis in range(getattr(output, "ndim", 0))
            if not output.broadcastable[axis] and _counts_rows(shapes, output, axis, axis_of)
        )
        for output in computed
    ]


def _counts_rows(shapes, output, axis, axis_of):
    try:
        length = shapes.get_shape(output, axis)
    except Exception:  # an operation's own inference
        return False
    return any(
        each.owner is not None
        and isinstance(each.owner.op, Shape_i)
        and axis_of.get(each.owner.inputs[0]) == each.owner.op.i
        for each in ancestors([length])
    )


def sliced_by_inputs(expressions, inputs):
    """Return the shared variables of which rows are sliced, from and to what inputs say.

    These are ``data`` and ``labels`` in ``data[i * n : (i + 1) * n]`` and, for an input i,
    ``T.cast(labels, "int32")[i * n : (i + 1) * n]``.
    """
    inputs, found = set(inputs), []
    for variable in ancestors([each for each in expressions if isinstance(each, Variable)]):
        node = variable.owner
        if node is None or not isinstance(node.op, Subtensor):
            continue
        rows = get_idx_list(node.inputs, node.op.idx_list)[0]
        bounds = [rows.start, rows.stop] if isinstance(rows, slice) else [None]
        if not all(isinstance(each, Variable) for each in bounds):
            continue
        if not all(inputs.intersection(ancestors([each])) for each in bounds):
            continue
        sliced = [each for each in ancestors([node.inputs[0]]) if not isinstance(each, Constant)]
        if inputs.isdisjoint(sliced):
            found += [each for each in sliced if isinstance(each, SharedVariable)]
    return list(dict.fromkeys(found))
