"""Sessions that tests share, and the proof that nothing of them is left.

With SYNKHRONOS_TEST_DEVICES=opencl0:0,opencl0:0 (and SYNKHRONOS_TEST_MASTER=1) the tests that take
a session as it comes run on these devices. A process can fork for devices only once, so all share
one session, and the tests that fork for themselves are left out. Compiling for devices takes long:
each test runs with one of its parameters, another for each layout of devices, or with all of them
where SYNKHRONOS_TEST_ALL=1 is set. See test_opencl.py.
"""

import contextlib
import faulthandler
import gc
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import psutil
import pytest

import synkhronos as synk
from synkhronos import session as _session

TEST_SECONDS = 600  # that a test may take with its fixtures, or it hangs


def end_after(seconds):
    """End this process in so many seconds, saying where its threads are; once more: put it off."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=Watch.stderr)


class Watch:
    """Sees to it that no test hangs for ever, nor do the examples of the documentation.

    In place of pytest's `faulthandler_timeout`, which goes on waiting, and does not watch what
    comes after an error of a test. There is only one timer.
    """

    stderr = 2

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self):
        end_after(TEST_SECONDS)
        yield
        faulthandler.cancel_dump_traceback_later()

    def pytest_exception_interact(self, node):
        if isinstance(node, pytest.Item):
            end_after(TEST_SECONDS)  # pytest has just stopped the timer


def pytest_configure(config):
    Watch.stderr = os.dup(2)  # before pytest captures it
    config.add_cleanup(lambda: os.close(Watch.stderr))
    config.pluginmanager.register(Watch())


def descriptors():
    """Return the open descriptors of this process, and what they are."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    # The descriptor of the listing itself is one of them, and gone by now.
    return {
        number: name for number, name in found.items() if os.path.exists(f"/proc/self/fd/{number}")
    }


def names_in_shared_memory():
    return {name for name in os.listdir("/dev/shm") if name.startswith("synkhronos")}


@contextlib.contextmanager
def nothing_left():
    """Fail if what runs inside leaves a process, a descriptor or a name in shared memory."""
    gc.collect()
    children = set(psutil.Process().children(recursive=True))
    names, before = names_in_shared_memory(), descriptors()
    yield
    gc.collect()
    left = set(psutil.Process().children(recursive=True)) - children
    assert not left, f"processes are left: {left}"
    wait_for_names_to_go(names)
    after = descriptors()
    new = {number: name for number, name in after.items() if before.get(number) != name}
    assert not new, f"descriptors are left: {new}"


def wait_for_names_to_go(but):
    """Wait for names in shared memory that another run on this machine has for a moment."""
    wait_until(
        lambda: names_in_shared_memory() <= but,
        20,
        lambda: f"names are left: {names_in_shared_memory() - but}",
    )


def fork_on_devices(master_rank):
    if os.environ.get("SYNKHRONOS_TEST_NCCL") == "stand-in":
        from support import stand_in

        stand_in.install()
    synk.fork(devices=DEVICES, master_rank=master_rank)


DEVICES = os.environ.get("SYNKHRONOS_TEST_DEVICES", "").split(",")
ON_DEVICES = DEVICES != [""]
IS_MIXED = ON_DEVICES and len({device.rstrip("0123456789:") for device in DEVICES}) > 1
collect_ignore = [] if ON_DEVICES else ["on_devices"]
if "SYNKHRONOS_TEST_NCCL" not in os.environ:
    collect_ignore.append("on_devices/test_nccl.py")


def layouts(*pairs):
    """Return the pairs (number of ranks, master's rank) that a fixture forks, one by one."""
    if ON_DEVICES:
        return [(len(DEVICES), int(os.environ.get("SYNKHRONOS_TEST_MASTER", "0")))]
    return list(pairs)


def nameless(value):
    """Return what a value looks like, without its address: tests have the same name in each run."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def layout_id(pair):
    return f"{pair[0]}ranks-master{pair[1]}"


@contextlib.contextmanager
def forked(n, master_rank=0, **kwargs):
    """Fork, and prove at the end that close() leaves nothing."""
    if ON_DEVICES:
        if _session._Current.session is None:
            fork_on_devices(master_rank)
        current = _session._Current.session
        assert (n, master_rank) == (current.n_ranks, current.master_rank)
        yield SimpleNamespace(n=n, master=master_rank, session=current)
        return
    with nothing_left():
        assert synk.fork(n, master_rank=master_rank, **kwargs) == n
        current = _session._Current.session
        try:
            yield SimpleNamespace(n=n, master=master_rank, session=current)
        finally:
            if _session._Current.session is not None:
                synk.close()


def pytest_collection_modifyitems(config, items):
    if not ON_DEVICES:
        return
    by_test = {}
    for item in items:
        if not {"no_session", "script"} & set(item.fixturenames):
            by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    chosen = set()
    for name, each in by_test.items():
        one = zlib.crc32(f"{DEVICES} {name}".encode()) % len(each)  # another one for each layout
        chosen.update(each if "SYNKHRONOS_TEST_ALL" in os.environ else [each[one]])
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


ALL_LAYOUTS = layouts((1, 0), (2, 0), (3, 0), (4, 0), (3, 1), (2, 1))
FEWER_LAYOUTS = layouts((1, 0), (2, 0), (3, 1), (4, 0))


@pytest.fixture(scope="module", params=ALL_LAYOUTS, ids=layout_id)
def ranks(request):
    """A session, for each number of ranks; n may be more than there are cores."""
    with forked(*request.param) as session:
        yield session


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("SYNKHRONOS_DEVICES", raising=False)


@pytest.fixture(autouse=True)
def no_signal_ignored():
    """Have signals that tests send do something, also below nohup or in a script's background."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [signum for signum in usual if signal.getsignal(signum) == signal.SIG_IGN]
    for signum in ignored:
        signal.signal(signum, usual[signum])
    yield
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)


@pytest.fixture
def no_session():
    """For tests that fork themselves: no session before, and nothing left after."""
    assert _session._Current.session is None
    with nothing_left():
        yield
        if _session._Current.session is not None:
            synk.close()


@pytest.fixture(autouse=True, scope="session")
def nothing_left_at_all():
    # Looking for what is left collects garbage, which is slow if it looks through all of Theano.
    gc.collect()
    gc.freeze()
    names = names_in_shared_memory()
    yield
    if ON_DEVICES and _session._Current.session is not None:
        synk.close()
    assert _session._Current.session is None
    wait_for_names_to_go(names)


@pytest.fixture
def script(tmp_path):
    """Return a function that runs a script in an interpreter of its own."""

    def run(text, timeout=60, check=True, **kwargs):
        path = tmp_path / "script.py"
        path.write_text(text)
        here = os.path.dirname(__file__)
        env = {**os.environ, "PYTHONPATH": here, **kwargs.pop("env", {})}
        done = subprocess.run(
            [sys.executable, *kwargs.pop("options", ()), str(path)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
            env=env,
            **kwargs,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run


def wait_until(condition, seconds, what=lambda: ""):
    """Wait until the condition holds; return how long it took, or fail, saying what there is."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not within {seconds} s {what()}"
        time.sleep(0.005)
    return time.monotonic() - begin
