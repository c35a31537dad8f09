"""How many ranks, with how many threads each, are fastest for a function of yours.

NAME is a function in FILE.py that is called without arguments, in a session of one rank. It returns
a function of synk.function() or make_train_step(), and the arguments of a call: (step, (x, y)), or
(step, (x, y), {"batch": rows}). If it, or the file, calls fork(), that session takes the place of
the first one. All is as with synk.advise(step, args, kwargs), which prints the same.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys

from synkhronos.tools.bench import frame, options


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.add_argument("step", metavar="FILE.py:NAME", type=_place, help="what makes the function")
    options.add(parser, "--seconds", options.positive, 2.0, "time for each way")


def _place(text):
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected FILE.py:NAME, got {text!r}")
    return file, name


def measure(args, report):
    """Make the function, and show what is advised."""
    import synkhronos as synk
    from synkhronos._session.current import Current

    synk.fork(1, use_gpu=False)
    Current.session.is_of_run = True  # fork() of the file may begin another one
    try:
        step, arguments, keywords = _made(*args.step)
        try:
            advice = synk.advise(step, arguments, keywords, seconds=args.seconds)
        except (TypeError, ValueError) as error:
            raise frame.Refused(f"{args.step[0]}:{args.step[1]}: {error}") from error
    finally:
        if synk.status().state == "open":
            synk.close()
    ways = [
        {
            "ranks": ranks,
            "threads": threads,
            "seconds": seconds,
            "slowest": advice.slowest[ranks, threads],
        }
        for (ranks, threads), seconds in advice.seconds.items()
    ]
    best = {name: getattr(advice, name) for name in ("ranks", "threads", "gain", "lines")}
    report.results.update(function=advice.function, rows=advice.rows, ways=ways, **best)
    # What others do meanwhile is told of by the frame.
    report.show(str(dataclasses.replace(advice, others=advice.others._replace(cores=0.0))))


def _made(file, name):
    """Return what a function in a file makes."""
    if not os.path.isfile(file):
        raise frame.Refused(f"there is no file {file}")
    folder, module = os.path.split(os.path.abspath(file))
    sys.path.insert(0, folder)  # as for a script
    spec = importlib.util.spec_from_file_location(module[:-3], file)
    loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
        make = getattr(loaded, name, None)
        if not callable(make):
            raise frame.Refused(f"{file} has no function {name}")
        made = make()
    except SystemExit as end:
        raise frame.Refused(f"{file} has ended the process, with {end.code!r}") from end
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise frame.Refused(f"{file}:{name}() must return (step, args), or (step, args, kwargs)")
    return (*made, None)[:3]
