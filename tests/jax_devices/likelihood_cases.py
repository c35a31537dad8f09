"""Likelihoods on devices of JAX, compared with plain models.

`test_jax_ranks` runs them in a process of their own, in which nothing has started JAX.
SYNKHRONOS_TEST_JAX names the device: on a machine with a GPU, cuda0.
"""

import os
import signal

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")
pytest.importorskip("jax")

from pytensor.link.jax.dispatch import jax_funcify  # noqa: E402
from support import pymc_models as models  # noqa: E402

from synkhronos import WorkerDied  # noqa: E402
from synkhronos._host.pytensor import jax_devices  # noqa: E402
from synkhronos.extensions import pymc as parallel  # noqa: E402
from synkhronos.extensions.pymc import on_devices  # noqa: E402

pytestmark = models.MARKS

DEVICE = os.environ.get("SYNKHRONOS_TEST_JAX", "jax:cpu")
REFUSED_BY_JAX = {"of_its_own_operation"}


def on(n_ranks):
    """Return the names of the devices of so many ranks."""
    return [DEVICE] * n_ranks


def everything(model, points):
    """Return value, gradient and Hessian at some points."""
    functions = model.compile_logp(), model.compile_dlogp(), model.compile_d2logp()
    return [np.asarray(function(point)) for point in points for function in functions]


def assert_close(found, expected, rtol=1e-10):
    """Compare arrays, relative to the largest number of each."""
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=rtol * np.abs(right).max())


@pytest.mark.every
@pytest.mark.parametrize("name", sorted({*models.DIVIDED} - REFUSED_BY_JAX))
def test_equal_to_the_plain_model(name):
    model = models.make(models.DIVIDED[name])
    at = models.points(model)
    expected = models.evaluate(model, at)
    with parallel.likelihood(model, devices=on(2)) as ours:
        models.assert_equal(models.evaluate(model, at), expected)
        assert set(ours.left) <= {"alone"} and len(ours.worker_pids) == 2
        assert ours.devices == on(2)


@pytest.mark.parametrize("n_ranks", [1, 3])
@pytest.mark.parametrize("name", ["hierarchical", "parameter_for_each_row", "two_lengths"])
def test_second_derivatives(name, n_ranks):
    model = models.make(models.DIVIDED[name])
    at = models.points(model)
    expected = everything(model, at)
    with parallel.likelihood(model, devices=on(n_ranks)):
        assert_close(everything(model, at), expected)


def test_new_data():
    with pm.Model() as model:
        x = pm.Data("x", models.X)
        mean = pm.math.dot(x, pm.Normal("weights", shape=3))
        pm.Normal("y", mean, pm.HalfNormal("sigma"), observed=pm.Data("y_data", models.Y))
    at = models.points(model)
    given = [
        {"x": models.X[::-1], "y_data": models.Y},
        {"x": models.X[:7], "y_data": models.Y[:7]},
        {"x": models.X[:1], "y_data": models.Y[:1]},
    ]
    expected = []
    for data in given:
        with model:
            pm.set_data(data)
        expected.append(everything(model, at))
    with model:
        pm.set_data({"x": models.X, "y_data": models.Y})
    with parallel.likelihood(model, devices=on(3)) as ours:
        workers = ours.worker_pids
        for data, right in zip(given, expected):
            pm.set_data(data)
            assert_close(everything(model, at), right)
        assert ours.worker_pids == workers


def test_an_operation_that_jax_lacks():
    model = models.make(models.of_its_own_operation)
    with pytest.raises(
        ValueError, match=r"y: JAX can't compute it: .*RowWiseSquares.*likelihood\("
    ), parallel.likelihood(model, devices=on(2)):
        pass
    with model:
        pm.Normal("z", pm.Normal("center"), observed=models.Y)
    at = models.points(model, 1)
    expected = models.evaluate(model, at)
    with parallel.likelihood(model, devices=on(2)) as ours:
        assert ours.divided == ["z"] and "RowWiseSquares" in ours.left["y"]
        models.assert_equal(models.evaluate(model, at), expected)


class FailingSquares(models.RowWiseSquares):
    """The same; JAX takes it, and fails when it compiles."""


parallel.row_wise(FailingSquares)


@jax_funcify.register(FailingSquares)
def _failing_squares(op, **kwargs):
    def squares(value, mu):
        raise TypeError("no squares today")

    return squares


def test_fewer_rows_than_ranks_and_an_operation_that_fails():
    """The first rank has no rows of `few`: what fails is `y`."""
    with pm.Model() as model:
        pm.Normal("few", pm.Normal("center"), observed=models.Y[:2])
        models.of_its_own_operation(FailingSquares)
    at = models.points(model, 1)
    expected = models.evaluate(model, at)
    with parallel.likelihood(model, devices=on(3)) as ours:
        assert ours.divided == ["few"] and "no squares today" in ours.left["y"]
        models.assert_equal(models.evaluate(model, at), expected)


