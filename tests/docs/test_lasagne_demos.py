"""The MNIST demos find their data, train as serial Theano does, and say what is wrong."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import importlib
import threading
from pathlib import Path

import numpy as np
import pytest
import theano
from support import gallery
from support.running import python

from synkhronos import session

ROOT = Path(__file__).parents[2]
SCRIPTS = ("train_mnist_theano", "train_mnist_cpu_data", "train_mnist_gpu_data")
# 400 rows do not divide by 90, nor 90 by 3: averages must be over rows.
SMALL = ["custom_mlp:1,20,0,0", "90", "2", "--data", "digits", "--rows", "400", "--parts", "3"]

pytest.importorskip("lasagne")


@pytest.fixture
def demo(monkeypatch):
    """Import demos; undo what they set, and end the session if one of them fails to."""

    def load(name):
        return importlib.import_module(f"demos.lasagne_mnist.{name}")

    monkeypatch.syspath_prepend(str(ROOT))
    float_type = theano.config.floatX
    yield load
    theano.config.floatX = float_type
    assert session._Current.session is None or session.close(), "the demo left its session open"


@pytest.fixture
def data(demo):
    return demo("data")


# Training.


@pytest.mark.slow("runs three scripts that compile a network each")
def test_ranks_train_as_serial_theano_does(demo, capsys, tmp_path):
    picture = tmp_path / "curves.png"
    serial = demo("train_mnist_theano").main(SMALL)
    picked = demo("train_mnist_cpu_data").main([*SMALL, "--ranks", "3", "--plot", str(picture)])
    scattered = demo("train_mnist_gpu_data").main([*SMALL, "--devices", "cpu,cpu,cpu"])
    out = capsys.readouterr().out
    for result in (picked, scattered):
        assert result["ranks"] == 3
        assert result["replicas_equal"]
        np.testing.assert_allclose(result["losses"], serial["losses"], atol=1e-4)
        assert result["accuracies"] == pytest.approx(serial["accuracies"], abs=0.01)
        assert result["test_loss"] == pytest.approx(serial["test_loss"], abs=1e-4)
        assert result["test_accuracy"] == pytest.approx(serial["test_accuracy"], abs=0.01)
    assert serial["losses"][1] < serial["losses"][0] < 2.5
    assert len(serial["accuracies"]) == 2 and len(serial["seconds"]) == 2 * 5
    assert not serial["has_dropout"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert out.count("Epoch 1 of 2 took ") == out.count("Epoch 2 of 2 took ") == 3
    assert "133, 133, 134" in out and out.count("IN PLACE OF MNIST") == 3
    assert out.count("equal, bit by bit: yes") == 2


@pytest.mark.slow("compiles a network of convolutions")
def test_cnn_with_dropout_trains_on_ranks(demo):
    result = demo("train_mnist_gpu_data").main(
        ["cnn", "50", "2", "--data", "digits", "--rows", "100", "--ranks", "2"]
    )
    assert result["has_dropout"] and result["replicas_equal"]
    assert np.isfinite(result["losses"]).all() and result["losses"][1] < 2.5


@pytest.mark.slow("runs three demos, each in a process of its own")
def test_all_demos_are_run_and_compared(demo, capfd, tmp_path):
    picture = tmp_path / "curves.png"
    found = demo("run_lasagne_demos").main(
        ["100", "--model", "custom_mlp:1,20,0,0", "--epochs", "2", "--data", "digits"]
        + ["--rows", "400", "--devices", "cpu,cpu", "--seed", "3", "--plot", str(picture)]
    )
    assert found["ranks"] == 2
    assert found["difference"] < 1e-4
    for name in ("cpu_data", "gpu_data"):
        assert found[name]["replicas_equal"] and found["speedups"][name] > 0
        np.testing.assert_allclose(found[name]["losses"], found["serial"]["losses"], atol=1e-4)
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capfd.readouterr().out
    assert gallery.unsaid("lasagne_mnist/run_lasagne_demos", out) == []
    assert out.count("Final results:") == 3


def test_the_comparison_says_why_curves_differ_and_when_they_should_not(demo):
    agreement = demo("run_lasagne_demos").agreement
    assert "masks" in agreement(0.1, 2, True)
    assert "DIFFER" in agreement(0.1, 1, True)
    assert "DIFFER" in agreement(0.1, 2, False)
    assert "agree" in agreement(1e-6, 2, False)


def test_the_comparison_ends_with_a_demo_that_fails(demo, capfd):
    with pytest.raises(SystemExit) as end:
        demo("run_lasagne_demos").main(["--data", "nowhere", "--devices", "cpu"])
    assert "train_mnist_gpu_data.py failed" in end.value.code
    assert "nowhere" in capfd.readouterr().err


def test_minibatches_take_every_row_once_and_evenly(demo):
    runs = demo("runs")
    for n_rows, batch_size, parts in ((1078, 500, 2), (400, 90, 3), (7, 2, 3), (2, 2, 3)):
        batches = list(runs.minibatches(n_rows, batch_size, np.random.RandomState(0), parts))
        assert len(batches) == runs.count_minibatches(n_rows, batch_size, parts)
        edges = runs.part_edges(n_rows, parts)
        rows = np.concatenate([part for batch in batches for part in batch])
        assert sorted(rows) == list(range(n_rows))
        for batch in batches:
            assert len(batch) == parts
            assert 1 <= sum(map(len, batch)) < batch_size + parts
            for part, start, stop in zip(batch, edges[:-1], edges[1:]):
                assert ((part >= start) & (part < stop)).all()


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vgg"], "there is no model 'vgg'"),
        (["custom_mlp:2,800"], "DEPTH,WIDTH,DROP_IN,DROP_HID"),
        (["custom_mlp:2,800,0,1"], "less than 1"),
        (["mlp", "0"], "at least 1"),
        (["mlp", "--json", "no/such/file"], "--json: no/such/file can't be written"),
        (["mlp", "--data", "no/such/folder"], "no/such/folder"),
    ],
)
def test_scripts_say_what_is_wrong_with_their_arguments(demo, capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        demo("train_mnist_cpu_data").main(arguments)
    assert end.value.code not in (0, None)
    assert said in f"{end.value.code} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "2", "--parts", "3"], "--parts must be the number of ranks here, 2"),
        (["--ranks", "3", "--rows", "2"], "3 ranks need as many rows, got 2"),
    ],
)
def test_scripts_say_what_is_wrong_with_their_ranks(demo, arguments, said):
    with pytest.raises(SystemExit) as end:
        demo("train_mnist_gpu_data").main(["mlp", "--data", "digits", *arguments])
    assert str(end.value.code).startswith("train_mnist_gpu_data: ") and said in end.value.code


def test_arguments_are_those_of_2017(demo):
    runs = demo("runs")
    for line, expected in (([], ("mlp", 500, 10)), (["cnn", "64", "3"], ("cnn", 64, 3))):
        given = runs.parse(line, "demo", "")
        assert (given.model, given.batch, given.epochs) == expected
    assert demo("run_lasagne_demos").parse(["250"]).batch == 250


@pytest.mark.slow("starts four scripts")
def test_scripts_run_from_any_folder(tmp_path):
    for script in (*SCRIPTS, "run_lasagne_demos"):
        child = python(ROOT / "demos/lasagne_mnist" / f"{script}.py", "--help", cwd=tmp_path)
        assert (child.returncode, child.stderr) == (0, ""), child.stderr
        assert "BATCH_SIZE" in child.stdout
        assert ("--ranks" in child.stdout) == (script != "train_mnist_theano")


# Models and data.


def test_build_network_knows_the_models_of_2017(demo, capsys):
    import lasagne

    build_network = demo("networks").build_network
    assert demo("common").build_network is build_network  # as scripts of 2017 import it
    assert demo("common").load_dataset is demo("data").load_dataset

    def shapes(model):
        network = build_network(model, theano.tensor.tensor4())
        return [p.get_value().shape for p in lasagne.layers.get_all_params(network)]

    assert shapes("mlp") == [(784, 800), (800,), (800, 800), (800,), (800, 10), (10,)]
    assert shapes("custom_mlp:1,30,.2,.5") == [(784, 30), (30,), (30, 10), (10,)]
    assert shapes("cnn")[::2] == [(32, 1, 5, 5), (32, 32, 5, 5), (512, 256), (256, 10)]
    assert capsys.readouterr().out.count("Building model and compiling functions...") == 3
    with pytest.raises(ValueError, match=r"no model 'resnet'.* mlp, cnn or custom_mlp"):
        build_network("resnet")


def write_idx(file, array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    file.write_bytes(gzip.compress(header + array.astype("uint8").tobytes()))


@pytest.fixture
def folder(data, tmp_path):
    """A folder with the four files of a very small MNIST."""
    random = np.random.RandomState(0)
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name, n_rows in (("train", 60), ("t10k", 20)):
        images = random.randint(0, 256, (n_rows, 28, 28))
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", np.arange(n_rows) % 10)
    assert {file.name for file in folder.iterdir()} == set(data.CHECKSUMS)
    return folder


def check(dataset):
    X_train, y_train, X_val, y_val, X_test, y_test = dataset
    assert X_train.shape == (50, 1, 28, 28) and X_train.dtype == "float32"
    assert [len(array) for array in (X_val, X_test)] == [10, 20]
    assert y_train.tolist() == [i % 10 for i in range(50)] and y_train.dtype == "uint8"
    assert (len(y_val), len(y_test)) == (10, 20)
    images = np.random.RandomState(0).randint(0, 256, (60, 28, 28))
    np.testing.assert_array_equal(np.concatenate([X_train, X_val])[:, 0] * 256, images)


def test_mnist_is_read_from_a_folder_or_from_the_current_one(data, folder, monkeypatch, capsys):
    check(data.load_dataset(folder))
    monkeypatch.chdir(folder)
    check(data.load_dataset())
    assert "MNIST from folder ." in capsys.readouterr().out


def corrupted(folder, file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def shortened(folder, file):
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes())[:-100]))


def replaced(folder, file):
    file.write_bytes(b"<html>")


def removed(folder, file):
    file.unlink()


def labels(*values):
    return lambda folder, file: write_idx(
        folder / file.name.replace("images-idx3", "labels-idx1"), np.array(values)
    )


def few_rows(n_rows):
    def damage(folder, file):
        write_idx(file, np.zeros((n_rows, 28, 28)))
        labels(*[0] * n_rows)(folder, file)

    return damage


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("train", corrupted, "{} is (damaged|no idx file)"),
        ("train", shortened, "{} is (damaged|no idx file)"),
        ("t10k", replaced, "{} is (damaged|no idx file)"),
        ("t10k", removed, "t10k-images"),
        ("t10k", labels(*range(10), *range(9)), "t10k-images.* does not go with .*t10k-labels"),
        ("t10k", labels(*range(20)), "labels from 0 to 9, got 20 up to 19"),
        ("train", few_rows(5), "{} has too few images: 5, .* 6 are"),
        ("t10k", few_rows(0), "{} has too few images: 0, .* 1 are"),
    ],
)
def test_what_is_wrong_with_files_is_told(data, folder, name, damage, said):
    file = folder / f"{name}-images-idx3-ubyte.gz"
    damage(folder, file)
    with pytest.raises((ValueError, FileNotFoundError), match=said.format(file)):
        data.load_dataset(folder)


@contextlib.contextmanager
def served(folder):
    """Serve a folder's files to this machine; yield the address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache; and no file of the current folder, nor a proxy, in the way."""
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("SYNKHRONOS_DATA", str(cache))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(elsewhere)
    return cache


