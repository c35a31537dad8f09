"""Programs of others, unchanged, by ``synkhronos run --parallel`` beside serial Theano.

--clones is a folder with clones of DeepLearningTutorials, Newmu (its Theano-Tutorials), Lasagne,
Recipes, theanets and keras (2.3.1). A copy of each program runs with made data of few rows, in
Python, and with ranks. What it prints is compared, number by number. The columns:

lines       changed lines of its file: of Python 2; to run for a shorter time; for made data and
            today's libraries
divided     functions divided, of those that were called
on ranks    part of the time of all functions in which they ran on all ranks
difference  the largest of a printed number from serial Theano's, relative to numbers above 1
still       the same with constants in place of Theano's random numbers, which differ between ranks
rounded     where that is over the limit: the largest difference between serial runs, in which the
            values that shared variables begin with are one unit in the last place more or less
CPU         seconds of each rank
times       as fast as serial Theano, both with one thread for each process; first calls left out
"""

import ast
import dataclasses
import difflib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import synkhronos as synk
from benchmarks.foreign.table import PROGRAMS
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options

EQUAL = 1e-5  # of numbers that are printed with six digits
CLOSE = 0.3  # of programs that draw random numbers
ROUNDED = 8  # serial runs with other roundings
_HERE = Path(__file__).parents[1]
_FIXERS = [f"lib2to3.fixes.fix_{name}" for name in ("xrange", "repr", "imports", "urllib")]
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)(?![\w])")
_OF_RUN = re.compile(
    r"\d+(\.\d+)?m?s( \d+[mu]?s/step)?\b|\(took .*?\)|[\d.]+ ?(sec|minutes)\w*|(?<!\S)/\S+"
)


def add_arguments(parser):
    """Add the options of this benchmark."""
    names = [each.name for each in PROGRAMS]
    parser.add_argument("--clones", required=True, metavar="FOLDER", help="the clones")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME",
        help="programs with this in their names; may be repeated. There are: " + ", ".join(names),
    )  # fmt: skip
    options.add(parser, "--ranks", options.count, 2, "ranks to run with")
    options.add(parser, "--timeout", options.positive, 1200, "seconds of one run")
    parser.add_argument(
        "--once", action="store_true", help="leave out the runs without random numbers"
    )
    parser.add_argument(
        "--larger", action="store_true", help="recurrent programs, with steps of usual sizes"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="leave all files and output there")


def measure(args, report):
    """Run all, and show a line for each, and then what stayed in the master."""
    clones = Path(args.clones).resolve()
    chosen = [
        each for each in PROGRAMS if not args.only or any(part in each.name for part in args.only)
    ]
    if not chosen:
        raise frame.Refused(f"--only {' '.join(args.only)} is in no program's name")
    if not any((clones / each.file).is_file() for each in chosen):
        raise frame.Refused(f"--clones {args.clones} has none of these programs")
    if args.larger:
        chosen = [
            dataclasses.replace(each, shorter=each.shorter + each.larger)
            for each in chosen
            if each.larger
        ]
    table = frame.Table(
        "program", "lines", "divided", "on ranks", "difference", "still", "rounded", "CPU",
        "times", "", first=34, widths=[10, 9, 10, 12, 10, 10, 14, 7, 1],
    )  # fmt: skip
    report.show(table.head)
    found = report.results["programs"] = {}
    with tempfile.TemporaryDirectory(prefix="foreign-") as folder:
        place = Path(args.keep or folder).resolve()
        for program in turns.progress("programs", chosen):
            found[program.name] = _compare(program, clones, place, args)
            report.show(table.line(*_cells(program.name, found[program.name])))
    report.show(_remains(found))


def _compare(program, clones, place, args):
    """Return what is known of a program after all its runs."""
    found = {"draws": program.draws}
    try:
        serial = _run(program, clones, place, args, 0)
        ranked = _run(program, clones, place, args, args.ranks)
        found.update(lines=serial["lines"], **_speed(serial, ranked))
        noise, runs = "on", [serial["out"], ranked["out"]]
        found["difference"] = difference(program, *runs)
        if program.draws and not args.once:
            noise = "off"
            runs = [_run(program, clones, place, args, n, noise)["out"] for n in (0, args.ranks)]
            found["still"] = difference(program, *runs)
        over = [found.get("still", found["difference"])]
        if not (program.draws and args.once) and over != [None] and not over[0] <= EQUAL:
            serial_runs = [
                _run(program, clones, place, args, 0, noise, seed)["out"]
                for seed in range(1, ROUNDED + 1)
            ]
            found["rounded"], found["is_rounding"] = growth(program, *runs, serial_runs)
    except frame.Failed as error:
        found["failed"] = str(error)
    return found