def test_results_that_are_no_numbers(monkeypatch):
    def evaluate(self, kind, values):
        result = plain(self, kind, values)
        result[-1] = np.nan
        return result

    plain = on_devices.DeviceEvaluator.evaluate
    monkeypatch.setattr(on_devices.DeviceEvaluator, "evaluate", evaluate)
    model = models.make(models.logistic)
    with pytest.raises(
        ValueError, match=r"y: JAX can't compute it: .*gradients differ"
    ), parallel.likelihood(model, devices=on(1)):
        pass


def test_a_likelihood_without_parameters():
    with pm.Model() as model:
        pm.Normal("y", 0, 1, observed=models.Y)
        pm.Normal("z", pm.Normal("center"), observed=models.Y)
    at = models.points(model, 1)
    expected = models.evaluate(model, at)
    with parallel.likelihood(model, devices=on(2)) as ours:
        assert ours.divided == ["y", "z"]
        models.assert_equal(models.evaluate(model, at), expected)


def test_observed_variables_without_potentials():
    """``pm.sample_smc`` scales the former alone."""
    with pm.Model() as model:
        weights = pm.Normal("weights", shape=3)
        pm.Normal("y", models.X @ weights, 1.0, observed=models.Y)
        pm.Potential("more", -((models.Y - models.X @ weights) ** 2))
    [at] = models.points(model, 1)
    expected = model.compile_fn(model.logp(vars=model.observed_RVs))(at)
    with parallel.likelihood(model, devices=on(2)) as ours:
        found = model.compile_fn(model.logp(vars=model.observed_RVs))(at)
        assert found == pytest.approx(expected, rel=1e-10)
        assert {type(each) for each in ours.evaluators} == {on_devices.DeviceEvaluator}


def test_a_block_in_which_ranks_compute_nothing(caplog):
    with parallel.likelihood(models.make(models.logistic), devices=on(1)):
        pass
    assert caplog.messages[-1].startswith("ranks have computed nothing")


def test_devices_do_not_help_where_rows_can_not_be_divided():
    model = models.make(models.autoregression)
    with pytest.raises(
        ValueError, match=r"over devices \(.*\)\. Sample it without"
    ), parallel.likelihood(model, devices=on(1)):
        pass


def test_a_worker_that_dies():
    model, point = models.logistic_at_a_point()
    expected = model.compile_logp()(point)
    with pytest.raises(WorkerDied, match=r"rank 0 .*enter it again"), parallel.likelihood(
        model, devices=on(2)
    ) as ours:
        os.kill(ours.worker_pids[0], signal.SIGKILL)
        model.compile_logp()(point)
    with parallel.likelihood(model, devices=on(2)):
        assert model.compile_logp()(point) == pytest.approx(expected)


def test_rows_that_do_not_fit(monkeypatch):
    class Full:
        def memory_stats(self):
            return {"bytes_limit": 2_000_000_000, "bytes_in_use": 1_500_000_000}

    monkeypatch.setattr(on_devices._Own, "device", Full())
    monkeypatch.setattr(on_devices._Own, "name", "cuda0")
    rows = on_devices.DeviceRows(0, (), on_devices.LayoutOfDevices((1,), ("",), 0), True)
    rows._check_room(400_000_000)
    with pytest.raises(MemoryError, match=r"cuda0 take 0.6 GB, but 0.5 GB are free there"):
        rows._check_room(600_000_000)


def test_devices_that_are_not_there():
    model = models.make(models.logistic)
    with pytest.raises(
        RuntimeError, match=r"JAX can't open the device jax:cpu777"
    ), parallel.likelihood(model, devices=["jax:cpu777"]):
        pass


def test_without_jax(monkeypatch):
    model = models.make(models.logistic)
    monkeypatch.setattr(jax_devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"pip install 'synkhronos\[jax-cuda\]'"
    ), parallel.likelihood(model, devices=["cuda0"]):
        pass


def test_the_environment_names_devices(monkeypatch):
    model, point = models.logistic_at_a_point()
    expected = model.compile_logp()(point)
    monkeypatch.setenv("SYNKHRONOS_DEVICES", ",".join(on(2)))
    with parallel.likelihood(model) as ours:
        assert ours.devices == on(2)
        assert model.compile_logp()(point) == pytest.approx(expected)
    monkeypatch.setenv("SYNKHRONOS_DEVICES", "cuda0,cpu")
    with pytest.raises(
        ValueError, match=r"^SYNKHRONOS_DEVICES or --devices must"
    ), parallel.likelihood(model):
        pass


