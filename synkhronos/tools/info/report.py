"""One check of ``synkhronos info``, their table, and probes of libraries in child processes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from importlib import metadata
from typing import Callable, Sequence

from synkhronos._host import pythons
from synkhronos._machine.devices import run_captured
from synkhronos._wording import printable

OK, MISSING, BROKEN = "ok", "missing", "broken"
COLOURS = {OK: "\033[32m", MISSING: "\033[33m", BROKEN: "\033[31m"}
REINSTALL = "reinstall it in this environment: pip install --force-reinstall synkhronos"


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the table; the exit status is 1 if an essential check failed."""

    name: str
    status: str
    found: str
    advice: str = ""
    essential: bool = False

    @property
    def failed(self) -> bool:
        """Whether Synkhronos cannot work because of this check."""
        return self.essential and self.status != OK


def not_imported(host: str, install: str, error: str) -> Check:
    """Return the check of a host library that can't be imported."""
    if f"No module named {host.lower()!r}" in error:
        return Check(host, MISSING, error, pythons.advice(host, install), essential=True)
    advice = f"if {host.upper()}_FLAGS or .{host.lower()}rc are not the cause, {REINSTALL}"
    return Check(host, BROKEN, error, advice, essential=True)


def check_cache(host: str, facts: dict) -> Check:
    """Check that a host library can write to its compile cache."""
    if "cache" not in facts:
        return Check("Compile cache", BROKEN, f"not known without {host}", f"see {host}")
    if not facts["cache_writable"]:
        advice = f"name a folder that can be written: {host.upper()}_FLAGS=base_compiledir=..."
        return Check("Compile cache", BROKEN, facts["cache"], advice, essential=True)
    return Check("Compile cache", OK, facts["cache"], essential=True)


def table(results: list[Check], colour: bool) -> str:
    """Return the checks as text, with the advice of a check indented below it.

    >>> print(table([Check("pygpu", MISSING, "not installed", "install it")], colour=False))
    pygpu           missing  not installed
                             -> install it
    """
    lines = []
    for check in results:
        status = f"{check.status:7}"
        if colour:
            status = f"{COLOURS[check.status]}{status}\033[0m"
        lines.append(f"{check.name:15} {status}  {printable(check.found)}")
        if check.advice:
            lines.append(f"{'':24} -> {printable(check.advice)}")
    return "\n".join(lines)


def as_json(results: list[Check]) -> str:
    """Return the checks as a JSON object."""
    ok = not any(check.failed for check in results)
    return json.dumps({"ok": ok, "checks": [dataclasses.asdict(c) for c in results]}, indent=2)


def facts_of(command: Sequence[str], timeout: float) -> tuple[dict, str]:
    """Return the facts that a child process prints about a library, and the error that ended it."""
    try:
        child = run_captured(command, timeout=timeout)
        stdout, error = child.stdout, last_line(child.stderr) if child.returncode else ""
        if child.returncode and not error:
            error = f"the process ended with exit status {child.returncode}"
    except subprocess.TimeoutExpired as expired:
        stdout, error = expired.stdout or "", f"no answer within {timeout:g} s"
    facts: dict = {}
    for line in (stdout.decode() if isinstance(stdout, bytes) else stdout).splitlines():
        # Only lines with facts are JSON: Theano and g++ print on stdout if a compilation fails.
        if line.startswith("{"):
            facts.update(json.loads(line))
    return facts, error


def last_line(text: str) -> str:
    """Return the last line of a traceback that names the error, shortened."""
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    # Theano adds lines such as "Apply node that caused the error" after some errors.
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    line = (errors or lines or [""])[-1]
    return line if len(line) <= 300 else line[:300] + " ..."


def installed_version(name: str) -> str | None:
    """Return the version of a package of this environment, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_versions(facts: dict, too_new: Callable[[str, str], str] | None = None) -> list[Check]:
    """Name the NumPy and SciPy that the host imports; without it, those that are installed.

    `too_new(name, version)` returns what to install in place of a version that is too new, or "".
    """
    results = []
    for name, label in (("numpy", "NumPy"), ("scipy", "SciPy")):
        version = facts.get(name) or installed_version(name)
        advice = too_new(name, version) if too_new and version else ""
        if advice:
            results.append(Check(label, BROKEN, version, advice, essential=name == "numpy"))
        elif version:
            results.append(Check(label, OK, version, essential=True))
        else:
            results.append(Check(label, MISSING, "not installed", REINSTALL, essential=True))
    return results
