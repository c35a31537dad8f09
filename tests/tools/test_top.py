"""``synkhronos top`` and ``status(live=True)`` see the sessions of other processes as they are."""

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time

import pytest
from support import running
from support.jupyter import in_kernel, needs_jupyter

import synkhronos as synk
from synkhronos.comm.shared import gate_memory
from synkhronos.profiling import live
from synkhronos.tools import top
from synkhronos.tools.top import sampling

TOP = [sys.executable, "-m", "synkhronos", "top"]
# It makes as many calls as each line of its input says. Rank 1 sleeps in a call, rank 0 does not.
SCRIPT = """
import sys, time
import numpy as np
import theano.tensor as T
from theano.compile.ops import as_op
import synkhronos as synk

@as_op(itypes=[T.dvector], otypes=[T.dvector])
def nap(rows):
    time.sleep(rows[0])
    return rows.copy()

synk.fork(2)
x = T.dvector("x")
f = synk.function([x], (nap(x).sum(), "sum"), mode="FAST_COMPILE", check=0)
f([0.0, 0.0])
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        f([0.0, 0.05])
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "lopsided.py"
    path.write_text(SCRIPT)
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, path, "--lr", "0.1"], **given) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()
        assert process.wait(60) == 0


def call(script, n):
    script.stdin.write(f"{n}\n")
    script.stdin.flush()


def session_of(process, found):
    [session] = [each for each in found["sessions"] if each["pid"] == process.pid]
    return session


def top_of(process, *options):
    return running.run(*TOP, "--pid", process.pid, *options)


def test_calls_are_counted_and_those_who_wait_are_seen(script):
    sampler = sampling.Sampler()
    before = session_of(script, sampler.sample(0.1))
    call(script, 30)
    found = session_of(script, sampler.sample(1.2))
    assert script.stdout.readline() == "done\n"
    after = session_of(script, sampler.sample(0.1))
    assert after["calls"] - before["calls"] == 30
    assert 15 < found["calls_per_second"] < 21
    assert found["script"] == "lopsided.py --lr 0.1"
    master, worker = found["ranks"]
    assert master["waits"] > 0.8 and worker["computes"] > 0.8
    assert master["is_master"] and not worker["is_master"]
    for rank in after["ranks"]:
        assert rank["no_call"] == 1.0 and rank["process"] == "sleeping"
        assert 0 <= rank["cpu"] < 0.5 and rank["resident"] > 1e7


def test_json_has_what_is_documented(script):
    done = top_of(script, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    found = json.loads(line)
    assert sorted(found) == ["host", "seconds", "sessions"]
    [session] = found["sessions"]
    assert list(session) == [
        *("id", "kind", "pid", "script", "n_ranks", "calls", "calls_per_second", "shared", "ranks")
    ]
    assert [each["rank"] for each in session["ranks"]] == [0, 1]
    assert list(session["ranks"][0]) == [
        *("rank", "device", "pid", "is_master", "process", "cpu", "resident", "shared"),
        *("computes", "waits", "no_call"),
    ]


def test_without_a_terminal_one_table_is_printed(script):
    done = top_of(script)
    title, columns, *ranks = done.stdout.splitlines()[2:6]
    assert title.startswith("lopsided.py --lr 0.1: 2 ranks, ")
    assert columns.split()[:4] == ["rank", "device", "pid", "process"]
    assert ranks[0].split()[:4] == ["0,", "master", "cpu", str(script.pid)]
    assert max(map(len, done.stdout.splitlines())) <= 90


@pytest.mark.parametrize(("key", "status"), [(b"q", 0), (b"\x03", 0), (None, 143)])
def test_a_terminal_is_left_as_it_was(script, key, status):
    with in_terminal(script.pid, 24, status) as (ours, process):
        shown = read_until(ours, b"sleeping")
        assert b"0, master" in shown and b"\x1b[?1049h" in shown and b"more" not in shown
        os.write(ours, key) if key else process.terminate()


@contextlib.contextmanager
def in_terminal(pid, lines, status=0):
    """Watch a process in a terminal, and end as the block says; give the terminal's other end."""
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    line = [*TOP, "--pid", str(pid), "--interval", "0.2"]
    given = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY); "
    take += "os.execv(sys.argv[1], sys.argv[1:])"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": str(lines)}
    with subprocess.Popen([sys.executable, "-c", take, *line], env=environment, **given) as process:
        try:
            yield ours, process
            assert b"\x1b[?1049l" in read_until(ours, b"\x1b[?1049l")
            assert process.wait(20) == status
        finally:
            process.kill()
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_keys_scroll_if_there_are_more_sessions_than_lines():
    files = [os.memfd_create(gate_memory.NAME) for _ in range(8)]
    for number, file in enumerate(files):
        os.ftruncate(file, gate_memory.GateMemory.nbytes(1))
        os.pwrite(file, table_of(device=f"cpu{number}")(os.getpid()), 0)
    with in_terminal(os.getpid(), lines=10) as (ours, _):
        shown = read_until(ours, b"q ends")
        assert b"8 sessions" in shown and b"cpu0" in shown and b"cpu3" not in shown
        assert re.search(rb"[67] more sessions: arrows", shown)
        for down, up in ((b"\x1b[6~", b"\x1b[5~"), (b"\x1b[B", b"\x1bOA"), (b"j", b"k")):
            for key, wanted in ((down, b"cpu7"), (up, b"8 sessions")):
                for _ in range(4):
                    os.write(ours, 15 * key)
                assert wanted in read_until(ours, wanted)
        os.write(ours, b"jq")
    for file in files:
        os.close(file)


