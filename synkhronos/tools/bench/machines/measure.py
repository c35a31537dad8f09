"""Take the measurements of ``synkhronos bench machines`` on one layout, in turns."""

import collections
import statistics

from synkhronos.tools.bench import options
from synkhronos.tools.bench.machines import programs
from synkhronos.tools.bench.machines.programs import ProgramError

ROUNDS = 5  # in which the programs take turns
REPETITIONS = 300  # of one program in one round, at most
TOLERANCE = 1e-3  # relative, of the losses of the first steps with and without overlap
_FIRST_STEPS = 3
_CHECKED_BYTES = 4000, 1_000_000  # of reductions that are compared with what they must be
_LONG_SECONDS = 1.0  # a measurement that takes longer needs none before it to wake all ranks
_EXCHANGED_BYTES, _EXCHANGES = 4 << 20, 5
_MOST_ROWS = 8192  # of each rank: the memory of a network's layers grows with them


def measure(hosts, args, done):
    """Return the figures of one layout, or None if its ranks are those of one that is `done`."""
    with programs.session(hosts, args) as ours:
        counts = _fork(ours, args)
        if tuple(counts) in done:
            return None
        found = {"machines": [host.name for host in hosts], "counts": counts}
        with programs.processes(hosts, counts, args) as mpi:
            hello = mpi.ask("hello")
            found["mpi"] = hello["version"]
            if _counts(hello["hosts"]) != counts:
                raise ProgramError(
                    f"MPI has its processes on {', '.join(hello['hosts'])}, and not on each "
                    f"machine as many as there are ranks: {counts}."
                )
            found.update(_measure_reductions(ours, mpi, counts, args))
        found["steps"] = [] if args.no_training else _measure_steps(hosts, ours, sum(counts), args)
        return found


def _counts(hosts):
    return [hosts.count(host) for host in dict.fromkeys(hosts)]


def _fork(ours, args, overlap=False, compress=False):
    with options.shown("a session begins"):
        threads = args.threads_per_rank
        return ours.ask("fork", overlap=overlap, compress=compress, threads_per_rank=threads)


def _measure_reductions(ours, mpi, counts, args):
    for system in (ours, mpi):
        for nbytes in _CHECKED_BYTES:
            if not system.ask("check", nbytes=nbytes):
                raise ProgramError(f"{system.name} computed a wrong all_reduce.")
    network = mpi.ask("network", other=counts[0], nbytes=_EXCHANGED_BYTES, count=_EXCHANGES)
    single, half = _Turns(args.seconds), _Turns(args.seconds)
    single.add(("synkhronos", "call"), ours, "call")
    single.add(("mpi", "call"), mpi, "call")
    for nbytes in args.sizes:
        single.add(("synkhronos", nbytes), ours, "all_reduce", nbytes=nbytes)
        single.add(("mpi", nbytes), mpi, "all_reduce", nbytes=nbytes)
        half.add(("float16", nbytes), ours, "all_reduce", nbytes=nbytes)
    for _ in options.progress("rounds of reductions", range(ROUNDS)):
        for turns in (single, half):
            _fork(ours, args, compress=turns is half)
            turns.take()
    figures = {**single.figures(), **half.figures()}
    rows = [{"what": "call"}, *({"what": "all_reduce", "bytes": size} for size in args.sizes)]
    for row in rows:
        for system in ("synkhronos", "mpi", "float16"):
            key = system, row.get("bytes", "call")
            if key in figures:
                row[system] = figures[key]
    return {"network": network, "rows": rows}


class _Turns:
    """Measurements that programs take in turns."""

    def __init__(self, seconds):
        self._seconds = seconds
        self._jobs = []  # (key, program, question), in order
        self._counts = {}
        self._times = collections.defaultdict(list)

    def add(self, key, program, do, **question):
        """Add a measurement to each round."""
        self._jobs.append((key, program, {"do": do, **question}))

    def take(self):
        """Take all measurements: one round."""
        for key, program, question in self._jobs:
            if key not in self._counts:
                [once] = program.ask(warm=1, count=1, **question)
                fits = int(self._seconds / ROUNDS / max(once, 1e-6))
                self._counts[key] = min(max(fits, 1), REPETITIONS), once < _LONG_SECONDS
                if once >= _LONG_SECONDS:
                    self._times[key].append(once)
                    continue
            count, is_short = self._counts[key]
            warm = 1 + count // 10 if is_short else 0
            self._times[key] += program.ask(warm=warm, count=count, **question)

    def figures(self):
        """Return the median and the least of the seconds of each measurement."""
        return {key: _figures(seconds) for key, seconds in self._times.items()}


