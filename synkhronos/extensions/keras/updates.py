"""The updates of a Keras model's functions, made equal on all ranks.

running averages ──▶ averaged
optimizer ─────────▶ step
metrics ───────────▶ added_up
"""

from synkhronos import ops
from synkhronos._host import tensor as T
from synkhronos.extensions import train


def averaged(updates, graph):
    """Return a model's updates, such as running averages, averaged over the ranks.

    Integers, such as counts of steps, are equal on all ranks already.
    """
    first = {}
    for variable, value in updates:
        # A shared layer has several updates of a variable. Keras keeps the first.
        first.setdefault(variable, value)
    equal, differing = [], []
    for variable, value in first.items():
        average = graph.running_average(value)
        if average is not None:
            equal.append((variable, average))
        elif variable.dtype.startswith("float"):
            differing.append((variable, graph.expression(value)))
        else:
            equal.append((variable, graph.expression(value)))
    return [*equal, *train.average_updates(differing).items()]


def step(model, graph):
    """Return the updates of the optimizer, with gradients averaged over the ranks."""
    params, loss = model._collected_trainable_weights, graph.expression(model.total_loss)
    if not params:
        return model.optimizer.get_updates(loss=loss, params=[])
    return list(train.parallel_updates(loss, params, model.optimizer).items())


def metrics_of(model):
    """Return all metrics of a model, with those of its layers and outputs."""
    return model._get_training_eval_metrics()


def added_up(model, graph):
    """Return the updates of the metrics, which count the rows of all ranks."""
    fed = {*model._feed_inputs, *model._feed_targets, *model._feed_sample_weights}
    updates = {}
    for metric in metrics_of(model):
        # Where a state has several updates, Keras takes the first.
        added = {
            state: _added(metric, state, graph.expression(value))
            for state, value in reversed(metric.updates)
        }
        # A metric that counts minibatches (the loss of an output does) adds a mean of each.
        op = "sum" if all(_depends_on(fed, number) for number in added.values()) else "avg"
        for state, number in added.items():
            if _depends_on(fed, number):
                number = ops.all_reduce(number, op)
            updates.setdefault(state, state + number)
    return list(updates.items())


def _added(metric, state, value):
    """Return the number that an update adds to a state."""
    operands = list(value.owner.inputs) if value.owner else []
    if state not in operands or value.owner.op != T.add:
        raise ValueError(
            f"The metric {metric.name!r} sets {state} to something else than itself plus a number, "
            "so the ranks' numbers can't be added up. Perhaps compute it in a callback, from "
            "model.predict()?"
        )
    operands.remove(state)
    return operands[0] if len(operands) == 1 else T.add(*operands)


def _depends_on(inputs, variable):
    """Return whether a variable depends on the values of inputs, not only on their shapes."""
    pending, seen = [variable], set()
    while pending:
        variable = pending.pop()
        if variable in inputs:
            return True
        if variable.owner and variable not in seen:
            seen.add(variable)
            op, operands = variable.owner.op, variable.owner.inputs
            # Keras computes a size as the sum of ones that are filled into that shape.
            pending += operands[1:] if op == T.fill and operands[0].ndim == 0 else operands
    return False