def read_until(terminal, text, seconds=20):
    shown, end = b"", time.monotonic() + seconds
    while text not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 1 << 16)
    return shown


def test_no_session(capsys):
    assert top.main(options(pid=os.getpid())) == 1
    out, err = capsys.readouterr()
    assert (out, err.startswith("There is no running session")) == ("", True)


def options(**given):
    names = "hosts", "hostfile", "pid", "interval"
    found = {**dict.fromkeys(names), "once": False, "wait": False, "json": False, **given}
    return top.argparse.Namespace(**found)


def test_a_session_that_ends_meanwhile(capsys):
    synk.fork(2)
    sampler = sampling.Sampler(os.getpid())
    assert session_of_this(sampler.sample(0.1))
    kept = sampling.find([os.getpid()])
    synk.close()
    assert kept and all(gate.look() is None for gate in kept)
    assert sampler.sample(0.1)["sessions"] == []
    synk.fork(2)  # another is found

    def end(seconds):
        synk.close()

    assert sampler.sample(0.01, end)["sessions"] == []


def session_of_this(found):
    return [each for each in found["sessions"] if each["pid"] == os.getpid()]


# Another user, who writes what he likes where root looks.

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
HOSTILE = "\x1b]0;mine\x07\x9b2J\n\u202e\ud800"


