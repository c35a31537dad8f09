"""The updates of a Keras model's functions, as Keras has them in one process.

    running averages ──▶ of_layers
    optimizer ─────────▶ of_optimizer
    metrics ───────────▶ of_metrics

The division of the whole function decides which part of them each rank computes.
"""

from synkhronos.extensions import train


def of_layers(model):
    """Return a model's own updates, such as running averages, as pairs.

    A layer that several inputs share has several updates of a variable. Keras keeps the first.
    """
    first = {}
    for variable, value in model.updates:
        first.setdefault(variable, value)
    return list(first.items())


def of_optimizer(model, is_average):
    """Return the updates of the optimizer, with gradients averaged over the ranks if asked for."""
    params, loss = model._collected_trainable_weights, model.total_loss
    if params and is_average:
        return list(train.parallel_updates(loss, params, model.optimizer).items())
    return model.optimizer.get_updates(loss=loss, params=params)


def metrics_of(model):
    """Return all metrics of a model, with those of its layers and outputs."""
    return model._get_training_eval_metrics()


def of_metrics(metrics):
    """Return the updates of metrics."""
    updates = {}
    for metric in metrics:
        # Where a state has several updates, Keras takes the first.
        for state, value in metric.updates:
            updates.setdefault(state, value)
    return list(updates.items())
