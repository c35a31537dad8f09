"""The time of a step of training: serial Theano with one thread and with all, and 1 to n ranks.

Every system trains the same network with the same minibatches, picked at random from the same rows,
by gradient descent, with momentum or without. Each system is a process of its own, and they take
turns in rounds. Times are those of a step, from the call to its return: the median of the round
that other programs disturbed least. The shares are those of the master's time, measured in other
steps than the times:
compute is Theano's function; collectives the reduction of gradients and of the loss; waiting the
time that ranks wait for one another in the reduction and at the finish barrier; input the picking
of rows; and call the rest. "Update" is the time that serial Theano needs, on one thread, to update
all parameters from given gradients: ranks compute that in addition to their part of the rows.

PyTorch trains the same network with --peers: in one process, and in DistributedDataParallel.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from typing import NamedTuple

import numpy as np

from synkhronos.tools.bench import collectives, options, peers, torch_training
from synkhronos.tools.bench.networks import NETWORKS

BATCH = 512
MINIBATCHES = 8  # the data set has as many rows as this many minibatches
RATE = 0.01
MOMENTUM = {"sgd": 0.0, "momentum": 0.9}  # of the update rules
PLAIN = {"THEANO_FLAGS": "optimizer_excluding=synkhronos_cpu"}  # for graphs without our rewrites
ROUNDS = 10
FIRST = 4  # steps of each system whose losses are compared; they are not timed
TOLERANCE = 1e-3  # relative, of these losses
UPDATES = 50
COLOURS = {"serial": "0.6", "torch": "0.8"}  # of the bars; others are ranks
SHARES = ("compute", "collectives", "waiting", "input", "call")

_clock = time.perf_counter


class BenchError(Exception):
    """A system failed, or computed another result than serial Theano."""


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--ranks", type=options.count, help="ranks at most (default: one for each core)"
    )
    parser.add_argument(
        "--devices",
        type=_devices_of_ranks,
        metavar="A,B",
        help="one for each rank, such as cuda0,cuda1; serial Theano gets the first (default: cpu)",
    )
    parser.add_argument(
        "--networks",
        type=options.names(NETWORKS, "network"),
        default=list(NETWORKS),
        metavar="NAMES",
        help=f"which ({','.join(NETWORKS)})",
    )
    parser.add_argument(
        "--batch",
        type=options.count,
        help=f"rows of a minibatch, on all ranks ({BATCH})",
    )
    parser.add_argument(
        "--rows",
        type=_counts,
        metavar="A,B",
        help="several of these, one after the other, such as 128,512",
    )
    parser.add_argument(
        "--rule",
        choices=list(MOMENTUM),
        default="momentum",
        help="the update rule (default: momentum)",
    )
    parser.add_argument(
        "--plain-graphs",
        action="store_true",
        help="measure the ranks without the rewrites of graphs for CPUs too",
    )
    parser.add_argument(
        "--peers", action="store_true", help="compare with PyTorch, where it is installed"
    )
    parser.add_argument(
        "--peer-python",
        action="append",
        type=collectives.python_path,
        default=[],
        metavar="PATH",
        help="look for torch in this interpreter too",
    )
    parser.add_argument(
        "--seconds",
        type=options.positive,
        default=10.0,
        metavar="S",
        help="time for each system and network (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--plot", metavar="FILE.png", help="draw examples per second, and shares")


def _devices_of_ranks(text):
    from synkhronos._machine.devices import DEVICE_NAME, EXAMPLES

    found = [name.strip() for name in text.split(",")]
    for name in found:
        if not DEVICE_NAME.fullmatch(name):
            raise argparse.ArgumentTypeError(f"{name!r} is no device, {EXAMPLES}")
    return found


def _counts(text):
    return [options.count(part.strip()) for part in text.split(",")]


def main(args) -> int:
    """Measure, print, and return the exit status."""
    from synkhronos._machine import devices

    if args.rows and args.batch:
        print("--batch gives one number of rows, --rows several: give one of them", file=sys.stderr)
        return 2
    if args.ranks and args.devices and args.ranks != len(args.devices):
        print(f"--ranks {args.ranks}, but --devices names {len(args.devices)}", file=sys.stderr)
        return 1
    if not options.can_plot(args.plot):  # checked before the measurements, which take minutes
        return 1
    cores = devices.usable_cores()
    names = args.devices or ["cpu"] * (args.ranks or cores)
    results = {
        "cores": cores,
        "devices": names,
        "busy_cores": options.busy_cores(),
        "networks": {},
    }
    if results["busy_cores"] > 0.2:
        busy = results["busy_cores"]
        print(f"others keep {busy:.1f} cores busy: this tells little about speed", file=sys.stderr)
    torch = _find_torch(args) if args.peers else None
    batches = args.rows or [args.batch or BATCH]
    try:
        for name, batch in itertools.product(args.networks, batches):
            key = name if len(batches) == 1 else f"{name}, {batch} rows"
            results["networks"][key] = found = measure(
                Job(name, batch, args.rule), names, args.seconds, cores, args.plain_graphs, torch
            )
            if not args.json:
                print(network_text(found, cores), flush=True)
    except (BenchError, peers.PeerError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(results, indent=2))
    if args.plot:
        plot(results, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    return 0


def _find_torch(args):
    """Return an interpreter that has torch; None, with a sentence, if there is none."""
    if args.devices and set(args.devices) != {"cpu"}:
        print("not compared with PyTorch: that is for CPU ranks", file=sys.stderr)
        return None
    try:
        return peers.find("gloo", [*args.peer_python, sys.executable])
    except peers.PeerError as error:
        print(f"not compared with PyTorch: {error}", file=sys.stderr)
        return None


class Job(NamedTuple):
    """A network that all systems train, with minibatches of so many rows, by an update rule."""

    name: str
    batch: int = BATCH
    rule: str = "momentum"


def measure(job, devices, seconds, cores, plain_graphs=False, torch=None):
    """Return the time of a step of one network, and its shares, in each system.

    Parameters
    ----------
    plain_graphs : bool
        Measure the ranks without the rewrites of graphs for CPUs too.
    torch : str or None
        An interpreter that has PyTorch.
    """
    most, first = len(devices), devices[0]
    forms = {"serial, 1 thread": ("serial", 1), f"serial, {cores} threads": ("serial", cores)}
    if first != "cpu":
        forms = {"serial, 1 thread": ("serial", 1), f"serial, {first}": ("serial", [first])}
    for n in range(1, most + 1):
        forms[f"{n} rank{'s' * (n > 1)}"] = ("one", devices[:n])
    forms[f"{most} rank{'s' * (most > 1)}, two functions"] = ("two", devices)
    if plain_graphs:
        forms[f"{most} rank{'s' * (most > 1)}, plain"] = ("one", devices)
    for n_ranks, threads in _sizes_of_torch(most, cores) if torch else ():
        count = f"{n_ranks} ranks" if n_ranks > 1 else f"{threads} thread{'s' * (threads > 1)}"
        forms[f"PyTorch, {count}"] = ("torch", (n_ranks, threads))
    with contextlib.ExitStack() as stack:
        systems = {}
        for label, (form, where) in forms.items():
            if form == "torch":
                system = torch_training.TorchTraining(torch, *where, job.name, _writer(job))
            else:
                environment = PLAIN if label.endswith(", plain") else {}
                system = _System(label, form, where, job, environment=environment)
            systems[label] = stack.enter_context(system)
        first = {label: system.ask("losses", FIRST) for label, system in systems.items()}
        for label, losses in first.items():
            if not np.allclose(losses, first["serial, 1 thread"], rtol=TOLERANCE):
                raise BenchError(f"{job.name}: {label} does not train as serial Theano: {first}")
        return _take_turns(job, forms, systems, seconds)


def _sizes_of_torch(n_ranks, cores):
    """Return pairs (processes, threads of each): one process with one thread, with all, and all."""
    sizes = [(1, 1), (1, cores), (n_ranks, max(1, cores // n_ranks))]
    return sorted(set(sizes), key=sizes.index)


def _writer(job):
    def write(path):
        network = NETWORKS[job.name]()
        rows = network.rows(MINIBATCHES * job.batch)
        momentum = MOMENTUM[job.rule]
        torch_training.write_setup(path, network, rows, job.batch, RATE, momentum)

    return write


def _take_turns(job, forms, systems, seconds):
    times = {label: [] for label in systems}
    counts = {}
    for label, system in systems.items():
        once = min(system.ask("times", 2))
        counts[label] = max(1, int(seconds / ROUNDS / once))
    for _ in range(ROUNDS):
        for label, system in systems.items():
            steps = system.ask("times", 1 + counts[label])[1:]  # the first finds the ranks asleep
            times[label].append(statistics.median(steps))
    network = NETWORKS[job.name]()
    found = {
        "title": network.title,
        "numbers": int(network.n_numbers),
        "batch": job.batch,
        "rule": job.rule,
        "update": min(systems["serial, 1 thread"].ask("updates", UPDATES)),
        "systems": {},
    }
    for label, (form, where) in forms.items():
        has_ranks = form in ("one", "two")
        found["systems"][label] = {
            "form": "plain" if label.endswith(", plain") else form,
            "number": len(where) if has_ranks or isinstance(where, list) else where,
            "seconds": min(times[label]),
            "rounds": times[label],
            "shares": systems[label].ask("shares", max(5, counts[label])) if has_ranks else None,
        }
    return found


class _System:
    """A process that trains when the benchmark asks for steps."""

    def __init__(self, label, *job, environment=()):
        self._label = label
        # A new interpreter: a forked one would copy the state of sessions.
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_be_system, args=(end, *job), daemon=False)
        with _in_environment(dict(environment)):
            self._process.start()
        end.close()
        try:
            self._hear()  # Wait until it has compiled: the next system finds the code in the cache.
        except BaseException:
            self.close()
            raise

    def ask(self, what, count):
        """Take `count` steps and return their losses, times, or shares."""
        with contextlib.suppress(OSError):
            self._pipe.send((what, count))
        return self._hear()

    def _hear(self):
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise BenchError(f"{self._label}: the process ended") from None
        if isinstance(answer, str):
            raise BenchError(f"{self._label}:\n{answer}")
        return answer

    def close(self):
        """End the process."""
        self._pipe.close()
        self._process.join()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


@contextlib.contextmanager
def _in_environment(more):
    """Set variables for the processes that start in the block."""
    before = dict(os.environ)
    if "THEANO_FLAGS" in before and "THEANO_FLAGS" in more:
        more = {**more, "THEANO_FLAGS": f"{before['THEANO_FLAGS']},{more['THEANO_FLAGS']}"}
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            os.environ.pop(name)
        os.environ.update(before)


def _be_system(pipe, form, where, job):
    try:
        with _stepping(form, where, job) as step:
            pipe.send(None)
            while True:
                what, count = pipe.recv()
                if what == "losses":
                    answer = [float(step()) for _ in range(count)]
                elif what == "times":
                    answer = [_timed(step) for _ in range(count)]
                elif what == "updates":
                    answer = _times_of_updates(job, count)
                else:
                    answer = shares(step, count)
                pipe.send(answer)
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(traceback.format_exc())


def _timed(step):
    begin = _clock()
    step()
    return _clock() - begin


def _times_of_updates(job, count):
    """Return times of an update of all parameters from given gradients."""
    from synkhronos._host import library

    params = NETWORKS[job.name]().params
    gradients = [library.shared(np.full_like(p.get_value(), 1e-6)) for p in params]
    update = library.function([], [], updates=_rule(job)(gradients, params, RATE))
    return [_timed(update) for _ in range(count)]


def _rule(job, module=None):
    """Return the update rule of a job, of `update_rules` or of another module."""
    from synkhronos.extensions import update_rules

    return getattr(module or update_rules, job.rule)


@contextlib.contextmanager
def _stepping(form, where, job):
    """Yield a function that takes one step: with so many threads, or on these devices."""
    from threadpoolctl import threadpool_limits

    import synkhronos as synk
    from synkhronos._host import library
    from synkhronos.extensions import train, updates

    name, batch, _ = job
    library.config.floatX = "float32"  # the dtype of constants that Theano adds to the graph
    with contextlib.ExitStack() as stack:
        if isinstance(where, list):
            synk.fork(devices=where)  # before the network is made, so that its values are there
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
        if form == "one":
            function = train.make_train_step(
                inputs, *arguments, _rule(job), RATE, averages=network.averages
            )
        else:
            function = train.make_train_function(*arguments, *inputs, _rule(job, updates), RATE)
        data = [synk.data(array) for array in rows]
        yield lambda: function(*data, batch=pick())


def shares(step, count):
    """Return the shares of the master's time, named as in `SHARES`, over `count` steps."""
    import synkhronos as synk

    with synk.profile() as recorded:
        total = sum(_timed(step) for _ in range(count))
    calls = recorded.calls[recorded.calls["rank"] == recorded.master_rank]
    parts = {
        "compute": calls["compute"].sum(),
        "collectives": calls["reduce"].sum(),
        "waiting": calls["meet"].sum() + calls["finish"].sum(),
        "input": calls["rows"].sum(),
    }
    parts["call"] = total - sum(parts.values())
    return {name: parts[name] / total for name in SHARES}


def network_text(found, cores):
    """Return the results of one network as text."""
    systems, batch = found["systems"], found["batch"]
    one, many = (s["seconds"] for s in systems.values() if s["form"] == "serial")
    column = [label for label, s in systems.items() if s["form"] == "serial"][1].split(", ")[1]
    lines = [
        f"{found['title']}: {found['numbers']:,} numbers; minibatches of {batch} rows, float32, "
        f"{cores} cores; {found['rule']}, update {1e3 * found['update']:.2f} ms",
        f"{'':24}{'ms/step':>9}{'rows/s':>9}{'/ 1 thread':>12}{f'/ {column}':>13}"
        + "".join(f"{name:>12}" for name in SHARES),
    ]
    for label, system in systems.items():
        seconds = system["seconds"]
        line = f"  {label:22}{1e3 * seconds:9.2f}{batch / seconds:9.0f}"
        line += f"{one / seconds:12.2f}{many / seconds:13.2f}"
        if system["shares"]:
            line += "".join(f"{100 * system['shares'][name]:10.1f} %" for name in SHARES)
        lines.append(line)
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
        colours = [COLOURS.get(systems[label]["form"], "C3") for label in labels]
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
