"""A step of training with a parameter server that overlaps, beside one that does not.

The benchmark starts one job of servers and workers by ``synkhronos launch``. In turns the workers
take steps in which gradients are pushed as soon as they are computed, with priorities, and awaited
just before their parameters are used in the next step; and steps that push everything without
priorities and wait for everything. Both send the same bytes.
"""

import json
import statistics
from pathlib import Path

from benchmarks import groups
from synkhronos._wording import count
from synkhronos.tools import launch, turns
from synkhronos.tools.bench import frame, options, programs

WAYS = {
    "compute": "compute, without a store",
    "communicate": "push everything, wait for everything, alone",
    "everything": "compute, push everything, wait for it",
    "overlap": "push at once, with priorities; wait late",
}
_WORKER = Path(__file__).with_name("programs") / "overlap_worker.py"


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--servers", options.count, 1, "servers")
    options.add(parser, "--workers", options.count, 2, "workers")
    what = "rows of each worker (as many as are computed while all parameters are sent)"
    options.add(parser, "--batch", options.count, None, what)
    options.add(parser, "--units", options.counts, [1024] * 10, "of layers")
    options.add(parser, "--steps", options.count, 4, "of one way in a turn")
    options.add(parser, "--turns", options.count, 3, "of all ways")
    what = "draw two steps of worker 0 (.png), or a trace (.json)"
    parser.add_argument("--timeline", metavar="FILE", help=what)
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--hosts", metavar="LIST", help="the machines, as for synkhronos launch")
    machines.add_argument("--hostfile", metavar="FILE", help="a file with a machine in each line")
    launch.add_mpirun_arguments(parser)


def measure(args, report):
    """Run the job, and show what its first worker tells."""
    frame.check_picture("--timeline", args.timeline)
    command = "from synkhronos.__main__ import main; sys.exit(main())"
    line = programs.interpreter(command, "launch")
    line += ["--servers", str(args.servers), "--workers", str(args.workers)]
    line += ["--threads-per-rank", "1"]
    if args.hosts:  # all processes, evenly
        names = [each.partition(":")[0] for each in args.hosts.split(",")]
        line += ["--hosts", ",".join(names)]
    line += ["--hostfile", args.hostfile] if args.hostfile else []
    line += ["--agent", args.agent] if args.agent else []
    line += ["--mpirun-args", args.mpirun_args] if args.mpirun_args else []
    timeline = args.timeline and str(Path(args.timeline).absolute())
    settings = {name: getattr(args, name) for name in ("units", "batch", "steps", "turns")}
    line += [str(_WORKER), json.dumps({**settings, "timeline": timeline})]
    with programs.Program("the job", line, groups.environment()) as job, turns.shown("the job"):
        report.results.update({**settings, **job.hear()})
    report.show(text(args, report.results))


def text(args, figures):
    """Return the figures as a table."""
    seconds = figures["seconds"]
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    table = frame.Table("ms of a step", "median", "least", "most", first=44)
    lines = [
        f"{count(args.servers, 'server')}, {count(args.workers, 'worker')}; "
        f"{1e-6 * figures['nbytes']:.1f} MB of parameters in {figures['keys']} keys; "
        f"{figures['batch']} rows for each worker",
        table.head,
    ]
    for way, title in WAYS.items():
        shown = medians[way], min(seconds[way]), max(seconds[way])
        lines.append(table.line(title, *(f"{1e3 * each:.1f}" for each in shown)))
    ratios = sorted(a / b for a, b in zip(seconds["everything"], seconds["overlap"]))
    balance = medians["compute"] / medians["communicate"]
    lines += [
        f"overlap is {statistics.median(ratios):.2f} times as fast as everything at once "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f} of {count(len(ratios), 'turn')})",
        f"computing takes {balance:.2f} of the time of sending; overlap gains most at 1: "
        "--batch changes it",
        f"beside Theano's function a thread of the process does {100 * figures['beside']:.0f} % of "
        "the copying that it does alone",
    ]
    if figures["summary"]:
        lines += ["", f"two steps of worker 0, in {args.timeline}:", figures["summary"]]
    return "\n".join(lines)
