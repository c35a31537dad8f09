"""Batches that a process of its own reads and prepares, and what they are made of."""

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from support.images import places
from support.leaks import nothing_left
from support.waiting import LONG, wait_until

from synkhronos.rules import array_files, loading
from synkhronos.rules.compatible.models.data import utils
from synkhronos.rules.loading import Loader
from synkhronos.rules.preprocessing import Preprocess, crop_and_mirror

SHAPE = (2, 3, 3, 4)  # of batches, c01b; those in files are larger
PREPARE = Preprocess(mean=[10.0, 20.0], scale=255.0, std=[0.5, 0.25], cropsize=3, flag_batch=False)


def images(number):
    return np.random.RandomState(number).randint(0, 256, (2, 6, 5, 4)).astype("uint8")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    names = [folder / f"{i}.npy" for i in range(4)] + [folder / "4.hkl", folder / "5.npz"]
    for i, name in enumerate(names[:4]):
        np.save(name, images(i))
    try:
        array_files.write_hickle(names[4], images(4))
    except ImportError:
        names[4] = folder / "4.npy"
        np.save(names[4], images(4))
    np.savez(names[5], images(5))
    return names


@pytest.fixture(scope="module")
def loader(files):
    with Loader(files, SHAPE, preprocess=PREPARE) as loader:
        yield loader


def prepared(number, position, mode="train", seed=(0,)):
    random = np.random.RandomState([*seed, position])
    return PREPARE(images(number), mode, random)


def all_of(loader, number):
    return [loader.next().copy() for _ in range(number)]


def test_batches_come_in_order_from_files_of_all_kinds(loader):
    order = [3, 0, 5, 4, 2]
    loader.begin(order, "train", seed=(1, 2, 3))
    for position, number in enumerate(order):
        got = loader.next()
        assert got.dtype == "float32" and got.shape == SHAPE
        np.testing.assert_array_equal(got, prepared(number, position, seed=(1, 2, 3)))
    with pytest.raises(IndexError, match="No batch is left"):
        loader.next()


def test_a_resumed_epoch_sees_the_same_batches(loader):
    loader.begin([0, 1, 2, 3], "train", seed=(7, 1, 0))
    straight = all_of(loader, 4)
    loader.begin([0, 1, 2, 3], "train", seed=(7, 1, 0), start=2)
    np.testing.assert_array_equal(all_of(loader, 2), straight[2:])
    loader.begin([0, 1, 2, 3], "train", seed=(7, 2, 0))
    assert (np.array(all_of(loader, 4)) != straight).any()


def test_validation_is_not_random(loader):
    for seed in (1, 2):
        loader.begin([1, 1], "val", seed=seed)
        for got in all_of(loader, 2):
            np.testing.assert_array_equal(got, prepared(1, 0, "val"))


def test_what_is_left_of_an_order_is_dropped(loader):
    loader.begin([0, 1, 2, 3, 4])
    loader.next()
    loader.begin([5, 4])
    np.testing.assert_array_equal(loader.next(), prepared(5, 0))
    loader.begin([])
    with pytest.raises(IndexError, match="No batch is left"):
        loader.next()


def test_two_batches_are_read_while_the_rank_computes(loader, files, tmp_path):
    """The third one is read when the first one has been given back."""
    loader.begin([0, 1, 2])
    first = loader.next()
    kept = first.copy()
    held, deadline = loader._held, time.monotonic() + LONG
    while 1 not in loader._ready:
        loader._take(loader._answer(deadline))
    time.sleep(0.1)
    np.testing.assert_array_equal(first, kept)  # not written over
    assert set(loader._ready) == {1} and loader._ready[1] != held
    second = loader.next()
    while 2 not in loader._ready:
        loader._take(loader._answer(deadline))
    np.testing.assert_array_equal(first, prepared(2, 2))  # the same half
    np.testing.assert_array_equal(second, prepared(1, 1))


