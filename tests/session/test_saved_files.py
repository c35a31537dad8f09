"""One behaviour of all files with arrays: whole or not there, checked before anything is set."""

import io
import json
import os
import random
import resource
import stat
import zipfile

import numpy as np
import pytest
import theano
from support.layouts import Layout

import synkhronos as synk
from synkhronos.extensions import update_rules
from synkhronos.parameter_server import saving
from synkhronos.parameter_server.updaters import rule_updater
from synkhronos.rules import snapshots
from synkhronos.rules.recorder import Recorder

LAYOUTS = [Layout(2)]
START, OTHER = np.full(1000, 7.0), np.full(1000, 8.0)
pytestmark = pytest.mark.usefixtures("quickly_compiled", "ranks")


class Checkpoint:
    file, what = "run.npz", "a checkpoint"

    def __init__(self):
        self.w = theano.shared(START, "w")

    def set(self, value):
        synk.broadcast(self.w, value)

    def get(self):
        return self.w.get_value()

    def save(self, path):
        synk.save(path, self.w)

    def load(self, path):
        synk.load(path, self.w)


class Snapshot(Checkpoint):
    file, what = "snapshot_0003.npz", "a snapshot"

    def __init__(self):
        super().__init__()
        self.params, self.data = [self.w], None
        self.recorder = Recorder(None, 2, "m", False)
        self.history = snapshots.History(self)

    def save(self, path):
        states = [self.history.capture(self.recorder)]
        snapshot = snapshots.Snapshot("BSP", 3, 0, 20, {}, states)
        assert snapshots.write(str(path.parent), snapshot) == str(path)

    def load(self, path):
        self.history.restore(snapshots.read_file(path).state_of(0), self.recorder, {})


class Weights:
    file, what = "weights.npz", "weights"

    def __init__(self):
        self.value = START

    def set(self, value):
        self.value = value

    def get(self):
        return self.value

    def save(self, path):
        saving.save_weights(path, {"w": self.value})

    def load(self, path):
        self.value = saving.load_weights(path, {"w": (START.shape, START.dtype)})["w"]


class States:
    file, what = "states.npz", "states of updaters"

    def __init__(self):
        self.updater = rule_updater(update_rules.momentum, learning_rate=1.0)
        self.updater.init_model("w", np.zeros(START.shape))
        self.set(START)

    def set(self, value):
        self.updater.set_states({"w": {"0 w_velocity": value}})

    def get(self):
        return self.updater.states()["w"]["0 w_velocity"]

    def save(self, path):
        saving.save_states(path, [saving.dump(self.updater)])

    def load(self, path):
        saving.restore(self.updater, saving.load_states(path)[0])


USERS = [Checkpoint, Snapshot, Weights, States]


@pytest.fixture(params=USERS, ids=lambda user: user.__name__)
def user(request):
    """Return one that writes and reads a file, with its value already other than in the file."""
    return request.param()


@pytest.fixture
def path(user, tmp_path):
    path = tmp_path / user.file
    user.save(path)
    user.set(OTHER)
    return path


def test_what_was_saved_comes_back_and_stands_alone(user, path):
    assert list(path.parent.iterdir()) == [path]
    with np.load(path, allow_pickle=False) as file:
        assert any(np.array_equal(file[name], START) for name in file.files)
        assert json.loads(str(file["about"]))["what"] == user.what
    user.load(path)
    assert np.array_equal(user.get(), START)


