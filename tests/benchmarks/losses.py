"""Losses of public reports and papers, trained on ranks and in one process.

Each loss of ``support.losses`` is trained with a few minibatches by serial Theano, or Keras, and
on ranks, in these ways:

step        train.make_train_step
function    synk.function with updates of gradients that ops.all_reduce averages
forgotten   synk.function with updates of gradients that each rank has computed by itself
keras       parallelize(), for losses and metrics of Keras

After each minibatch the loss, the other outputs and all parameters are compared. What is found:

equal       all numbers are serial Theano's, to a ten-millionth
whole       they are, and a warning said that each rank computes the whole, which is no faster
told        they are not, and an exception or a PortingWarning came with the first such step, or
            before it
late        the first word came with a later step
alarm       all are equal, but there was a warning or an exception
SILENT      they are not, and nothing was said

The exit status is 1 if anything is SILENT.
"""

import collections
import os
import tempfile
import warnings

import numpy as np
from support import compiling
from support.losses import LOSSES

from synkhronos import session
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options

LOAD_MATTERS = False
WAYS = ("step", "function", "forgotten", "keras")
OUTCOMES = ("equal", "whole", "told", "late", "alarm", "SILENT")
TOLERANCE = 1e-7


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.add_argument(
        "--ranks", type=options.count, nargs="+", default=[2, 3], metavar="N",
        help="numbers of ranks (2 3)",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME",
        help="losses with this in their names; may be repeated",
    )  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help=f"({' '.join(WAYS)})")
    parser.add_argument("--words", action="store_true", help="print what was told, too")


def measure(args, report):
    """Train all, and show a line for each loss, and how many trainings ended in which way."""
    chosen = [
        each for each in LOSSES if not args.only or any(part in each.name for part in args.only)
    ]
    if not chosen:
        raise frame.Refused(f"--only {' '.join(args.only)} is in no loss's name")
    compiling.fold_constants_in_python()
    compiling.compute_streams_in_numpy()
    found = report.results["trainings"] = []
    if "keras" in args.ways:
        import_keras()
    with compiling.quickly():
        serial = {}
        for ranks in args.ranks:
            with frame.session(ranks, "cpu", threads_per_rank=1, check="first"):
                for loss in turns.progress(f"losses on {ranks} ranks", chosen):
                    for way in args.ways:
                        if loss.keras if way == "keras" else loss.make:
                            found.append(_outcome(loss, way, ranks, serial))
    _show(args, report, chosen, found)


def _show(args, report, chosen, found):
    pairs = [(way, ranks) for way in args.ways for ranks in args.ranks]
    heads = [f"{way} {ranks}" for way, ranks in pairs]
    table = frame.Table("loss", "mean", *heads, first=26, least=8)
    report.show(table.head)
    by_key = {(each["loss"], each["way"], each["ranks"]): each for each in found}
    for loss in chosen:
        mine = [by_key.get((loss.name, *pair)) for pair in pairs]
        cells = [each["outcome"] if each else "" for each in mine]
        report.show(table.line(loss.name, "yes" if loss.is_mean else "no", *cells))
        for pair, each in zip(pairs, mine):
            if args.words and each and each["words"]:
                report.show(f"    {' '.join(map(str, pair))}: {each['words']}")
    for way in args.ways:
        report.show(f"{way}: {_counted([each for each in found if each['way'] == way])}")
    total = f"{len(chosen)} losses, {len(found)} trainings: {_counted(found)}"
    n_silent = sum(each["outcome"] == "SILENT" for each in found)
    report.show(total)
    if n_silent:
        report.end()
        raise frame.Failed(f"{n_silent} of {len(found)} trainings were SILENT.")


def _counted(found):
    counts = collections.Counter(each["outcome"] for each in found)
    return ", ".join(f"{counts[each]} {each}" for each in OUTCOMES)


def import_keras():
    """Import Keras on Theano, with float64, and leave the user's settings as they are."""
    os.environ.setdefault("KERAS_BACKEND", "theano")
    os.environ.setdefault("KERAS_HOME", tempfile.mkdtemp(prefix="keras-"))
    import keras
    import theano

    keras.backend.set_floatx("float64")
    theano.config.floatX = "float64"


