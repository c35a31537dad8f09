"""The CPU time and memory of each process of a machine, from mpirun to the return of fork().

The machine is the script's, on test hosts with a rank each; it needs root. Others have the same
processes. PSS counts what processes share once, divided among them.
"""

import json
import subprocess
from pathlib import Path

from support import hosts

from synkhronos.tools.bench import frame, options

_SCRIPT = Path(__file__).with_name("programs") / "started.py"


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--hosts", options.count, 2, "test hosts")


def measure(args, report):
    """Show what the processes of the first host have taken."""
    if hosts.missing():
        raise frame.Refused(f"needs {hosts.missing()}")
    with hosts.up(args.hosts) as these:
        line, environment = these.launch(_SCRIPT), these.environment()
        done = subprocess.run(line, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    report.results["processes"] = found = json.loads(done.stdout)
    table = frame.Table("process", "CPU s", "PSS MB", first=32)
    lines = [table.line(name, f"{cpu:.2f}", f"{pss / 1e6:.1f}") for name, cpu, pss in found]
    report.show("\n".join([table.head, *lines]))
