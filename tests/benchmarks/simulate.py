"""The carriers of 64 and 256 machines in one process, over a simulated network.

Carriers are the package's, with their loops, waits, seals, fetches and reductions. MPI, the clock
and the sockets to leaders are not: each machine's link sends one message after the other at
--bandwidth and receives so, too, --latency later. A carrier takes --message for each message that
it sends or takes, and 0.5 ns for each byte of it, for the seal. Leaders are scripts that send what
real ones send, and compute nothing. Arrays are not carried, nor reduced: only their lengths are, in
the same messages. Not simulated are mpirun, MPI's own start, its protocol and headers, other
traffic, and what leaders and ranks do.

Network is the time that the least bytes need, with the latencies that can't be avoided: one of an
array, or 2 (M - 1) / M of it. Start is from MPI's start to the plan of the session. Signs of life
are those of a second. A death is that of the last machine, and that of the first, from its last
sign to the end of all leaders' sessions. 256 machines take two minutes, and 1.4 GB of memory.
"""

import gc

from benchmarks import clusters
from benchmarks.simulated import Cluster, Costs
from synkhronos.tools.bench import frame, options

LOAD_MATTERS = False  # the clock is simulated
_SHOWN = ("messages", "of the busiest", "MB of the busiest", "/ array", "ms", "network")


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--machines", options.counts, [64, 256], "numbers of machines")
    options.add(parser, "--broadcast", options.sizes, "64K,40M", "bytes of arrays to broadcast")
    options.add(parser, "--all-reduce", options.sizes, "1K,64K,100M", "bytes of arrays to reduce")
    options.add(parser, "--calls", options.count, 1, "calls of each operation, for the mean")
    for name, default in {"--latency": "50us", "--message": "15us"}.items():
        parser.add_argument(name, type=clusters.seconds, default=default, help=f"({default})")
    what = "of each link, in each direction (10Gbit)"
    parser.add_argument("--bandwidth", type=clusters.rate, default="10Gbit", help=what)


def measure(args, report):
    """Show a table for each number of machines."""
    gc.disable()  # it would look through millions of objects that stay
    costs = Costs(args.latency, 1 / args.bandwidth, args.message)
    operations = [("broadcast", n) for n in args.broadcast]
    operations += [("all_reduce", n) for n in args.all_reduce]
    for n in args.machines:
        if n < 2:
            raise frame.Refused("--machines: one machine alone sends nothing")
        table = frame.Table(f"{n:,} machines", *_SHOWN, widths=[11, 16, 19, 9, 11, 10], first=25)
        report.show(f"\n{table.head}")
        report.results[n] = []
        for row in rows(n, costs, operations, args.calls):
            report.results[n].append(row)
            report.show(line(table, row))


def rows(n, costs, operations, calls=1):
    """Yield what each operation takes on so many machines."""

    def row(what, measured, network=0.0, nbytes=0):
        seconds, traffic = zip(*measured)
        sent = [[sum(x) / len(measured) for x in zip(*machine)] for machine in zip(*traffic)]
        mean = sum(seconds) / len(measured)
        return {"what": what, "nbytes": nbytes, "seconds": mean, "network": network, "sent": sent}

    most = max((nbytes for _, nbytes in operations), default=4)
    with Cluster(n, costs, most, whole=False) as cluster:
        yield row("start", [cluster.start])
        yield row("call", [cluster.do("call") for _ in range(calls)], 2 * costs.latency)
        for what, nbytes in operations:
            cluster.do("call")  # what the last one has left to send is not counted
            share = 1 if what == "broadcast" else 2 * (n - 1) / n
            network = share * (costs.latency + nbytes * costs.byte)
            yield row(what, [cluster.do(what, nbytes) for _ in range(calls)], network, nbytes)
        yield row("signs of life", [cluster.pass_time(1.0)])
        yield row("death", [cluster.kill(n - 1)])
    with Cluster(n, costs, whole=False) as cluster:
        yield row("death of the first", [cluster.kill(0)])


def line(table, row):
    """Return the line of an operation."""
    messages, sent = zip(*row["sent"])
    nbytes = row["nbytes"]
    cells = [f"{sum(messages):,.0f}", f"{max(messages):,.1f}", f"{1e-6 * max(sent):,.1f}"]
    cells.append(f"{max(sent) / nbytes:.2f}" if nbytes >= 1 << 20 else "")
    cells.append(f"{1e3 * row['seconds']:,.2f}")
    cells.append(f"{1e3 * row['network']:,.2f}" if row["network"] else "")
    return table.line(f"{row['what']:10} {nbytes:13,}" if nbytes else row["what"], *cells)
