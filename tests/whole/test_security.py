"""Who may see and reach what: memory, pipes and pickles of a session, and hostile files."""

import argparse
import ast
import gzip
import importlib
import logging
import os
import re
import shutil
import socket
import stat
import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support import ports
from support.helpers import function, on_ranks
from support.layouts import Layout, forked
from support.leaks import descriptors, nothing_left
from support.running import run
from support.sources import MODULES
from support.watched import WATCHED

import synkhronos as synk
from synkhronos.__main__ import main
from synkhronos._machine import devices, shared_memory
from synkhronos.parameter_server.group import machine, watched
from synkhronos.profiling import NAMES, _lines_of_ranks, status
from synkhronos.rules import command as rule
from synkhronos.rules import loading, plain_pickles, request, rule_classes
from synkhronos.rules.places import RankPlace
from synkhronos.tools import info, launch
from synkhronos.tools.bench import frame, scaling
from synkhronos.tools.info import cuda_libraries, machines

ROOT = Path(__file__).parents[2]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def two_ranks():
    """A session in which everything has happened that opens memory or pipes."""
    with forked(Layout(2)) as ranks:
        x, s = T.dvector("x"), theano.shared(np.arange(4.0), "s")
        f = function([x], [x.sum(), (x * s.sum(), "gather")])
        ranks.kept = f, s, synk.data(np.ones(5))
        f(np.ones(5)), f(ranks.kept[2], batch=[0, 3]), f(np.ones(9), num_slices=2)
        synk.scatter(s, np.arange(5.0))
        synk.all_gather(s)
        yield ranks
        ranks.kept = ()


@pytest.fixture(params=["nameless", "fallback"])
def memory(request, monkeypatch):
    """Both ways to shared memory; the second is for systems without files that have no name."""
    if request.param == "fallback":
        monkeypatch.delattr(os, "O_TMPFILE")
    return request.param


# Text that others have written, in what we print.

HOSTILE = "\x1b]0;mine\x07\x9b2J\r\x7f\u202e\u2066\ud800"
ESCAPED = r"\x1b]0;mine\x07\x9b2J\r\x7f\u202e\u2066\ud800"


def _in_a_log():
    log = logging.getLogger("synkhronos")
    handler = logging.StreamHandler(sys.stderr)
    log.addHandler(handler)
    try:
        log.warning("%s, %s, %s: %d", HOSTILE, ValueError(HOSTILE), Path(HOSTILE), 3)
    finally:
        log.removeHandler(handler)


def _in_a_benchmark():
    frame.Report(None).show(HOSTILE)


DOORS = {
    "a log": _in_a_log,
    "a run": lambda: watched.WatchedRanks(names=[], environment={}).say(HOSTILE),
    "a launch": lambda: launch.say(HOSTILE),
    "a refusal": lambda: rule.refuse(HOSTILE, 2),
    "checks": lambda: print(info.table([info.Check("a", "ok", HOSTILE, HOSTILE)], colour=True)),
    "machines": lambda: print(machines.table([[HOSTILE] * len(machines._COLUMNS)])),
    "a benchmark": _in_a_benchmark,
    "a status": lambda: print(status.Status("open", ranks=(_rank_of(HOSTILE),))),
    "a profile": lambda: print(*(row[0] for row in _lines_of_ranks(_NO_CALLS, [HOSTILE])[1:])),
}
_NO_CALLS = np.zeros(0, [("rank", int), ("bytes", int), *((name, float) for name in NAMES)])


def _rank_of(name):
    return status.RankStatus(0, name, 1, True, name, 0, 0, name)


@pytest.mark.parametrize("door", DOORS)
def test_what_others_have_written_is_no_command_to_a_terminal(door, capfd):
    DOORS[door]()
    out, err = capfd.readouterr()
    assert ESCAPED in out + err
    shown = (out + err).replace("\033[32m", "").replace("\033[0m", "")  # our colours
    assert all(each.isprintable() or each == "\n" for each in shown)