@contextlib.contextmanager
def of_another_user(table, nbytes, program=None, cuts=False):
    """Give the number of a process of another user, which has a table as of a session open."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
            file = os.memfd_create(gate_memory.NAME, 0)
            os.ftruncate(file, nbytes)
            os.pwrite(file, table(os.getpid()), 0)
            if program is not None:
                os.execve(program, ["nap", "60"], {})
            os.close(writer)
            while cuts:
                os.ftruncate(file, gate_memory.GateMemory.nbytes(0)), os.ftruncate(file, nbytes)
                os.pwrite(file, table(os.getpid()), 0)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b""  # its end is closed by exec, too
        yield pid
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def table_of(**changes):
    """Return what makes the table of a session of one rank, with some of its label replaced."""

    def table(pid):
        label = {"rank": 0, "of": 1, "device": HOSTILE, "pid": pid, "role": "master", **changes}
        text = json.dumps({name: each for name, each in label.items() if each is not None})
        return bytes(2 * 8 * gate_memory.LINE) + text.encode().ljust(gate_memory.LABEL, b"\0")

    return table


@as_root
def test_memory_of_another_user_in_a_program_of_root_is_not_shown(script, tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "nap")
    os.chmod(tmp_path / "nap", 0o4755)
    given = table_of(), gate_memory.GateMemory.nbytes(1)
    with open(tmp_path / "nap", "rb") as nap, of_another_user(*given, nap.fileno()) as pid:
        if os.stat(f"/proc/{pid}").st_uid != 0:
            pytest.skip("programs of this folder don't become root (nosuid)")
        holders = [gate.holders for gate in sampling.find()]
        assert any(script.pid in each for each in holders)
        assert not any(pid in each for each in holders)
        assert sampling.find([pid]) == []


WRONG = {
    "a size of no table": (table_of(), 10**6),
    "millions of ranks": (table_of(), gate_memory.GateMemory.nbytes(4_000_000)),
    "more than memory": (table_of(), (1 << 63) - 4096),
    "a path": (table_of(pid="../../tmp"), None),
    "a list": (table_of(pid=[1]), None),
    "no number": (table_of(of=float("nan")), None),
    "a negative number": (table_of(rank=-1), None),
    "a large number": (table_of(of=10**100), None),
    "a missing entry": (table_of(device=None), None),
    "no text": (table_of(session={}), None),
    "no object": (lambda pid: bytes(16 * gate_memory.LINE) + b"[" * 120 + b"]" * 120, None),
}


@as_root
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_table_is_told_of_and_hides_no_other(case, script, monkeypatch):
    table, nbytes = WRONG[case]
    with of_another_user(table, nbytes or gate_memory.GateMemory.nbytes(1)) as pid:
        monkeypatch.setattr(sampling, "_own_processes", lambda: [pid, script.pid])
        found = sampling.Sampler().sample(0.05)
    [session] = found["sessions"]
    assert session["pid"] == script.pid
    assert list(found["problems"]) == [f"process {pid}"]
    assert f"The table of process {pid} can't be read" in str(top._watched(found))


@as_root
def test_a_table_that_is_cut_off_meanwhile(script, monkeypatch):
    with of_another_user(table_of(), gate_memory.GateMemory.nbytes(1), cuts=True) as pid:
        monkeypatch.setattr(sampling, "_own_processes", lambda: [pid, script.pid])
        monkeypatch.setattr(sampling, "LOOK_SECONDS", 0)
        found = sampling.Sampler().sample(0.5)
    assert session_of(script, found)


@as_root
def test_names_of_another_user_are_no_commands_to_a_terminal(capsys):
    rich = pytest.importorskip("rich.console")
    with of_another_user(table_of(), gate_memory.GateMemory.nbytes(1)) as pid:
        assert top.main(options(pid=pid, once=True, interval=0.1)) == 0
        [session] = sampling.Sampler(pid).sample(0.05)["sessions"]
    watched = live.Watched([session], [HOSTILE])
    console = rich.Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(watched.rich(120))
    as_html = watched._repr_html_().replace("&#x27;", "'")
    for shown in (capsys.readouterr().out, captured.get(), repr(watched), as_html):
        assert r"\x1b]0;mine\x07\x9b2J" in shown and r"\u202e\ud800" in shown
        assert not set(shown) & set(HOSTILE) - set("]0;mine2J\n")


def test_processes_of_other_users_are_not_looked_at(script, monkeypatch):
    assert any(script.pid in gate.holders for gate in sampling.find())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert sampling.find() == []


def test_a_half_written_label_shows_no_session(script):
    [gate] = sampling.find([script.pid])
    gate.look(with_labels=True)
    assert [label["rank"] for label in gate.labels] == [0, 1]
    number = gate.holders[script.pid]
    with open(f"/proc/{script.pid}/fd/{number}", "r+b") as memory:
        memory.seek(3 * 8 * gate_memory.LINE)
        first = memory.read(1)
        memory.seek(-1, os.SEEK_CUR)
        memory.write(b"?")
        memory.flush()
        gate.look(with_labels=True)
        assert gate.labels == []
        memory.seek(-1, os.SEEK_CUR)
        memory.write(first)


def test_a_narrow_terminal_has_fewer_columns_and_whole_numbers():
    rich = pytest.importorskip("rich.console")
    rank = {"rank": 0, "is_master": True, "device": "cpu", "pid": 1234567, "process": "sleeping"}
    rank.update(cpu=0.97, resident=118e6, shared=1e6, computes=1.0, waits=0.0, no_call=0.0)
    session = {"script": "a.py", "n_ranks": 1, "calls": 1, "kind": "session", "shared": 0}
    watched = live.Watched([{**session, "calls_per_second": 1.0, "ranks": [rank]}])
    for width, names in ((60, 7), (90, 10)):
        console = rich.Console(width=width, color_system=None)
        with console.capture() as captured:
            console.print(watched.rich(width))
        columns, row = captured.get().splitlines()[-2:]
        assert "…" not in columns + row and "1234567" in row and "97 %" in row
        assert len(columns.replace("no call", "no_call").split()) == names


def test_what_a_command_has_begun_is_shown_as_this_command(monkeypatch):
    monkeypatch.setattr(sampling, "_BEGUN", {"a.program"})
    code = (
        "import subprocess as s, sys; "
        "p = s.Popen([sys.executable, '-c', 'input()', 'a.program'], stdin=s.PIPE); "
        "print(p.pid, flush=True); input(); p.kill()"
    )
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, "--epochs", "3"], **given) as process:
        pid = int(process.stdout.readline())
        end = time.monotonic() + 10
        while (shown := sampling.script_of(pid)) != "--epochs 3" and time.monotonic() < end:
            time.sleep(0.01)  # until the child has become this program
        process.stdin.write("\n")
    assert shown == "--epochs 3"


def test_machines_of_one_session_are_merged():
    def answer(rank, is_master, calls):
        ranks = [{"rank": rank, "is_master": is_master}]
        session = {"id": "a:1:1", "calls": calls, "shared": 5, "ranks": ranks}
        return {"sessions": [session]}

    [session] = live.merged([answer(1, False, 1), answer(0, True, 2)])
    assert [rank["rank"] for rank in session["ranks"]] == [0, 1]
    assert (session["calls"], session["shared"]) == (2, 10)


def test_a_machine_that_never_answers_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(top.mpirun, "check", lambda: None)
    monkeypatch.setattr(top.mpirun, "line", lambda *_: ["sleep", "60"])
    monkeypatch.setattr(top, "_FIRST_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:
        watched = top._Hosts(options(hosts="node0"), stack)
        begin = time.monotonic()
        assert watched.sample(0.1)["sessions"] == []
        assert time.monotonic() - begin >= 1
        begin = time.monotonic()
        assert watched.sample(0.1)["sessions"] == []
        assert time.monotonic() - begin < 0.9


LIVE = """
import time
import theano.tensor as T
import synkhronos as synk
synk.fork(2)
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
f([1.0, 2.0])
with synk.status(live=True):
    end = time.monotonic() + 4
    while time.monotonic() < end:
        f([1.0, 2.0])
