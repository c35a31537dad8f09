"""One behaviour of all files with arrays: whole or not there, checked before anything is set."""

import io
import json
import os
import random
import re
import resource
import stat
import tracemalloc
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import theano
from support.layouts import Layout

import synkhronos as synk
from synkhronos._wording import printable
from synkhronos.extensions import update_rules
from synkhronos.parameter_server import weight_files
from synkhronos.parameter_server.updaters import rule_updater
from synkhronos.rules import snapshots
from synkhronos.rules.recorder import Recorder

LAYOUTS = [Layout(2)]
CODES = "\033[2J\033]0;me\007"  # commands to a terminal
START, OTHER = np.full(1000, 7.0), np.full(1000, 8.0)
pytestmark = pytest.mark.usefixtures("quickly_compiled", "ranks")


def checkpoint():
    w = theano.shared(START, "w")
    return SimpleNamespace(
        file="run.npz",
        what="a checkpoint",
        save=lambda path: synk.save(path, w),
        load=lambda path: synk.load(path, w),
        get=w.get_value,
        set=lambda value: synk.broadcast(w, value),
    )


def snapshot():
    w, recorder = theano.shared(START, "w"), Recorder(None, 2, "m", False)
    history = snapshots.History(SimpleNamespace(w=w, params=[w], data=None))

    def save(path):
        states = [history.capture(recorder)]
        written = snapshots.write(str(path.parent), snapshots.Snapshot("BSP", 3, 0, 20, {}, states))
        assert written == str(path)

    return SimpleNamespace(
        file="snapshot_0003.npz",
        what="a snapshot",
        save=save,
        load=lambda path: history.restore(snapshots.read_file(path).state_of(0), recorder, {}),
        get=w.get_value,
        set=w.set_value,
    )


def weights():
    values = {"w": START}
    return SimpleNamespace(
        file="weights.npz",
        what="weights",
        save=lambda path: weight_files.save_weights(path, values),
        load=lambda path: values.update(weight_files.load_weights(path)),
        get=lambda: values["w"],
        set=lambda value: values.update(w=value),
    )


def states():
    updater = rule_updater(update_rules.momentum, learning_rate=1.0)
    updater.init_model("w", np.zeros(START.shape))
    name = "0 w_velocity"
    updater.set_states({"w": {name: START}})
    return SimpleNamespace(
        file="states.npz",
        what="states of updaters",
        save=lambda path: weight_files.save_states(path, [weight_files.dump(updater)]),
        load=lambda path: weight_files.restore(updater, weight_files.load_states(path)[0]),
        get=lambda: updater.states()["w"][name],
        set=lambda value: updater.set_states({"w": {name: value}}),
    )


USERS = [checkpoint, snapshot, weights, states]


@pytest.fixture(params=USERS, ids=lambda user: user.__name__)
def user(request):
    """Return one that writes and reads files, and what it holds."""
    return request.param()


@pytest.fixture
def path(user, tmp_path):
    """Return a file with START of a user that has OTHER since."""
    path = tmp_path / user.file
    user.save(path)
    user.set(OTHER)
    return path


def loads(user, path):
    """Return whether a file is read; if it is refused, nothing must have changed."""
    try:
        user.load(path)
    except ValueError as error:
        assert np.array_equal(user.get(), OTHER)
        assert str(path) in str(error) and str(error) == printable(str(error), kept="")
        return str(error)
    assert np.array_equal(user.get(), START)
    return ""


def test_what_was_saved_comes_back_and_stands_alone(user, path):
    assert list(path.parent.iterdir()) == [path]
    with np.load(path, allow_pickle=False) as file:
        assert any(np.array_equal(file[name], START) for name in file.files)
        assert json.loads(str(file["about"]))["what"] == user.what
        compressed = archive(dict(file), zipfile.ZIP_DEFLATED)
    assert not loads(user, path)
    user.set(OTHER)
    path.write_bytes(compressed)
    assert not loads(user, path)


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
    yield "an offset", whole[:-6] + b"\xff\xff\xff\0" + whole[-2:]
    yield "empty", b""
    yield "text", b"weights\n"
    yield "no archive", b"PK no zip"
    yield "one array", single.getvalue()
    yield "a pickle", archive({"about": np.array([{}], object)})
    yield "no table", archive(arrays)
    yield "no arrays", archive({"about": table})
    yield "more bytes", archive({"about": table, **arrays}, more=b"\0")
    yield "other names", archive({"about": table, **arrays}, suffix=".txt")
    others = ["{", "[]", "3", '{"version": 1}', "[" * 100_000, json.dumps({**about, CODES: 1})[:-1]]
    others += [
        json.dumps({**about, key: value}) for key in about for value in (None, CODES, [[CODES]])
    ]
    for text in others:
        yield text[:200], archive({"about": text, **arrays})


