"""The recorder of a rank: costs, errors and times, on standard output and in ``inforec.pkl``.

    start() ... end("calc")         a span of one of MODES, in which spans inside do not count
    train_error(count, cost, error)
    print_train_info(count)         a row of means and times each time that `count` passes a
    multiple of printFreq
    val_error(...), gather_val_info(), print_val_info(count)
    save(count, lr)                 inforec/inforec.pkl: a dict of lists of rows, see COLUMNS

Times are in seconds; a count is the number of batches of all ranks.
"""

from __future__ import annotations

import os
import pickle
import reprlib
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from synkhronos._machine.files import new_file
from synkhronos._machine.log import log
from synkhronos.profiling.spans import Span, own_times
from synkhronos.rules import plain_pickles

MODES = ("calc", "sync", "comm", "wait")
COLUMNS = {
    "train_info": ("count", "cost", "error"),
    "val_info": ("count", "cost", "error", "top-5 error"),
    "epoch_time": ("count", "seconds"),
    "all_time": ("count", "total", *MODES),
    "lr": ("count", "lr"),
}
FILE = "inforec.pkl"
POINTS = 200  # of a curve of training; each is a mean of rows
HOUR = 3600.0
CURVES = {  # a name, which begins with that of its figure -> a list of rows, and a column
    "train: cost": ("train_info", 1),
    "train: error": ("train_info", 2),
    "val: cost": ("val_info", 1),
    "val: error": ("val_info", 2),
    "val: top-5 error": ("val_info", 3),
    "lr": ("lr", 1),
    "epoch: hours": ("epoch_time", 1),
    **{f"seconds: {name}": ("all_time", i) for i, name in enumerate(("total", *MODES), 1)},
}