def _figures(seconds):
    return {"median": statistics.median(seconds), "least": min(seconds), "count": len(seconds)}


def _measure_steps(hosts, ours, n_ranks, args):
    # Another program: a session that begins anew sends all parameters over the network.
    with programs.session(hosts, args) as overlapping:
        trained = {"off": ours, "on": overlapping}
        for name, program in trained.items():
            _fork(program, args, overlap=name == "on")
        steps = []
        usual = -(-args.batch // n_ranks) * n_ranks
        for network in args.networks:
            with options.shown(f"the first steps of {network}"):
                _check_training(trained.values(), network, usual)
            size = ours.ask("size", network=network)
            balanced = _balanced_rows(ours, network, usual, n_ranks)
            for rows in dict.fromkeys([usual, balanced]):
                steps.append({"network": network, "rows": rows, **size})
        turns = _Turns(args.seconds)
        for number, step in enumerate(steps):
            which = {"network": step["network"], "rows": step["rows"]}
            for part in ("compute", "communication"):
                turns.add((number, part), ours, "step", part=part, **which)
            for name, program in trained.items():
                turns.add((number, name), program, "step", part="step", **which)
        for _ in options.progress("rounds of training", range(ROUNDS)):
            turns.take()
    for (number, part), figures in turns.figures().items():
        steps[number][part] = figures
    for step in steps:
        parts = ("compute", *trained)
        step["hidden"] = hidden({part: step[part]["median"] for part in parts})
    return steps


def _check_training(all_programs, network, rows):
    question = {"network": network, "rows": rows, "count": _FIRST_STEPS}
    first, *others = [program.ask("losses", **question) for program in all_programs]
    for found in others:
        if any(abs(a - b) > TOLERANCE * abs(a) for a, b in zip(first, found)):
            raise ProgramError(
                f"{network} does not train with overlap as without: its losses are {found}, and "
                f"without overlap {first}."
            )


def _balanced_rows(ours, network, usual, n_ranks):
    """Return the number of rows with which a network computes as long as it communicates."""

    def seconds(part, rows):
        return min(ours.ask("step", network=network, rows=rows, part=part, warm=1, count=2))

    with options.shown(f"the rows with which {network} computes as long as it communicates"):
        communication = seconds("communication", usual)
        return balance(
            lambda rows: seconds("compute", rows), communication, usual, n_ranks, _MOST_ROWS
        )


def balance(compute, target, usual, n_ranks, most):
    """Return a multiple of `n_ranks` with which ``compute(rows)`` takes about `target` seconds.

    Each rank gets a row at least, and `most` at most.

    >>> balance(lambda rows: 0.01 + 0.001 * rows, 0.3, 64, 4, 1000)
    288
    >>> balance(lambda rows: 0.01 + 0.001 * rows, 0.002, 64, 4, 1000)
    4
    """
    times = {number: compute(number) for number in (usual, 4 * usual)}
    for _ in range(3):
        # Points that lie far apart: near ones differ by what other programs do, too.
        low, high = min(times), max(times)
        slope = max((times[high] - times[low]) / (high - low), 1e-9)
        wanted = min(low + (target - times[low]) / slope, 8 * high)
        rows = n_ranks * min(max(round(wanted / n_ranks), 1), most)
        if low <= rows <= high:
            break
        times[rows] = compute(rows)
    return rows


def hidden(medians):
    """Return the share of the communication that overlap hides, or None if there is nothing.

    >>> hidden({"compute": 1.0, "off": 2.0, "on": 1.5})
    0.5
    >>> print(hidden({"compute": 1.0, "off": 1.01, "on": 1.0}))
    None
    """
    if medians["off"] <= 1.02 * medians["compute"]:
        return None
    return (medians["off"] - medians["on"]) / (medians["off"] - medians["compute"])