"""


@needs_jupyter
def test_a_live_status_in_a_notebook(tmp_path):
    import nbformat

    cells = [nbformat.v4.new_code_cell(LIVE + "print('after')\nsynk.close()")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "in.ipynb")
    in_kernel(tmp_path, "execute", "in.ipynb", "out.ipynb")
    [cell] = nbformat.read(tmp_path / "out.ipynb", 4).cells
    shown, said = cell.outputs
    assert "a second" in shown.data["text/plain"]
    assert "<td>0, master</td>" in shown.data["text/html"]
    assert said.text == "after\n"


def test_a_live_status_without_a_terminal_ends_with_its_session(tmp_path):
    (tmp_path / "live.py").write_text(LIVE + "    synk.close()\n    time.sleep(2)\n    f.name\n")
    done = running.run(sys.executable, "live.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Synkhronos: 1 session\n\nlive.py: 2 ranks, ")
    assert len(done.stdout.splitlines()) == 6


def test_a_process_forked_in_the_block_ends():
    code = (
        "import os, sys, synkhronos as synk; synk.fork(2)\n"
        "with synk.status(live=True):\n    os.fork() or sys.exit(3)\n"
        "    print(os.WEXITSTATUS(os.wait()[1]))"
    )
    done = running.run(sys.executable, "-c", code)
    assert (done.returncode, done.stderr, done.stdout.count("Synkhronos: ")) == (0, "", 1)
    assert done.stdout.startswith("3\n")


@pytest.mark.parametrize("end", ["", "next(generator); "])
def test_a_live_status_that_is_not_left_ends_with_python(end):
    begin = "import synkhronos as synk; synk.fork(2); live = synk.status(live=True); "
    block = "exec('def block():\\n with live: yield'); generator = block(); "
    done = running.run(sys.executable, "-c", begin + (block + end if end else "live.__enter__()"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Synkhronos: ") == 1


def test_a_live_status_needs_a_session():
    with pytest.raises(synk.SessionError, match="a live status"):
        synk.status(live=True)
