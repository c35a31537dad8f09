"""Data sets of model files: published formats, made-up data, fixed splits, shards."""

import gc
import gzip
import os
import pickle
import struct

import numpy as np
import pytest

from synkhronos.rules import array_files
from synkhronos.rules.compatible.models.data import (
    Cifar10_data,
    ImageNet_data,
    IMDB_data,
    MNIST_data,
    sources,
)

KINDS = [Cifar10_data, MNIST_data, IMDB_data, ImageNet_data]


@pytest.fixture(autouse=True)
def chosen(monkeypatch, tmp_path):
    """Return a function that chooses the data; at first an empty folder."""
    for name in ("SYNKHRONOS_MADE_BATCHES", "SYNKHRONOS_STREAM", "SYNKHRONOS_SEED"):
        monkeypatch.delenv(name, raising=False)

    def choose(data=str(tmp_path), **others):
        for name, value in {"data": data, **others}.items():
            monkeypatch.setenv(f"SYNKHRONOS_{name.upper()}", str(value))

    choose()
    return choose


def made(kind, chosen, batches=7, rows=3, **kwargs):
    chosen("made", made_batches=batches)
    kwargs.update({"size": 16} if kind is ImageNet_data else {})
    data = kind(**kwargs)
    data.batch_data(rows)
    return data


def numbers_of_shards(data, size, epoch=0, mode="train"):
    found = []
    for rank in range(size):
        data.shuffle_data(mode, common_seed=epoch)
        data.shard_data(mode, rank, size)
        found.append(getattr(data, f"{mode}_shard").tolist())
    return found


# Shards.


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_a_partition_with_no_batch_twice_and_none_left_out(kind, chosen):
    """Theirs were seeded by time and process id, so they overlapped and missed data."""
    data = made(kind, chosen)
    for size in (1, 2, 3, 7):
        shards = numbers_of_shards(data, size)
        assert sorted(each for shard in shards for each in shard) == list(range(7))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_mnist_is_sharded_too(chosen):
    """Theirs was not: all ranks saw the same batches."""
    data = made(MNIST_data, chosen)
    seen = []
    for rank in range(2):
        data.shard_data("train", rank, 2)
        assert data.n_batch_train == len(data.train_img_shard) == (4, 3)[rank]
        seen += [images.tobytes() for images in data.train_img_shard]
    assert len(set(seen)) == 7


def test_the_order_depends_on_seed_and_epoch_and_is_that_of_all_ranks(chosen):
    """Theirs ignored common_seed."""
    one, other = made(Cifar10_data, chosen), made(Cifar10_data, chosen)
    assert numbers_of_shards(one, 2, epoch=3) == numbers_of_shards(other, 2, epoch=3)
    orders = [str(numbers_of_shards(one, 1, epoch)) for epoch in range(4)]
    assert len(set(orders)) == 4
    another = made(Cifar10_data, chosen, seed=1)
    assert numbers_of_shards(another, 1) != numbers_of_shards(one, 1)
    chosen("made", seed=1)
    assert numbers_of_shards(Cifar10_data_of(7), 1) == numbers_of_shards(another, 1)


def Cifar10_data_of(batches):
    data = Cifar10_data()
    data.batch_data(3)
    assert len(data.train_img) == batches
    return data


def test_asynchronous_workers_see_different_orders(chosen):
    orders = set()
    for stream in range(3):
        chosen("made", stream=stream)
        orders.add(str(numbers_of_shards(made(Cifar10_data, chosen), 1)))
    assert len(orders) == 3


def test_an_epoch_that_is_no_whole_number_is_taken(chosen):
    """GOSGD's epochs were floats, at which theirs raised TypeError."""
    data = made(ImageNet_data, chosen)
    assert numbers_of_shards(data, 1, epoch=2.6) == numbers_of_shards(data, 1, epoch=2)


def test_the_order_is_kept_in_an_array(chosen):
    one, other = made(MNIST_data, chosen), made(MNIST_data, chosen)
    numbers_of_shards(one, 2, epoch=5)
    other.train_order, other.train_shard = one.train_order, one.train_shard
    for a, b in zip(one.train_img_shard, other.train_img_shard):
        np.testing.assert_array_equal(a, b)
    assert all(type(each) is np.ndarray for each in (one.train_order, one.train_shard))


def test_validation_keeps_its_order(chosen):
    data = made(Cifar10_data, chosen, batches=16)
    assert numbers_of_shards(data, 2, epoch=9, mode="val") == [[0, 2], [1, 3]]
    assert data.n_batch_val == 2


