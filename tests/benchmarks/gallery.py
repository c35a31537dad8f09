"""PyMC models of notebooks and scripts on ranks, beside the plain models.

FOLDER is a checkout, such as one of pymc-devs/pymc-examples; NOTEBOOK is a part of the path of a
file in it (.ipynb, .myst.md, .py). Each is run in a process of its own, statement by statement; one
that fails is left out. Sampling and plots do nothing, and files that are read are looked for by
their names in FOLDER. Then each model with observed variables is compared with itself on ranks:

equal   the largest difference of log-probability and gradients at two points, relative to the
        log-probability and to the largest gradient
gain    the shortest time of value and gradient of the plain model, by that of all ranks
"""

import ast
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options

_MOST_MODELS = 12  # of a notebook
_SECONDS = 60  # for a statement
_CELL = re.compile(r"^```\{code-cell\}.*?\n(?:---\n.*?\n---\n|(?::.*?\n)*)(.*?)^```", re.M | re.S)
_MAGIC = re.compile(r"^\s*([%!].*|.*\?)$", re.MULTILINE)
_STUBS = re.compile("sample|fit$|find_MAP|compute_log|model_to_|set_data|plot|summary|loo|compare")


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK")
    options.add(parser, "--ranks", options.count, 2, "ranks")
    options.add(parser, "--seconds", options.positive, 300.0, "for each notebook")


def measure(args, report):
    """Run the notebooks, and show a line for each model."""
    if not args.folder.is_dir():
        raise frame.Refused(f"FOLDER must be a folder, got {args.folder}")
    found = report.results["models"] = []
    paths = {}  # one of those that differ in their suffixes alone
    for suffix in (".ipynb", ".py", ".myst.md"):
        for path in args.folder.rglob(f"*{suffix}"):
            name = str(path.relative_to(args.folder))
            if not args.notebooks or any(each in name for each in args.notebooks):
                paths[name.removesuffix(suffix)] = path
    for name, path in sorted(paths.items()):
        with turns.shown(name):
            results = _results(path, args)
        for each in results:
            found.append({"notebook": name, **each})
            report.show(_line(found[-1]))
    n_models = sum("model" in each for each in found)
    n_divided = sum(bool(each.get("divided")) for each in found)
    report.show(f"{n_models} models, of which {n_divided} are divided")


