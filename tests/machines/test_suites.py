"""The behaviour suites on several machines: see tests/support/layouts.py.

Those of a layout in one job: pytest is the master's script. On one layout functions are compiled as
Theano does by default, on the others without a C compiler, which takes less than half the time.
"""

import faulthandler
from pathlib import Path

import pytest
from support import running

HERE = Path(__file__).parents[1]
RUN_PYTEST = HERE / "support" / "run_pytest.py"
WAITS = "starts a job on several hosts, and compiles"
COMPILED = ["calls/test_functions", "collectives/test_ops", "training/test_updates"]
COLLECTIVES = "collectives/test_collectives"
# The suites of each layout. Collectives compile little, so they run on two others; one of their
# tests is for two ranks. Suites about slices compute on each machine as on one alone.
ON_TWO = [*COMPILED, f"{COLLECTIVES}::test_the_collectives_of_2017s_example"]
ON_FOUR_RANKS = [*COMPILED, "calls/test_slices", COLLECTIVES]
ON_THREE = [COLLECTIVES, "collectives/test_ops", "calls/test_functions"]
IN_BUCKETS = ["collectives/test_ops", "training/test_updates"]
NO_COMPILER = {"THEANO_FLAGS": "cxx="}
FEW = [
    "collectives/test_collectives::test_broadcast",
    "collectives/test_ops::test_training_in_one_function_is_serial_training",
    "calls/test_functions::test_every_rank_sees_its_own_rows_in_rank_order",
]


def run(these, layout, names, request, leave_out="", **variables):
    """Run test files in a job on some hosts, with a session on a layout such as 2x1.

    A test whose name has the text `leave_out` is left out.
    """
    faulthandler.cancel_dump_traceback_later()  # what runs has its own, for each test
    n_machines, n_ranks = layout.split("x")
    paths = []
    for name in names:
        file, *test = name.split("::")
        paths.append("::".join([str(HERE / f"{file}.py"), *test]))
    # Machines but the first import the test's module for what it defines.
    folders = [str(HERE), *dict.fromkeys(str(Path(path.split("::")[0]).parent) for path in paths)]
    pytest_arguments = ["-q", "--color=no", "--no-header", "-p", "no:cacheprovider", *paths]
    pytest_arguments += ["-k", f"not {leave_out}"] if leave_out else []
    variables["PYTHONPATH"] = running.python_path(*folders)
    done = running.run(
        *these.script("-n", n_ranks, RUN_PYTEST, *pytest_arguments, n_hosts=int(n_machines)),
        cwd=HERE.parent,
        env=these.environment(SYNKHRONOS_TEST_MACHINES=layout, **variables),
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    summary = next(line for line in reversed(done.stdout.splitlines()) if " passed" in line)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        request.config.pluginmanager.getplugin("terminalreporter").write_line(f" {summary}")
    assert these.is_empty()


def test_a_few_of_each_on_two_machines(two_hosts, request):
    run(two_hosts, "2x1", FEW, request, **NO_COMPILER)


@pytest.mark.slow(WAITS)
@pytest.mark.parametrize(
    "machines, names, options",
    [
        ("2x1", ON_TWO, {}),
        ("2x2", ON_FOUR_RANKS, {"leave_out": "one_variable_at_a_time", **NO_COMPILER}),
        ("3x1", ON_THREE, NO_COMPILER),
        (
            "2x2",
            IN_BUCKETS,
            {"leave_out": "take_one_round", "SYNKHRONOS_TEST_BUCKET": "1", **NO_COMPILER},
        ),
    ],
    ids=["2x1", "2x2", "3x1", "2x2, each array in a bucket"],
)
def test_suites(three_hosts, machines, names, options, request):
    run(three_hosts, machines, names, request, **options)
