"""The suites of the tests on these ranks, each in a pytest of its own; see tests/devices, too."""

import os

from scenarios import Skip, scenario
from scenarios.compare import true

GRAPHS = ["calls/test_functions", "calls/test_slices", "calls/test_sliced_updates"]
FORMS = ["calls/test_axes", "calls/test_rows", "calls/test_data", "calls/test_theano_arguments"]


def passes(run, *suites, quick=False):
    """Run test files, of which each test has one of its parameters; return pytest's last line."""
    if run.quick and not quick:
        raise Skip("--quick")
    from support import on_devices

    flags = os.environ["THEANO_FLAGS"] + ",floatX=float64"  # in which they are written
    done = on_devices.outcome(
        ",".join(run.devices),
        suites[:1] if run.quick else suites,
        "not thorough" if run.is_mixed or run.quick else "",
        THEANO_FLAGS=flags,
    )
    said = (done.stdout or done.stderr).strip().splitlines() or ["pytest said nothing"]
    true(done.returncode == 0, "\n".join([said[-1], *said[-200:]]))
    return said[-1]


@scenario(limit=1300)
def values_on_devices(run):
    """Values stay on the device of their rank, and kernels that fail elsewhere work."""
    if run.kind == "cpu":
        raise Skip("CPU ranks only")
    return passes(run, "devices/test_device_ranks")


@scenario(limit=1300)
def collectives(run):
    """Every collective for all dtypes and shapes, all operations, several variables at once."""
    return passes(
        run, "collectives/test_collectives", "collectives/test_bad_collectives", quick=True
    )


@scenario(limit=1300)
def all_reduce_in_the_graph(run):
    """ops.all_reduce, weighted by rows where it averages, in outputs and in updates."""
    return passes(run, "collectives/test_ops")


@scenario(limit=1300)
def functions(run):
    """All ways to reduce outputs, batches, rows that stay on the device, slices, updates."""
    return passes(run, *GRAPHS)


@scenario(limit=1300)
def forms_of_functions(run):
    """Rows on other axes and by number, Data, all that ``theano.function`` takes."""
    return passes(run, *FORMS)


@scenario(limit=1300)
def sending_functions(run):
    """Functions, variables and random streams reach the ranks once."""
    return passes(run, "calls/test_distribute", "calls/test_sparse")


@scenario(limit=1300)
def update_rules(run):
    """The rules of `extensions`, against serial Theano."""
    return passes(run, "training/test_updates", "training/test_rules")