def test_a_file_that_can_not_be_read_is_an_error_that_names_it(files, tmp_path):
    bad, other = tmp_path / "bad.npy", tmp_path / "other.npy"
    bad.write_bytes(b"no array")
    np.save(other, np.zeros((3, 3)))
    names = [files[0], bad, tmp_path / "missing.npy", other]
    with nothing_left(), Loader(names, images(0).shape, "uint8") as loader:
        for number, said in [
            (1, "bad.npy failed: ValueError"),
            (2, "missing.npy failed: FileNotFoundError"),
            (3, r"other.npy failed: .*must have the shape \(2, 6, 5, 4\), got \(3, 3\)"),
        ]:
            loader.begin([0, number, 0])
            np.testing.assert_array_equal(loader.next(), images(0))
            with pytest.raises(RuntimeError, match=said):
                loader.next()
        loader.begin([0])  # it goes on
        np.testing.assert_array_equal(loader.next(), images(0))


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 6, "signal 40")]
)
def test_a_loader_that_dies_is_an_error_that_names_the_file(files, number, name):
    with nothing_left():
        loader = Loader(files, SHAPE, preprocess=PREPARE)
        loader.begin([0, 1, 2, 3])
        loader.next()
        os.kill(loader.pid, number)
        with pytest.raises(RuntimeError, match=rf"has ended by {name} while it read .*\.npy"):
            for _ in range(3):
                loader.next()
        with pytest.raises((RuntimeError, IndexError)):
            loader.next()
        with pytest.raises(RuntimeError, match="closed"):
            loader.begin([0])
        loader.close()
        del loader


def test_a_loader_that_is_late_is_an_error(files):
    with Loader(files, SHAPE, preprocess=PREPARE, timeout=0.3) as loader:
        loader.timeout = 60
        loader.begin([0])
        loader.next()  # it has started
        loader.timeout = 0.3
        os.kill(loader.pid, signal.SIGSTOP)
        loader.begin([1])
        with pytest.raises(TimeoutError, match=r"has not read .*1\.npy after 0\.3 seconds"):
            loader.next()
        os.kill(loader.pid, signal.SIGCONT)
        np.testing.assert_array_equal(loader.next(), prepared(1, 0))


def test_close_ends_it_and_may_be_called_again(files):
    with nothing_left():
        loader = Loader(files, SHAPE, preprocess=PREPARE)
        process = psutil.Process(loader.pid)
        loader.begin([0, 1])
        view = loader.next()
        loader.close()
        loader.close()
        assert not process.is_running()
        np.testing.assert_array_equal(view, prepared(0, 0))  # its memory is there while it is
        with pytest.raises(RuntimeError, match="This loader is closed"):
            loader.begin([0])
        del loader, view


def test_a_loader_that_is_dropped_ends(files):
    with nothing_left():
        Loader(files, SHAPE, preprocess=PREPARE)


