"""Checks that a session leaves no process, descriptor or name in shared memory behind."""

import contextlib
import gc
import os
from pathlib import Path

import psutil

from support.waiting import wait_until


def processes_with(variable):
    """Yield the other processes whose environment has a variable, given as ``NAME=value``."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            given = {"=".join(each) for each in process.environ().items()}
            if variable in given and process.pid != os.getpid():
                yield process


def working_in(folder):
    """Return the command lines of the other processes that work in a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_there = process.cwd() == str(folder) and process.pid != os.getpid()
            if is_there and runs(process.pid):
                found.append(process.cmdline())
    return found


def runs(pid):
    """Return whether a process runs; an ended orphan may still be a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descriptors():
    """Return {number: file} of the open descriptors of this process."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    # listdir() lists its own descriptor, too, which is closed by now.
    return {
        number: name for number, name in found.items() if os.path.exists(f"/proc/self/fd/{number}")
    }


def names_in_shared_memory():
    return {name for name in os.listdir("/dev/shm") if name.startswith("synkhronos")}


def children():
    """Return the numbers of the processes below this one; psutil would read of all that run."""
    if not os.path.exists("/proc/thread-self/children"):  # of a kernel without these lists
        return {each.pid for each in psutil.Process().children(recursive=True)}
    found = [os.getpid()]
    for pid in found:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return {*found[1:]}


@contextlib.contextmanager
def nothing_left():
    """Fail if the block leaves a process, a descriptor or a name in shared memory."""
    gc.collect()
    processes = children()
    names, before = names_in_shared_memory(), descriptors()
    yield
    gc.collect()
    left = children() - processes
    assert not left, f"processes are left: {left}"
    wait_for_names_to_go(names)
    after = descriptors()
    new = {number: name for number, name in after.items() if before.get(number) != name}
    assert not new, f"descriptors are left: {new}"


def wait_for_names_to_go(but):
    """Wait until no other names are in shared memory: other test runs have some for a moment."""
    wait_until(
        lambda: names_in_shared_memory() <= but,
        20,
        lambda: f"names are left: {names_in_shared_memory() - but}",
    )