class Recorder:
    """Keeps and prints costs, errors and times of one rank.

    Parameters
    ----------
    comm : object, optional
        Has ``allgather``, by which the errors of all ranks' validation batches are gathered; none
        for a rank that validates alone.
    printFreq : int, optional
        How many batches, of all ranks, lie between two lines of the output.
    modelname : str, optional
        Names the folder of pictures.
    verbose : bool, optional
        Whether to print.

    Attributes
    ----------
    batch_size : int or None
        Rows of a batch, set by the loop that knows them: then lines have examples/s.
    train_info, val_info, epoch_time, all_time, lr : lists of rows
        As `COLUMNS` says. Times are in seconds, summed since the row before.

    Examples
    --------
    >>> recorder = Recorder(None, printFreq=2, modelname="digits", verbose=False)
    >>> for count in (1, 2):
    ...     recorder.start()
    ...     recorder.end("calc")
    ...     recorder.train_error(count, 0.5 * count, 0.25)
    ...     recorder.print_train_info(count)
    >>> recorder.train_info
    [[2, 0.75, 0.25]]
    """

    def __init__(
        self, comm: Any = None, printFreq: Any = 40, modelname: str = "model", verbose: bool = True
    ):
        if isinstance(printFreq, tuple) and len(printFreq) == 1:
            [printFreq] = printFreq  # as scripts of Theano-MPI have it, by a comma too many
        if isinstance(printFreq, bool) or int(printFreq) != printFreq or printFreq < 1:
            raise ValueError(f"printFreq must be a number of batches from 1 on, got {printFreq!r}.")
        self.comm, self.printFreq, self.modelname = comm, int(printFreq), modelname
        self.verbose = verbose
        self.batch_size = None
        self.train_info: list[list[float]] = []
        self.val_info: list[list[float]] = []
        self.epoch_time: list[list[float]] = []
        self.all_time: list[list[float]] = []
        self.lr: list[list[float]] = []
        self._train: list[list[float]] = []  # cost, error since the last row
        self._val: list[list[float]] = []
        self._spans: list[Span] = []  # since the last row
        self._starts: list[float] = []  # of running timers
        self._last_end = self._since = self._epoch_began = time.perf_counter()
        self._has_told = False  # whether it has warned of a cost that is not finite
        self._printed_at = self._seen = 0  # counts of the last row, and of the last batch
        self._is_new = True  # whether an epoch begins, in which counts may begin again
        self._saved_in: Any = None
        self._figure: Any = None  # of `plot`
        self._drawn: dict[str, tuple] = {}  # what each of its axes shows
        self._n_plots = 0

    def start(self) -> None:
        """Start a timer; timers may lie inside one another."""
        self._starts.append(time.perf_counter())

    def end(self, mode: str) -> None:
        """Add the time since the last `start` to a mode: "calc", "sync", "comm" or "wait".

        Without a timer that runs, the time since the last `end` is added.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
        begin = self._starts.pop() if self._starts else self._last_end
        self._last_end = time.perf_counter()
        self._spans.append(Span(None, mode, None, begin, self._last_end))

    def start_epoch(self) -> None:
        """Begin to measure an epoch."""
        self._starts.clear()
        self._epoch_began = time.perf_counter()
        self.clear_train_info()

    def end_epoch(self, count: int, epoch: float) -> None:
        """Keep and print the time of an epoch; write it into the file, if there is one."""
        seconds = time.perf_counter() - self._epoch_began
        self.epoch_time.append([_number(count), seconds])
        self._say(f"global epoch {epoch} took {seconds / HOUR:.4f} h")
        if self._saved_in is not None:
            self._write(self._saved_in)

    def train_error(self, count: int, cost: Any, error: Any) -> None:
        """Keep cost and error of one training step; warn once if the cost is no finite number."""
        self._train.append([_mean(cost), _mean(error)])
        cost = self._train[-1][0]
        if not (np.isfinite(cost) or self._has_told):
            self._has_told = True
            log.warning(
                f"the cost of training batch {count} is {cost}, and a step with such a gradient "
                "leaves no usable parameters. Look for numbers that are not finite among its rows, "
                "or lower the learning rate."
            )

    def print_train_info(self, count: int) -> None:
        """Keep and print a row, if `count` has passed a multiple of printFreq since the last one.

        Parameters
        ----------
        count : int
            Batches of all ranks, of the run or of this epoch.
        """
        self._starts.clear()  # timers that a failed step has left running
        if count < self._printed_at or (self._is_new and count <= self._seen):
            self._printed_at = 0  # the counts have begun again
        self._seen, self._is_new = count, False
        if count // self.printFreq == self._printed_at // self.printFreq:
            return
        if self._train:
            means = np.mean(self._train, axis=0).tolist()
            self.train_info.append([_number(count), *means])
            self._say(" ".join([str(count), *(f"{mean:.6f}" for mean in means)]))
        batches, seconds = count - self._printed_at, time.perf_counter() - self._since
        speed = ""
        if self.batch_size and seconds > 0:
            speed = f" {batches * self.batch_size / seconds:.1f} examples/s"
        took = own_times(MODES, self._spans)
        total = sum(took.values())
        self.all_time.append([_number(count), total, *took.values()])
        labels = ("train", *MODES[1:])
        times = " ".join(f"{label} {took[mode]:.4f}" for label, mode in zip(labels, MODES))
        self._say(f"time per {batches} batches: {total:.4f} ({times}){speed}")
        self._begin_row()
        self._printed_at = count

    def clear_train_info(self) -> None:
        """Drop costs, errors and times since the last row: the end of an epoch."""
        self._begin_row()
        self._printed_at, self._is_new = self._seen, True

    def _begin_row(self):
        self._train.clear()
        self._spans.clear()
        self._since = time.perf_counter()

    def val_error(self, count: int, cost: Any, error: Any, error_top5: Any = 0.0) -> None:
        """Keep cost, error and top-5 error of one validation batch."""
        self._val.append([_mean(cost), _mean(error), _mean(error_top5)])

    def gather_val_info(self) -> None:
        """Gather the validation batches of all ranks, which may have different numbers of them."""
        if self.comm is not None:
            self._val = [*chain.from_iterable(self.comm.allgather(self._val))]

    def print_val_info(self, count: int, comment: Any = None) -> None:
        """Keep and print the means over the validation batches, if there were any."""
        if comment is not None:
            self._say(str(comment))
        if not self._val:
            self._say("no validation batches")
            return
        means = np.mean(self._val, axis=0).tolist()
        self._val = []
        self.val_info.append([_number(count), *means])
        for name, mean in zip(("cost", "error", "top_5_error"), means):
            self._say(f"validation {name}: {mean:.4f}")

    def get_latest_val_info(self) -> Any:
        """Return ``[count, cost, error, top5]`` of the last validation; None before the first."""
        return list(self.val_info[-1]) if self.val_info else None

    def save(self, count: int, lr: Any, filepath: Any = "./inforec/") -> None:
        """Keep a learning rate, and write all rows into a file.

        Parameters
        ----------
        count : int
            Batches of all ranks.
        lr : float
            The learning rate of the epoch.
        filepath : str, optional
            A folder, in which ``inforec.pkl`` is replaced, or a file.
        """
        self.lr.append([_number(count), _mean(lr)])
        self._saved_in = _file(filepath)
        self._write(self._saved_in)

    def _write(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            # Python 2 reads this protocol, too.
            pickle.dump(self._rows(), file, protocol=2)

    def _rows(self):
        return {name: getattr(self, name) for name in COLUMNS}

    def load(self, filepath: Any = "./inforec/") -> None:
        """Put the rows of a file, of any version of Theano-MPI, after those that are here."""
        for name, rows in read(_file(filepath)).items():
            getattr(self, name).extend(rows)

    def cut(self, load_epoch: int) -> None:
        """Keep the rows of the first epochs only: `load_epoch` of them."""
        if load_epoch < 0:
            raise ValueError(f"load_epoch must be a number of epochs, got {load_epoch}.")
        for name in ("train_info", "all_time"):
            getattr(self, name)[:] = _of_first(getattr(self, name), self.val_info, load_epoch)
        for rows in (self.val_info, self.epoch_time, self.lr):
            del rows[load_epoch:]

    def state(self) -> dict[str, Any]:
        """Return all that a resumed run needs, as plain values."""
        now, times = time.perf_counter(), own_times(MODES, self._spans)
        train, val = _copied(self._train), _copied(self._val)
        return {
            "rows": {name: _copied(rows) for name, rows in self._rows().items()},
            "since": {"train": train, "val": val, "times": times},
            "counts": [self._printed_at, self._seen, int(self._is_new)],
            "seconds": {"row": now - self._since, "epoch": now - self._epoch_began},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned, in this process or an earlier one."""
        since, now = state["since"], time.perf_counter()
        for name in COLUMNS:
            setattr(self, name, _copied(state["rows"][name]))
        self._train, self._val = _copied(since["train"]), _copied(since["val"])
        self._starts.clear()
        self._spans, end = [], 0.0
        for mode in MODES:  # spans one after another, which end before this process begins
            begin = end - since["times"][mode]
            self._spans.append(Span(None, mode, None, begin, end))
            end = begin
        self._printed_at, self._seen, is_new = state["counts"]
        self._is_new = bool(is_new)
        self._since = now - state["seconds"]["row"]
        self._epoch_began = now - state["seconds"]["epoch"]

    def show(self, label: str = "", color_id: int = 0, show: bool = True) -> None:
        """Draw five figures: training, validation, times, epochs, learning rates.

        ``train.png`` and ``val.png`` are written into the working folder. Calls with
        ``show=False`` add their curves to the same figures; with True they end there, in windows
        if there is a display.
        """
        from matplotlib import pyplot

        for title in ("train", "val", "seconds", "epoch", "lr"):
            names = [name for name in CURVES if name.partition(":")[0] == title]
            figure = pyplot.figure(f"Synkhronos {title}", figsize=(3.2 * len(names), 3))
            axes = figure.axes or figure.subplots(1, len(names), squeeze=False)[0]
            for one, name in zip(axes, names):
                _draw_curve(one, name, self._rows(), label, color_id)
            figure.subplots_adjust(bottom=0.2, wspace=0.4)
            if title in ("train", "val"):
                figure.savefig(f"{title}.png")
        if show:
            if pyplot.get_backend().lower() not in ("agg", "pdf", "ps", "svg", "template"):
                pyplot.show()
            for title in ("train", "val", "seconds", "epoch", "lr"):
                pyplot.close(f"Synkhronos {title}")

    def plot_init(self, name: str, fig_specs: Any = None, save: bool = False) -> None:
        """Add axes named `name` to the picture that `plot` draws while the model trains.

        Parameters
        ----------
        name : str
        fig_specs : dict, optional
            Keyword arguments of matplotlib's ``Figure``, such as ``figsize``, for the first axes.
        save : bool, optional
            Whether only files are written; otherwise a window shows the picture too.
        """
        if self._figure is None:
            if save:
                from matplotlib.figure import Figure as make
            else:
                from matplotlib.pyplot import figure as make
            self._figure = make(**(fig_specs or {}))
        self._drawn.setdefault(name, ((), None, 1.5, "gray"))

    def plot(
        self,
        name: str,
        lines: Sequence[Sequence[float]] | None = ((),),
        image: Any = None,
        save: bool = False,
        lw: float = 1.5,
        cmap: Any = "gray",
    ) -> None:
        """Draw lines or an image in the axes `name`; write ``inforec/<model>/plot_<n>.png``."""
        self.plot_init(name, save=save)
        self._drawn[name] = lines, image, lw, cmap
        self._figure.clear()
        columns = int(np.ceil(np.sqrt(len(self._drawn))))
        rows = -(-len(self._drawn) // columns)
        for place, (each, (lines, image, lw, cmap)) in enumerate(self._drawn.items(), start=1):
            axes = self._figure.add_subplot(rows, columns, place, title=each)
            for line in lines or [()]:
                if len(line):
                    axes.plot(np.asarray(line, float), linewidth=lw)
            if image is not None:
                axes.imshow(np.asarray(image), cmap=cmap)
                axes.set_axis_off()
        folder = Path("inforec") / self.modelname
        folder.mkdir(parents=True, exist_ok=True)
        self._n_plots += 1
        self._figure.savefig(folder / f"plot_{self._n_plots}.png")
        if not save and self._figure.canvas.manager is not None:
            from matplotlib import pyplot

            pyplot.pause(0.001)

    def _say(self, text):
        if self.verbose:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


def read(path: Any) -> dict[str, list[list[float]]]:
    """Return the rows of a recorder's file, as `COLUMNS` says.

    Files of 2016 have no "sync" among their times: it is 0 then.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it isn't the file of a recorder.
    """
    path = Path(os.fspath(path))
    if not path.is_file():
        what = f"{path} is a folder" if path.is_dir() else f"There is no file {path}"
        raise FileNotFoundError(f"{what}, and no file of a recorder: a run writes inforec/{FILE}.")
    found = plain_pickles.load(path.read_bytes(), str(path))
    if not isinstance(found, dict) or not set(COLUMNS) & set(found):
        raise ValueError(f"{path} is no recorder's file: it has none of {', '.join(COLUMNS)}.")
    rows = {name: _rows(path, name, found.get(name, [])) for name in COLUMNS}
    rows["all_time"] = [
        [*row[:3], 0.0, *row[3:]] if len(row) == 2 + len(MODES) - 1 else row
        for row in rows["all_time"]
    ]
    for name, columns in COLUMNS.items():
        for row in rows[name]:
            if len(row) != len(columns):
                raise ValueError(
                    f"{path}: rows of {name} must have {', '.join(columns)}, got "
                    f"{reprlib.repr(row)}."
                )
    return rows


def _rows(path, name, found):
    """Return the rows of a table as lists of numbers; raise ValueError for anything else."""
    rows = []
    for row in found if isinstance(found, list) else [found]:
        numbers = row.tolist() if isinstance(row, np.ndarray) else row
        if isinstance(numbers, (list, tuple)):
            numbers = [each.tolist() if isinstance(each, np.ndarray) else each for each in numbers]
        kinds = (int, float, type(None))
        if not isinstance(numbers, list) or not all(isinstance(each, kinds) for each in numbers):
            raise ValueError(f"{path}: {name} must have rows of numbers, got {reprlib.repr(row)}.")
        rows.append(numbers)
    return rows


def draw(files: Sequence[Any], path: Any) -> Path:
    """Draw the curves of several runs into one picture.

    Parameters
    ----------
    files : list of str
        Files of recorders. The part of a file's name after its first ``_`` is its label, if there
        is one, else its path.
    path : str
        The picture to write; its suffix says its kind.

    Returns
    -------
    Path
        The picture.

    Raises
    ------
    FileNotFoundError, ValueError
        If one of the files can't be read; see `read`.
    """
    from matplotlib.figure import Figure

    if not files:
        raise ValueError("files must have one recorder's file or more, got none.")
    runs = {_label(file): read(file) for file in files}
    figure = Figure(figsize=(12.8, 7.8))
    grid = figure.subplots(3, 4).ravel()
    for color, (label, rows) in enumerate(runs.items()):
        for axes, name in zip(grid, CURVES):
            _draw_curve(axes, name, rows, label, color)
    grid[0].legend(fontsize="small")
    figure.subplots_adjust(0.05, 0.07, 0.98, 0.95, wspace=0.3, hspace=0.5)
    path = Path(path) if Path(path).suffix else Path(f"{os.fspath(path)}.png")
    with new_file(path) as file:
        figure.savefig(file, format=path.suffix[1:])
    return path


def _label(file):
    path = Path(file)
    return path.stem.partition("_")[2] or str(path)


def _draw_curve(axes, name, rows, label, color):
    x, y = _points(rows, name)
    axes.set_title(name, fontsize="small")
    axes.plot(x, y, f"C{color % 10}", marker="." if len(x) < 20 else "", label=label or "run")
    axes.set_xlabel("epoch", fontsize="small")


def _points(rows, name):
    """Return the epochs and values of a curve, in training at most POINTS means of rows."""
    own, column = CURVES[name]
    values = np.array([row[column] for row in rows[own]], float)
    if own not in ("train_info", "all_time"):  # a row for each epoch
        return np.arange(1, len(values) + 1), values / (HOUR if own == "epoch_time" else 1)
    epochs = max(1, *(len(rows[each]) for each in ("val_info", "epoch_time", "lr")))
    each = max(1, -(-len(values) // POINTS))
    blocks = [values[i : i + each] for i in range(0, len(values), each)]
    ends = np.cumsum([len(block) for block in blocks]) * epochs / max(1, len(values))
    return ends, np.array([block.mean() for block in blocks])


def _of_first(rows, val_info, epochs):
    """Return the rows of the first epochs, whether counts begin anew in each epoch or go on."""
    counts = [row[0] for row in val_info]
    if len(counts) > 1 and all(a < b for a, b in zip(counts, counts[1:])):
        last = counts[epochs - 1] if 0 < epochs <= len(counts) else (counts[-1] if epochs else -1)
        return [row for row in rows if row[0] <= last or epochs > len(counts)]
    kept, epoch, before = [], 1, -1
    for row in rows:
        epoch += row[0] <= before
        before = row[0]
        if epoch <= epochs:
            kept.append(row)
    return kept


def _file(path):
    path = Path(os.fspath(path))
    return path if path.suffix == ".pkl" else path / FILE


def _copied(rows):
    return [list(row) for row in rows]


def _mean(value):
    return float(np.mean(np.asarray(value, "float64")))


def _number(count):
    return int(count) if float(count).is_integer() else float(count)