def test_a_number_of_batches_that_is_set_is_a_bound(chosen):
    data = made(Cifar10_data, chosen)
    data.n_batch_train = 2
    for rank, size, expected in ((0, 1, 2), (0, 2, 2), (1, 7, 1)):
        data.shard_data("train", rank, size)
        assert data.n_batch_train == expected
    data.n_batch_val = 0
    assert data.n_batch_val == 0


def test_extend_data_repeats_the_last_batches(chosen):
    data = made(Cifar10_data, chosen)
    before = list(data.train_img)
    data.extend_data(0, 3), data.extend_data(0, 3)
    assert len(data.train_img) == len(data.train_labels) == 9 and len(data.val_img) == 3
    assert data.train_img[7] is before[5] and data.train_img[8] is before[6]  # as in utils
    assert [len(shard) for shard in numbers_of_shards(data, 3)] == [3, 3, 3]


def test_what_comes_too_early_or_is_wrong_is_refused(chosen):
    chosen("made")
    data = Cifar10_data()
    for early in (data.shuffle_data, data.shard_data, lambda: data.n_batch_train):
        with pytest.raises(RuntimeError, match="call batch_data"):
            early()
    with pytest.raises(ValueError, match="file_batch_size must be at least 1, got 0"):
        data.batch_data(0)
    data.batch_data(4)
    with pytest.raises(ValueError, match="mode must be 'train' or 'val', got 'test'"):
        data.shuffle_data("test")
    with pytest.raises(ValueError, match="rank must be from 0 to 1 for size=2, got 2"):
        data.shard_data("train", 2, 2)
    with pytest.raises(ValueError, match="8 batches can't be divided among 9 ranks"):
        data.shard_data("train", 0, 9)


# Made-up data, and digits.


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_data_are_the_same_in_all_processes_and_as_many_as_asked_for(kind, chosen):
    one, other = made(kind, chosen, 5), made(kind, chosen, 5)
    assert one.n_batch_train == 5 and one.n_batch_val == 1
    for mode in ("train", "val"):
        for a, b in zip(one.batch(mode, 0), other.batch(mode, 0)):
            np.testing.assert_array_equal(a, b)
        assert one.batch(mode, 0)[1].dtype == np.int64


@pytest.mark.parametrize("kind", [Cifar10_data, MNIST_data])
def test_a_class_of_made_up_images_can_be_learned(kind, chosen):
    data = made(kind, chosen, batches=20, rows=20)
    x, y, x_val, y_val, mean = data.rawdata[:5]
    are_bytes = kind is Cifar10_data
    assert x.dtype == (np.uint8 if are_bytes else np.float32) and mean.dtype == np.float32
    assert x.min() < 0.1 and x.max() > 0.9 * (255 if are_bytes else 1)
    assert mean.shape == ((3, 32, 32, 1) if are_bytes else (1, 784))
    np.testing.assert_allclose(mean.ravel(), x.mean(axis=0).ravel(), rtol=1e-4)
    x, x_val = (each.reshape(len(each), -1).astype("float32") for each in (x, x_val))
    centres = np.stack([x[y == each].mean(axis=0) for each in range(10)])
    found = ((x_val[:, None] - centres) ** 2).sum(2).argmin(axis=1)
    assert np.mean(found == y_val) > 0.95


def test_digits_have_the_shape_of_the_data_set(chosen):
    pytest.importorskip("sklearn")
    chosen("digits")
    kinds = ((Cifar10_data, (3, 32, 32), 255), (MNIST_data, (784,), 1))
    for kind, shape, largest in kinds:
        data = kind()
        x, y, x_val, y_val = data.rawdata[:4]
        assert x.shape == (1438, *shape) and x_val.shape == (359, *shape)
        assert x.max() == largest and set(y) == set(y_val) == set(range(10))
        data.batch_data(100)
        assert data.train_img[0].shape == (100, data.channels, data.height, data.width)
        assert [len(labels) for labels in data.train_labels] == 14 * [100] + [38]
    data = IMDB_data(n_words=514)
    data.batch_data(100)
    (words, mask), _ = data.batch("train", 0)
    assert words.shape == (16, 100) and mask.all() and data.n_class == 10
    assert words.min() >= 2 and words[8:].min() >= 258 and words.max() < 514
    with pytest.raises(ValueError, match="not for ImageNet_data"):
        ImageNet_data()


