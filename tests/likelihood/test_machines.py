"""The likelihood of PyMC models under ``synkhronos run`` and on ranks of several machines."""

import re

import pytest
from support import hosts
from support.running import python, python_path, run

pytest.importorskip("pymc", minversion="6")

# The operation is of the script, which other machines don't run.
SCRIPT = """
import contextlib, faulthandler, os, signal, socket, time
import numpy as np, pymc as pm
from support import pymc_models as models
from synkhronos import SessionError, WorkerDied, WorkerError
from synkhronos._session.current import Current
from synkhronos.extensions import pymc as parallel

faulthandler.dump_traceback_later(200, exit=True)  # a hang tells where it is

for name in ("logistic", "item_response", "missing", "two_lengths"):
    model = models.make(getattr(models, name))
    with models.equal_on_ranks(model, ranks=None) as ours:
        print(name, ours.ranks, len(ours.worker_pids))
        if name == "logistic":
            point, plain = models.points(model)[0], models.make(models.logistic)
            hessians = [each.compile_d2logp()(point) for each in (model, plain)]
            np.testing.assert_allclose(*hessians, rtol=1e-9)
            given = {"draws": 5, "tune": 5, "chains": 2, "random_seed": 1}
            given.update(progressbar=False, nuts_sampler="pymc")
            draws = pm.sample(cores=1, **given).posterior["weights"]
            with plain:
                right = pm.sample(cores=1, **given).posterior["weights"]
            np.testing.assert_allclose(draws, right, rtol=1e-6)
            try:
                pm.sample(cores=2, **given)
            except Exception as error:  # of PyMC
                print(error)

came = []

def interrupt(number, frame):
    came.append(number)
    raise KeyboardInterrupt

def call_until_it_came(seconds):
    before = len(came)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while len(came) == before:  # what is raised in a finalizer is dropped by Python
        evaluate(at)

signal.signal(signal.SIGALRM, interrupt)
model, plain = (models.make(models.student) for _ in range(2))
with parallel.likelihood(model):
    try:
        with parallel.likelihood(plain):
            pass
    except SessionError as error:
        print(error)
    for rows in (61, 3, 90):  # of 3 one rank has none
        for each in (model, plain):
            with each:
                pm.set_data({"x": models.X[:rows] + 1, "y_data": models.Y[:rows]})
        at, evaluate = models.points(model), models.evaluator(model)
        found = evaluate(at)
        models.assert_equal(found, models.evaluate(plain, at))
        for number in range(50):
            # Numba's code makes other errors of a KeyboardInterrupt now and then.
            with contextlib.suppress(KeyboardInterrupt, SystemError, TypeError):
                call_until_it_came(0.001 + 0.0003 * number)
            again = evaluate(at)
            assert all(np.array_equal(one, other) for one, other in zip(found[1], again[1]))
    assert len(came) == 150

@parallel.row_wise
class Troubled(models.Squares):
    def perform(self, node, inputs, outputs):
        super().perform(node, inputs, outputs)
        what = inputs[1].max()
        if what > 50 and socket.gethostname().endswith("-2"):
            if what < 150:
                raise ArithmeticError("of the second machine")
            if what > 250 or Current.link is None:  # it is in leaders, and in no worker
                os.kill(os.getpid(), signal.SIGKILL)

model = models.make(lambda: models.of_its_own_operation(Troubled))
for ranks, bias in ((3, 100.0), (None, 200.0), (None, 300.0)):
    with models.equal_on_ranks(model, ranks=ranks) as ours:
        function, begin = model.compile_logp(), time.monotonic()
        try:
            function({"bias": np.array(bias)})
            print("no error")
        except (WorkerDied, WorkerError) as error:
            seconds = time.monotonic() - begin
            print(ours.ranks, type(error).__name__, error, "" if seconds < 20 else seconds)
        if bias == 100:
            models.assert_equal(models.evaluate(model, models.points(model)), models.evaluate(
                models.make(models.of_its_own_operation), models.points(model)))
try:
    function({"bias": np.array(0.0)})
except SessionError as error:
    print(error)
"""


@pytest.mark.parametrize("options, ranks", [(["-n", "3"], 3), (["--devices", "cpu,cpu"], 2)])
def test_the_number_of_ranks_of_run(tmp_path, options, ranks):
    (tmp_path / "script.py").write_text(
        "from support import pymc_models as models\n"
        "with models.equal_on_ranks(models.make(models.student), ranks=None) as ours:\n"
        "    print(ours.ranks, len(ours.worker_pids))\n"
    )
    line = "-m", "synkhronos", "run", *options, tmp_path / "script.py"
    done = python(*line, PYTHONPATH=python_path(hosts.ROOT / "tests"))
    assert done.stdout == f"{ranks} {ranks - 1}\n", done


@pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")
def test_a_script_under_launch(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with hosts.up(2) as these:
        names = ",".join(f"{address}:2" for address in these.addresses)
        done = run(
            *these.launch(tmp_path / "script.py", hosts=names),
            env=these.environment(PYTHONPATH=python_path(hosts.ROOT / "tests")),
        )
        other = f"synk{these.net}-2"
        assert these.is_empty()
    lines = [
        "logistic 4 1",
        r"Chain . failed with: .*Write pm\.sample\(cores=1\): the chains follow one another.*",
        *("item_response 4 1", "missing 4 1", "two_lengths 4 1"),
        r"There is a session of fork\(\) already, or another likelihood\(\) block.*",
        f"6 WorkerError Rank 1 of 2 on {other} raised ArithmeticError: of the second machine ",
        rf"4 WorkerDied Worker rank [23] on {other} \(process .* was killed .*\(SIGKILL\)\. "
        r"Leave the likelihood\(\) block, and enter it again\. ",
        f"4 WorkerDied The first process on {other} has ended, and with it the job on 2 machines: "
        "start it again. ",
        "A function that was compiled in .*",
    ]
    said = [line for line in done.stdout.splitlines() if line]
    assert len(said) == len(lines), done
    for line, expected in zip(said, lines):
        assert re.fullmatch(expected, line), done