# Memory and pipes.


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_memory_is_for_its_user_whatever_the_umask_is(memory, umask):
    segments = shared_memory.Segments()
    before = os.umask(umask)
    try:
        ref = segments.create(100).ref
        segment = segments.create(100)
    finally:
        os.umask(before)
    status = os.fstat(segment.ref.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_uid == os.geteuid()
    assert status.st_nlink == 0  # it has no name
    assert ref != segment.ref


def test_names_of_the_fallback_can_not_be_guessed_or_taken(monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    made = []
    create = shared_memory.posix_ipc.SharedMemory

    def watched(name, flags, mode):
        memory = create(name, flags, mode=mode)
        path = Path("/dev/shm", name.lstrip("/"))
        made.append((name, flags, stat.S_IMODE(path.stat().st_mode), path))
        return memory

    monkeypatch.setattr(shared_memory.posix_ipc, "SharedMemory", watched)
    with nothing_left():
        segments = shared_memory.Segments()
        some = [segments.create(10) for _ in range(20)]
        del some
    names = {name for name, _, _, _ in made}
    assert len(names) == 20 and all(re.fullmatch("/synkhronos-[0-9a-f]{32}", n) for n in names)
    for _, flags, mode, path in made:
        assert flags == os.O_CREAT | os.O_EXCL and mode == 0o600 and not path.exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_name_that_is_there_is_not_used(monkeypatch, tmp_path, kind):
    monkeypatch.delattr(os, "O_TMPFILE")
    monkeypatch.setattr(shared_memory.secrets, "token_hex", lambda n: f"taken-{os.getpid()}")
    path, other = Path(f"/dev/shm/synkhronos-taken-{os.getpid()}"), tmp_path / "other"
    other.write_text("kept")
    path.write_text("kept") if kind == "file" else path.symlink_to(other)
    try:
        with pytest.raises(OSError, match=r"^/dev/shm: ") as error:
            shared_memory.Segments().create(10)
        assert isinstance(error.value.__cause__, shared_memory.posix_ipc.ExistentialError)
        assert path.read_text() == other.read_text() == "kept"
    finally:
        path.unlink()


def test_all_that_a_session_opens_is_for_its_user(two_ranks):
    opened = 0
    for pid in (os.getpid(), *two_ranks.session.worker_pids):
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            name = os.readlink(path) if os.path.lexists(path) else ""
            if name.startswith(("pipe:", "/dev/shm/", "/memfd:synkhronos")):
                status = os.stat(path)
                assert status.st_uid == os.geteuid(), name
                assert stat.S_IMODE(status.st_mode) == 0o600, name
                assert name.startswith(("pipe:", "/memfd:")) or status.st_nlink == 0, name
                opened += 1
    assert opened > 10


@as_root
def test_another_user_can_not_reach_the_memory_or_the_pipes(two_ranks):
    paths = [f"/proc/{os.getpid()}/fd/{two_ranks.kept[2]._store.contents.ref.segment.fd}"]
    for pid in two_ranks.session.worker_pids:
        paths += [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
    for path in paths[:1]:
        os.close(os.open(path, os.O_RDWR))  # its own user can

    def is_refused(path):
        try:
            os.open(path, os.O_RDONLY)
        except PermissionError:
            return True

    assert len(paths) > 5 and ports.as_nobody(lambda: all(map(is_refused, paths)))


def test_a_program_that_the_user_starts_inherits_nothing(tmp_path, memory):
    show = "import os; print({n: os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self"
    show += "/fd') if os.path.lexists(f'/proc/self/fd/{n}')})"

    def seen():
        with open(tmp_path / "seen", "w") as out:
            command = [sys.executable, "-c", show]
            run(*command, close_fds=False, capture_output=False, stdout=out, check=True)
        return ast.literal_eval((tmp_path / "seen").read_text())

    before, own = seen(), descriptors()
    with forked(Layout(2)) as ranks:
        f = function([], (ranks.n * theano.shared(1.0), "sum"))
        assert f() == 4
        kept = synk.data(np.ones(5))
        assert len(descriptors()) > len(own) + 5  # there is what could be inherited
        assert seen() == before
        del kept, f


# Nothing but the session's own processes.


def sockets(pid):
    """Return the sockets of a process by its descriptors, and what psutil says they are for."""
    process = psutil.Process(pid)
    ask = getattr(process, "net_connections", None) or process.connections
    return len([*ports.inodes(pid)]), len(ask("all"))


def test_nothing_listens_or_connects():
    before = sockets(os.getpid())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert sockets(os.getpid()) == (before[0] + 1, before[1] + 1)  # it would be seen
    with forked(Layout(3)) as ranks:
        s = theano.shared(np.ones(3), "s")
        everyone = [os.getpid(), *ranks.session.worker_pids]
        assert [sockets(pid) for pid in everyone] == [before] * 3
        assert on_ranks(lambda: sum(sockets(os.getpid()))) == [sum(before)] * 3
        synk.broadcast(s)
        synk.all_gather(s)
        synk.all_reduce(s, "sum")
        assert [sockets(pid) for pid in everyone] == [before] * 3


@pytest.mark.parametrize("fallback", ["", "1"])
@pytest.mark.slow("starts an interpreter")
def test_no_socket_and_no_file_is_opened_by_a_session(script, tmp_path, fallback):
    script(WATCHED, env={"FALLBACK": fallback})
    *events, last = (tmp_path / "events").read_text().splitlines()
    assert last.startswith("open seen ")
    attached = [e for e in events if re.match(r"open /proc/\d+/fd/\d+ ", e)]
    made = [e for e in events if e.startswith("open /dev/shm ")]
    pipes = [e for e in events if re.match(r"open /proc/self/fd/\d+ ", e)]  # its own, for each rank
    assert len(attached) > 3 and len(pipes) == 3 and bool(made) != bool(fallback)
    assert all(int(e.split()[-1]) & os.O_TMPFILE == os.O_TMPFILE for e in made)
    assert [e for e in events if e not in attached + made + pipes] == []


# Where there is an Unpickler, and what it is given; docs/security.rst lists the same.
UNPICKLED = {
    ("comm.shared.gate", "next_command"): "commands",
    ("comm.shared.gate", "_take_reply"): "answers",
    ("comm.mpi.leader_gate", "next_command"): "commands of another machine",
    ("comm.mpi.link", "_sort"): "messages of another machine",
    ("comm.mpi.link", "receive"): "messages of another machine",
    ("comm.mpi.mesh", "connections_given"): "messages on a socket",
    ("comm.reports", "raised_by_rank"): "answers",
    ("comm.channel", "receive"): "messages on a socket",
    ("comm.mpi.base_carrier", "_unframed"): "messages of another machine",
    ("parameter_server.group.several_machines", "_of_carrier"): "messages of a group",
    ("parameter_server.group.one_machine", "_read"): "messages of a group",
    ("parameter_server.group.large_messages", "unpack"): "messages of a group",
    ("_session.commands", "run"): "random states",
    ("_host.base.pickles", "load_with"): "functions",
    ("extensions.pymc.evaluator", "unpickled"): "likelihoods",
    ("comm.variable_memory", "_read"): "places",
    ("values", "get_value"): "random states",
    ("checkpoints", "describe"): "random states",
    ("_session.changes", "_differs"): "sparse values",
    ("rules.plain_pickles", "load"): "files of recorders",
    ("parameter_server.remote.keeping", "on_updater"): "updaters",
}


RUNS_WHAT_IT_READS = (
    r"allow_pickle(?!=False)|joblib\.load|from joblib|marshal|shelve|yaml\.load"
    r"|(?<!\.)\b(eval|exec)\("
)


UNPICKLES_MESSAGES = r"comm\.(recv|irecv|mrecv|bcast|gather|allgather|scatter|alltoall|allreduce)\("


def loads(tree):
    """Yield the names of the functions of a module that unpickle."""
    for made in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for call in (node for node in ast.walk(made) if isinstance(node, ast.Call)):
            called = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
            library = getattr(getattr(call.func, "value", None), "id", None)
            if called in ("Unpickler", "_Unpickler") or (
                called in ("load", "loads") and library in ("pickle", "cloudpickle")
            ):
                yield made.name


def test_pickles_are_read_in_few_places():
    found = {(name, function) for name, tree in MODULES.items() for function in loads(tree)}
    assert found == set(UNPICKLED)
    for path in (*ROOT.glob("synkhronos/**/*.py"), *ROOT.glob("demos/**/*.py")):
        runs = re.findall(RUNS_WHAT_IT_READS, path.read_text())
        if "tools" in path.parts:  # their communicators are MPI's own, which check no sender
            assert not re.search(UNPICKLES_MESSAGES, path.read_text()), path
        # `synkhronos run` runs the script that it is given.
        assert len(runs) == (path.parts[-2:] == ("tools", "run.py")), path
    page = (ROOT / "docs" / "security.rst").read_text()
    for what in UNPICKLED.values():
        assert what in page


# Files of other people.


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    float_type = theano.config.floatX
    yield lambda name: importlib.import_module(f"demos.{name}")
    theano.config.floatX = float_type


def test_downloads_have_checksums(demo):
    pytest.importorskip("lasagne")
    checksums = demo("lasagne_mnist.data").CHECKSUMS
    assert len(checksums) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", checksum) for checksum in checksums.values())
    assert demo("lasagne_mnist.data").MIRROR.startswith("https://")


@pytest.mark.parametrize(
    "shape, content, said",
    [
        ((2**32 - 1, 2**32 - 1, 2**32 - 1), b"", "more than the 1073741824"),
        ((2**31, 2**31, 4), b"", "more than the 1073741824"),  # 0 in 64 bits
        ((2**32 - 1, 28, 28), b"\0" * 784, "more than the 1073741824"),
        ((1, 28, 28), bytes(1 << 26), "holds more items, not the 784"),
        ((3, 28, 28), b"\0" * 784, "holds 784 items, not the 2352"),
    ],
)
def test_what_an_idx_file_says_of_itself_is_not_believed(demo, tmp_path, shape, content, said):
    pytest.importorskip("lasagne")
    common, file = demo("lasagne_mnist.data"), tmp_path / "images.gz"
    with gzip.open(file, "wb") as out:
        out.write(bytes([0, 0, 8, 3]) + struct.pack(">3I", *shape) + content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=said):
            common.read_idx(file, 3)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pixels", [10_000, 14_000])
def test_a_small_file_of_a_huge_image_is_refused(demo, tmp_path, pixels):
    pytest.importorskip("lasagne")
    image = pytest.importorskip("PIL.Image")
    image.new("1", (pixels, pixels)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 1 << 18
    common = demo("resnet.common")
    with pytest.raises(common.NoImages, match="decompression bomb"):
        common.read_image(tmp_path / "bomb.png", 8)


def test_an_image_runs_no_program_and_no_terminal_code(demo, tmp_path, monkeypatch):
    pytest.importorskip("lasagne")
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert shutil.which("gs") == str(ghostscript)
    file = tmp_path / "\033[2Jimage.png"
    file.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    common = demo("resnet.common")
    with pytest.raises(common.NoImages, match="can't be read as an image") as caught:
        common.read_image(file, 8)
    assert "\033" not in str(caught.value) and "[2Jimage.png" in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"networks": 3}',
        '{"networks": {"a": {"systems": {"b": {"form": "one", "number": "2"}}}}}',
        '{"networks": {"a": {"systems": {"b": {"form": "one", "number": 2}}}}}',
        '{"networks": {"a": {"title": 1, "numbers": 1e999, "systems": {"serial, 1 thread": '
        '{"form": "no", "seconds": 1}, "b": {"form": "one", "number": 2, "seconds": 0, "shares": '
        '{"compute": 1, "input": 0, "collectives": 0, "waiting": 0, "call": 0}}}}}}',
    ],
    ids=range(7),
)
def test_figures_that_are_none_are_refused(tmp_path, capsys, text):
    file = tmp_path / "figures.json"
    file.write_text(text)
    assert main(["bench", "scaling", str(file)]) == 1
    assert f"cannot use {file}: " in capsys.readouterr().err


def test_titles_in_figures_reach_no_terminal_as_codes():
    shares = {"compute": 0.8, "input": 0.1, "collectives": 0.1, "waiting": 0, "call": 0}
    ranks = {"form": "one", "number": 2, "seconds": 1.0, "shares": shares}
    systems = {"serial, 1 thread": {"form": "serial", "seconds": 2.0}, "2 ranks": ranks}
    found = {"title": "\033]0;me\007mlp", "numbers": 10, "systems": systems}
    [curve] = scaling.measured({"networks": {"mlp": found}})
    assert curve["name"] == "?]0;me?mlp"
    weak = [{**found, "weak": rows} for rows in (8, "\033]0;me")]
    curves = scaling.measured({"networks": dict(enumerate(weak))})
    assert [each["name"].split("mlp")[1] for each in curves] == [", 8 rows", ", ?]0;me rows"]


def test_what_a_pickle_says_of_itself_reaches_no_terminal_as_codes():
    """Those of files with arrays are in test_saved_files."""
    with pytest.raises(ValueError) as caught:
        plain_pickles.load(b"c\033[2J\033]0;me\007\nx\n.", "a file")
    assert str(caught.value).isprintable()


# The command line.


def test_links_are_made_in_no_folder_that_others_write_to(tmp_path, capsys):
    folder = tmp_path / "links"
    folder.mkdir()
    for mode in (0o777, 0o775, 0o1777):
        folder.chmod(mode)
        assert main(["info", "--link-cuda", str(folder)]) == 2
        assert "other users may write to" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@as_root
def test_links_are_made_in_no_folder_of_another_user(tmp_path, capsys):
    folder = tmp_path / "links"
    folder.mkdir(mode=0o755)
    os.chown(folder, ports.NOBODY, ports.NOBODY)
    assert main(["info", "--link-cuda", str(folder)]) == 2
    assert "name a folder that is yours" in capsys.readouterr().err


@as_root
@pytest.mark.parametrize("how", ["another's", "for all"])
def test_links_are_made_in_no_folder_that_others_can_replace(tmp_path, capsys, how):
    above = tmp_path / "above"
    (above / "links").mkdir(parents=True, mode=0o755)
    if how == "for all":
        above.chmod(0o777)
    else:
        os.chown(above, ports.NOBODY, ports.NOBODY)
    for name in ("links", "new"):
        assert main(["info", "--link-cuda", str(above / name)]) == 2
        assert f"other users may write to {above}, " in capsys.readouterr().err
        assert not os.path.exists(above / "new")
    above.chmod(0o1777)
    os.chown(above, 0, 0)
    assert main(["info", "--link-cuda", str(above / "links")]) != 2


@pytest.mark.slow("looks for libraries in other processes")
def test_a_link_is_not_named_as_a_folder_of_links(tmp_path, capsys, monkeypatch):
    """Its owner could make it point elsewhere when LD_LIBRARY_PATH has it."""
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libcuda.so.1"
    library.write_bytes(Path(sys.executable).resolve().read_bytes()[:64])
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    (tmp_path / "links").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "links")
    main(["info", "--link-cuda", str(tmp_path / "link")])
    out = capsys.readouterr().out
    assert f"{tmp_path / 'links' / 'libcuda.so'} -> " in out
    assert f"{tmp_path / 'link'}/" not in out and f"{tmp_path / 'link'}$" not in out


