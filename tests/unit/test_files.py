"""Files that are complete or not there, also if their process is killed."""

import fcntl
import os
import signal

import pytest

from synkhronos._machine import files
from synkhronos._machine.files import held, new_file, remove_left


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of another user")
@pytest.mark.parametrize("mode", [0o1777, 0o777])
@pytest.mark.parametrize(
    "planted", ["the file", "its folder", "in a folder of his", "behind a link of one's own"]
)
def test_no_link_of_another_user_is_followed_in_a_folder_for_all(tmp_path, planted, mode):
    for_all, victim = tmp_path / "tmp", tmp_path / "home"
    for_all.mkdir()
    for_all.chmod(mode)
    victim.mkdir()
    (victim / "a.npz").write_bytes(b"kept")
    link = for_all / "link"
    if planted == "in a folder of his":
        (for_all / "his").mkdir()
        os.chown(for_all / "his", 65534, 65534)
        link = for_all / "his" / "link"
    link.symlink_to(victim if planted == "its folder" else victim / "a.npz")
    os.lchown(link, 65534, 65534)
    os.chown(for_all, 1, 1)
    path = link / "a.npz" if planted == "its folder" else link
    if planted == "behind a link of one's own":
        path = tmp_path / "own"
        path.symlink_to(link)
    with pytest.raises(PermissionError, match="this link is another user's"), new_file(path):
        pass
    assert (victim / "a.npz").read_bytes() == b"kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of another user")
def test_links_of_those_who_may_write_are_followed(tmp_path):
    scratch, team, data = (tmp_path / name for name in ("scratch", "scratch/team", "data"))
    for folder, mode in (scratch, 0o1777), (team, 0o2775), (data, 0o755):
        folder.mkdir()
        folder.chmod(mode)
    os.chown(scratch, 1, 1)
    (team / "current").symlink_to(data)  # of a colleague, in a folder of this user
    os.lchown(team / "current", 65534, 65534)
    (scratch / "own").symlink_to("../data")
    (data / "in").symlink_to(data)
    os.lchown(data / "in", 65534, 65534)
    for path in (team / "current", scratch / "own" / "in", team / "current" / ".." / "data"):
        assert files.followed(str(path)) == str(data)


def test_no_folder_that_takes_the_place_of_another_is_written_to(tmp_path, monkeypatch):
    folder, victim = tmp_path / "folder", tmp_path / "home"
    folder.mkdir(), victim.mkdir()
    found = files.followed(str(folder))
    folder.rmdir(), folder.symlink_to(victim)
    monkeypatch.setattr(files, "followed", lambda path: os.path.join(found, "a.npz"))
    replaced = pytest.raises(PermissionError, match="another program has replaced this folder")
    with replaced, new_file(folder / "a.npz"):
        pass
    assert not list(victim.iterdir())


def test_errors_name_the_file_as_the_caller_does(tmp_path):
    path = tmp_path / "a.npz"
    path.mkdir()
    with pytest.raises(IsADirectoryError) as raised, new_file(path) as file:
        file.write(b"new")
    assert raised.value.filename2 == str(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_the_rights_of_a_file_of_another_user_are_not_taken_over(tmp_path):
    path = tmp_path / "a.npz"
    path.touch()
    os.chown(path, 65534, 65534)
    path.chmod(0o4777)
    with new_file(path) as file:
        file.write(b"new")
    assert path.stat().st_mode & 0o7777 == 0o666 & ~umask()


def umask():
    found = os.umask(0)
    os.umask(found)
    return found


def test_links_are_followed_as_by_the_system(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a/../a")
    (tmp_path / "a" / "c").symlink_to("../d")
    with new_file(tmp_path / "b" / "c") as file:
        file.write(b"new")
    assert (tmp_path / "d").read_bytes() == b"new" and (tmp_path / "a" / "c").is_symlink()
    (tmp_path / "e").symlink_to("e")
    with pytest.raises(OSError, match="Too many"), new_file(tmp_path / "e"):
        pass


def test_a_path_of_a_killed_process_is_free_though_its_children_live(tmp_path):
    """A child that a script had forked kept the lock, and the script could not start again."""
    path, (reader, writer) = str(tmp_path / "a.npz"), os.pipe()
    child = os.fork()
    if child == 0:
        with held(path, 0):
            if os.fork() == 0:
                os.close(writer)
                os.read(reader, 1)  # until the test has ended
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(reader)
    os.waitpid(child, 0)
    with held(path, 0):
        pass
    os.close(writer)
