"""The time of a step of training: serial Theano with one thread and with all, and 1 to n ranks.

Every system trains the same network with the same minibatches, picked at random from the same rows,
by descent with momentum. Each system is a process of its own, and they take turns in rounds. Times
are those of a step, from the call to its return: the median of the round that other programs
disturbed least. The shares are those of the master's time, measured in other steps than the times:
compute is Theano's function; collectives the reduction of gradients and of the loss; waiting the
time that ranks wait for one another in the reduction and at the finish barrier; input the picking
of rows; and call the rest.
"""

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
import traceback

import numpy as np

from synkhronos.tools.bench import options
from synkhronos.tools.bench.networks import NETWORKS

BATCH = 512
MINIBATCHES = 8  # the data set has as many rows as this many minibatches
RATE = 0.01
ROUNDS = 10
FIRST = 4  # steps of each system whose losses are compared; they are not timed
TOLERANCE = 1e-3  # relative, of these losses
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
        default=BATCH,
        help=f"rows of a minibatch, on all ranks ({BATCH})",
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


def main(args) -> int:
    """Measure, print, and return the exit status."""
    from synkhronos._machine import devices

    if args.ranks and args.devices and args.ranks != len(args.devices):
        print(f"--ranks {args.ranks}, but --devices names {len(args.devices)}", file=sys.stderr)
        return 1
    if not options.can_plot(args.plot):  # checked before the measurements, which take minutes
        return 1
    cores = devices.usable_cores()
    names = args.devices or ["cpu"] * (args.ranks or cores)
    results = {
        "batch": args.batch,
        "cores": cores,
        "devices": names,
        "busy_cores": options.busy_cores(),
        "networks": {},
    }
    if results["busy_cores"] > 0.2:
        busy = results["busy_cores"]
        print(f"others keep {busy:.1f} cores busy: this tells little about speed", file=sys.stderr)
    try:
        for name in args.networks:
            results["networks"][name] = found = measure(
                name, names, args.batch, args.seconds, cores
            )
            if not args.json:
                print(network_text(found, args.batch, cores), flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(results, indent=2))
    if args.plot:
        plot(results, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    return 0


def measure(name, devices, batch, seconds, cores):
    """Return the time of a step of one network, and its shares, in each system."""
    most, first = len(devices), devices[0]
    jobs = {"serial, 1 thread": ("serial", 1), f"serial, {cores} threads": ("serial", cores)}
    if first != "cpu":
        jobs = {"serial, 1 thread": ("serial", 1), f"serial, {first}": ("serial", [first])}
    for n in range(1, most + 1):
        jobs[f"{n} rank{'s' * (n > 1)}"] = ("one", devices[:n])
    jobs[f"{most} rank{'s' * (most > 1)}, two functions"] = ("two", devices)
    with contextlib.ExitStack() as stack:
        systems = {}
        for label, (form, where) in jobs.items():
            systems[label] = stack.enter_context(_System(label, form, where, name, batch))
        first = {label: system.ask("losses", FIRST) for label, system in systems.items()}
        for label, losses in first.items():
            if not np.allclose(losses, first["serial, 1 thread"], rtol=TOLERANCE):
                raise BenchError(f"{name}: {label} does not train as serial Theano: {first}")
        return _take_turns(name, jobs, systems, seconds)


def _take_turns(name, jobs, systems, seconds):
    times = {label: [] for label in systems}
    counts = {}
    for label, system in systems.items():
        once = min(system.ask("times", 2))
        counts[label] = max(1, int(seconds / ROUNDS / once))
    for _ in range(ROUNDS):
        for label, system in systems.items():
            steps = system.ask("times", 1 + counts[label])[1:]  # the first finds the ranks asleep
            times[label].append(statistics.median(steps))
    network = NETWORKS[name]()
    found = {"title": network.title, "numbers": int(network.n_numbers), "systems": {}}
    for label, (form, where) in jobs.items():
        shares = None if form == "serial" else systems[label].ask("shares", max(5, counts[label]))
        found["systems"][label] = {
            "form": form,
            "number": len(where) if isinstance(where, list) else where,
            "seconds": min(times[label]),
            "rounds": times[label],
            "shares": shares,
        }
    return found


class _System:
    """A process that trains when the benchmark asks for steps."""

    def __init__(self, label, *job):
        self._label = label
        # A new interpreter: a forked one would copy the state of sessions.
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_be_system, args=(end, *job), daemon=False)
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


def _be_system(pipe, form, where, name, batch):
    try:
        with _stepping(form, where, name, batch) as step:
            pipe.send(None)
            while True:
                what, count = pipe.recv()
                if what == "losses":
                    answer = [float(step()) for _ in range(count)]
                elif what == "times":
                    answer = [_timed(step) for _ in range(count)]
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


@contextlib.contextmanager
def _stepping(form, where, name, batch):
    """Yield a function that takes one step: with so many threads, or on these devices."""
    from threadpoolctl import threadpool_limits

    import synkhronos as synk
    from synkhronos._host import library
    from synkhronos.extensions import train, update_rules, updates

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
            step = update_rules.momentum(*arguments, RATE)
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
                inputs, *arguments, update_rules.momentum, RATE, averages=network.averages
            )
        else:
            function = train.make_train_function(*arguments, *inputs, updates.momentum, RATE)
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


def network_text(found, batch, cores):
    """Return the results of one network as text."""
    systems = found["systems"]
    one, many = (s["seconds"] for s in systems.values() if s["form"] == "serial")
    column = [label for label, s in systems.items() if s["form"] == "serial"][1].split(", ")[1]
    lines = [
        f"{found['title']}: {found['numbers']:,} numbers; minibatches of {batch} rows, float32, "
        f"{cores} cores",
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
        rates = [results["batch"] / systems[label]["seconds"] for label in labels]
        colours = ["0.6" if systems[label]["form"] == "serial" else "C3" for label in labels]
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