def test_a_download_is_checked_and_kept(data, folder, cache, monkeypatch, capsys):
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    monkeypatch.setattr(data, "CHECKSUMS", {name: sums[name] for name in data.CHECKSUMS})
    with served(folder) as address:
        monkeypatch.setattr(data, "MIRROR", address)
        check(data.load_dataset())
        assert {file.name for file in cache.iterdir()} == set(sums)
    check(data.load_dataset())  # the server is gone
    assert capsys.readouterr().out.count("MNIST from the cache") == 2


def test_a_download_with_another_checksum_is_refused(data, folder, cache, monkeypatch):
    with served(folder) as address:
        monkeypatch.setattr(data, "MIRROR", address)
        with pytest.raises(ValueError, match=r"SHA256 hash of .*train-images-idx3-ubyte.gz"):
            data.load_dataset()
    assert not list(cache.iterdir())


def test_without_a_network_digits_stand_in_and_it_is_said(data, cache, monkeypatch, capsys):
    monkeypatch.setattr(data, "MIRROR", "http://127.0.0.1:9/")
    dataset = data.load_dataset()
    out = capsys.readouterr().out
    assert "could not be downloaded" in out and "IN PLACE OF MNIST" in out
    assert [array.shape for array in dataset[::2]] == [(n, 1, 28, 28) for n in (1079, 359, 359)]
    for images, labels in zip(dataset[::2], dataset[1::2]):
        assert images.dtype == "float32" and images.min() >= 0 and 0.9 < images.max() < 1
        assert set(labels) == set(range(10))