def _outcome(loss, way, ranks, serial):
    """Return what is known of the training of a loss in one way."""
    key = loss.name, way == "keras"
    if key not in serial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            serial[key] = [*_steps(loss, "serial keras" if way == "keras" else "serial")]
    found, told, words = [], [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in _steps(loss, way):
                found.append(step)
                told.append(_words(caught))
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        words = _words(caught) or words
    if session._Current.session is None:
        raise frame.Failed(f"{loss}, {way}, on {ranks} ranks: the session has ended: {words}")
    equal = [_are_equal(*pair) for pair in zip(found, serial[key])]
    first = equal.index(False) if False in equal else len(equal)
    if len(found) < len(serial[key]):
        outcome = "told" if first == len(found) else "late"
    elif first == len(found):
        is_whole = "computes whole minibatches" in words or "computes the whole minibatch" in words
        outcome = "whole" if is_whole else "alarm" if words else "equal"
    elif told[first]:
        outcome = "told"
    else:
        outcome = "late" if words else "SILENT"
    return {
        "loss": loss.name,
        "way": way,
        "ranks": ranks,
        "outcome": outcome,
        "words": " ".join(words.split())[:300],
    }


def _words(caught):
    from synkhronos import PortingWarning

    told = [str(each.message) for each in caught if issubclass(each.category, PortingWarning)]
    return told[0] if told else ""


def _are_equal(found, expected):
    if len(found) != len(expected):
        return False
    for one, other in zip(found, expected):
        if one.shape != other.shape or not np.isfinite(one).all():
            return False
        if np.abs(one - other).max(initial=0) > TOLERANCE * np.abs(other).max(initial=1e-3):
            return False
    return True


def _steps(loss, way):
    """Train, and yield after each minibatch the outputs and the parameters of all ranks."""
    return _keras_steps(loss, way) if "keras" in way else _theano_steps(loss, way)


def _theano_steps(loss, way):
    import synkhronos as synk

    training = loss.make()
    step = _compiled(training, way)
    updated = [variable for variable, _ in training.updates]
    variables = [*training.params, *updated, *training.state]
    for number, batch in enumerate(training.batches):
        for variable, values in training.schedule.items():
            value = np.asarray(values[number], variable.dtype)
            variable.set_value(value) if way == "serial" else synk.broadcast(variable, value)
        outputs = [np.asarray(each, "float64") for each in step(*batch)]
        yield [*outputs, *_values(variables, way == "serial")]


def _values(variables, is_serial):
    """Return the values of variables: NaN where one of a rank differs from the master's."""
    import synkhronos as synk

    values = [np.array(each.get_value()) for each in variables]
    if is_serial:
        return values
    everyone = [synk.gather(each, nd_up=1) for each in variables]
    return [
        own
        if all(np.array_equal(own, each, equal_nan=True) for each in all_of_it)
        else np.nan * own
        for own, all_of_it in zip(values, everyone)
    ]


def _compiled(training, way):
    """Return the training function."""
    import theano
    import theano.tensor as T

    import synkhronos as synk
    from synkhronos.extensions import train, update_rules

    inputs, params, loss = training.inputs, training.params, training.loss
    options = {"bcast_inputs": training.common, "serial_random": training.serial_random}
    options["mode"] = training.mode
    if way == "step":
        return train.make_train_step(
            inputs, loss, params, update_rules.sgd, learning_rate=training.rate,
            outputs=training.outputs, averages=training.updates, options=options,
        )  # fmt: skip
    reduced = synk.ops.all_reduce if way == "function" else lambda variable: variable
    grads = [reduced(each) for each in T.grad(loss, params)]
    updates = list(update_rules.sgd(grads, params, training.rate).items())
    updates += [(variable, reduced(value)) for variable, value in training.updates]
    if way == "serial":
        outputs = [loss, *(variable for variable, _ in training.outputs)]
        return theano.function(
            [*inputs, *training.common], outputs, updates=updates, mode=training.mode
        )
    return synk.function(inputs, [loss, *training.outputs], updates=updates, **options)


def _keras_steps(loss, way):
    from keras import backend

    from synkhronos.extensions.keras import parallelize

    training = loss.keras()
    model = training.build()
    if way == "keras":
        model = parallelize(model, serial_random=training.serial_random)
    for number, (x, y, *weights) in enumerate(training.batches):
        for name, values in training.schedule.items():
            backend.set_value(getattr(model, name), values[number])
        outputs = model.train_on_batch(x, y, *weights)
        yield [*np.atleast_2d(outputs), *_values(model.weights, way != "keras")]