def _speed(serial, ranked):
    functions = [each for each in ranked["report"]["functions"] if each["calls"]]
    seconds = sum(each["seconds"] for each in functions)
    later = [each["seconds"] - each["first_seconds"] for each in (serial["times"], *functions)]
    return {
        "functions": functions,
        "cpu_seconds": ranked["report"]["cpu_seconds"],
        "on_ranks": sum(each["seconds_on_ranks"] for each in functions) / (seconds or 1),
        "milliseconds": 1e3 * serial["times"]["seconds"] / max(1, serial["times"]["calls"]),
        "times": later[0] / sum(later[1:]) if sum(later[1:]) > 0 else None,
    }


def _run(program, clones, place, args, n_ranks, noise="on", rounding=0):
    """Run a program in a folder of its own; return its output and what was counted."""
    which = f"{program.name} {n_ranks} {noise}" + f" rounding {rounding}" * bool(rounding)
    folder = place / which.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    for each in "data", "home", "tmp", "site":
        (folder / each).mkdir(parents=True)
    lines = _copy(program, clones, folder)
    shutil.copy(_HERE / "programs" / "customize.py", folder / "site" / "sitecustomize.py")
    if program.make_data is not None:
        program.make_data(folder)
    line = [sys.executable]
    environment = _environment(folder, clones, noise, program.flags)
    if rounding:
        environment["ROUNDING"] = str(rounding)
    if n_ranks:
        line += ["-m", "synkhronos", "run", "--parallel", "-n", str(n_ranks)]
        line += ["--threads-per-rank", "1", "--report", str(folder / "report.json")]
    else:
        environment["FUNCTION_TIMES"] = str(folder / "times.json")
    line += [Path(program.file).name, *program.arguments]
    out, err = folder / "out.txt", folder / "err.txt"
    begin = time.perf_counter()
    with open(out, "w") as to_out, open(err, "w") as to_err:
        child = subprocess.Popen(
            line, cwd=folder / "code", env=environment, stdout=to_out, stderr=to_err,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            status = child.wait(args.timeout)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise frame.Failed(f"ran for more than {args.timeout:g} s") from None
            raise
    what = f"with {n_ranks} ranks" if n_ranks else "serially"
    if status:
        words = [each for each in err.read_text().splitlines() if re.match(r"\w+(\.\w+)*: ", each)]
        raise frame.Failed(f"failed {what}: {(words or ['status ' + str(status)])[-1][:150]}")
    result = {"lines": lines, "seconds": time.perf_counter() - begin}
    result["out"] = out.read_text() + "\n" + _logged(err.read_text())
    kind = "report" if n_ranks else "times"
    result[kind] = json.loads((folder / f"{kind}.json").read_text())
    return result


def _logged(errors):
    """Return what a program wrote to standard error before the report of `run`."""
    return errors.split("\nSynkhronos: ")[0]


def _environment(folder, clones, noise, more_flags):
    package = Path(synk.__file__).parents[1]
    libraries = [folder / "site", package, clones / "Lasagne", clones / "theanets"]
    given = {name: value for name, value in os.environ.items() if name != "SYNKHRONOS_CHECK"}
    flags = [os.environ.get("THEANO_FLAGS"), f"base_compiledir={_compile_folder()}", more_flags]
    return {
        **given,
        "PYTHONPATH": os.pathsep.join(map(str, libraries)),
        "THEANO_FLAGS": ",".join(filter(None, flags)),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "NOISE": noise,
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "KERAS_BACKEND": "theano",
    }


def _compile_folder():
    import theano

    return theano.config.base_compiledir


def _copy(program, clones, folder):
    """Copy a program with the files beside it; return how many lines were changed, by reason."""
    source = clones / program.file
    if not source.is_file():
        raise frame.Failed(f"{source.parent} has no file {source.name}")
    shutil.copytree(
        source.parent, folder / "code", ignore=shutil.ignore_patterns("*.ipynb", "*.jpg")
    )
    texts = [source.read_text(encoding="utf-8")]
    texts.append(_python_3(texts[0]) if program.is_python_2 else texts[0])
    texts.append(_replaced(texts[-1], program.shorter, source.name))
    texts.append(_replaced(texts[-1], program.other, source.name))
    lines = [_n_changed(*pair) for pair in zip(texts, texts[1:])]
    (folder / "code" / source.name).write_text(texts[-1], encoding="utf-8")
    for name, old, new in program.beside:
        file = folder / "code" / name
        text = file.read_text(encoding="utf-8")
        changed = _replaced(text, [(old, new)], name)
        file.write_text(changed, encoding="utf-8")
        lines[2] += _n_changed(text, changed)
    return lines


def _python_3(text):
    from lib2to3.refactor import RefactoringTool

    try:
        ast.parse(text)
        statements = []
    except SyntaxError:
        statements = [] if "import print_function" in text else ["lib2to3.fixes.fix_print"]
    tool = RefactoringTool([*_FIXERS, *statements], {"print_function": not statements})
    return str(tool.refactor_string(text.rstrip() + "\n", "the program"))


def _replaced(text, changes, name):
    for old, new in changes:
        if old not in text:
            raise frame.Failed(f"{name} has no {old.strip()!r}: is it another version?")
        text = text.replace(old, new)
    return text


def _n_changed(old, new):
    matcher = difflib.SequenceMatcher(None, old.rstrip().split("\n"), new.rstrip().split("\n"))
    codes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    return sum(max(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in codes)


def figures(program, text):
    """Return the lines of an output that are compared: their words, and their numbers."""
    lines = re.split(r"[\n\r\b]+", text)
    found = [(line, re.search(program.figures, line)) for line in lines]
    lines = [_OF_RUN.sub("", line[match.start() :]) for line, match in found if match]
    words = [_NUMBER.sub("#", line).split() for line in lines]
    return words, [[float(each) for each in _NUMBER.findall(line)] for line in lines]


def difference(program, serial, ranked):
    """Return the largest difference of numbers, or None if other lines were printed."""
    (words, numbers), (other_words, others) = (figures(program, each) for each in (serial, ranked))
    if not any(numbers):
        raise frame.Failed("printed no numbers to compare")
    return max(_differences(numbers, others)) if words == other_words else None


def _differences(numbers, others):
    """Return for each line the largest difference of numbers so far, up to other lines."""
    lines = []
    for line, other in zip(numbers, others):
        if len(line) != len(other):
            break
        lines.append(max([0, *map(_apart, line, other)]))
    return list(itertools.accumulate(lines, max))


def _apart(number, other):
    """Return the difference of two numbers; infinity for one that is no number, or infinite."""
    if number == other or (math.isnan(number) and math.isnan(other)):
        return 0
    apart = abs(number - other) / max(1, abs(number))
    return math.inf if math.isnan(apart) else apart


def growth(program, serial, ranked, rounded):
    """Return the largest difference between serial runs, and whether that of ranks exceeds it.

    At each line, too, the largest difference so far must be of the same size, at most twice theirs:
    a wrong number shows where roundings have not grown yet. Words may differ between serial runs,
    such as marks of the best numbers.
    """
    serial, ranked, *rounded = (figures(program, each)[1] for each in (serial, ranked, *rounded))
    pairs = itertools.combinations([serial, *rounded], 2)
    found = itertools.starmap(_differences, pairs)
    largest = [
        max((a for a in each if a < math.inf), default=0)
        for each in itertools.zip_longest(*found, fillvalue=0)
    ]
    lines = _differences(serial, ranked)
    are_alike = len(lines) <= len(largest) and all(
        a <= max(EQUAL, 2 * b) for a, b in zip(lines, largest)
    )
    return max(largest), are_alike and max(lines) <= max(largest)


def _verdict(found):
    if "failed" in found:
        return found["failed"]
    equal = float("inf") if found.get("is_rounding") else EQUAL
    for key, limit in ("difference", CLOSE if found["draws"] else equal), ("still", equal):
        if key in found and (found[key] is None or not found[key] <= limit):
            return "DIFFERS"
    return "" if found["on_ranks"] > 0.5 else "serial"


def _cells(name, found):
    if "failed" in found:
        return name, *[""] * 8, "  " + found["failed"]
    numbers = [
        "" if key not in found else "other" if found[key] is None else f"{found[key]:.1e}"
        for key in ("difference", "still", "rounded")
    ]
    divided = [each for each in found["functions"] if each["calls_on_ranks"]]
    cpu = (
        "unknown"
        if None in found["cpu_seconds"]
        else " ".join(f"{each:.1f}" for each in found["cpu_seconds"])
    )
    is_slow = found["times"] is not None and found["milliseconds"] > 5
    return (
        name, "+".join(map(str, found["lines"])), f"{len(divided)}/{len(found['functions'])}",
        f"{found['on_ranks']:.0%}", *numbers, cpu, f"{found['times']:.2f}" if is_slow else "",
        "  " + _verdict(found),
    )  # fmt: skip


def _remains(found):
    """Return how many programs are divided and equal, and what stayed in the master and why."""
    verdicts = [_verdict(each) for each in found.values()]
    lines = [
        f"\n{verdicts.count('')} of {len(found)} programs divided and equal, "
        f"{verdicts.count('serial')} mostly in the master alone and equal, "
        f"{sum(each not in ('', 'serial') for each in verdicts)} not"
    ]
    for name, each in found.items():
        alone = [f for f in each.get("functions", ()) if f["calls"] > f["calls_on_ranks"]]
        if alone:
            lines.append(f"\n{name}, in the master alone:")
        for f in alone:
            number, place = f["calls"] - f["calls_on_ranks"], f["name"].rpartition("/")[2]
            lines.append(f"  {place}, {number} of {f['calls']} calls: {f['reason']}")
    return "\n".join(lines)