def test_a_gpu_is_told_of_once(monkeypatch, caplog):
    model = models.make(models.logistic)
    monkeypatch.setattr(parallel, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(parallel, "_told", [])
    for _ in range(2):
        with parallel.likelihood(model, ranks=1):
            pass
    told = [each for each in caplog.messages if "NVIDIA" in each]
    assert len(told) == 1 and 'likelihood(devices=["cuda0"])' in told[0]


STARTED_BEFORE = """
import jax
from support import pymc_models as models
from synkhronos import SessionError
from synkhronos.extensions import pymc as parallel

jax.numpy.zeros(3).block_until_ready()
model = models.make(models.logistic)
try:
    with parallel.likelihood(model, devices=["jax:cpu"]):
        pass
except SessionError as error:
    print(error)
with parallel.likelihood(model, ranks=2) as ours:
    print(ours.ranks)
"""

STARTED_BY_FORK = """
import synkhronos as synk
from support import pymc_models as models
from synkhronos.extensions import pymc as parallel

synk.fork(devices=["jax:cpu"])
try:
    with parallel.likelihood(models.make(models.logistic), devices=["jax:cpu"]):
        pass
except synk.SessionError as error:
    print(error)
"""

STARTED_INSIDE = """
import numpy as np
from pymc.sampling.jax import get_jaxified_logp
from support import pymc_models as models
from synkhronos.extensions import pymc as parallel

model, point = models.logistic_at_a_point()
expected = model.compile_logp()(point)
for _ in range(2):
    with parallel.likelihood(model, devices=["jax:cpu"] * 2) as ours:
        import jax
        logp = jax.jit(jax.value_and_grad(get_jaxified_logp(model)))
        value, _ = logp([jax.numpy.asarray(point[each.name]) for each in model.value_vars])
        print(np.allclose(value, expected, rtol=1e-5), *ours.worker_pids)
"""


SAME_SHAPES = """
import os

os.environ["JAX_LOG_COMPILES"] = "1"
import pymc as pm
from support import pymc_models as models
from synkhronos.extensions import pymc as parallel

with pm.Model() as model:
    pm.Normal("y", pm.Normal("center"), observed=pm.Data("data", models.Y))
with parallel.likelihood(model, devices=["jax:cpu"]):
    logp = model.compile_logp()
    for data in (models.Y, models.Y + 1, models.Y[:5], models.Y):
        os.write(2, b"new data\\n")
        pm.set_data({"data": data})
        logp(model.initial_point())
"""

CHAINS = """
import numpy as np
import pymc as pm
from support import pymc_models as models
from synkhronos.extensions import pymc as parallel

model = models.make(models.logistic)
given = {"draws": 20, "tune": 20, "chains": 2, "random_seed": 1, "nuts_sampler": "pymc"}
given.update(progressbar=False, compute_convergence_checks=False)
draws = []
with model:
    draws.append(pm.sample(cores=1, **given).posterior["weights"])
with parallel.likelihood(model, devices=["jax:cpu"]):
    for cores in (1, 2):
        draws.append(pm.sample(cores=cores, **given).posterior["weights"])
print(*(np.allclose(each, draws[0], rtol=1e-3) for each in draws[1:]))
"""

CHAINS_AFTER_JAX = """
import jax
import pymc as pm
from support import pymc_models as models
from synkhronos.extensions import pymc as parallel

model = models.make(models.logistic)
given = {"draws": 9, "tune": 9, "chains": 2, "nuts_sampler": "pymc", "progressbar": False}
given["compute_convergence_checks"] = False
with parallel.likelihood(model, devices=["jax:cpu"]):
    jax.numpy.zeros(3).block_until_ready()
    print(pm.sample(cores=1, **given).posterior.sizes["chain"])
    try:
        pm.sample(cores=2, **given)
    except Exception as error:
        print(error)
"""


@pytest.fixture
def on_device(script):
    """Return a function that runs a script on the device, and returns what it has printed."""

    def run(code, stream="stdout"):
        return getattr(script(code.replace("jax:cpu", DEVICE), timeout=300), stream)

    return run


def test_new_data_of_the_same_shape_compile_nothing(on_device):
    """What JAX has compiled for other lengths is freed: a worker would grow with each."""
    _, *compiled = on_device(SAME_SHAPES, "stderr").split("new data")
    assert [each.count("Compiling jit(vector)") for each in compiled] == [1, 0, 1, 1]


def test_chains_in_this_process_and_in_others(on_device):
    assert on_device(CHAINS) == "True True\n"


def test_chains_in_others_after_jax_has_started(on_device):
    chains, refused = on_device(CHAINS_AFTER_JAX).splitlines()
    assert chains == "2" and "write pm.sample(cores=1): they follow" in refused


def test_jax_that_has_started_before(on_device):
    refused, ranks = on_device(STARTED_BEFORE).splitlines()
    assert "must come before JAX computes anything in this process" in refused
    assert ranks == "2"


def test_a_session_that_has_started_jax(on_device):
    assert "Start the script by python, with the devices in" in on_device(STARTED_BY_FORK)


def test_jax_that_starts_in_a_block(on_device):
    """The next block finds the same workers: no others could be forked."""
    first, second = on_device(STARTED_INSIDE).splitlines()
    assert first == second and first.startswith("True ")
