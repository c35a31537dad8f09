"""Reductions and steps of training on several machines, beside as many processes of MPI.

all_reduce sums an array of float32 of each rank in place; MPI's is MPI.Allreduce with IN_PLACE. A
call has a number as its output; MPI's is a Bcast of 256 bytes and a Reduce of a number. float16 is
fork(compress="float16"). Synkhronos is timed in Python on the master, from the call to its return;
of MPI it is the slowest process. Both are there all the time, and take turns in rounds. Times are
medians, with the least ones in brackets. Cable is the time of the least bytes that an all-reduce
can send, 2 (M - 1) / M of an array for M machines, at the bandwidth that MPI has between two.

Compute is a step without a reduction, and communication the reduction of all gradients, without a
step. "off" and "on" are steps without and with overlap. Hidden is (off - on) / (off - compute): the
share of the communication that overlap hides, of that which isn't hidden without it. Each network
has a second line, with so many rows that it computes as long as it communicates.

With ``--count`` nothing is timed: what machines send is counted. Least is the bytes that a machine
must send at least in an all_reduce, 2 (M - 1) / M of an array.

With ``--json FILE`` the figures go to a file, after each layout.
"""

import contextlib
import os
from pathlib import Path

from synkhronos._machine.devices import python_command
from synkhronos._wording import count
from synkhronos.comm.mpi import folders
from synkhronos.launch import CannotLaunch, mpirun, where
from synkhronos.tools import launch, turns
from synkhronos.tools.bench import frame, options
from synkhronos.tools.bench.programs import Program

SIZES = "1K,16K,256K,1M,4M,16M,64M"
NETWORKS = ("mlp", "dense")
ROUNDS = 5
_TOLERANCE = 1e-3  # relative, of the losses of the first steps with and without overlap
_FIRST_STEPS = 3
_CHECKED_BYTES = 4000, 1_000_000  # of reductions that are compared with what they must be
_EXCHANGED_BYTES, _EXCHANGES = 4 << 20, 5
_MOST_ROWS = 8192  # of each rank: the memory of a network's layers grows with them


def add_arguments(parser):
    """Add the options of this benchmark."""
    launch.add_hosts_arguments(parser)
    launch.add_mpirun_arguments(parser)
    what = (
        "ranks of each machine, such as 1,2, one layout after the other (default: 1, and then what "
        "--hosts says, or fork() decides)"
    )
    options.add(parser, "--ranks", options.counts, None, what)
    what = "threads of BLAS and OpenMP in each rank (default: as in fork)"
    options.add(parser, "--threads-per-rank", options.count, None, what)
    options.add(parser, "--sizes", options.sizes, SIZES, "bytes of a rank's array")
    known = options.names(NETWORKS, "network")
    options.add(parser, "--networks", known, list(NETWORKS), "which to train")
    parser.add_argument("--no-training", action="store_true", help="leave out steps of training")
    what = "count messages between machines, and their bytes, in place of measuring times"
    parser.add_argument("--count", action="store_true", help=what)
    options.add(parser, "--batch", options.count, 512, "rows of a minibatch, on all ranks")
    what = "time for each figure, where one measurement is not longer"
    options.add(parser, "--seconds", options.positive, 2.0, what)


def measure(args, report):
    """Measure each layout, and show its tables."""
    try:
        hosts = _hosts(args)
        mpirun.check()
        found = report.results["layouts"] = []
        for layout in layouts(hosts, args.ranks):
            done = {tuple(each["counts"]) for each in found}
            figures = measure_layout(layout, args, done)
            if figures is not None:
                found.append(figures)
                report.show(text_of_traffic(figures) if args.count else text(figures))
    except ValueError as error:
        raise frame.Refused(f"can't measure machines: {error}") from None


def _hosts(args):
    hosts = where.find_hosts(args.hosts, args.hostfile)
    if hosts[0].name is None:
        raise CannotLaunch(
            "there is no allocation of Slurm or PBS with several machines: name them with --hosts "
            "node0:2,node1:2, or a --hostfile."
        )
    if hosts[0].devices:
        raise CannotLaunch("layouts have numbers of ranks, not devices: write node0:2,node1:2.")
    if len(hosts) < 2:
        raise CannotLaunch(
            f"{hosts[0].name} is one machine alone, and nothing crosses a network: name two or "
            "more, such as --hosts node0:2,node1:2."
        )
    return hosts


def layouts(hosts, ranks):
    """Return lists of hosts, one for each layout.

    >>> found = layouts([where.Host("a", 2), where.Host("b", 1)], None)
    >>> [[(host.name, host.ranks) for host in each] for each in found]
    [[('a', 1), ('b', 1)], [('a', 2), ('b', 1)]]
    """
    found = [[where.Host(host.name, number) for host in hosts] for number in ranks or (1,)]
    if ranks is None and hosts not in found:
        found.append(hosts)
    return found


