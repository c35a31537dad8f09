"""The time of a step of training: serial Theano with one thread and with all, and 1 to n ranks.

Every system trains the same network with the same minibatches, picked at random from the same rows,
by gradient descent, with momentum or without. Each system is a process of its own, and they take
turns in rounds. Times are those of a step, from the call to its return: the median of the round
that other programs disturbed least. The shares are those of the master's time, measured in other
steps than the times: compute is Theano's function; collectives the reduction of gradients and of
the loss; waiting the time that ranks wait for one another in the reduction and at the finish
barrier; input the picking of rows; and call the rest. "Update" is the time that serial Theano
needs, on one thread, to update all parameters from given gradients: ranks compute that in addition
to their part of the rows.

By default a minibatch has the same rows for any number of ranks, which divide it. With --weak each
rank gets so many, and serial Theano those of all ranks. With --one-core-each n ranks use n cores,
instead of all: so one rank is one device, and ``synkhronos bench scaling`` has the times of 1 to n.
"""

import contextlib
import itertools
import json
import os
import statistics
import sys
from typing import NamedTuple

import numpy as np

from synkhronos._wording import count
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options, programs
from synkhronos.tools.bench.networks import NETWORKS

BATCH = 512
MINIBATCHES = 8  # the data set has as many rows as this many minibatches
RATE = 0.01
MOMENTUM = {"sgd": 0.0, "momentum": 0.9}  # of the update rules
# Of a line without what makes steps faster: our rewrites of graphs, or cuDNN.
PLAIN = {"cpu": ("plain", "optimizer_excluding=synkhronos_cpu"),
         "cuda": ("without cuDNN", "dnn.enabled=False")}  # fmt: skip
FIRST = 4  # steps of each system whose losses are compared; they are not timed
SHARES = ("compute", "collectives", "waiting", "input", "call")
_ROUNDS = 10
_TOLERANCE = 1e-3  # relative, of these losses
_UPDATES = 50
_COLOURS = {"serial": "0.6", "torch": "0.8"}  # of the bars; others are ranks


def add_arguments(parser):
    """Add the options of this benchmark."""
    what = "ranks at most, or these numbers alone, such as 1,2,4 (default: one for each core)"
    options.add(parser, "--ranks", options.counts, None, what)
    what = "one for each rank, such as cuda0,cuda1; serial Theano gets the first (default: cpu)"
    options.add(parser, "--devices", options.devices_of_ranks, None, what)
    options.add(parser, "--networks", options.names(NETWORKS, "network"), list(NETWORKS), "which")
    what = f"rows of a minibatch, on all ranks, or with --weak on each ({BATCH})"
    options.add(parser, "--batch", options.count, None, what)
    what = "several of these, one after the other, such as 128,512"
    options.add(parser, "--rows", options.counts, None, what)
    what = "the update rule (momentum)"
    parser.add_argument("--rule", choices=list(MOMENTUM), default="momentum", help=what)
    what = "measure the ranks without the rewrites of graphs for CPUs too; on CUDA, without cuDNN"
    parser.add_argument("--plain-graphs", action="store_true", help=what)
    what = "so many rows for each rank, instead of for all together"
    parser.add_argument("--weak", action="store_true", help=what)
    what = "one core for each CPU rank, and the others idle"
    parser.add_argument("--one-core-each", action="store_true", help=what)
    what = "time for each system and network"
    options.add(parser, "--seconds", options.positive, 10.0, what)


class TrainingTask(NamedTuple):
    """A network that all systems train, with minibatches of so many rows, by an update rule."""

    name: str
    batch: int = BATCH
    rule: str = "momentum"
    one_core: bool = False  # for each rank


class System(NamedTuple):
    """A system that trains.

    Attributes
    ----------
    form : str
        "serial", "one" or "two" functions on ranks, "plain" for ranks without our rewrites; or that
        of another library.
    number : int
        Of ranks, or of threads.
    program : context manager
        Of what is asked for `losses`, `times` and, of our ranks, `shares`, as of `Trainer`.
    """

    form: str
    number: int
    program: object


def measure(args, report):
    """Measure without other libraries."""
    measure_beside(lambda job, n_ranks: {}, args, report)