def archive(arrays, compression=zipfile.ZIP_STORED, more=b"", suffix=".npy"):
    """Return the bytes of an archive of arrays."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as out:
        for name, array in arrays.items():
            with out.open(f"{name}{suffix}", "w") as each:
                np.lib.format.write_array(each, np.asarray(array))
                each.write(more)
    return file.getvalue()


def damages(whole):
    with np.load(io.BytesIO(whole)) as file:
        arrays = {name: file[name] for name in file.files}
    table = arrays.pop("about")
    about, middle, single = json.loads(str(table)), len(whole) // 2, io.BytesIO()
    np.save(single, START)
    yield "cut", whole[:middle]
    yield "a bit", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    yield "empty", b""
    yield "text", b"weights\n"
    yield "no archive", b"PK no zip"
    yield "one array", single.getvalue()
    yield "a pickle", archive({"about": np.array([{}], object)})
    yield "no table", archive(arrays)
    yield "no arrays", archive({"about": table})
    yield "more bytes", archive({"about": table, **arrays}, more=b"\0")
    yield "other names", archive({"about": table, **arrays}, suffix=".txt")
    yield "no JSON", archive({"about": str(table)[:-1], **arrays})
    for other in ("[]", "{}", '{"version": 1}', "[" * 100_000, "3"):
        yield other[:20], archive({"about": other, **arrays})
    yield "version", archive({"about": json.dumps({**about, "version": 2}), **arrays})
    for key in about.keys() - {"version", "what"}:
        for value in (None, [], [[0]]):
            yield key, archive({"about": json.dumps({**about, key: value}), **arrays})


def test_a_damaged_file_is_refused_by_name_before_anything_is_set(user, path):
    whole = path.read_bytes()
    for name, data in damages(whole):
        path.write_bytes(data)
        with pytest.raises(ValueError) as caught:
            user.load(path)
        if name != "variables":  # fewer than were given are told as such
            said = f"{user.file}' can't be read: it is damaged, or does not hold {user.what}: "
            assert said in str(caught.value), name
        assert str(path) in str(caught.value) and str(caught.value).isprintable(), name
        assert np.array_equal(user.get(), OTHER), name
    path.unlink()
    with pytest.raises(FileNotFoundError):
        user.load(path)
    assert np.array_equal(user.get(), OTHER)


def test_any_other_byte_is_refused_or_harmless(user, path, seeds=range(100)):
    whole = path.read_bytes()
    for seed in seeds:
        draw = random.Random(seed)
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 4])):
            # Most of the bytes are numbers of the array; the rest is at both ends.
            at = draw.choice([draw.randrange(len(data)), draw.randrange(400), -draw.randrange(900)])
            data[at] = draw.randrange(256)
        path.write_bytes(data)
        try:
            user.load(path)
        except ValueError:
            assert np.array_equal(user.get(), OTHER), seed
        else:
            assert np.array_equal(user.get(), START), seed
            user.set(OTHER)


def test_a_compressed_file_is_read(user, path):
    with np.load(path) as file:
        path.write_bytes(archive(dict(file), zipfile.ZIP_DEFLATED))
    user.load(path)
    assert np.array_equal(user.get(), START)


def test_a_file_of_another_kind_is_refused(user, path):
    other = USERS[USERS.index(type(user)) - 1]()
    file = path.with_name(other.file)
    other.save(file)
    with pytest.raises(ValueError, match=f"{other.file}' holds {other.what}, not {user.what}[.]"):
        user.load(file)
    assert np.array_equal(user.get(), OTHER)


def test_a_full_disk_leaves_the_old_file(user, path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            user.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(path.parent.iterdir()) == [path]
    user.load(path)
    assert np.array_equal(user.get(), START)


def test_the_file_is_replaced_in_one_step_where_it_is(user, path, monkeypatch):
    kept = path.rename(path.with_name("kept.npz"))
    path.symlink_to(kept)
    kept.chmod(0o600)
    seen, real = [], os.replace

    def replace(new, old):
        with zipfile.ZipFile(new) as complete:  # before it gets the name
            seen.append((complete.testzip(), old))
        real(new, old)

    monkeypatch.setattr(os, "replace", replace)
    user.save(path)
    assert seen == [(None, str(kept))] and path.is_symlink()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert {*path.parent.iterdir()} == {path, kept}
    user.set(START)
    user.load(path)
    assert np.array_equal(user.get(), OTHER)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the link of another user")
def test_a_link_of_another_user_is_not_followed_in_a_folder_for_all(user, path):
    kept = path.rename(path.with_name("kept.npz"))
    path.symlink_to(kept)
    path.parent.chmod(0o1777)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    with pytest.raises(PermissionError, match="another user's"):
        user.save(path)
    user.load(kept)
    assert np.array_equal(user.get(), START)