def start_session(hosts, args):
    """Return the program that measures Synkhronos."""
    line = python_command("from synkhronos.__main__ import main; sys.exit(main())", "launch")
    names = [host.name if host.ranks is None else f"{host.name}:{host.ranks}" for host in hosts]
    line += ["--hosts", ",".join(names), "--mpirun-args", args.mpirun_args]
    line += ["--agent", args.agent] if args.agent else []
    line += ["--wait-answer", str(args.wait_answer), "--wait-start", str(args.wait_start)]
    script = str(Path(__file__).with_name("measured_session.py"))
    return _started_by_mpirun("Synkhronos", [*line, script])


def start_mpi(hosts, counts, args):
    """Return the program that measures MPI, with so many processes on each machine."""
    code = "from synkhronos.tools.bench.machines.processes import main; main()"
    line = mpirun.line(hosts, args, python_command(code), {}, counts)
    return _started_by_mpirun("MPI", line)


@contextlib.contextmanager
def _started_by_mpirun(name, line):
    with folders.of_mpirun(os.environ) as environment, Program(name, line, environment) as program:
        yield program


def measure_layout(hosts, args, done):
    """Return the figures of one layout, or None if its ranks are those of one that is `done`."""
    with start_session(hosts, args) as ours:
        counts = _fork(ours, args)
        if tuple(counts) in done:
            return None
        found = {"machines": [host.name for host in hosts], "counts": counts}
        if args.count:
            return {**found, "traffic": _count_traffic(ours, args)}
        with start_mpi(hosts, counts, args) as mpi:
            hello = mpi.ask("hello")
            found["mpi"] = hello["version"]
            there = hello["hosts"]
            if [there.count(host) for host in dict.fromkeys(there)] != counts:
                raise frame.Failed(
                    f"MPI has its processes on {', '.join(there)}, and not on each machine as many "
                    f"as there are ranks: {counts}."
                )
            found.update(_measure_reductions(ours, mpi, counts, args))
        found["steps"] = [] if args.no_training else _measure_steps(hosts, ours, sum(counts), args)
        return found


def _fork(ours, args, overlap=False, compress=False):
    with turns.shown("a session begins"):
        threads = args.threads_per_rank
        return ours.ask("fork", overlap=overlap, compress=compress, threads_per_rank=threads)


def _count_traffic(ours, args):
    rows = [{"what": "call"}]
    rows += [{"what": w, "nbytes": n} for w in ("broadcast", "all_reduce") for n in args.sizes]
    for row in turns.progress("operations", rows):
        row["sent"] = ours.ask("traffic", count=_EXCHANGES, **row)
    return rows


def _measure_reductions(ours, mpi, counts, args):
    for system in (ours, mpi):
        for nbytes in _CHECKED_BYTES:
            if not system.ask("check", nbytes=nbytes):
                raise frame.Failed(f"{system.name} computed a wrong all_reduce.")
    network = mpi.ask("network", other=counts[0], nbytes=_EXCHANGED_BYTES, count=_EXCHANGES)
    single, half = (turns.Turns(args.seconds, ROUNDS) for _ in range(2))
    rows = [{"what": "call"}, *({"what": "all_reduce", "bytes": size} for size in args.sizes)]
    for row in rows:
        question = {"do": row["what"], **({"nbytes": row["bytes"]} if "bytes" in row else {})}
        for name, program in (("synkhronos", ours), ("mpi", mpi)):
            single.add((name, row.get("bytes")), _asking(program, **question))
        if "bytes" in row:
            half.add(("float16", row["bytes"]), _asking(ours, **question))
    for _ in turns.progress("rounds of reductions", range(ROUNDS)):
        for measured in (single, half):
            _fork(ours, args, compress=measured is half)
            measured.take()
    figures = {**single.figures(), **half.figures()}
    for row in rows:
        for system in ("synkhronos", "mpi", "float16"):
            if (system, row.get("bytes")) in figures:
                row[system] = figures[system, row.get("bytes")]
    return {"network": network, "rows": rows}


def _asking(program, **question):
    """Return a function that asks a program for the seconds of some repetitions."""
    return lambda count: program.ask(count=count, **question)