OF_A_RANK = """
import sys, time
from synkhronos.rules.loading import Loader
loader = Loader([sys.argv[1]], (2, 6, 5, 4), "uint8")
loader.begin([0])
loader.next()
print(loader.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_rank(files):
    rank = subprocess.Popen(
        [sys.executable, "-c", OF_A_RANK, str(files[0])], stdout=subprocess.PIPE, text=True
    )
    with rank:
        loader = psutil.Process(int(rank.stdout.readline()))
        loader.send_signal(signal.SIGINT)  # a Ctrl-C goes to all processes of a terminal
        loader.send_signal(signal.SIGUSR1)
        rank.kill()
    wait_until(lambda: not loader.is_running(), what=lambda: "the loader is left")


def test_it_loads_no_mpi_and_no_theano():
    text = (
        "import sys, synkhronos.rules.loading\nprint(sorted({'theano', 'mpi4py'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "use, kind, said",
    [
        (lambda loader: loader.begin([6]), ValueError, "order must be from 0 to 5, got 6"),
        (lambda loader: loader.begin([0], "test"), ValueError, "mode must be 'train' or 'val'"),
        (lambda loader: loader.begin([0], start=2), ValueError, "start must be from 0 to 1"),
        (lambda loader: Loader([], (1,)), ValueError, "names must have one file or more"),
        (
            lambda loader: Loader(["a.npy"], (1,), preprocess=abs),
            TypeError,
            "preprocess must be a Preprocess or None",
        ),
    ],
)
def test_what_it_can_not_read_is_refused(loader, use, kind, said):
    with nothing_left(), pytest.raises(kind, match=said):
        use(loader)


# What is done with images.


@pytest.mark.parametrize("order", ["c01b", "bc01"])
def test_means_and_deviations(order):
    x = images(0).astype("float64")  # c01b
    mean, std = np.random.RandomState(1).rand(2, 6, 5), [0.5, 0.25]
    expected = (x - mean[..., None]) / 255 / np.reshape(std, (2, 1, 1, 1))
    given = x if order == "c01b" else x.transpose(3, 0, 1, 2)
    found = Preprocess(mean=mean, scale=255, std=std, order=order)(given, "train", None)
    found = found if order == "c01b" else found.transpose(1, 2, 3, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    again = Preprocess(**Preprocess(mean=mean, std=std, order=order).as_plain())
    np.testing.assert_array_equal(again.mean, mean)


@pytest.mark.parametrize("flag_batch", [True, False])
@pytest.mark.parametrize("order", ["c01b", "bc01"])
def test_crops_and_mirror_images(order, flag_batch):
    """All random places and both directions come, and the mirror is along columns."""
    x = np.arange(30 * 2 * 6 * 5).reshape(30, 2, 6, 5)
    given = x.transpose(1, 2, 3, 0) if order == "c01b" else x
    random, seen = np.random.RandomState(3), set()
    for _ in range(200 if flag_batch else 8):
        found = crop_and_mirror(given, "train", True, flag_batch, (4, 3), random, order)
        found = found.transpose(3, 0, 1, 2) if order == "c01b" else found
        assert found.shape == (30, 2, 4, 3) and found.dtype == x.dtype
        there = places(found, x)
        assert len(set(there)) == 1 or not flag_batch
        seen |= set(there)
    assert seen == {(i, j, mirrored) for i in range(3) for j in range(3) for mirrored in (0, 1)}


@pytest.mark.parametrize("mode, rand_crop", [("val", True), ("train", False)])
def test_the_center_is_not_random_and_no_seed_is_set(mode, rand_crop):
    """Each call seeded NumPy's global random state."""
    x = np.arange(2 * 5 * 7 * 3).reshape(2, 5, 7, 3)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    found = utils.crop_and_mirror(x, mode, rand_crop, True, 3)
    np.testing.assert_array_equal(found, x[:, 1:4, 2:5])
    assert (np.random.get_state()[1] == before).all()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("test",), "mode must be"),
        (("val", True, True, 6), r"cropsize must be inside the images' \(5, 7\), got 6"),
        (("val", True, True, 3, None, "b01c"), "order must be"),
    ],
)
def test_crops_that_do_not_fit_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        crop_and_mirror(np.zeros((2, 5, 7, 3)), *arguments)


# theanompi.models.data.utils


def test_batches_of_cifar_are_unpickled(tmp_path):
    data = np.arange(12, dtype="uint8").reshape(2, 6)
    batch = {b"data": data, b"labels": [1, 2], b"batch_label": b"training batch 1 of 5"}
    path = tmp_path / "data_batch_1"
    for each in (batch, {key.decode(): value for key, value in batch.items()}):
        path.write_bytes(pickle.dumps(each, protocol=2))
        found = utils.unpickle(path)
        assert found["labels"] == [1, 2]
        np.testing.assert_array_equal(found["data"], data)
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="must hold a dict, but holds a list"):
        utils.unpickle(path)
    path.write_bytes(pickle.dumps({"data": os.system}))
    with pytest.raises(ValueError, match=r"posix\.system"):
        utils.unpickle(path)
    with pytest.raises(FileNotFoundError):
        utils.unpickle(tmp_path / "none")


@pytest.mark.parametrize("number, size", [(1, 1), (5, 2), (6, 3), (2, 4), (1, 4)])
def test_batches_are_extended_to_a_multiple(number, size):
    imgs, labels = utils.extend_data(0, size, [*range(number)], [*"abcdefgh"[:number]])
    assert len(imgs) == len(labels) == -(-number // size) * size
    assert imgs[:number] == [*range(number)] and set(imgs) == set(range(number))
    assert [*"abcdefgh"[:number]] == labels[:number]
    assert imgs[number:] == ([*range(number)] * size)[-(len(imgs) - number) or number * size :]


def test_batches_that_can_not_be_extended_are_refused():
    with pytest.raises(ValueError, match="equally many batches, at least one, got 2 and 1"):
        utils.extend_data(0, 2, [1, 2], [1])
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        utils.extend_data(2, 2, [1], [1])


def test_the_command_is_this_python():
    assert loading.COMMAND[0] == sys.executable
