"""The recorder of a rank: costs, errors and times, on standard output and in ``inforec.pkl``.

    start() ... end("calc")         seconds into one of MODES, less those of timers inside
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
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from synkhronos._machine.files import new_file
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
SECONDS_BETWEEN_LIVE_LINES = 0.2
POINTS = 200  # of a curve of training; each is a mean of rows
HOUR = 3600.0
IN_ONE_PICTURE = (
    *("train: cost", "train: error", "val: cost", "val: error"),
    *("val: top-5 error", "lr", "epoch: hours", "seconds: total"),
    *(f"seconds: {mode}" for mode in MODES),
)


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
        self, comm: Any = None, printFreq: int = 40, modelname: str = "model", verbose: bool = True
    ):
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
        self._times = dict.fromkeys(MODES, 0.0)
        self._timers: list[list[float]] = []  # of each timer: start, seconds inside
        self._last_end = self._since = self._epoch_began = time.perf_counter()
        self._printed_at = self._seen = 0  # counts of the last row, and of the last batch
        self._is_new = True  # an epoch, whose counts may go on or begin again
        self._saved_in: Any = None
        self._line = _Line()
        self._pictures: dict[str, Any] = {}

    def start(self) -> None:
        """Start a timer; timers may lie inside one another."""
        self._timers.append([time.perf_counter(), 0.0])

    def end(self, mode: str) -> None:
        """Add the time since the last `start` to a mode: "calc", "sync", "comm" or "wait".

        Without a timer that runs, the time since the last `end` is added.
        """
        if mode not in self._times:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
        now = time.perf_counter()
        began, inside = self._timers.pop() if self._timers else (self._last_end, 0.0)
        self._times[mode] += now - began - inside
        if self._timers:
            self._timers[-1][1] += now - began
        self._last_end = now

    def start_epoch(self) -> None:
        """Begin to measure an epoch."""
        self._timers.clear()
        self._epoch_began = time.perf_counter()
        self.clear_train_info()

    def end_epoch(self, count: int, epoch: float) -> None:
        """Keep and print the time of an epoch; bring it into the file, if there is one."""
        seconds = time.perf_counter() - self._epoch_began
        self.epoch_time.append([_number(count), seconds])
        self._say(f"global epoch {epoch} took {seconds / HOUR:.4f} h")
        if self._saved_in is not None:
            self._write(self._saved_in)

    def train_error(self, count: int, cost: Any, error: Any) -> None:
        """Keep cost and error of one training step."""
        self._train.append([_mean(cost), _mean(error)])

    def print_train_info(self, count: int) -> None:
        """Keep and print a row, if `count` has passed a multiple of printFreq since the last one.

        Parameters
        ----------
        count : int
            Batches of all ranks, of the run or of this epoch.
        """
        self._timers.clear()  # of steps that have failed to end them
        if count < self._printed_at or (self._is_new and count <= self._seen):
            self._printed_at = 0  # the counts have begun again
        self._seen, self._is_new = count, False
        if count // self.printFreq == self._printed_at // self.printFreq:
            if self.verbose and self._train:
                self._line.show(f"{count} {self._costs()}{self._speed(count)}")
            return
        batches, speed = count - self._printed_at, self._speed(count)
        if self._train:
            cost, error = np.mean(self._train, axis=0).tolist()
            self.train_info.append([_number(count), cost, error])
            self._say(f"{count} {cost:.6f} {error:.6f}")
        total = sum(self._times.values())
        self.all_time.append([_number(count), total, *(self._times[mode] for mode in MODES)])
        parts = [("train", "calc"), ("sync", "sync"), ("comm", "comm"), ("wait", "wait")]
        times = " ".join(f"{label} {self._times[mode]:.4f}" for label, mode in parts)
        self._say(f"time per {batches} batches: {total:.4f} ({times}){speed}")
        self._begin_row()
        self._printed_at = count

    def _costs(self):
        cost, error = np.mean(self._train, axis=0)
        return f"{cost:.6f} {error:.6f}"

    def _speed(self, count):
        seconds = time.perf_counter() - self._since
        if not self.batch_size or seconds <= 0:
            return ""
        return f" {(count - self._printed_at) * self.batch_size / seconds:.1f} examples/s"

    def clear_train_info(self) -> None:
        """Drop costs, errors and times since the last row: the end of an epoch."""
        self._begin_row()
        self._printed_at, self._is_new = self._seen, True

    def _begin_row(self):
        self._train.clear()
        self._times = dict.fromkeys(MODES, 0.0)
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
            pickle.dump({name: getattr(self, name) for name in COLUMNS}, file, protocol=2)

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
        rows = {name: [list(row) for row in getattr(self, name)] for name in COLUMNS}
        since = {"train": self._train, "val": self._val, "times": self._times}
        now = time.perf_counter()
        seconds = {"row": now - self._since, "epoch": now - self._epoch_began}
        return {
            "rows": rows,
            "since": {name: _copied(value) for name, value in since.items()},
            "counts": [self._printed_at, self._seen, int(self._is_new)],
            "seconds": seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned, in this process or an earlier one."""
        for name in COLUMNS:
            setattr(self, name, [list(row) for row in state["rows"][name]])
        since, now = state["since"], time.perf_counter()
        self._train, self._val = _copied(since["train"]), _copied(since["val"])
        self._times = dict(since["times"])
        self._printed_at, self._seen, is_new = state["counts"]
        self._is_new = bool(is_new)
        self._since = now - state["seconds"]["row"]
        self._epoch_began = now - state["seconds"]["epoch"]
        self._timers.clear()

    def show(self, label: str = "", color_id: int = 0, show: bool = True) -> None:
        """Draw five figures: training, validation, times, epochs, learning rates.

        ``train.png`` and ``val.png`` are written into the working folder. Calls with
        ``show=False`` add their curves to the same figures; with True they end there, in windows
        if there is a display.
        """
        from matplotlib import pyplot

        panels = _panels({name: getattr(self, name) for name in COLUMNS})
        for title, curves in panels.items():
            figure = pyplot.figure(f"Synkhronos {title}", figsize=(3.2 * len(curves), 3))
            axes = figure.axes or figure.subplots(1, len(curves), squeeze=False)[0]
            for one, (name, points) in zip(axes, curves.items()):
                _draw_curve(one, name, points, label, color_id)
            figure.subplots_adjust(bottom=0.2, wspace=0.4)
            if title in ("train", "val"):
                figure.savefig(f"{title}.png")
        if show:
            if pyplot.get_backend().lower() not in ("agg", "pdf", "ps", "svg", "template"):
                pyplot.show()
            for title in panels:
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
        if "figure" not in self._pictures:
            self._pictures.update(figure=_new_figure(save, fig_specs), axes=[], number=0)
        if name not in self._pictures["axes"]:
            self._pictures["axes"].append(name)

    def plot(
        self,
        name: str,
        lines: Sequence[Sequence[float]] = ((),),
        image: Any = None,
        save: bool = False,
        lw: float = 1.5,
        cmap: Any = "gray",
    ) -> None:
        """Draw lines or an image in the axes `name`; write ``inforec/<model>/plot_<n>.png``."""
        if name not in self._pictures.get("axes", ()):
            self.plot_init(name, save=save)
        self._pictures[name] = (lines, image, lw, cmap)
        figure, names = self._pictures["figure"], self._pictures["axes"]
        figure.clear()
        columns = int(np.ceil(np.sqrt(len(names))))
        grid = figure.subplots(-(-len(names) // columns), columns, squeeze=False).ravel()
        for axes in grid[len(names) :]:
            axes.set_visible(False)
        for axes, each in zip(grid, names):
            _draw_plot(axes, each, *self._pictures.get(each, ((), None, lw, cmap)))
        folder = Path("inforec") / self.modelname
        folder.mkdir(parents=True, exist_ok=True)
        self._pictures["number"] += 1
        figure.savefig(folder / f"plot_{self._pictures['number']}.png")
        if not save and figure.canvas.manager is not None:
            from matplotlib import pyplot

            pyplot.pause(0.001)

    def _say(self, text):
        if self.verbose:
            self._line.say(text)


class _Line:
    """Standard output: plain lines, and on a terminal one line that changes."""

    def __init__(self):
        self._shown, self._last = 0, 0.0

    def say(self, text):
        sys.stdout.write(f"\r{' ' * self._shown}\r{text}\n" if self._shown else f"{text}\n")
        sys.stdout.flush()
        self._shown = 0

    def show(self, text):
        """Write over the line that was shown last, if lines of ranks don't mix: no mpirun."""
        now = time.monotonic()
        if (
            not sys.stdout.isatty()
            or "OMPI_COMM_WORLD_RANK" in os.environ
            or now - self._last < SECONDS_BETWEEN_LIVE_LINES
        ):
            return
        sys.stdout.write(f"\r{text.ljust(self._shown)}")
        sys.stdout.flush()
        self._shown, self._last = len(text), now


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
        raise FileNotFoundError(f"No recorder file {path}: a run writes inforec/{FILE}.")
    found = plain_pickles.load(path.read_bytes(), str(path))
    if not isinstance(found, dict) or not set(COLUMNS) & set(found):
        raise ValueError(f"{path} is no recorder's file: it has none of {', '.join(COLUMNS)}.")
    rows = {name: [list(row) for row in found.get(name, [])] for name in COLUMNS}
    rows["all_time"] = [_with_sync(row) for row in rows["all_time"]]
    for name, columns in COLUMNS.items():
        for row in rows[name]:
            if len(row) != len(columns):
                raise ValueError(
                    f"{path}: rows of {name} must have {', '.join(columns)}, got {row}."
                )
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
    runs = {_label(file): _panels(read(file)) for file in files}
    figure = Figure(figsize=(12.8, 7.8))
    grid = dict(zip(IN_ONE_PICTURE, figure.subplots(3, 4).ravel()))
    for color, (label, panels) in enumerate(runs.items()):
        for curves in panels.values():
            for name, points in curves.items():
                _draw_curve(grid[name], name, points, label, color)
    grid[IN_ONE_PICTURE[0]].legend(fontsize="small")
    figure.subplots_adjust(0.05, 0.07, 0.98, 0.95, wspace=0.3, hspace=0.5)
    figure.savefig(os.fspath(path))
    return Path(path)


def _label(file):
    path = Path(file)
    return path.stem.partition("_")[2] or str(path)


def _panels(rows):
    """Return {figure: {panel: (numbers of epochs, values)}} of a run."""
    epochs = max(len(rows["val_info"]), len(rows["epoch_time"]), len(rows["lr"]))
    panels = {
        "train": _training(rows["train_info"], COLUMNS["train_info"][1:], epochs),
        "val": {name: _column(rows["val_info"], i) for i, name in enumerate(("cost", "error"), 1)},
        "seconds": _training(rows["all_time"], COLUMNS["all_time"][1:], epochs),
        "epoch": {"hours": _column(rows["epoch_time"], 1, 1 / HOUR)},
        "lr": {"lr": _column(rows["lr"], 1)},
    }
    panels["val"]["top-5 error"] = _column(rows["val_info"], 3)
    return {
        figure: {f"{figure}: {name}" if figure != name else name: each for name, each in of.items()}
        for figure, of in panels.items()
    }


def _column(rows, i, factor=1.0):
    return np.arange(1, len(rows) + 1), np.array([row[i] * factor for row in rows], float)


def _training(rows, names, epochs):
    """Return points of each column after the first: means of so many rows that few are left."""
    each = max(1, -(-len(rows) // POINTS))
    blocks = [rows[i : i + each] for i in range(0, len(rows), each)]
    means = [np.mean(block, axis=0) for block in blocks]
    ends = np.cumsum([len(block) for block in blocks]) / max(len(rows), 1) * max(epochs, 1)
    return {name: (ends, np.array([mean[i] for mean in means])) for i, name in enumerate(names, 1)}


def _draw_curve(axes, name, points, label, color):
    x, y = points
    axes.set_title(name, fontsize="small")
    axes.plot(x, y, f"C{color % 10}", marker="." if len(x) < 20 else "", label=label or "run")
    axes.set_xlabel("epoch", fontsize="small")


def _new_figure(save, specs):
    if save:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(**(specs or {}))
        FigureCanvasAgg(figure)
        return figure
    from matplotlib import pyplot

    return pyplot.figure(**(specs or {}))


def _draw_plot(axes, name, lines, image, lw, cmap):
    axes.set_title(name)
    for line in lines:
        if len(line):
            axes.plot(np.asarray(line, float), linewidth=lw)
    if image is not None:
        axes.imshow(np.asarray(image), cmap=cmap)
        axes.set_axis_off()


def _with_sync(row):
    if len(row) != len(COLUMNS["all_time"]) - 1:
        return row
    count, total, calc, *rest = row
    return [count, total, calc, 0.0, *rest]


def _of_first(rows, val_info, epochs):
    """Return the rows of the first epochs: counts begin anew with each, or go on."""
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


def _copied(value):
    if isinstance(value, dict):
        return dict(value)
    return [list(row) for row in value]


def _mean(value):
    return float(np.mean(np.asarray(value, "float64")))


def _number(count):
    return int(count) if float(count).is_integer() else float(count)