def measure_beside(peers, args, report):
    """Measure each network; ``peers(job, n_ranks)`` returns other systems, by their labels."""
    from synkhronos._machine import devices

    if args.rows and args.batch:
        raise frame.Refused("--batch gives one number of rows, --rows several: give one of them")
    most = max(args.ranks or [0])
    if most and args.devices and most != len(args.devices):
        raise frame.Refused(f"--ranks {most}, but --devices names {len(args.devices)}")
    names = args.devices or ["cpu"] * (most or devices.usable_cores())
    if args.one_core_each and set(names) != {"cpu"}:
        raise frame.Refused("--one-core-each is for CPU ranks, but --devices names others")
    cores = devices.usable_cores()
    if args.one_core_each and len(names) > cores:
        ranks = count(len(names), "rank")
        raise frame.Refused(f"--one-core-each: {ranks}, but only {count(cores, 'core')} here")
    report.results.update(cores=cores, devices=names, one_core=args.one_core_each, networks={})
    are_listed = args.weak or len(args.ranks or ()) > 1
    numbers = sorted({*args.ranks}) if len(args.ranks or ()) > 1 else range(1, len(names) + 1)
    batches = args.rows or [args.batch or BATCH]
    for name, batch in itertools.product(args.networks, batches):
        key = name if len(batches) == 1 else f"{name}, {batch} rows"
        for ranks in [[n] for n in numbers] if args.weak else [numbers]:
            rows = batch * ranks[0] if args.weak else batch
            job = TrainingTask(name, rows, args.rule, args.one_core_each)
            systems = _systems(job, names, cores, ranks, args.plain_graphs, are_listed)
            systems.update(peers(job, ranks[-1]))
            found = _measure_network(job, systems, args.seconds)
            if args.weak:
                found["weak"] = batch
            at = f"{key}, {count(ranks[0], 'rank')}" if args.weak else key
            report.results["networks"][at] = found
            report.show(text(found, cores))


def _systems(job, devices, cores, numbers, plain_graphs, are_listed=False):
    """Return serial Theano and our ranks, by their labels; if listed, only with one function."""
    from synkhronos._machine.devices import kind

    first, most = devices[0], numbers[-1]
    found = {}

    def add(label, form, number, where, flags=""):
        serve = "from synkhronos.tools.bench import training; training.serve()"
        line = programs.interpreter(serve, json.dumps([form, where, job]))
        given = ",".join(filter(None, [os.environ.get("THEANO_FLAGS", ""), flags]))
        environment = {**os.environ, "THEANO_FLAGS": given}
        found[label] = System(form, number, programs.Program(label, line, environment))

    add("serial, 1 thread", "serial", 1, 1)
    if first == "cpu":
        add(f"serial, {cores} threads", "serial", cores, cores)
    else:
        add(f"serial, {first}", "serial", 1, [first])
    for n in numbers:
        add(count(n, "rank"), "one", n, devices[:n])
    if not are_listed:
        add(f"{count(most, 'rank')}, two functions", "two", most, devices)
    if plain_graphs:
        what, flags = PLAIN.get(kind(first), PLAIN["cpu"])
        add(f"{count(most, 'rank')}, {what}", "plain", most, devices[:most], flags)
    return found


def _measure_network(job, systems, seconds):
    """Return the time of a step of one network, and its shares, in each system."""
    with contextlib.ExitStack() as stack:
        first, running = {}, {}
        for label, system in systems.items():
            running[label] = program = stack.enter_context(system.program)
            # One after the other: the next one finds the code in the compile cache.
            with turns.shown(f"{job.name}: {label} compiles"):
                first[label] = program.ask("losses", count=FIRST)
            if not np.allclose(first[label], first["serial, 1 thread"], rtol=_TOLERANCE):
                raise frame.Failed(f"{job.name}: {label} does not train as serial Theano: {first}")
        steps = turns.Turns(seconds, _ROUNDS, most=10_000)
        for label, program in running.items():
            steps.add(label, lambda n, program=program: program.ask("times", count=n))
        steps.take_all(f"rounds of {job.name}")
        network = NETWORKS[job.name]()
        found = {
            "title": network.title,
            "numbers": int(network.n_numbers),
            "batch": job.batch,
            "rule": job.rule,
            "update": min(running["serial, 1 thread"].ask("updates", count=_UPDATES)),
            "systems": {},
        }
        for label, system in systems.items():
            rounds = [statistics.median(each) for each in steps.rounds_of[label]]
            shares = None
            if system.form in ("one", "two", "plain"):
                shares = running[label].ask("shares", count=max(5, len(steps.rounds_of[label][0])))
            found["systems"][label] = {
                "form": system.form,
                "number": system.number,
                "seconds": min(rounds),
                "rounds": rounds,
                "shares": shares,
            }
        return found


def serve():
    """Be a system: train as the argument says, whenever the benchmark asks for steps."""
    form, where, job = json.loads(sys.argv[1])
    job = TrainingTask(*job)
    with stepping(form, where, job) as step:
        programs.serve(Trainer(step, job))


class Trainer:
    """A system that trains: a method for each thing that the benchmark asks for."""

    def __init__(self, step, job):
        self._step, self._job = step, job

    def losses(self, count):
        """Return the losses of so many steps."""
        return [float(self._step()) for _ in range(count)]

    def times(self, count):
        """Return the seconds of so many steps."""
        return [turns.seconds_of(self._step) for _ in range(count)]

    def updates(self, count):
        """Return times of an update of all parameters from given gradients."""
        from synkhronos._host import library

        params = NETWORKS[self._job.name]().params
        gradients = [library.shared(np.full_like(p.get_value(), 1e-6)) for p in params]
        update = library.function([], [], updates=_rule(self._job)(gradients, params, RATE))
        return [turns.seconds_of(update) for _ in range(count)]

    def shares(self, count):
        """Return the shares of the master's time, named as in `SHARES`, over some steps."""
        import synkhronos as synk

        with synk.profile() as recorded:
            total = sum(self.times(count))
        calls = recorded.calls[recorded.calls["rank"] == recorded.master_rank]
        parts = {
            "compute": calls["compute"].sum(),
            "collectives": calls["reduce"].sum(),
            "waiting": calls["meet"].sum() + calls["finish"].sum(),
            "input": calls["rows"].sum(),
        }
        parts["call"] = total - sum(parts.values())
        return {name: float(parts[name] / total) for name in SHARES}


