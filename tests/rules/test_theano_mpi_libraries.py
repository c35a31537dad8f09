"""What Theano-MPI's scripts import beside models: helpers, exchangers, a worker, the rules."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import theano
from support import compatible as imports
from support import groups
from support.rules import FOR_ROOT

from synkhronos.rules import compatible
from synkhronos.rules.compatible.lib import base, exchanger, helper_funcs, hwloc_utils
from synkhronos.rules.compatible.models import layers2

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture
def layers():
    first = layers2.FC(theano.tensor.matrix(), 3, input_shape=(2, 4), printinfo=False)
    return layers2.get_layers(layers2.Softmax(first, 2, printinfo=False))


def values(layers):
    return [each.val.get_value() for layer in layers for each in (layer.W, layer.b)]


def test_weights_are_saved_and_loaded_by_their_names(layers, tmp_path):
    folder = str(tmp_path / "snapshots")
    helper_funcs.save_weights(layers, folder, 4)
    paths = helper_funcs.collect_weight_path(layers, folder, 4, l_range=[1])
    assert [os.path.basename(path) for path in paths] == ["W_1_4.npy", "b_1_4.npy"]
    saved = values(layers)
    helper_funcs.load_weights_from_memory(layers, [value + 1 for value in saved])
    np.testing.assert_array_equal(values(layers)[0], saved[0] + 1)
    helper_funcs.load_weights(layers, folder, 4, l_range=[0])
    np.testing.assert_array_equal(values(layers)[0], saved[0])
    np.testing.assert_array_equal(values(layers)[2], saved[2] + 1)


def test_a_model_is_saved_with_its_rate_and_its_last_errors(layers, tmp_path):
    path = f"{tmp_path}/snapshots/"
    params, _ = layers2.get_params(layers)
    model = SimpleNamespace(
        layers=layers, epoch=5, name="m", params=params, current_info=[8, 0.5, 0.25, 0.0],
        shared_lr=theano.shared(np.float32(0.125)),
    )  # fmt: skip
    helper_funcs.save_model(model, path, verbose=False)
    assert np.load(f"{path}lr_5.npy") == 0.125 and os.path.exists(f"{path}W_0_5.npy")
    assert "epoch: 5 val_info [8, 0.5" in (tmp_path / "snapshots" / "val_info.txt").read_text()
    helper_funcs.check_model_cdd(model)
    assert [each.get_value().shape for each in model.vels] == [p.get_value().shape for p in params]
    helper_funcs.save_momentums(params, path, 5)
    helper_funcs.load_momentums(model.vels, path, 5)
    np.testing.assert_array_equal(model.vels[0].get_value(), params[0].get_value())
    with pytest.raises(TypeError, match="can't be trained"):
        helper_funcs.check_model(model)


def test_a_process_is_bound_to_cores_without_hwloc(monkeypatch, capsys):
    before = os.sched_getaffinity(0)
    one = min(before)
    monkeypatch.setenv("CPULIST_A", "")
    try:
        hwloc_utils.bind_to_socket_mem(f"{one}-{one}", label="A")
        assert os.environ["CPULIST_A"] == str(one)
        cores, package = hwloc_utils.detect_socket_num(label="A")
    finally:
        os.sched_setaffinity(0, before)
    assert cores == {one} and package >= 0 and f"[{one}]" in capsys.readouterr().out
    assert hwloc_utils.range_to_list("5") == "5"  # theirs could not read it


def exchanged(group, sync_type):
    """Exchange on one rank of a group; return the values, in a list for the parent."""
    params = [theano.shared(np.full(3, group.rank + 1.0)), theano.shared(np.float32(group.rank))]
    zeros = [theano.shared(np.zeros_like(each.get_value())) for each in params]
    model = SimpleNamespace(params=params, vels=params, vels2=zeros)
    comm = base.Comm(group)
    recorder = SimpleNamespace(start=lambda: None, end=lambda mode: None)
    made = exchanger.BSP_Exchanger(comm, None, "ar", sync_type, None, model)
    made.exchange(recorder)
    targets = zeros if sync_type == "cdd" else params
    return [each.get_value().tolist() for each in targets]


@pytest.mark.parametrize(
    "sync_type, expected",
    [
        ("cdd", [[[3, 3, 3], 1], [[3, 3, 3], 1]]),
        ("avg", [[[1.5, 1.5, 1.5], 0.5], [[1.5, 1.5, 1.5], 0.5]]),
        ("swap", [[[2, 2, 2], 1], [[1, 1, 1], 0]]),
    ],
)
def test_an_exchanger_sums_averages_or_swaps(sync_type, expected):
    assert groups.run(2, lambda group: exchanged(group, sync_type)) == expected


def test_names_of_batch_normalizations_are_left_out():
    params = [theano.shared(0.0, name) for name in ("W", "gamma", "beta")]
    assert exchanger.remove_BN_params(params) == params[:1]
    with pytest.raises(ValueError, match="sync_type must be one of"):
        exchanger.BSP_Exchanger(SimpleNamespace(size=1), None, "ar", "x", None, None)


SCRIPT = """
from theanompi import BSP
from theanompi.rules import BSP as the_same

assert BSP is the_same
rule = BSP()
rule.wait()
rule.init(devices=['cuda0', 'cuda1', 'cuda2'], modelfile='models.small', modelclass='Model')
print('devices given by the script: 3')
rule.wait()
"""


@pytest.mark.slow("starts ranks")
def test_a_session_script_runs_as_it_is_on_other_devices(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.py").write_text("raise SystemExit(0)\nclass Model: pass\n")
    (tmp_path / "session.py").write_text(SCRIPT)
    line = ["rule", "script", "--devices", "cpu,cpu", "session.py"]
    done = subprocess.run(
        [sys.executable, "-m", "synkhronos", *line],
        cwd=tmp_path, env={**os.environ, **FOR_ROOT}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "2 workers on cpu, cpu" in done.stdout, done.stdout + done.stderr


def test_a_worker_trains_without_a_launcher(monkeypatch, tmp_path):
    """One rank, as `theanompi.worker` was called with one device."""
    monkeypatch.setattr(theano.config, "floatX", "float32")
    monkeypatch.chdir(tmp_path)
    with imports.restored():
        compatible.install()
        from support import rule_model
    worker = importlib.import_module("synkhronos.rules.compatible.worker").BSP_Worker(
        "cpu", "cdd", "ar"
    )
    assert (worker.rank, worker.size) == (0, 1)
    model = rule_model.Model({"verbose": False, "rank": 0, "size": 1, "n_epochs": 2})
    worker.build(model, {"mname": "Model"})
    worker.BSP_run(model)
    assert len(worker.recorder.val_info) == model.n_epochs
