"""Ask each of several machines what it has, for ``synkhronos info --hosts``.

As a script this file prints what its machine has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from synkhronos._machine import devices
from synkhronos._wording import printable
from synkhronos.comm.mpi import job
from synkhronos.launch import CannotLaunch, mpirun, where
from synkhronos.tools import turns

_COLUMNS = ("machine", *job.COLUMNS, "cores", "devices")
_VERSIONS = slice(2, 7)  # of a row: what must be the same everywhere


def main(options: argparse.Namespace) -> int:
    """Print a table of the machines; return 1 if they disagree or one gives no answer."""
    try:
        hosts = where.find_hosts(options.hosts, options.hostfile)
        mpirun.check()
        command = devices.module_command("synkhronos.tools.info.machines")
        lines = [mpirun.line([host], options, command, {}) for host in hosts]
    except ValueError as error:
        print(printable(f"can't ask the machines: {error}"), file=sys.stderr)
        return 2
    with turns.shown("asking the machines"), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda asked: _ask(*asked, options), zip(hosts, lines)))
    rows = [row for row, _ in answers if row]
    if options.json:
        titles, *listed = job.with_titles(_COLUMNS, rows)
        named = [dict(zip(titles, row)) for row in listed]
        problems = {host.name: each for host, (_, each) in zip(hosts, answers) if each}
        ok = not problems and agree(rows)
        print(json.dumps({"ok": ok, "machines": named, "problems": problems}, indent=2))
        return int(not ok)
    if rows:
        print(table(rows))
    for _, problem in answers:
        if problem:
            print(printable(problem))
    if not agree(rows):
        print(disagreement(rows))
    elif len(rows) == len(hosts):
        print("All have the same versions." if len(rows) > 1 else "It can be reached.")
    return int(len(rows) < len(hosts) or not agree(rows))


def _ask(host, line, options):
    """Return the row of a machine, and a sentence if there is none."""
    try:
        return [host.name, *mpirun.answer(line, host, options)], None
    except CannotLaunch as error:
        return None, str(error)


def agree(rows: list[list[str]]) -> bool:
    """Return whether all machines have the same versions."""
    return len({tuple(row[_VERSIONS]) for row in rows}) <= 1


def disagreement(rows: list[list[str]]) -> str:
    """Return a sentence that names the versions that differ.

    >>> rows = [["a", "n", "1", "e2", "Theano 1", numpy, "3.8"] for numpy in ("1.23", "1.2")]
    >>> disagreement(rows)
    'They differ in NumPy: fork() needs the same versions on all machines.'
    """
    columns = zip(*(row[_VERSIONS] for row in job.with_titles(_COLUMNS, rows)))
    names = [name for name, *values in columns if len({*values}) > 1]
    return f"They differ in {' and '.join(names)}: fork() needs the same versions on all machines."


def table(rows: list[list[str]]) -> str:
    """Return the rows as text.

    >>> print(table([["a", "n", "0.1", "e2", "Theano 1.0.5", "1.23.5", "3.11.7", "2", "2 cpu"]]))
    machine  host  Synkhronos  files  Theano  NumPy   Python  cores  devices
    a        n     0.1         e2     1.0.5   1.23.5  3.11.7  2      2 cpu
    """
    rows = [[printable(cell, kept="") for cell in row] for row in rows]
    lines = job.with_titles(_COLUMNS, rows)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def own_row() -> list[str]:
    """Return what this machine has: the columns of the table after the first."""
    devices.undo_binding()
    try:
        counts = Counter(devices.kind(name) for name in devices.resolve())
        found = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    except Exception as error:
        found = f"none: {error}"
    return [*job.facts(), str(devices.usable_cores()), found]


if __name__ == "__main__":
    mpirun.tell(own_row())
