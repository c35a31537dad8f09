"""A loader: the process of a rank that reads and prepares its next batches while it computes.

::

    rank                                    loader
    begin(order, mode, seed)  ── begin ──▶  reads order[0] into half 0, order[1] into half 1
    next()                    ◀─ ready 0 ─
      computes with half 0                  goes on reading, until both halves are full
    next()                    ── free 0 ─▶  reads order[2] into half 0
                              ◀─ ready 1 ─
    close(), or its death     ── end ────▶  ends

Both halves lie in one memfd, which both processes map. Messages go through a `Channel`. Each
`begin` has a number, by which answers to earlier ones are known and dropped.

A batch depends on its file and on (seed, position) alone, so a resumed run gets the batches that
the first run would have had.
"""

from __future__ import annotations

import collections
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from typing import Any, Iterator, Sequence

import numpy as np

from synkhronos._machine.devices import module_command
from synkhronos._machine.processes import name_of_signal, wait_or_kill
from synkhronos._wording import shown, whole_number
from synkhronos.comm.channel import Channel, Closed
from synkhronos.comm.handlers import Handlers
from synkhronos.rules import array_files
from synkhronos.rules.preprocessing import Preprocess, check_mode

HALVES = 2
SECONDS_TO_END = 5.0
COMMAND = module_command("synkhronos.rules.loading")


class Loader:
    """Reads batches from files in a process of its own, two batches ahead.

    Parameters
    ----------
    names : list of str
        The files, one for each batch: ``.hkl``, ``.npy`` or ``.npz`` with one array.
    batch_shape : tuple of int
        The shape of a batch that has been prepared.
    dtype : str, optional
        Of the batches.
    preprocess : Preprocess, optional
        Makes a batch from the array of a file; by default the array is the batch.
    timeout : float, optional
        Seconds after which `next` raises TimeoutError.

    Raises
    ------
    TypeError
        If `preprocess` is anything but a Preprocess.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     names = [f"{folder}/{i}.npy" for i in range(3)]
    ...     for i, name in enumerate(names):
    ...         np.save(name, np.full((2, 2), i, "uint8"))
    ...     with Loader(names, (2, 2)) as loader:
    ...         loader.begin([2, 0], "train")
    ...         [float(loader.next()[0, 0]) for _ in range(2)]
    [2.0, 0.0]
    """

    def __init__(
        self,
        names: Sequence[Any],
        batch_shape: Sequence[int],
        dtype: Any = "float32",
        preprocess: Any = None,
        timeout: float = 600.0,
    ):
        if preprocess is not None and not isinstance(preprocess, Preprocess):
            raise TypeError(f"preprocess must be a Preprocess or None, got {shown(preprocess)}.")
        self.names = [os.path.abspath(os.fspath(name)) for name in names]
        if not self.names:
            raise ValueError("names must have one file or more, got none.")
        self.batch_shape, self.dtype = tuple(int(n) for n in batch_shape), np.dtype(dtype)
        self.timeout = timeout
        self._position, self._held, self._number = 0, None, 0
        self._order: list[int] = []
        self._ready: dict[int, int] = {}  # position -> the half that has it
        fd, self._halves = _new_memory(self.batch_shape, self.dtype)
        try:
            self._process, self._channel = _started(fd)
        finally:
            os.close(fd)
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        self._answers: collections.deque[dict] = collections.deque()
        self._send(
            "open",
            names=self.names,
            shape=self.batch_shape,
            dtype=self.dtype.str,
            preprocess=None if preprocess is None else preprocess.as_plain(),
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The number of the loader's process."""
        return self._process.pid

    def begin(
        self, order: Sequence[int], mode: str = "train", seed: Any = 0, start: int = 0
    ) -> None:
        """Start to read batches; those of an earlier `begin` that are left are dropped.

        Parameters
        ----------
        order : list of int
            Which files are read, as numbers of `names`.
        mode : str, optional
            "train" or "val", for what `preprocess` does.
        seed : int or tuple of int, optional
            For all that is random, such as (seed, epoch, rank).
        start : int, optional
            The position in `order` of the first batch to read: where a resumed run goes on.
        """
        check_mode(mode)
        order = [whole_number("order", each, 0, len(self.names) - 1) for each in order]
        seed = [int(each) % 2**32 for each in np.atleast_1d(np.asarray(seed))]
        self._position = whole_number("start", start, 0, len(order))
        self._order, self._held, self._number = order, None, self._number + 1
        self._ready.clear()
        self._send(
            "begin", number=self._number, order=order, mode=mode, seed=seed, start=self._position
        )

    def next(self) -> np.ndarray:
        """Return the next batch: a view that is valid until the next call of this loader.

        Raises
        ------
        IndexError
            After the last batch of `order`.
        RuntimeError
            If the file can't be read, or the loader has died; the message names the file.
        TimeoutError
            If the loader needs longer than `timeout`.
        """
        if self._position >= len(self._order):
            raise IndexError("No batch is left of the order that begin() was given.")
        if self._held is not None:
            self._send("free", number=self._number, half=self._held)
            self._held = None
        deadline = time.monotonic() + self.timeout
        while self._position not in self._ready:
            self._take(self._answer(deadline))
        self._held = self._ready.pop(self._position)
        self._position += 1
        return self._halves[self._held]

    def close(self) -> None:
        """End the loader's process; calling it again does nothing."""
        self._end()
        self._order, self._position, self._halves = [], 0, []  # views keep the memory

    @property
    def _file(self):
        return self.names[self._order[self._position]]

    def _take(self, answer):
        if answer["number"] != self._number:
            return  # of an earlier begin()
        if "error" in answer:
            self._order = []
            raise RuntimeError(f"Loading {answer['name']} failed: {answer['error']}")
        self._ready[answer["position"]] = answer["half"]

    def _answer(self, deadline):
        """Return the next answer of the loader; raise if the loader has died, or is late."""
        while not self._answers:
            if not self._channel.wait(max(deadline - time.monotonic(), 0)):
                raise TimeoutError(
                    f"The loader has not read {self._file} after {self.timeout:g} seconds."
                )
            try:
                self._answers.extend(self._channel.receive())
            except Closed:
                raise self._death() from None
        return self._answers.popleft()

    def _send(self, what, **values):
        if not self._end.alive:
            raise RuntimeError("This loader is closed. Make another one.")
        try:
            self._channel.send((what, values))
        except Closed:
            raise self._death() from None

    def _death(self):
        code = self._process.wait(SECONDS_TO_END)
        by = f"by {name_of_signal(-code)}" if code < 0 else f"with the exit status {code}"
        where = f" while it read {self._file}" if self._position < len(self._order) else ""
        self.close()
        return RuntimeError(f"The loader (process {self._process.pid}) has ended {by}{where}.")


def _new_memory(shape, dtype) -> tuple[int, list[np.ndarray]]:
    """Return a descriptor of new memory for all halves, and the halves as arrays."""
    nbytes = max(int(np.prod(shape)) * dtype.itemsize, 1)
    fd = os.memfd_create("synkhronos-batches", os.MFD_CLOEXEC)
    try:
        # Allocate all pages now: a later write to a page that can't be had would raise SIGBUS.
        os.posix_fallocate(fd, 0, HALVES * nbytes)
        return fd, _halves(fd, shape, dtype)
    except BaseException:
        os.close(fd)
        raise


def _halves(fd, shape, dtype):
    nbytes = max(int(np.prod(shape)) * dtype.itemsize, 1)
    memory = mmap.mmap(fd, HALVES * nbytes)
    return [np.ndarray(shape, dtype, memory, i * nbytes) for i in range(HALVES)]


def _started(memory):
    """Start the loader's process; return it, and the channel to it."""
    own, its = socket.socketpair()
    with its:
        kept = [memory, its.fileno()]
        command = [*COMMAND, *map(str, kept)]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=kept)
        except BaseException:
            own.close()
            raise
    return process, Channel(own)


