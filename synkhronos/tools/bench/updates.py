"""The update of a training step on ranks, beside serial Theano's.

Each figure is of steps of a multilayer perceptron, on the master, in turns: the time from the
meeting at which all ranks have computed their gradients until the function has ended. So the
figures of ranks have the reduction of the gradients in them, too; that of serial Theano has not.
"Not vectorized" are ranks with ``THEANO_FLAGS=optimizer_excluding=synkhronos_vectorize``.
"""

import json
import time

import numpy as np

from synkhronos.tools.bench import options

RULES = ("adam", "momentum", "sgd", "rmsprop", "adagrad", "adadelta", "adamax", "nesterov_momentum")
WAYS = {"serial": "serial", "plain": "not vectorized", "ranks": "ranks"}
_QUANTILE = 10  # percent of steps that are faster: other programs slow the others down


def add_arguments(parser):
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--ranks", type=options.count, default=2, metavar="N", help="ranks of the session (2)")
    add(
        "--rules", type=options.names(RULES, "rule"), default=["adam", "momentum", "sgd"],
        metavar="LIST", help="update rules (adam,momentum,sgd)",
    )  # fmt: skip
    add(
        "--units", type=_units, default=[[128, 128], [512, 512], [2048, 2048]], metavar="LIST",
        help="of the layers between 784 and 10; networks apart by / (128,128/512,512/2048,2048)",
    )  # fmt: skip
    add("--batch", type=options.count, default=128, metavar="ROWS", help="rows of a step (128)")
    add("--steps", type=options.count, default=100, help="steps to time of each way (100)")
    add("--json", action="store_true", help="print a JSON object")


def _units(text):
    return [[options.count(each.strip()) for each in net.split(",")] for net in text.split("/")]


def main(args) -> int:
    """Measure, print, and return the exit status."""
    import synkhronos as synk

    results = []
    for units in args.units:
        for rule in args.rules:
            # One session for each, so that no other functions take memory.
            synk.fork(args.ranks, threads_per_rank=1)
            try:
                results.append(_measure(rule, units, args))
            finally:
                synk.close()
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        _print(results, args)
    return 0


def _measure(rule, units, args):
    from synkhronos import session

    arrays = session._Current.session.comm.arrays
    stamps = {}
    storage = getattr(arrays, "_storage", None)
    if storage is not None:  # several ranks
        hear = storage.hear

        def hear_and_stamp():
            hear()
            stamps.setdefault("met", time.perf_counter())

        storage.hear = hear_and_stamp
    end_all = arrays.end_all

    def end_and_stamp():
        end_all()
        stamps["end"] = time.perf_counter()

    arrays.end_all = end_and_stamp
    random = np.random.RandomState(0)
    x = random.randn(args.batch, 784).astype("float32")
    y = random.randint(0, 10, args.batch).astype("int32")
    steps = {way: _step(rule, units, way == "ranks") for way in ("plain", "ranks")}
    serial, n_parameters = _serial_update(rule, units)
    times = {way: [] for way in WAYS}
    for number in options.progress(f"{rule} {units}", range(args.steps + 3)):
        for way, step in steps.items():
            step(x, y)
            stamps.clear()
            step(x, y)
            begin = stamps.get("met", stamps["end"])
            if number >= 3:
                times[way].append(stamps["end"] - begin)
        np.dot(x, x.T)  # between two updates a step evicts from the caches what it does not use
        begin = time.perf_counter()
        serial()
        if number >= 3:
            times["serial"].append(time.perf_counter() - begin)
    quick = {way: 1e3 * float(np.percentile(each, _QUANTILE)) for way, each in times.items()}
    return {"rule": rule, "units": units, "parameters": n_parameters, "ms": quick}


def _parameters(units):
    from synkhronos._host import library

    random, params = np.random.RandomState(0), []
    sizes = [784, *units, 10]
    for n_in, n_out in zip(sizes, sizes[1:]):
        weights = random.normal(scale=(2 / n_in) ** 0.5, size=(n_in, n_out))
        params.append(library.shared(weights.astype("float32"), "W"))
        params.append(library.shared(np.zeros(n_out, "float32"), "b"))
    return params


def _step(rule, units, vectorized):
    from synkhronos._host import library
    from synkhronos._host import tensor as T
    from synkhronos.extensions import train, update_rules

    x, y = T.matrix("x", "float32"), T.ivector("y")
    params, h = _parameters(units), x
    for number in range(0, len(params), 2):
        h = T.dot(h, params[number]) + params[number + 1]
        h = T.nnet.relu(h) if number + 2 < len(params) else T.nnet.softmax(h)
    loss = T.nnet.categorical_crossentropy(h, y).mean()
    mode = library.compile.get_default_mode()
    mode = mode if vectorized else mode.excluding("synkhronos_vectorize")
    rule = getattr(update_rules, rule)
    return train.make_train_step(
        [x, y], loss, params, rule, learning_rate=0.001, options={"mode": mode}
    )


def _serial_update(rule, units):
    """Return a Theano function that updates from gradients in shared variables; and its size."""
    from synkhronos._host import library
    from synkhronos.extensions import update_rules

    params = _parameters(units)
    gradients = [library.shared(param.get_value() * np.float32(0.01)) for param in params]
    updates = getattr(update_rules, rule)(gradients, params, learning_rate=0.001)
    size = sum(param.get_value(borrow=True).size for param in params)
    return library.function([], updates=updates), size


def _print(results, args):
    print(f"ms of an update, {args.ranks} ranks; the fastest {_QUANTILE} % of steps are faster")
    titles = "".join(f"{title:>16}" for title in WAYS.values())
    print(f"{'rule':18}{'parameters':>12}{titles}{'ranks/serial':>16}")
    for each in results:
        shown = "".join(f"{each['ms'][way]:16.3f}" for way in WAYS)
        ratio = each["ms"]["ranks"] / each["ms"]["serial"]
        print(f"{each['rule']:18}{each['parameters']:12,}{shown}{ratio:16.2f}")