@pytest.mark.parametrize("kind", [Cifar10_data, MNIST_data])
def test_a_model_may_scale_the_rows_before_they_are_divided_into_batches(kind, chosen):
    chosen("made", made_batches=3)
    data = kind(False)
    data.rawdata[0] = data.rawdata[0] / np.float32(500)
    data.batch_data(10)
    assert len(data.train_img) == 3 and len(data.rawdata[0]) == 30
    batches = [next(data.batches_train) for _ in range(6)]
    assert all(
        images.max() < 0.6 and len(images) == len(labels) == 10 for images, labels in batches
    )
    assert len({images.tobytes() for images, _ in batches[:3]}) == 3
    assert next(data.batches_val)[0].shape == data.val_img[0].shape


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_bad_number_of_batches_is_refused(chosen, text):
    chosen("made", made_batches=text)
    with pytest.raises(ValueError, match="SYNKHRONOS_MADE_BATCHES must be a whole number"):
        MNIST_data()


# Published formats.


@pytest.fixture
def cifar(tmp_path):
    """Write the five files of CIFAR-10, with 4 rows each; return all images and labels."""
    random = np.random.RandomState(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    images, labels = random.randint(256, size=(20, 3072)).astype("uint8"), list(range(20))
    for number in range(5):
        rows = slice(4 * number, 4 * number + 4)
        # Python 2 wrote them, so keys are bytes, unless they are read as text.
        content = {b"data": images[rows], b"labels": labels[rows], b"batch_label": b"batch"}
        with open(folder / f"data_batch_{number + 1}", "wb") as file:
            pickle.dump(content, file, protocol=2)
    return images, labels


def test_cifar_is_read_and_split_the_same_in_all_processes(cifar):
    """Theirs was split by an unseeded permutation: one rank's validation rows trained another."""
    np.random.seed(1)
    x, y, x_val, y_val, _ = Cifar10_data().rawdata
    np.random.seed(2)
    again = Cifar10_data(seed=5).rawdata
    assert y.tolist() == again[1].tolist() and y_val.tolist() == again[3].tolist()
    assert len(y) == 16 and sorted([*y, *y_val]) == cifar[1]
    for images, labels in ((x, y), (x_val, y_val)):
        np.testing.assert_array_equal(images, cifar[0][labels].reshape(-1, 3, 32, 32))
        assert images.dtype == np.uint8


def test_a_missing_file_of_cifar_is_named_with_its_page(cifar, tmp_path):
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3 .*cs\.toronto\.edu.*made"):
        Cifar10_data()


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps([1]), pickle.dumps({"data": np.zeros(5, "uint8")})]
)
def test_a_damaged_file_of_cifar_is_refused(cifar, tmp_path, content):
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match="data_batch_2 is no file of CIFAR-10"):
        Cifar10_data()


def write_idx(file, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "wb") as stream:
        stream.write(header + array.astype("uint8").tobytes())


@pytest.fixture(params=[("", ""), ("mnist", ".gz")], ids=["plain", "gzipped"])
def mnist(request, tmp_path):
    folder, end = tmp_path / request.param[0], request.param[1]
    folder.mkdir(exist_ok=True)
    random = np.random.RandomState(0)
    arrays = []
    for part, rows in (("train", 6), ("t10k", 3)):
        arrays += [random.randint(256, size=(rows, 28, 28)), random.randint(10, size=rows)]
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays[-2:]):
            write_idx(folder / f"{part}-{kind}-ubyte{end}", array)
    return arrays


def test_mnist_is_read_from_idx_files_and_scaled_once(mnist):
    """LSGAN's was divided by 255 twice."""
    *found, mean, test_images, test_labels = MNIST_data().rawdata
    assert test_images is found[2] and test_labels is found[3]
    for images, expected in zip(found[::2], mnist[::2]):
        expected = expected.reshape(-1, 784) / np.float32(255)
        np.testing.assert_allclose(images, expected, rtol=1e-6)
        assert images.max() > 0.9
    for labels, expected in zip(found[1::2], mnist[1::2]):
        np.testing.assert_array_equal(labels, expected)
    assert mean.shape == (1, 784)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"\0\0\x08\x01\0\0\0\6" + bytes(6), "no idx file of bytes in 3 dimensions"),
        (b"\0\0\x08\x03" + 12 * b"\xff", "more than 1073741824 bytes"),
        (b"\0\0\x08\x03\0\0\0\6\0\0\0\x1c\0\0\0\x1c" + bytes(5), "not the 4704 bytes"),
        (b"\0\0\x08\x03\0\0\0\6\0\0\0\1\0\0\0\1" + bytes(6), "28 x 28"),
    ],
)
def test_a_wrong_idx_file_is_refused(tmp_path, content, said):
    for name in ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"):
        (tmp_path / name).write_bytes(content)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(6))
    with pytest.raises(ValueError, match=said):
        MNIST_data()


