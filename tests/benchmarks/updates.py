"""The update of a training step on ranks, beside serial Theano's.

Each figure is of steps of a multilayer perceptron, on the master, in turns: the time from the
meeting at which all ranks have computed their gradients until the function has ended. So the
figures of ranks have the reduction of the gradients in them, too; that of serial Theano has not.
"Not vectorized" are ranks with ``THEANO_FLAGS=optimizer_excluding=synkhronos_vectorize``.
"""

import numpy as np

from synkhronos import session
from synkhronos._host import library
from synkhronos.extensions import train, update_rules
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, networks, options

RULES = ("adam", "momentum", "sgd", "rmsprop", "adagrad", "adadelta", "adamax", "nesterov_momentum")
WAYS = {"serial": "serial", "plain": "not vectorized", "ranks": "ranks"}
_UNITS = [[128, 128], [512, 512], [2048, 2048]]
_RATE = 0.001


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--ranks", options.count, 2, "ranks of the session")
    rules = options.names(RULES, "rule")
    options.add(parser, "--rules", rules, ["adam", "momentum", "sgd"], "update rules")
    parser.add_argument(
        "--units", type=_units, default=_UNITS, metavar="LIST",
        help="of the layers between 784 and 10; networks apart by / (128,128/512,512/2048,2048)",
    )  # fmt: skip
    options.add(parser, "--batch", options.count, 128, "rows of a step")
    options.add(parser, "--steps", options.count, 100, "steps to time of each way")


def _units(text):
    return [options.counts(units) for units in text.split("/")]


def measure(args, report):
    """Measure each network and rule, and show the table."""
    found = report.results["updates"] = []
    titles = WAYS.values()
    table = frame.Table("rule", "parameters", *titles, "ranks/serial", first=18, least=16)
    title = f"ms of an update, {args.ranks} ranks; the fastest 10 % of steps are faster"
    report.show(f"{title}\n{table.head}")
    for units in args.units:
        for rule in args.rules:
            # One session for each, so that no other functions take memory.
            with frame.session(args.ranks, "cpu", threads_per_rank=1):
                each = _measure(rule, units, args)
            found.append(each)
            ms = [f"{each['ms'][way]:.3f}" for way in WAYS]
            ratio = each["ms"]["ranks"] / each["ms"]["serial"]
            report.show(table.line(rule, f"{each['parameters']:,}", *ms, f"{ratio:.2f}"))


def _measure(rule, units, args):
    arrays = session._Current.session.comm.arrays
    stamps = {}
    storage = getattr(arrays, "_storage", None)
    if storage is not None:  # several ranks
        hear = storage.hear

        def hear_and_stamp():
            hear()
            stamps.setdefault("met", turns.clock())

        storage.hear = hear_and_stamp
    end_all = arrays.end_all

    def end_and_stamp():
        end_all()
        stamps["end"] = turns.clock()

    arrays.end_all = end_and_stamp
    x, y = networks.Mlp(units).rows(args.batch)

    def seconds(step):
        stamps.clear()
        step(x, y)
        return stamps["end"] - stamps.get("met", stamps["end"])

    measured = turns.Turns(None, rounds=args.steps, most=1)
    for way in ("plain", "ranks"):
        step = _step(rule, units, way == "ranks")
        measured.add(way, lambda count, step=step: [seconds(step) for _ in range(count)])
    update, n_parameters = _serial_update(rule, units)

    def serial(count):
        np.dot(x, x.T)  # between two updates a step evicts from the caches what it does not use
        return [turns.seconds_of(update) for _ in range(count)]

    measured.add("serial", serial)
    figures = measured.take_all(f"{rule} {units}")
    ms = {way: 1e3 * figures[way]["p10"] for way in WAYS}
    return {"rule": rule, "units": units, "parameters": n_parameters, "ms": ms}


def _step(rule, units, vectorized):
    network = networks.Mlp(units)
    mode = library.compile.get_default_mode()
    mode = mode if vectorized else mode.excluding("synkhronos_vectorize")
    return train.make_train_step(
        [network.x, network.y],
        network.loss,
        network.params,
        getattr(update_rules, rule),
        learning_rate=_RATE,
        options={"mode": mode},
    )


def _serial_update(rule, units):
    """Return a Theano function that updates from gradients in shared variables; and its size."""
    network = networks.Mlp(units)
    gradients = [library.shared(each.get_value() * np.float32(0.01)) for each in network.params]
    updates = getattr(update_rules, rule)(gradients, network.params, learning_rate=_RATE)
    return library.function([], updates=updates), int(network.n_numbers)