def _end(process, channel):
    """Close the channel, which ends the process; kill it if that takes too long."""
    channel.close()
    wait_or_kill(process, SECONDS_TO_END)


class _Work:
    """The loader's side: the batches that it still has to read, and the halves that are free."""

    def __init__(self, memory: int, channel: Channel):
        self._memory, self._channel = memory, channel
        self._free: collections.deque = collections.deque()
        self._positions: Iterator[int] = iter(())
        self._begun: dict[str, Any] = {"number": 0}
        self.handlers = Handlers(open=self.open, begin=self.begin, free=self.free)

    def open(self, names, shape, dtype, preprocess):
        """Map the memory, and keep the names of the files."""
        self._names = names
        self._halves = _halves(self._memory, tuple(shape), np.dtype(dtype))
        os.close(self._memory)
        self._preprocess = None if preprocess is None else Preprocess(**preprocess)

    def begin(self, **begun):
        """Drop what is left, and begin with another order."""
        self._begun = begun
        self._free = collections.deque(range(HALVES))
        self._positions = iter(range(begun["start"], len(begun["order"])))

    def free(self, number, half):
        """Take back a half, unless another order has begun since."""
        if number == self._begun["number"]:
            self._free.append(half)

    def step(self) -> bool:
        """Read one batch; return whether there was one to read, and a half for it."""
        position = next(self._positions, None) if self._free else None
        if position is None:
            return False
        half, begun = self._free.popleft(), self._begun
        name = self._names[begun["order"][position]]
        try:
            self._read(name, self._halves[half], begun, position)
        except Exception as error:  # the rank raises it, and may begin again
            self._positions = iter(())
            said = "".join(traceback.format_exception_only(type(error), error)).strip()
            self._channel.send({"number": begun["number"], "name": name, "error": said})
        else:
            self._channel.send({"number": begun["number"], "position": position, "half": half})
        return True

    def _read(self, name, half, begun, position):
        array = array_files.read(name)
        if self._preprocess is not None:
            random = np.random.RandomState([*begun["seed"], position])
            array = self._preprocess(array, begun["mode"], random)
        if array.shape != half.shape:
            raise ValueError(f"a batch must have the shape {half.shape}, got {array.shape}.")
        np.copyto(half, array, casting="unsafe")


def _serve(work: _Work, channel: Channel) -> None:
    """Handle messages until the channel is closed; read batches between them."""
    is_busy = False
    while True:
        while is_busy and not channel.wait(0):
            is_busy = work.step()
        channel.wait()
        for what, values in channel.receive():
            work.handlers[what](**values)
        is_busy = True


def main() -> None:
    """Run a loader; the arguments are the file descriptors of its memory and its channel."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the rank ends it
    memory, number = (int(text) for text in sys.argv[1:])
    channel = Channel(socket.socket(fileno=number))
    try:
        _serve(_Work(memory, channel), channel)
    except Closed:
        channel.close()


if __name__ == "__main__":
    main()
