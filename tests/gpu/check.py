#!/usr/bin/env python3
"""Check Synkhronos on the devices of this machine, and write down what was found.

    check.py     which devices; one process for each group ──▶ child.py   the scenarios of a group
             ◀── events: begin, end, figures ─────────────────

This process imports no Theano and opens no device. A process that crashes or hangs costs the
scenario that it was in: another one goes on with the next.
"""

import argparse
import collections
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import scenarios

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]

FLAGS = "device=cpu,force_device=True,floatX=float32"  # the ranks open their devices themselves
STARTUP = 300  # seconds until a group has imported what it needs
SHOWN = 12  # lines of an error; the record has all of them
FAILED = "FAIL"


def main(argv=None):
    """Run the check; return the exit status."""
    arguments = parse(argv)
    layouts = [arguments.devices]
    if arguments.devices is None:
        n_gpu, reason = count_gpus()
        if not n_gpu:
            print(f"no CUDA device: {reason}. Name others: --devices cpu,cpu", file=sys.stderr)
            return 2
        layouts = layouts_of(n_gpu)
    record = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "command": sys.argv[1:] if argv is None else argv,
        "results": [],
    }
    began = time.perf_counter()
    try:
        for number, devices in enumerate(layouts):
            for group in arguments.only:
                if number and group in scenarios.ONCE:
                    continue
                print(f"\n{', '.join(devices)}: {group}", flush=True)
                for result in run_group(group, devices, arguments.quick):
                    record["results"].append({"devices": devices, "group": group, **result})
                    show(result)
                write(arguments.json, record)
    except KeyboardInterrupt:
        record["interrupted"] = True
        print("\ninterrupted: what follows is of the scenarios until then")
    record["seconds"] = time.perf_counter() - began
    record["ok"] = conclude(record) and "interrupted" not in record
    write(arguments.json, record)
    return 0 if record["ok"] else 1


def parse(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Check Synkhronos on the devices of this machine against NumPy and CPU Theano.",
        epilog="Without --devices it takes all CUDA devices. Where there is one only, everything "
        "runs twice: on that device alone, which is an NCCL clique of one, and as two ranks that "
        "share it. The exit status is 1 if anything failed, and 2 if nothing could be run.",
    )
    add = parser.add_argument
    add("--devices", type=names, metavar="A,B", help="one for each rank, as in cuda0,cuda1")
    add("--json", type=Path, metavar="FILE", help="write the record here, after each group")
    add("--quick", action="store_true", help="few sizes and steps, and nothing that compiles long")
    add(
        "--only",
        type=names,
        metavar="GROUP,...",
        default=list(scenarios.GROUPS),
        help=f"of {', '.join(scenarios.GROUPS)}; or a file of scenarios, ending with .py",
    )
    arguments = parser.parse_args(argv)
    for group in arguments.only:
        if group not in scenarios.GROUPS and not (group.endswith(".py") and Path(group).exists()):
            parser.error(f"there is no group {group!r}; they are {', '.join(scenarios.GROUPS)}")
    return arguments


