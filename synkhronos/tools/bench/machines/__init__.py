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

The figures go to a file (--json) that ``synkhronos bench scaling --network`` reads.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from synkhronos._wording import count
from synkhronos.tools import launch
from synkhronos.tools.bench import collectives, options
from synkhronos.tools.bench.machines import measure
from synkhronos.tools.bench.machines.programs import ProgramError

SIZES = "1K,16K,256K,1M,4M,16M,64M"
NETWORKS = ("mlp", "dense")
BATCH = 512


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument(
        "--hosts",
        metavar="LIST",
        help="the machines, such as node0:2,node1:2 (with 2 ranks); without it those of a Slurm or "
        "PBS allocation",
    )
    machines.add_argument(
        "--hostfile", metavar="FILE", help="a file with a machine in each line: node1 slots=2"
    )
    launch.add_mpirun_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=counts,
        metavar="LIST",
        help="ranks of each machine, such as 1,2, one layout after the other (default: 1, and then "
        "what --hosts says, or fork() decides)",
    )
    parser.add_argument(
        "--threads-per-rank",
        type=options.count,
        metavar="N",
        help="threads of BLAS and OpenMP in each rank (default: as in fork)",
    )
    parser.add_argument(
        "--sizes",
        type=collectives.parse_sizes,
        default=SIZES,
        help=f"bytes of a rank's array ({SIZES})",
    )
    parser.add_argument(
        "--networks",
        type=options.names(NETWORKS, "network"),
        default=list(NETWORKS),
        metavar="NAMES",
        help=f"which to train ({','.join(NETWORKS)})",
    )
    parser.add_argument("--no-training", action="store_true", help="leave out steps of training")
    parser.add_argument(
        "--batch",
        type=options.count,
        default=BATCH,
        help=f"rows of a minibatch, on all ranks ({BATCH})",
    )
    parser.add_argument(
        "--seconds",
        type=options.positive,
        default=2.0,
        metavar="S",
        help="time for each figure, where one measurement is not longer (default: 2)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file, too")


def counts(text):
    """Return the numbers in a list such as ``1,2``, each at least 1."""
    return [options.count(each.strip()) for each in text.split(",")]


def main(args) -> int:
    """Measure, print, and return the exit status."""
    try:
        hosts = _hosts(args)
        _check_file(args.json)
        launch.check_mpirun()
        results = {"cores": os.cpu_count(), "busy_cores": options.busy_cores(), "layouts": []}
        if results["busy_cores"] > 0.2:
            busy = results["busy_cores"]
            print(
                f"others keep {busy:.1f} cores of this machine busy: this tells little about speed",
                file=sys.stderr,
            )
        for layout in layouts(hosts, args.ranks):
            done = {tuple(each["counts"]) for each in results["layouts"]}
            found = measure.measure(layout, args, done)
            if found is not None:
                results["layouts"].append(found)
                print(text(found), flush=True)
                if args.json:  # after each layout: the next one may take long, or fail
                    Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
    except (launch.CannotLaunch, ValueError) as error:
        print(f"can't measure machines: {error}", file=sys.stderr)
        return 2
    except ProgramError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _hosts(args):
    hosts = launch.find_hosts(args)
    if hosts is None:
        raise launch.CannotLaunch(
            "there is no allocation of Slurm or PBS with several machines: name them with --hosts "
            "node0:2,node1:2, or a --hostfile."
        )
    if len(hosts) < 2:
        raise launch.CannotLaunch(
            f"{hosts[0].name} is one machine alone, and nothing crosses a network: name two or "
            "more, such as --hosts node0:2,node1:2."
        )
    return hosts


def _check_file(name):
    if name is None:
        return
    folder = Path(name).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(name).is_dir():
        raise launch.CannotLaunch(f"--json can't write {name}: is there such a folder?")


def layouts(hosts, ranks):
    """Return lists of hosts, one for each layout.

    >>> layouts([launch.Host("a", 2), launch.Host("b", 1)], None)
    [[Host(name='a', ranks=1), Host(name='b', ranks=1)], \
[Host(name='a', ranks=2), Host(name='b', ranks=1)]]
    """
    found = [[launch.Host(host.name, number) for host in hosts] for number in ranks or (1,)]
    if ranks is None and hosts not in found:
        found.append(hosts)
    return found


def text(found):
    """Return the figures of one layout as text."""
    network = found["network"]
    ranks = found["counts"]
    each = count(ranks[0], "rank") + " each" if len({*ranks}) == 1 else f"{ranks} ranks"
    lines = [
        f"{len(ranks)} machines, {each}: {', '.join(found['machines'])}",
        f"MPI: {found['mpi']}, {sum(ranks)} processes. Between two of them: "
        f"{1e3 * network['latency']:.3f} ms, {8e-6 * network['bandwidth']:.1f} Mbit/s each way",
        "",
        f"{'ms, median (least)':24}{'Synkhronos':>22}{'MPI':>22}{'ratio':>17}"
        f"{'float16':>22}{'/ float32':>10}{'cable':>11}",
    ]
    lines += [_line(row, found) for row in found["rows"]]
    if found["steps"]:
        lines += ["", _head_of_steps()]
        lines += [_line_of_step(step) for step in found["steps"]]
    return "\n".join(lines) + "\n"


def _line(row, found):
    ours, mpi, half = row["synkhronos"], row["mpi"], row.get("float16")
    name = "call" if row["what"] == "call" else f"all_reduce {row['bytes']:13,}"
    line = f"{name:24}{_shown(ours):>22}{_shown(mpi):>22}"
    ratios = [ours[kind] / mpi[kind] for kind in ("median", "least")]
    line += f"{'{:.2f} ({:.2f})'.format(*ratios):>17}"
    if half:
        line += f"{_shown(half):>22}{half['median'] / ours['median']:10.2f}"
        line += f"{1e3 * least_seconds(row['bytes'], found):11.3f}"
    return line


def least_seconds(nbytes, found):
    """Return the time that the least bytes of an all-reduce take on the cable of a machine.

    >>> network = {"latency": 0.0001, "bandwidth": 1e6}
    >>> round(least_seconds(1e6, {"counts": [2, 2, 2, 2], "network": network}), 4)
    1.5002
    """
    n, network = len(found["counts"]), found["network"]
    return 2 * network["latency"] + 2 * (n - 1) / n * nbytes / network["bandwidth"]


def _shown(times):
    return f"{1e3 * times['median']:.3f} ({1e3 * times['least']:.3f})"


def _head_of_steps():
    columns = ("MB", "rows", "compute", "communication", "off", "on", "hidden")
    return f"{'step of training, ms':26}" + "".join(f"{name:>15}" for name in columns)


def _line_of_step(step):
    line = f"{step['title']:26}{step['bytes'] / 1e6:15.1f}{step['rows']:15}"
    for part in ("compute", "communication", "off", "on"):
        line += f"{1e3 * step[part]['median']:15.2f}"
    return line + ("            -" if step["hidden"] is None else f"{100 * step['hidden']:13.0f} %")
