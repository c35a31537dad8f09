#!/usr/bin/env python3
"""Say how fast inputs reach a CUDA device, from locked pages and from others, in half a minute.

First steps of the cnn and the mlp: of serial Theano on the device, of one rank, and of one rank
that locks nothing, in turns. Then copies of 0.4 to 100 MB, and how long it takes to lock that much.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
MEGABYTES = 0.4, 1.6, 12, 100


def copies(device, repeats):
    """Measure copies of memory that ranks share."""
    import numpy as np

    import synkhronos as synk
    from synkhronos import _host
    from synkhronos._host.theano.page_locks import PageLocks
    from synkhronos._machine.shared_memory import Segments

    os.environ.setdefault("SYNKHRONOS_LOCKED_GIB", "4")
    synk.fork(devices=[device])
    locks = PageLocks.current
    print("pages can be locked" if locks else "no pages can be locked", flush=True)
    print(f"{'MB':>7}  {'not locked':>24}  {'locked':>24}  {'to lock it':>12}", flush=True)
    for size in MEGABYTES:
        array = Segments().create(int(size * 1e6)).array(np.uint8, int(size * 1e6))
        array[...] = 1
        value, cells = _host.empty_on_device(array.shape, array.dtype), []
        for is_locked in (False, True):
            if is_locked and locks:
                begin = time.perf_counter()
                found = [locks.lock([array]) for _ in range(2)]
                cells.append(f"{1e3 * (time.perf_counter() - begin):9.2f} ms" * found[1])
            seconds = []
            for _ in range(repeats):
                begin = time.perf_counter()
                value.write(array)
                value.sync()
                seconds.append(time.perf_counter() - begin)
            each = statistics.median(seconds)
            cells.insert(is_locked, f"{1e3 * each:9.3f} ms {size / 1e3 / each:6.1f} GB/s")
        print(f"{size:7}  {cells[0]:>24}  {cells[1]:>24}  {''.join(cells[2:]):>12}", flush=True)
    synk.close()


def steps(device, network, batch, seconds):
    """Measure steps of training; all systems compile at the same time."""
    from synkhronos.tools import turns
    from synkhronos.tools.bench import programs, training

    job = training.TrainingTask(network, batch)
    systems = {
        f"serial, {device}": ("serial", {}),
        "1 rank, locked": ("one", {"SYNKHRONOS_LOCKED_GIB": "4"}),
        "1 rank": ("one", {}),
    }
    with contextlib.ExitStack() as stack:
        running, losses, measured = {}, {}, turns.Turns(seconds, 5, most=10_000)
        for label, (form, more) in systems.items():
            serve = "from synkhronos.tools.bench import training; training.serve()"
            line = programs.interpreter(serve, json.dumps([form, [device], job]))
            program = programs.Program(label, line, {**os.environ, **more})
            running[label] = stack.enter_context(program)
            program.send("losses", count=4)
        for label, program in running.items():
            losses[label] = program.hear("losses")
            measured.add(label, lambda n, program=program: program.ask("times", count=n))
        found = measured.take_all(network)
        first = None
        for label, program in running.items():
            each = found[label]["median"]
            first = first or each
            line = f"{network}  {label:24} {1e3 * each:9.3f} ms  {each / first:6.3f} of serial"
            if "rank" in label:
                shares = program.ask("shares", count=100)
                line += "  " + ", ".join(f"{name} {100 * x:.1f} %" for name, x in shares.items())
            print(line, flush=True)
        print(f"{network}  losses: {losses}", flush=True)


def main(argv=None):
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda0")
    parser.add_argument("--networks", default="cnn,mlp")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each system's steps")
    parser.add_argument("--repeats", type=int, default=20, help="of each copy")
    arguments = parser.parse_args(argv)
    for network in filter(None, arguments.networks.split(",")):
        steps(arguments.device, network, arguments.batch, arguments.seconds)
    if arguments.device != "cpu":
        copies(arguments.device, arguments.repeats)  # at the end: this process opens the device


if __name__ == "__main__":
    main()