SENTENCES = [[5, 6, 7], [8], [9, 12000]] + [[number] for number in range(10, 47)]


@pytest.mark.parametrize("name", ["imdb.pkl", "imdb.pkl.gz", "imdb.npz"])
def test_imdb_is_read_from_the_tutorials_pickle_and_from_keras(tmp_path, name):
    labels = [number % 2 for number in range(40)]
    file = tmp_path / name
    if name.endswith("npz"):
        sentences = np.empty(40, object)
        sentences[:] = SENTENCES
        np.savez(file, x_train=sentences, y_train=np.array(labels))
    else:
        with (gzip.open if name.endswith("gz") else open)(file, "wb") as stream:
            pickle.dump((SENTENCES, labels), stream, protocol=2)
            pickle.dump((SENTENCES, labels), stream, protocol=2)
    data = IMDB_data(n_words=10000, maxlen=4)
    found = data.rawdata[0] + data.rawdata[2]
    assert sorted(found) == sorted(SENTENCES) and len(data.rawdata[2]) == 2
    expected = {str(words): label for words, label in zip(SENTENCES, labels)}
    for words, label in zip(found, [*data.rawdata[1], *data.rawdata[3]]):
        assert expected[str(words)] == label
    data.batch_data(38)
    (words, mask), _ = data.batch("train", 0)
    rows = data.rawdata[0]
    for number, sentence in enumerate(rows):
        n = len(sentence)
        assert words[:n, number].tolist() == [w if w < 10000 else 1 for w in sentence]
        assert mask[:n, number].all() and not mask[n:, number].any()


def test_imdb_that_is_something_else_is_refused(tmp_path):
    (tmp_path / "imdb.pkl").write_bytes(pickle.dumps(3))
    with pytest.raises(ValueError, match=r"imdb\.pkl is not IMDB"):
        IMDB_data()
    (tmp_path / "imdb.pkl").write_bytes(pickle.dumps((SENTENCES, [0] * 40)))
    with pytest.raises(ValueError, match="Take a greater maxlen"):
        IMDB_data(maxlen=1)


def write_imagenet(folder, end, rows=4):
    random = np.random.RandomState(0)
    base = folder / "prepdata_1000cat_4b"
    for part, files in (("train", 3), ("val", 2)):
        (base / f"{part}_hkl_4b").mkdir(parents=True)
        for number in range(files):
            file = base / f"{part}_hkl_4b" / f"{number:04}{end}"
            images = random.randint(256, size=(3, 8, 8, rows)).astype("uint8")
            if end == ".npy":
                np.save(file, images)
            else:
                array_files.write_hickle(file, images)
    for name, array in {
        "labels/train_labels": np.arange(12),
        "labels/val_labels": np.arange(8),
        "misc/img_mean": np.full((3, 8, 8), 100.0),
    }.items():
        (base / name).parent.mkdir(exist_ok=True)
        np.save(base / name, array)
    return base


@pytest.mark.parametrize("end", [".npy", ".hkl"])
def test_imagenet_is_read_from_a_file_for_each_batch(tmp_path, end):
    if end == ".hkl":
        pytest.importorskip("h5py")
    base = write_imagenet(tmp_path, end)
    data = ImageNet_data(file_batch_size=4)
    data.batch_data(4)
    assert (data.n_batch_train, data.n_batch_val, data.height) == (3, 2, 8)
    images, labels = data.batch("train", 1)
    np.testing.assert_array_equal(labels, [4, 5, 6, 7])
    np.testing.assert_array_equal(images, array_files.read(base / "train_hkl_4b" / f"0001{end}"))
    prepared, _ = data.prepared("val", 1, crop=6)
    raw = data.batch("val", 1)[0][:, 1:7, 1:7].astype("float32")
    std = np.array([0.229, 0.224, 0.225]).reshape(3, 1, 1, 1)
    np.testing.assert_allclose(prepared, (raw - 100) / 255 / std, rtol=1e-4, atol=1e-6)