def test_a_folder_of_links_is_for_its_user_to_write_to(tmp_path):
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(Path(sys.executable).resolve().read_bytes()[:64])
    before = os.umask(0)
    try:
        assert cuda_libraries.link(tmp_path / "links", {"libcuda": library})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "links").stat().st_mode) == 0o755


def test_a_link_to_a_file_of_another_user_is_not_followed(tmp_path, capsys):
    folder, other = tmp_path / "links", tmp_path / "other"
    folder.mkdir(mode=0o755)
    other.write_text("kept")
    (folder / "libcuda.so").symlink_to(other)
    assert main(["info", "--link-cuda", str(folder)]) == 2
    assert "libcuda.so, which is no link that" in capsys.readouterr().err
    assert other.read_text() == "kept" and (folder / "libcuda.so").is_symlink()


@pytest.mark.slow("looks for devices in other processes")
def test_modules_in_the_working_folder_are_not_run(tmp_path, monkeypatch):
    for name in ("json", "statistics", "ctypes", "pygpu", "dataclasses", "shlex", "theano"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: True)
    cuda_libraries.probe()
    devices.probe("cuda")
    info.check_pygpu()
    assert info.probe("theano")[0]["theano"] == theano.__version__
    assert not (tmp_path / "ran").exists()


def _commands():
    """Return commands of this package that start Python in the working folder of the user."""
    asked = request.Request("BSP", [RankPlace(None, "cpu")], "m", "M")
    options = argparse.ArgumentParser()
    launch.add_arguments(options)
    nothing = [sys.executable, "-I", "-c", ""]
    return {
        "loader": loading.COMMAND,
        "rule": [*rule_classes._LAUNCHER, "--help"],
        "rank of a rule": [*rule.worker_command(asked, [])[:-1], "{"],
        "run": launch.run_line(options.parse_args(["none.py"])),
        "machine": machine.command("token", [1], nothing),
    }


