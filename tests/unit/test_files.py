"""Files that are complete or not there, also if their process is killed."""

import fcntl
import os
import signal

import pytest

from synkhronos._machine.files import new_file, remove_left


def killed_while_it_writes(path):
    child = os.fork()
    if child == 0:
        with new_file(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_killed_process_leaves_nothing_or_what_the_next_removes(tmp_path, monkeypatch, is_named):
    """Of 50 kills 48 left a file beside the snapshot."""
    if is_named:  # as where the file system has no files without names
        monkeypatch.delattr(os, "O_TMPFILE")
    path = tmp_path / "a[1].npz"
    path.write_bytes(b"old")
    path.chmod(0o640)
    killed_while_it_writes(path)
    assert len(list(tmp_path.iterdir())) == 1 + is_named
    with new_file(path) as file:
        file.write(b"new")
        with new_file(path) as other:  # a file that is being written stays
            other.write(b"other")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_named", [False, True])
def test_processes_that_write_one_file_do_not_disturb_each_other(tmp_path, monkeypatch, is_named):
    """One took what another was about to rename for left over: 1 of 200 saves raised."""
    if is_named:
        monkeypatch.delattr(os, "O_TMPFILE")
    path, replace = tmp_path / "a.npz", os.replace

    def replace_late(*names):
        remove_left(tmp_path, r"a\.npz")
        replace(*names)

    monkeypatch.setattr(os, "replace", replace_late)
    with new_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_only_what_is_left_is_removed(tmp_path):
    names = [
        ".s_1.npz.0123abcd",
        ".s_2.npz.0123abcd",
        ".s_1.npz.mine",
        "s_1.npz",
        ".t.npz.0123abcd",
    ]
    for name in names:
        (tmp_path / name).touch()
    with open(tmp_path / names[1]) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_left(tmp_path, r"s_\d+\.npz")
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])


def test_a_link_is_replaced_where_it_is_not_to_be_followed(tmp_path):
    path, target = tmp_path / "worker.prof", tmp_path / "target"
    target.write_bytes(b"kept")
    path.symlink_to(target)
    with new_file(path, follow=False) as file:
        file.write(b"new")
    assert (path.read_bytes(), target.read_bytes(), path.is_symlink()) == (b"new", b"kept", False)
