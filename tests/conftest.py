"""Fixtures that all tests share: sessions, their layouts, and the proof that nothing is left."""

import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import os
import signal
import sys
import threading
import zlib

import hypothesis
import pytest

# Before all others: it serves Theano's names on PyTensor.
from support import host_library  # isort: skip
from support import compiling, hosts, layouts, running
from support.leaks import names_in_shared_memory, nothing_left, wait_for_names_to_go
from support.running import python_path
from support.tiers import beyond_the_sample
from support.waiting import Watch

import synkhronos as synk
from synkhronos import session as _session

# Many tests compute what serial Theano does not: see `as_users_run_them`.
os.environ.setdefault("SYNKHRONOS_CHECK", "0")
# Theano imports distutils. That of setuptools takes a quarter of Theano's import.
if sys.version_info < (3, 12):
    os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")
# Its deadline of an example is 0.2 s, which a busy machine misses; the same examples in each run.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")
# Folders.
COMPILE_MUCH = {"calls", "collectives", "docs", "faster", "ported", "stress", "training", "whole"}
# Files that take a minute and more come first, so that the last ones keep all processes busy.
LONG = {"test_opencl.py", "test_bench.py", "test_check.py", "test_rule_cases.py", "test_zoo.py"}
LONG |= {"test_rules_demos.py", "test_points_of_calls.py", "test_lost_hosts.py", "test_suites.py"}
LONG |= {"test_core_alone.py", "test_bench_machines.py", "test_store_cases.py", "test_cudnn.py"}
# How `make test` begins to say which tests it leaves out: all others have further layouts.
QUICK = "not (slow or thorough"
# The first imports theanompi, which only ranks have; the second is Theano only on PyTensor; the
# last one changes any process that imports it.
collect_ignore = [
    "support/rule_model.py",
    "support/walked_model.py",
    "support/rule_cases.py",
    "support/on_pytensor",
    "support/forging",
]
collect_ignore.append("support/compiling_cudnn.py")  # a script, for Theano only
collect_ignore.append("benchmarks/programs")  # some import libraries that are not here
if importlib.util.find_spec("pymc") is None:
    collect_ignore.append("support/pymc_models.py")
if not layouts.ON_DEVICES:
    collect_ignore.append("devices/test_device_ranks.py")
if not (layouts.ON_DEVICES and host_library.ON_PYTENSOR):
    collect_ignore.append("jax_devices/jax_cases.py")
if layouts.ONLY is None or layouts.ONLY.transport == "shared":
    collect_ignore.append("devices/test_nccl.py")


def pytest_configure(config):
    compiling.fold_constants_in_python()
    if not layouts.ON_DEVICES:
        compiling.compute_streams_in_numpy()
    Watch.stderr = os.dup(2)  # before pytest captures it
    config.add_cleanup(lambda: os.close(Watch.stderr))
    config.pluginmanager.register(Watch())


def pytest_ignore_collect(collection_path):
    """Leave out what can't run on the host of this run; see tests/support/host_library.py."""
    return True if host_library.reason_to_leave_out(collection_path) else None


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        own = getattr(metafunc.module, "LAYOUTS", layouts.USUAL)
        wanted = own if layouts.ONLY is None else [layouts.ONLY]
        if layouts.ONLY is None and metafunc.config.getoption("markexpr").startswith(QUICK):
            marker = metafunc.definition.get_closest_marker("layouts")
            wanted = [each for each in own if marker is None or each in marker.args][:1]
        metafunc.parametrize("layout", wanted, ids=str, indirect=True, scope="module")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    keep(config, items, {*items} - host_library.leave_out(items))
    if layouts.ONLY is not None:
        keep_one_of_each_test(config, items)
        return
    keep(config, items, {item for item in items if is_on_its_layout(item)})
    for item in beyond_the_sample(items):
        item.add_marker(pytest.mark.thorough)
    items[:] = compiling_by_turns(items)


def compiling_by_turns(items):
    """Put files that compile much between others, in the order that they have.

    Theano compiles one operation at a time, in whatever process: where two processes test, one
    would wait for the other.
    """
    files = [list(each) for _, each in itertools.groupby(items, lambda item: item.path)]
    files.sort(key=lambda each: each[0].path.name not in LONG)
    much = [each for each in files if each[0].path.parent.name in COMPILE_MUCH]
    little = [each for each in files if each not in much]
    by_turns = itertools.zip_longest(much, little, fillvalue=())
    return [item for pair in by_turns for each in pair for item in each]