@pytest.mark.parametrize("name", ["loader", "rule", "rank of a rule", "run", "machine"])
def test_commands_import_nothing_from_the_working_folder(tmp_path, name):
    for module in ("json", "logging", "numpy", "socket", "argparse", "random", "runpy", "pickle"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    done = run(*_commands()[name], cwd=tmp_path)
    assert not (tmp_path / "ran").exists(), done.stderr
    assert "No module named" not in done.stderr


def test_a_model_named_by_a_dotted_name_hides_no_module(tmp_path):
    """It is found in the working folder, which comes last: a `json.py` there is not imported."""
    (tmp_path / "json.py").write_text("raise AssertionError")
    (tmp_path / "net.py").write_text("import csv, json\nfrom part import a\n")
    (tmp_path / "part.py").write_text("a = 1\n")
    code = "import sys\nfrom synkhronos.rules.compatible import import_model\n"
    command = devices.python_command(f"{code}sys.modules.pop('json')\nimport_model('net')")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_folder_of_a_script_replaces_no_folder_of_the_path(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("")
    (tmp_path / "script.py").write_text("import helper\n")
    command = devices.module_command("synkhronos", "run", "-n", "1", "script.py")
    paths = {**os.environ, "PYTHONPATH": f"{tmp_path / 'lib'}:{ROOT}"}
    done = run(*command, env=paths, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# Opening this file as a log truncates it, and a message goes to it.
UCX = "UCX_LOG_FILE={}\nUCX_LOG_LEVEL=info\n"


@pytest.mark.mpi
@pytest.mark.parametrize("load", ["library", "check"])
def test_a_ucx_conf_in_the_working_folder_is_not_read(tmp_path, load):
    """UCX, which Open MPI loads, reads it: that of another user could overwrite files."""
    kept = tmp_path / "kept"
    kept.write_text("kept")
    (tmp_path / "ucx.conf").write_text(UCX.format(kept))
    code = {
        "library": "import os\nbefore = os.getcwd()\nimport synkhronos.comm.mpi.mpi_library\n"
        "assert os.getcwd() == before",
        "check": "from synkhronos.launch import mpirun\nmpirun.check()",
    }
    done = run(*devices.python_command(code[load]), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert kept.read_text() == "kept"


def test_another_interpreter_runs_under_pythonsafepath(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    for value in ("", "1"):  # the path of 1 has no working folder to leave out
        monkeypatch.setenv("PYTHONSAFEPATH", value)
        command = devices.python_command("import json\nprint('' in sys.path, *sys.argv[1:])", "x")
        done = run(*command)
        assert (done.stdout, done.stderr) == ("False x\n", "")


def test_a_theanorc_takes_no_file_or_link_that_is_there(tmp_path, capsys):
    path, other = tmp_path / "theanorc", tmp_path / "other"
    path.symlink_to(other)  # to nothing: a plain open would make what it points to
    assert main(["theanorc", str(path)]) == 1
    assert "exists" in capsys.readouterr().err and not other.exists()