def names(text):
    """Return the names that commas separate."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError("names nothing")
    return found


def count_gpus():
    """Return how many CUDA devices there are, and why none; asked in another process."""
    child = subprocess.run(
        [sys.executable, "-c", "import synkhronos; print(synkhronos.get_n_gpu())"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    if child.returncode:
        return 0, (child.stderr.strip().splitlines() or [ended(child.returncode)])[-1]
    return int(child.stdout.split()[-1]), "pygpu counts 0; `synkhronos info` says more"


def layouts_of(n_gpu):
    """Return the lists of devices to check on a machine with so many GPUs.

    >>> layouts_of(1), layouts_of(2)
    ([['cuda0'], ['cuda0', 'cuda0']], [['cuda0', 'cuda1'], ['cuda0']])
    """
    if n_gpu == 1:
        return [["cuda0"], ["cuda0", "cuda0"]]
    return [[f"cuda{number}" for number in range(n_gpu)], ["cuda0"]]


def environment():
    """Return the environment of the processes that compute; the user's own flags win."""
    flags = ",".join(filter(None, [FLAGS, os.environ.get("THEANO_FLAGS", "")]))
    folders = [str(CHECKOUT), str(CHECKOUT / "tests"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    return {**os.environ, "THEANO_FLAGS": flags, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def run_group(group, devices, quick):
    """Yield how each scenario ended, starting another process after a crash."""
    done, told = [], set()
    with tempfile.TemporaryDirectory(prefix="synkhronos-check-") as folder:
        while True:
            child, before = Child(folder, group, devices, quick, done), len(done)
            for result in child.results():
                if result["name"] in child.names:
                    done.append(result["name"])
                # Each process forks and closes: the first success is enough to know.
                if result["name"] not in told or result["status"] == FAILED:
                    told.add(result["name"])
                    yield result
            # No progress: the ranks did not start, or the module does not import.
            if len(done) in (before, len(child.names) + before):
                return


class Child:
    """One process, and what it says until it ends or is ended."""

    def __init__(self, folder, group, devices, quick, done):
        self.names = []  # the scenarios that it will run
        self.deadline = time.monotonic() + STARTUP
        self.events = Path(folder, "events")
        self.events.write_text("")
        self.log, self.said_before = Path(folder, "log"), 0
        request = {
            "events": str(self.events),
            "group": group,
            "devices": devices,
            "quick": quick,
            "done": done,
        }
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "child.py"), json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    def results(self):
        """Yield the scenarios as they end, the one that ends the process too."""
        current, began = "start", time.perf_counter()
        try:
            for event in self._events():
                if "names" in event:
                    self.names = event["names"]
                elif "begin" in event:
                    current, began = event["begin"], time.perf_counter()
                    self.said_before = event["said"]
                    self.deadline = time.monotonic() + event["limit"]
                else:
                    current, self.deadline = None, time.monotonic() + STARTUP
                    if event["error"]:
                        event["error"] += self._end_of_log()
                    yield {"name": event.pop("end"), **event}
        finally:
            how = self._end()
        if how and current:
            yield {
                "name": current,
                "status": FAILED,
                "seconds": time.perf_counter() - began,
                "detail": how,
                "error": self._end_of_log(),
                "figures": {},
            }

    def _events(self):
        with open(self.events) as lines:
            text, over = "", False
            while not over:
                # Once more after the end: the last lines may have come in between.
                over = self.process.poll() is not None or time.monotonic() > self.deadline
                text += lines.read()
                *complete, text = text.split("\n")
                yield from map(json.loads, complete)
                if not over and not complete:
                    time.sleep(0.02)

    def _end(self):
        """End the process and its ranks; say how it ended if that was not of itself and well."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return "no answer in the time that it has: it was ended"
        return ended(self.process.returncode)

    def _end_of_log(self, characters=3000):
        with open(self.log, errors="replace") as log:
            log.seek(self.said_before)
            text = log.read()[-characters:].strip()
        return f"\nIts output ends:\n{text}\n" if text else ""


def ended(status):
    """Say how a process ended, if it did not end well.

    >>> ended(-11), ended(0)
    ('the process was ended by SIGSEGV', '')
    """
    if status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return f"the process ended with exit status {status}" if status else ""


def show(result):
    """Print a line for a scenario, and below it what went wrong."""
    line = (
        f"{result['status']:5} {result['name']:28} {result['seconds']:7.1f} s  {result['detail']}"
    )
    print(line.rstrip(), flush=True)
    for name, value in result["figures"].items():
        print(f"      {name:44} {value}", flush=True)
    for text in result["error"].strip().splitlines()[-SHOWN:]:
        print(f"      | {text}", flush=True)


def conclude(record):
    """Print the sums and what failed; return whether nothing did."""
    results = record["results"]
    count = collections.Counter(result["status"] for result in results)
    failed = [result for result in results if result["status"] == FAILED]
    print(
        f"\n{count['ok']} passed, {len(failed)} failed, {count['known']} failed as known, "
        f"{count['skip']} skipped; {record['seconds']:.0f} s"
    )
    for result in failed:
        print(f"FAIL  {', '.join(result['devices'])}: {result['group']}: {result['name']}")
    return bool(count["ok"]) and not failed


def write(file, record):
    """Write the record, whole at any moment."""
    if file is not None:
        beside = file.with_name(file.name + ".part")
        beside.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(beside, file)


if __name__ == "__main__":
    sys.exit(main())