def _measure_steps(hosts, ours, n_ranks, args):
    # Another program: a session that begins anew sends all parameters over the network.
    with start_session(hosts, args) as overlapping:
        trained = {"off": ours, "on": overlapping}
        for name, program in trained.items():
            _fork(program, args, overlap=name == "on")
        steps = []
        usual = -(-args.batch // n_ranks) * n_ranks
        for network in args.networks:
            with turns.shown(f"the first steps of {network}"):
                _check_training(trained.values(), network, usual)
            size = ours.ask("size", network=network)
            balanced = _balanced_rows(ours, network, usual, n_ranks)
            for rows in dict.fromkeys([usual, balanced]):
                steps.append({"network": network, "rows": rows, **size})
        measured = turns.Turns(args.seconds, ROUNDS)
        for number, step in enumerate(steps):
            which = {"do": "step", "network": step["network"], "rows": step["rows"]}
            for part in ("compute", "communication"):
                measured.add((number, part), _asking(ours, part=part, **which))
            for name, program in trained.items():
                measured.add((number, name), _asking(program, part="step", **which))
        figures = measured.take_all("rounds of training")
    for (number, part), found in figures.items():
        steps[number][part] = found
    for step in steps:
        parts = ("compute", *trained)
        step["hidden"] = hidden({part: step[part]["median"] for part in parts})
    return steps


def _check_training(all_programs, network, rows):
    question = {"network": network, "rows": rows, "count": _FIRST_STEPS}
    first, *others = [program.ask("losses", **question) for program in all_programs]
    for found in others:
        if any(abs(a - b) > _TOLERANCE * abs(a) for a, b in zip(first, found)):
            raise frame.Failed(
                f"{network} does not train with overlap as without: its losses are {found}, and "
                f"without overlap {first}."
            )


def _balanced_rows(ours, network, usual, n_ranks):
    """Return the number of rows with which a network computes as long as it communicates."""

    def seconds(part, rows):
        return min(ours.ask("step", network=network, rows=rows, part=part, count=3)[1:])

    with turns.shown(f"the rows with which {network} computes as long as it communicates"):
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


def text(found):
    """Return the figures of one layout as text."""
    network, ranks = found["network"], found["counts"]
    each = count(ranks[0], "rank") + " each" if len({*ranks}) == 1 else f"{ranks} ranks"
    heads = "Synkhronos", "MPI", "ratio", "float16", "/ float32", "cable"
    table = frame.Table("ms, median (least)", *heads, widths=[22, 22, 17, 22, 11, 11])
    lines = [
        f"{len(ranks)} machines, {each}: {', '.join(found['machines'])}",
        f"MPI: {found['mpi']}, {sum(ranks)} processes. Between two of them: "
        f"{1e3 * network['latency']:.3f} ms, {8e-6 * network['bandwidth']:.1f} Mbit/s each way",
        "",
        table.head,
    ]
    for row in found["rows"]:
        ours, mpi, half = row["synkhronos"], row["mpi"], row.get("float16")
        name = "call" if row["what"] == "call" else f"all_reduce {row['bytes']:13,}"
        ratios = [ours[kind] / mpi[kind] for kind in ("median", "least")]
        cells = [_shown(ours), _shown(mpi), "{:.2f} ({:.2f})".format(*ratios)]
        if half:
            cable = f"{1e3 * least_seconds(row['bytes'], found):.3f}"
            cells += [_shown(half), f"{half['median'] / ours['median']:.2f}", cable]
        lines.append(table.line(name, *cells))
    if found["steps"]:
        parts = ("compute", "communication", "off", "on")
        table = frame.Table("step of training, ms", "MB", "rows", *parts, "hidden", first=26)
        lines += ["", table.head]
        for step in found["steps"]:
            cells = [f"{step['bytes'] / 1e6:.1f}", str(step["rows"])]
            cells += [f"{1e3 * step[part]['median']:.2f}" for part in parts]
            cells.append("-" if step["hidden"] is None else f"{100 * step['hidden']:.0f} %")
            lines.append(table.line(step["title"], *cells))
    return "\n".join(lines) + "\n"


def text_of_traffic(found):
    """Return what the machines of one layout have sent as text."""
    heads = "messages", "of the busiest", "KB of the busiest", "/ array", "least"
    table = frame.Table("sent in a call", *heads, widths=[10, 16, 19, 9, 7])
    n = len(found["counts"])
    lines = [f"{n} machines: {', '.join(found['machines'])}", "", table.head]
    for row in found["traffic"]:
        messages, sent = zip(*row["sent"])
        cells = [f"{sum(messages):.1f}", f"{max(messages):.1f}", f"{1e-3 * max(sent):,.1f}"]
        if row["what"] != "call":
            cells.append(f"{max(sent) / row['nbytes']:.2f}")
        if row["what"] == "all_reduce":
            cells.append(f"{2 * (n - 1) / n:.2f}")
        name = "call" if row["what"] == "call" else f"{row['what']} {row['nbytes']:13,}"
        lines.append(table.line(name, *cells))
    return "\n".join(lines) + "\n"


def _shown(times):
    return f"{1e3 * times['median']:.3f} ({1e3 * times['least']:.3f})"


def least_seconds(nbytes, found):
    """Return the time that the least bytes of an all-reduce take on the cable of a machine.

    >>> network = {"latency": 0.0001, "bandwidth": 1e6}
    >>> round(least_seconds(1e6, {"counts": [2, 2, 2, 2], "network": network}), 4)
    1.5002
    """
    n, network = len(found["counts"]), found["network"]
    return 2 * network["latency"] + 2 * (n - 1) / n * nbytes / network["bandwidth"]