def _results(path, args):
    command = [sys.executable, "-m", "benchmarks.gallery", path, args.folder, args.ranks]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "timeout": args.seconds}
    given["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run([*map(str, command)], check=False, **given)
        lines, note = done.stdout, f"ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        lines, note = late.stdout or b"", f"not all in {args.seconds:g} seconds"
    return [*map(json.loads, lines.splitlines()), *([{"note": note}] if note else [])]


def _line(found):
    if "note" in found:
        return f"{found['notebook']}: {found['note']}"
    parts = [f"{name} ({rows} rows)" for name, rows in found["divided"].items()]
    words = [f"divided {', '.join(parts)}"] if parts else []
    words += [f"equal to {found['equal']:.0e}, gain {found['gain']:.2f}"] if parts else []
    words += [f"not divided {name}: {why}" for name, why in found["left"].items()]
    return f"{found['notebook']}, {found['model']}: {'; '.join(words)}"


# What follows runs in the process of a notebook.


def _cells(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return _CELL.findall(text) if path.suffix == ".md" else [text]
    cells = json.loads(text)["cells"]
    return ["".join(each["source"]) for each in cells if each["cell_type"] == "code"]


def _run(path, folder):
    """Run a notebook; return its models with observed variables by their names, and its errors."""
    models, errors = [], []
    names = {"__name__": path.stem, "__file__": str(path), "display": print}

    def attempt(function, *given):
        signal.alarm(_SECONDS)
        try:
            return function(*given)
        except (Exception, SystemExit) as error:
            errors.append(error)
        finally:
            signal.alarm(0)

    def execute(statement):
        exec(compile(ast.Module([statement], []), str(path), "exec"), names)

    with _replaced(folder, models):
        for cell in _cells(path):
            tree = attempt(ast.parse, _MAGIC.sub("", cell))
            for each in tree.body if tree else ():
                attempt(execute, each)
        if "build_model" in names:  # of pymc-model-catalogue
            names["model"], *_ = attempt(names["build_model"]) or [None]
    called = {id(value): name for name, value in names.items()}
    models = [each for each in models if each.parent is None and each.observed_RVs]
    return {called.get(id(each), f"#{at}"): each for at, each in enumerate(models, 1)}, errors


@contextlib.contextmanager
def _replaced(folder, models):
    """Replace what takes long or needs a network, and note the models that are made."""
    import arviz
    import pandas
    import pymc

    def too_long(*_):
        raise TimeoutError(f"a statement takes more than {_SECONDS} seconds")

    def file_of(name):
        last = Path(name).name
        places = itertools.chain([Path(name)], folder.rglob(last), folder.rglob(f"{last}.csv"))
        for each in places:
            if each.is_file():
                return each
        raise FileNotFoundError(f"needs {name}")

    def reading(read):
        def wrapped(name, *args, **kwargs):
            return read(file_of(name) if isinstance(name, str | Path) else name, *args, **kwargs)

        return wrapped

    def noting(self, *args, make=pymc.Model.__init__, **kwargs):
        make(self, *args, **kwargs)
        models.append(self)

    signal.signal(signal.SIGALRM, too_long)
    no_network = mock.Mock(side_effect=OSError("needs a network"))
    with contextlib.ExitStack() as stack:

        def replace(owner, name, new):
            stack.enter_context(mock.patch.object(owner, name, new))

        for owner in (pymc, arviz):
            for name in filter(_STUBS.match, dir(owner)):
                replace(owner, name, mock.MagicMock())
        for name in ("read_csv", "read_table", "read_excel", "read_json"):
            replace(pandas, name, reading(getattr(pandas, name)))
        for name in ("load", "loadtxt", "genfromtxt"):
            replace(np, name, reading(getattr(np, name)))
        replace(pymc.Model, "__init__", noting)
        replace(pymc.Model, "set_data", mock.MagicMock())
        replace(pymc, "get_data", lambda name: stack.enter_context(file_of(name).open("rb")))
        replace(socket.socket, "connect", no_network)
        with contextlib.suppress(ImportError):
            import bambi

            replace(bambi.Model, "fit", lambda self, **_: self.build() or mock.MagicMock())
            replace(bambi, "load_data", lambda name, *_: pandas.read_csv(file_of(name)))
        yield


def _evaluation(model):
    """Return a function of a point: log-probability and gradients in one vector."""
    import pymc

    outputs = [model.logp(), *([model.dlogp()] if model.continuous_value_vars else ())]
    function = pymc.compile(model.value_vars, outputs, on_unused_input="ignore")
    return lambda point: np.concatenate([np.ravel(each) for each in function(**point)])


def _compared(model, n_ranks):
    """Compare a model with itself on ranks."""
    from support.pymc_models import points

    from synkhronos.extensions import pymc as parallel

    plain, at = _evaluation(model), points(model)
    try:
        with parallel.likelihood(model, ranks=n_ranks) as ours:
            on_ranks = _evaluation(model)
            found, expected = ([run(each) for each in at] for run in (on_ranks, plain))
            measured = turns.Turns(0.5, rounds=20)
            measured.add_calls({"plain": lambda: plain(at[0]), "ranks": lambda: on_ranks(at[0])})
            seconds = {way: each["least"] for way, each in measured.take_all("").items()}
            return {
                "divided": {term.name: term.length for term in ours.evaluators[0].terms},
                "left": ours.left,
                "equal": max(map(_difference, found, expected)),
                "gain": seconds["plain"] / seconds["ranks"],
            }
    except ValueError as refusal:
        reasons = re.search(r"over ranks \((.*)\)\. Sample it", str(refusal), re.DOTALL)
        if reasons is None:
            raise
        return {"divided": {}, "left": dict([reasons[1].split(": ", 1)])}


def _difference(found, expected):
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return np.inf
    scales = np.abs(expected)
    scales[1:] = scales[1:][finite[1:]].max(initial=1e-300)
    return float((np.abs(found - expected)[finite] / scales[finite]).max(initial=0))


def _main(path, folder, n_ranks):
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the notebook prints
    os.environ["MPLBACKEND"] = "Agg"
    models, errors = _run(Path(path), Path(folder))
    for name, model in [*models.items()][:_MOST_MODELS]:
        try:
            found = {"model": name, **_compared(model, int(n_ranks))}
        except Exception as error:
            found = {"note": f"{name} fails: {type(error).__name__}: {str(error)[:200]}"}
        print(json.dumps(found), file=out, flush=True)
    if not models:
        kinds = FileNotFoundError, OSError, ImportError, Exception
        errors = [each for kind in kinds for each in errors if isinstance(each, kind)]
        why = f": {type(errors[0]).__name__}: {str(errors[0])[:200]}" if errors else ""
        print(json.dumps({"note": f"no model{why}"}), file=out)


if __name__ == "__main__":
    _main(*sys.argv[1:])
