"""Check a model's first batch, before minutes are spent on compiling the model.

    this process ── fork ──▶ a copy: train_iter(0), with a function that does nothing
                 ◀── shapes ──  ends; what it has read is read again here

The copy opens its files anew, so in this process no file position, generator or random state
changes. Nothing is checked if the model has started threads, opened pipes, sockets or files to
write to, or mapped shared memory: a forked copy would lack the threads, and share the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import numbers
import os
import select
import signal
import stat
import sys
import threading
import time
import warnings
from typing import Any, Callable

import numpy as np

from synkhronos import _host
from synkhronos.rules.recorder import Recorder

_SECONDS = 60.0  # for the copy, which may hang: it has this thread alone


class FirstBatch:
    """A check of the first batch. Make it before the model is imported: see `_not_copied`."""

    def __init__(self) -> None:
        self._before = _not_copied()

    def check(self, model: Any) -> None:
        """Check that the first batch fits the network.

        A model whose ``train_iter_fn`` is None before it is compiled loads a batch as in training.
        The shape of its ``shared_x`` must then fit the input of the network, if the model has
        ``layers`` of layers2, or an ``output_layer`` of Lasagne.

        Raise ValueError if the shapes, or the numbers of images and labels, do not fit;
        RuntimeError if the batch can't be loaded.
        """
        if not self._can_look(model):
            return
        answer = _in_a_copy(lambda: _look(model), _SECONDS)
        if answer is None:
            return
        name, data = type(model).__name__, type(model.data).__name__
        if "error" in answer:
            raise RuntimeError(
                f"{name} can't load its first batch: {answer['error']}. Nothing was compiled."
            )
        images, labels, expected = tuple(answer["images"]), answer["labels"], _input_shape(model)
        if expected is not None and not _fits(images, *expected):
            raise ValueError(
                f"a batch of {data} is of the shape {images} as {name} loads it, but its network "
                f"takes {expected[0]}: the data do not fit the model. Nothing was compiled."
            )
        if labels and labels[0] not in images:
            raise ValueError(
                f"a batch of {data} has images of the shape {images} as {name} loads it, but "
                f"{labels[0]} labels. Nothing was compiled."
            )

    def _can_look(self, model):
        n_batches = getattr(model.data, "n_batch_train", None)
        return (
            getattr(model, "__dict__", {}).get("train_iter_fn", model) is None
            and not getattr(model.data, "para_load", False)
            and not (isinstance(n_batches, numbers.Real) and n_batches < 1)
            and isinstance(getattr(model, "shared_x", None), _host.SharedVariable)
            and self._before >= _not_copied()
        )


def _not_copied():
    """Return the threads, channels, writable files and shared memory, which a fork can't copy."""
    with open("/proc/self/maps") as maps:
        shared = [line.split()[0] for line in maps if line.split()[1] == "rw-s"]
    writable = [
        (fd, inode)
        for fd, inode in _descriptors(stat.S_ISREG)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    ]
    return {*threading.enumerate(), *_descriptors(_is_channel), *writable, *shared}


def _descriptors(is_wanted):
    """Yield the file descriptors of this process with a wanted mode, each with its inode."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of listdir itself
            status = os.fstat(int(name))
            if is_wanted(status.st_mode):
                yield int(name), status.st_ino


def _is_channel(mode):
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _in_a_copy(function: Callable[[], Any], seconds: float) -> Any:
    """Return a function's result in a copy of this process, sent as JSON; None if it sends none."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about other threads
        pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setpgid(0, 0)
            _use_own_files()
            os.write(writer, json.dumps(function()).encode() + b"\n")
        os._exit(0)
    os.close(writer)
    answer, end = b"", time.monotonic() + seconds
    try:
        # Processes that the copy has started may keep the pipe open after it has ended.
        while not answer.endswith(b"\n") and time.monotonic() < end:
            if select.select([reader], [], [], 0.1)[0]:
                part = os.read(reader, 1 << 16)
                if not part:
                    break
                answer += part
            elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
    finally:
        os.close(reader)
        for kill in (os.killpg, os.kill):  # the copy may not have its own group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return json.loads(answer) if answer.endswith(b"\n") else None


def _use_own_files():
    """Open all regular files anew, at the same positions, which a forked process would share."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd, _ in list(_descriptors(stat.S_ISREG)):
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == os.O_WRONLY:
            os.dup2(nowhere, fd)
            continue
        own = os.open(f"/proc/self/fd/{fd}", mode)
        os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, fd)
    for fd in (1, 2):
        os.dup2(nowhere, fd)


class _Stop(BaseException):
    """Ends ``train_iter`` where it would train: the batch is loaded."""


def _stop(*_, **__):
    raise _Stop


def _look(model):
    """Let ``train_iter`` load the first batch, but not train; return the shapes, or an error."""
    for name, value in vars(model).items():
        if isinstance(value, _host.SharedVariable) and _host.lives_on_device(value):
            zeros = np.zeros((1,) * value.ndim, value.dtype)
            setattr(model, name, _host.shared_on_host(zeros, name))
    model.train_iter_fn = _stop
    try:
        model.train_iter(0, Recorder(None, verbose=False))
    except _Stop:
        pass
    except (AttributeError, TypeError, NameError):
        return None  # it may need functions that are not compiled yet; else training will fail
    except Exception as error:
        if isinstance(error, KeyError) and _is_of(model.train_iter, error):
            return None
        return {"error": f"{type(error).__name__}: {error}"}
    images, labels = (getattr(model, name, None) for name in ("shared_x", "shared_y"))
    has_labels = isinstance(labels, _host.SharedVariable)
    return {
        "images": _host.peek(images).shape,
        "labels": _host.peek(labels).shape if has_labels else (),
    }


def _is_of(method, error):
    """Return whether an error was raised by a line of a method itself."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    return frame.tb_frame.f_code is getattr(method, "__code__", None)


def _input_shape(model):
    """Return the shape that a network takes, and whether it takes ``x`` as it is; None if unknown.

    Lengths that the network leaves open are None.
    """
    x = getattr(model, "x", model)
    for layer in (getattr(model, "layers", None) or [])[:1]:
        if getattr(layer, "input", None) is x and hasattr(layer, "input_shape"):
            return tuple(int(n) for n in layer.input_shape), True
    lasagne = sys.modules.get("lasagne")
    last = getattr(model, "output_layer", None)
    if lasagne is not None and isinstance(last, lasagne.layers.Layer):
        layers = lasagne.layers.get_all_layers(last)
        inputs = [each for each in layers if isinstance(each, lasagne.layers.InputLayer)]
        if len(inputs) == 1:
            return tuple(inputs[0].shape), inputs[0].input_var is x
    return None


def _fits(found, expected, as_it_is):
    """Return whether images fit an input; the batch is the first axis or the last, of any length.

    Without `as_it_is` the model may cut off rows and columns.

    >>> _fits((3, 32, 32, 128), (64, 3, 32, 32), True), _fits((8, 3, 9, 9), (None, 3, 8, 8), True)
    (True, False)
    >>> _fits((8, 3, 9, 9), (None, 3, 8, 8), False)
    True
    """
    if len(found) != len(expected):
        return False
    images = [found[1:], found[:-1]] if len(found) == 4 else [found[1:]]
    inputs = [expected[1:], expected[:-1]] if len(found) == 4 else [expected[1:]]

    def same(image, wanted):
        return all(w in (None, n) or (not as_it_is and i and n > w)
                   for i, (n, w) in enumerate(zip(image, wanted)))  # fmt: skip

    return any(same(image, wanted) for image in images for wanted in inputs)