def keep_one_of_each_test(config, items):
    """Keep, for a run on devices, each test with one of its parameters, another for each layout.

    Compilation for devices takes long. With SYNKHRONOS_TEST_ALL=1 all tests are kept.
    """
    by_test = {}
    for item in items:
        if not {"no_session", "script"} & set(item.fixturenames) and fits_the_layout(item):
            name = item.nodeid.split("[")[0].replace(str(item.path.parent.name) + "/", "", 1)
            by_test.setdefault(name, []).append(item)
    chosen = set()
    for name, each in by_test.items():
        one = zlib.crc32(f"{list(layouts.ONLY.devices)} {name}".encode()) % len(each)
        chosen.update(each if "SYNKHRONOS_TEST_ALL" in os.environ else [each[one]])
    keep(config, items, chosen)


def fits_the_layout(item):
    """Return whether a test can run on the one layout of this run."""
    if layouts.ONLY.machines == 1:
        return True
    marker = item.get_closest_marker("layouts")
    ranks = {each.ranks for each in marker.args} if marker else {layouts.ONLY.ranks}
    return layouts.ONLY.ranks in ranks and not item.get_closest_marker("one_machine")


def keep(config, items, chosen):
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def is_on_its_layout(item):
    """Return whether a test has its layout here; it may name a few layouts of its file."""
    marker = item.get_closest_marker("layouts")
    return marker is None or item.callspec.params["layout"] in marker.args


@pytest.fixture(scope="module")
def layout(request):
    """Return the layout of the tests of a file: each of its LAYOUTS in turn."""
    return request.param


@pytest.fixture(scope="module")
def ranks(layout):
    """Yield a session on the layout, for all tests of a file."""
    with layouts.forked(layout) as session:
        yield session


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("SYNKHRONOS_DEVICES", raising=False)


@pytest.fixture(autouse=True)
def no_signal_ignored():
    """Restore the handlers of signals that nohup, or a shell's background job, ignores."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [signum for signum in usual if signal.getsignal(signum) == signal.SIG_IGN]
    for signum in ignored:
        signal.signal(signum, usual[signum])
    yield
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)


@pytest.fixture
def no_session():
    """Check that there is no session before the test, and nothing left after it."""
    assert _session._Current.session is None
    with nothing_left():
        yield
        if _session._Current.session is not None:
            synk.close()


@pytest.fixture(autouse=True, scope="session")
def nothing_left_at_all():
    names = names_in_shared_memory()
    yield
    if layouts.ONLY is not None and _session._Current.session is not None:
        synk.close()
    assert _session._Current.session is None
    wait_for_names_to_go(names)


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """Hide older objects from the garbage collector, which tests of this file call often."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quickly_compiled():
    """Compile functions that name no mode without a C compiler."""
    with compiling.quickly():
        yield


@pytest.fixture
def compiled_if_thorough(request):
    """Compile C code in `thorough` combinations only; others compute the same graph in Python."""
    if request.node.get_closest_marker("thorough"):
        yield
        return
    with compiling.in_python():
        yield


@pytest.fixture
def extensions():
    """Return the package `synkhronos.extensions`; skip the test where the core is alone."""
    package = pytest.importorskip("synkhronos.extensions")
    for name in ("rules", "train", "update_rules", "updates"):
        importlib.import_module(f"{package.__name__}.{name}")
    return package


@pytest.fixture
def other_thread():
    """Run a second thread, which gets the signals that the main thread masks."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@pytest.fixture(autouse=True)
def as_users_run_them(request):
    """Compare the first calls of demos and examples with serial Theano."""
    if request.path.parent.name == "docs":
        request.getfixturevalue("monkeypatch").setenv("SYNKHRONOS_CHECK", "first")


@pytest.fixture
def script(tmp_path):
    """Return a function that runs a script in an interpreter of its own."""

    def run(text, check=True, **kwargs):
        path = tmp_path / "script.py"
        path.write_text(text)
        here = os.path.dirname(__file__)
        quickly = {} if layouts.ON_DEVICES else running.IN_PYTHON
        env = {**quickly, **os.environ, "PYTHONPATH": python_path(here), **kwargs.pop("env", {})}
        options = kwargs.pop("options", ())
        done = running.run(sys.executable, *options, path, cwd=tmp_path, env=env, **kwargs)
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run


@functools.lru_cache(maxsize=None)
def why_no_hosts():
    """Return what this machine lacks for test hosts, or an empty string."""
    return hosts.missing()


@contextlib.contextmanager
def hosts_up(number):
    if why_no_hosts():
        pytest.skip(f"no hosts: this machine lacks {why_no_hosts()}")
    with hosts.up(number) as these:
        yield these


@pytest.fixture(scope="module")
def two_hosts():
    """Yield two hosts, for all tests of a file: see tests/support/hosts.py."""
    with hosts_up(2) as these:
        yield these


@pytest.fixture(scope="module")
def three_hosts():
    """Yield three hosts, for all tests of a file."""
    with hosts_up(3) as these:
        yield these