def test_a_damaged_file_is_refused_by_name_before_anything_is_set(user, path):
    whole = path.read_bytes()
    for name, data in damages(whole):
        path.write_bytes(data)
        error = loads(user, path)
        assert "can't be read: it is damaged, or does not hold " in error or (
            '"variables": []' in name or f"not {user.what}." in error
        ), name
    path.unlink()
    with pytest.raises(FileNotFoundError):
        user.load(path)
    assert np.array_equal(user.get(), OTHER)


def test_any_other_byte_is_refused_or_harmless(user, path, seeds=range(100)):
    whole = path.read_bytes()
    for seed in seeds:
        draw, data = random.Random(seed), bytearray(whole)
        for _ in range(draw.choice([1, 1, 4])):
            # Most of the bytes are numbers of the array; the rest is at both ends.
            at = draw.choice([draw.randrange(len(data)), draw.randrange(400), -draw.randrange(900)])
            data[at] = draw.randrange(256)
        path.write_bytes(data)
        loads(user, path)
        user.set(OTHER)


def test_a_file_of_another_kind_is_refused(user, path):
    for other in (make() for make in USERS):
        file = path.with_name(other.file)
        other.save(file)
        user.set(OTHER)
        said = f"{other.file}' holds {other.what}, not {user.what}."
        assert loads(user, file).endswith(said if other.what != user.what else "")


def test_a_full_disk_leaves_the_old_file(user, path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        with pytest.raises(OSError, match="too large: .*" + re.escape(repr(str(path)))):
            user.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(path.parent.iterdir()) == [path] and not loads(user, path)


def test_the_file_is_replaced_in_one_step_where_it_is(user, path, monkeypatch):
    kept = path.rename(path.with_name("kept.npz"))
    path.symlink_to(kept)
    kept.chmod(0o600)
    seen, real = [], os.replace

    def replace(new, old):
        with zipfile.ZipFile(new) as complete:  # before it gets the name
            seen.append((complete.testzip(), os.path.basename(old)))
        real(new, old)

    monkeypatch.setattr(os, "replace", replace)
    user.save(path)
    assert seen == [(None, kept.name)] and path.is_symlink()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert {*path.parent.iterdir()} == {path, kept}
    user.set(START)
    user.load(path)
    assert np.array_equal(user.get(), OTHER)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the link of another user")
def test_a_link_of_another_user_is_not_followed_in_a_folder_for_all(user, path):
    kept = path.rename(path.with_name("kept.npz"))
    path.symlink_to(kept)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    for mode in (0o1777, 0o777):
        path.parent.chmod(mode)
        with pytest.raises(PermissionError, match="another user's"):
            user.save(path)
    assert not loads(user, kept)


def test_a_pipe_is_refused_without_a_wait(user, path):
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="this is a pipe or a device, and not a file"):
        user.load(path)


def test_a_file_takes_no_more_memory_than_it_has_bytes(user, path):
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    packed = archive({**arrays, "unnamed": np.zeros(1 << 28, "u1")}, zipfile.ZIP_DEFLATED)
    most = []
    unusual = archive(arrays, zipfile.ZIP_BZIP2)  # of which zipfile unpacks more than is asked
    for data in (packed, unusual, *(claiming(arrays, name) for name in arrays)):
        path.write_bytes(data)
        tracemalloc.start()
        loads(user, path)
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        user.set(OTHER)
    path.write_bytes(unusual)
    assert max(most) < 1 << 22 and "compressed in an unusual way" in loads(user, path)


def claiming(arrays, name):
    """Return the bytes of an archive in which the header of one array claims many more bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for each, array in arrays.items():
            header = np.lib.format.header_data_from_array_1_0(np.asarray(array))
            if each == name:
                header["shape"] = (1 << 26,)
            with out.open(f"{each}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(member, header)
                member.write(np.asarray(array).tobytes())
    return file.getvalue()