def _rule(job, module=None):
    """Return the update rule of a job, of `update_rules` or of another module."""
    from synkhronos.extensions import update_rules

    return getattr(module or update_rules, job.rule)


@contextlib.contextmanager
def stepping(form, where, job):
    """Yield a function that takes one step: with so many threads, or on these devices."""
    from threadpoolctl import threadpool_limits

    import synkhronos as synk
    from synkhronos._host import library
    from synkhronos._machine.cores import spread
    from synkhronos.extensions import train, updates

    name, batch, *_ = job
    library.config.floatX = "float32"  # the dtype of constants that Theano adds to the graph
    with contextlib.ExitStack() as stack:
        if isinstance(where, list):
            if job.one_core:
                os.sched_setaffinity(0, spread(len(where)))
            try:
                synk.fork(devices=where)  # before the network is made, so that its values are there
            except (ImportError, RuntimeError) as error:
                sys.exit(str(error))  # such as of a device that can't be opened
            stack.callback(synk.close)
        else:
            stack.enter_context(threadpool_limits(where))
        network = NETWORKS[name]()
        random = np.random.RandomState(3)
        rows = network.rows(MINIBATCHES * batch)
        arguments = network.loss, network.params
        inputs = [network.x, network.y]

        def pick():
            return random.randint(0, MINIBATCHES * batch, batch)

        if form == "serial":
            step = _rule(job)(*arguments, RATE)
            step.update(network.averages)
            function = library.function(inputs, network.loss, updates=step)
            buffers = [np.empty((batch, *array.shape[1:]), array.dtype) for array in rows]

            def serial():
                chosen = pick()
                for array, buffer in zip(rows, buffers):
                    np.take(array, chosen, axis=0, out=buffer, mode="clip")
                return function(*buffers)

            yield serial
            return
        if form == "two":
            function = train.make_train_function(*arguments, *inputs, _rule(job, updates), RATE)
        else:
            function = train.make_train_step(
                inputs, *arguments, _rule(job), RATE, averages=network.averages,
                per_rank="normalization" if network.averages else None,
            )  # fmt: skip
        data = [synk.data(array) for array in rows]
        yield lambda: function(*data, batch=pick())


def text(found, cores):
    """Return the results of one network as text."""
    systems, batch = found["systems"], found["batch"]
    serial = {label: s["seconds"] for label, s in systems.items() if s["form"] == "serial"}
    one, many = serial.values()
    column = list(serial)[1].split(", ")[1]
    heads = "ms/step", "rows/s", "/ 1 thread", f"/ {column}", *SHARES
    table = frame.Table("", *heads, first=24)
    lines = [
        f"{found['title']}: {found['numbers']:,} numbers; minibatches of {batch} rows, float32, "
        f"{cores} cores; {found['rule']}, update {1e3 * found['update']:.2f} ms",
        table.head,
    ]
    for label, system in systems.items():
        seconds = system["seconds"]
        cells = [f"{1e3 * seconds:.2f}", f"{batch / seconds:.0f}"]
        cells += [f"{one / seconds:.2f}", f"{many / seconds:.2f}"]
        if system["shares"]:
            cells += [f"{100 * system['shares'][name]:.1f} %" for name in SHARES]
        lines.append(table.line(f"  {label}", *cells))
    return "\n".join(lines) + "\n"


def plot(results, path):
    """Draw rows per second of each system, and the shares of systems with ranks."""
    from matplotlib.figure import Figure

    networks = results["networks"].values()
    figure = Figure(figsize=(5 * len(networks), 7), layout="constrained")
    axes = figure.subplots(2, len(networks), squeeze=False)
    for (top, bottom), found in zip(axes.T, networks):
        systems = found["systems"]
        labels = list(systems)
        rates = [found["batch"] / systems[label]["seconds"] for label in labels]
        colours = [_COLOURS.get(systems[label]["form"], "C3") for label in labels]
        bars = top.bar(range(len(labels)), rates, color=colours)
        top.bar_label(bars, [f"{rate / rates[0]:.2f}" for rate in rates])
        top.margins(y=0.1)
        top.set_title(found["title"], fontsize="medium")
        top.set_ylabel("rows per second\n(above: / 1 thread)")
        with_ranks = [label for label in labels if systems[label]["shares"]]
        left = np.zeros(len(with_ranks))
        for number, name in enumerate(SHARES):
            parts = np.array([100 * systems[label]["shares"][name] for label in with_ranks])
            bottom.bar(range(len(with_ranks)), parts, bottom=left, label=name, color=f"C{number}")
            left += parts
        bottom.set_ylabel("share of the master's time in %")
        for panel, names in ((top, labels), (bottom, with_ranks)):
            panel.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize="small")
    bottom.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=110)