def test_what_imagenet_lacks_is_named(tmp_path):
    base = write_imagenet(tmp_path, ".npy", rows=3)
    with pytest.raises(FileNotFoundError, match="prepdata_1000cat_128b"):
        ImageNet_data()
    data = ImageNet_data(file_batch_size=4)
    with pytest.raises(ValueError, match="3 files of 8 images have 12 labels"):
        data.batch_data(8)
    data.batch_data(4)
    with pytest.raises(ValueError, match="has 3 images, but 4 labels"):
        data.prepared("train", 0, crop=6)
    (base / "labels" / "val_labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"val_labels\.npy is missing\. Get it from"):
        ImageNet_data(file_batch_size=4)
    for file in (base / "train_hkl_4b").iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no files \.hkl or \.npy"):
        ImageNet_data(file_batch_size=4)


@pytest.mark.parametrize("of_batch", [True, False])
def test_parts_are_cut_out_and_mirrored_at_random(chosen, of_batch):
    data = made(ImageNet_data, chosen, rows=6)
    raw, _ = data.batch("train", 0)
    as_is = {"mean": None, "scale": 1.0, "std": None}
    got, _ = data.prepared("train", 0, 12, True, of_batch, epoch=1, **as_is)
    again, _ = data.prepared("train", 0, 12, True, of_batch, epoch=1, **as_is)
    np.testing.assert_array_equal(got, again)
    others = [data.prepared("train", 0, 12, True, of_batch, epoch) for epoch in range(3)]
    assert len({images.tobytes() for images, _ in others}) == 3
    places = set()
    for row in range(6):
        for top in range(5):
            for left in range(5):
                part = raw[:, top : top + 12, left : left + 12, row]
                for flip, each in enumerate((part, part[:, :, ::-1])):
                    if np.array_equal(each, got[..., row]):
                        places.add((top, left, flip))
    assert len(places) == 1 if of_batch else len(places) > 1


@pytest.mark.parametrize("source", ["made", "files"])
def test_a_loader_gives_the_same_batches_from_any_one_on(chosen, tmp_path, source):
    if source == "made":
        data = made(ImageNet_data, chosen, batches=5, rows=4)
    else:
        write_imagenet(tmp_path, ".npy")
        data = ImageNet_data(file_batch_size=4)
        data.batch_data(4)
    plan = [("train", number, epoch) for epoch in (0, 1) for number in range(3)]
    plan += [("val", 0, 1), ("train", 1, 2), ("train", 2, 2)]  # the last epoch was resumed

    def run():
        found = []
        for mode, number, epoch in plan:
            data.shuffle_data(mode, epoch)
            data.shard_data(mode, 0, 1)
            images, labels = data.prepared(mode, number, 6, True, False, epoch)
            found.append((images.copy(), labels))
        return found

    expected = run()
    data.spawn_load()
    data.para_load_init(None, 6, 6, True, False)
    data.para_load_init(None, 6, 6, True, False)  # is there already
    try:
        for (images, labels), (other_images, other_labels) in zip(run(), expected):
            np.testing.assert_array_equal(images, other_images)
            np.testing.assert_array_equal(labels, other_labels)
    finally:
        data.para_load_close()
        data.para_load_close()
    assert not data.para_load


def test_made_up_images_are_in_files_that_go_with_the_data(chosen):
    data = made(ImageNet_data, chosen)
    names = [*data.train_img, *data.val_img]
    images = [array_files.read(name) for name in names]
    assert len({each.tobytes() for each in images}) == 8
    np.testing.assert_array_equal(data.batch("val", 0)[0], images[-1])
    del data
    gc.collect()
    assert not any(os.path.exists(name) for name in names)


# Folders.


def test_the_folder_is_that_of_the_variable_or_data_at_home(chosen, tmp_path, monkeypatch):
    assert sources.folder() == tmp_path
    monkeypatch.setenv("HOME", "/somewhere")
    chosen("")
    assert str(sources.folder()) == "/somewhere/data"
    for kind in (Cifar10_data, MNIST_data, IMDB_data):
        with pytest.raises(FileNotFoundError, match=r"not in /somewhere/data: .* https?://"):
            kind()


class Harmful:
    def __reduce__(self):
        return os.system, ("true",)


def test_objects_of_keras_that_could_run_code_are_refused(tmp_path):
    sentences = np.empty(2, object)
    sentences[:] = [[3, 4], Harmful()]
    np.savez(tmp_path / "imdb.npz", x_train=sentences, y_train=np.zeros(2))
    with pytest.raises(ValueError, match=r"it names posix\.system"):
        IMDB_data()
