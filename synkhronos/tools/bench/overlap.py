"""A step of training with a parameter server that overlaps, beside one that does not.

The benchmark starts one job of servers and workers by ``synkhronos launch``. In turns the workers
take steps in which gradients are pushed as soon as they are computed, with priorities, and awaited
just before their parameters are used in the next step; and steps that push everything without
priorities and wait for everything. Both send the same bytes.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from synkhronos._machine.devices import python_command
from synkhronos._wording import count
from synkhronos.tools import launch
from synkhronos.tools.bench import options as checks

MARK = "synkhronos-bench "  # before the line of figures of a worker
WAYS = ["overlap", "everything", "compute", "communicate"]
UNITS = [1024] * 10  # 41 MB
_WORKER = Path(__file__).with_name("overlap_worker.py")


def add_arguments(parser):
    """Add the options of ``--overlap``."""
    group = parser.add_argument_group("overlap of computing and sending, on several machines")
    add = group.add_argument
    add("--overlap", action="store_true", help="measure a step of training with servers instead")
    add("--servers", type=checks.count, default=1, metavar="N", help="servers (1)")
    add("--workers", type=checks.count, default=2, metavar="N", help="workers (2)")
    add(
        "--batch", type=checks.count, metavar="N",
        help="rows of each worker (as many as are computed while all parameters are sent)",
    )  # fmt: skip
    add("--units", type=_units, default=UNITS, metavar="LIST", help="of layers (ten of 1024)")
    add("--steps", type=checks.count, default=4, help="of one way in a turn (4)")
    add("--turns", type=checks.count, default=3, help="of all ways (3)")
    add("--timeline", metavar="FILE", help="draw two steps of worker 0 (.png), or a trace (.json)")
    machines = group.add_mutually_exclusive_group()
    machines.add_argument("--hosts", metavar="LIST", help="the machines, as for synkhronos launch")
    machines.add_argument("--hostfile", metavar="FILE", help="a file with a machine in each line")
    launch.add_mpirun_arguments(group)


def _units(text):
    return [checks.count(each.strip()) for each in text.split(",")]


def main(arguments) -> int:
    """Measure, print, and return the exit status."""
    if arguments.timeline and not checks.can_plot(arguments.timeline):
        return 2
    figures, status = measure(arguments)
    if figures is None:
        print("the workers have told no figures", file=sys.stderr)
        return status or 1
    sys.stdout.write(text(arguments, figures))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2))
    return 0


def measure(arguments):
    """Run the job; return its figures, None without them, and its exit status."""
    line = python_command("from synkhronos.__main__ import main; sys.exit(main())", "launch")
    line += ["--servers", str(arguments.servers), "--workers", str(arguments.workers)]
    line += ["--threads-per-rank", "1"]
    if arguments.hosts:  # all processes, evenly
        names = [each.partition(":")[0] for each in arguments.hosts.split(",")]
        line += ["--hosts", ",".join(names)]
    line += ["--hostfile", arguments.hostfile] if arguments.hostfile else []
    line += ["--agent", arguments.agent] if arguments.agent else []
    line += ["--mpirun-args", arguments.mpirun_args] if arguments.mpirun_args else []
    timeline = arguments.timeline and str(Path(arguments.timeline).absolute())
    settings = {name: getattr(arguments, name) for name in ("units", "batch", "steps", "turns")}
    line += [str(_WORKER), json.dumps({**settings, "ways": WAYS, "timeline": timeline})]
    figures = None
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as job:
        for said in job.stdout:
            if said.startswith(MARK):
                figures = {**settings, **json.loads(said[len(MARK) :])}
            else:
                print(said, end="", flush=True)
    return figures, job.returncode


def text(arguments, figures):
    """Return the figures as a table."""
    seconds = figures["seconds"]
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    lines = [
        f"{count(arguments.servers, 'server')}, {count(arguments.workers, 'worker')}; "
        f"{1e-6 * figures['nbytes']:.1f} MB of parameters in {figures['keys']} keys; "
        f"{figures['batch']} rows for each worker",
        f"{'ms of a step':44}{'median':>10}{'least':>10}{'most':>10}",
    ]
    titles = {
        "compute": "compute, without a store",
        "communicate": "push everything, wait for everything, alone",
        "everything": "compute, push everything, wait for it",
        "overlap": "push at once, with priorities; wait late",
    }
    for way, title in titles.items():
        times = seconds[way]
        shown = [1e3 * each for each in (medians[way], min(times), max(times))]
        lines.append(f"{title:44}" + "".join(f"{each:10.1f}" for each in shown))
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
        lines += ["", f"two steps of worker 0, in {arguments.timeline}:", figures["summary"]]
    return "\n".join(lines) + "\n"
