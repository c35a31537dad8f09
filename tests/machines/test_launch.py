"""``synkhronos launch``: hosts, the line of mpirun, streams, exit statuses, Ctrl-C, mistakes."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support import hosts, launching
from support.launching import FOR_ROOT, needs_mpirun
from support.machine_scripts import end_cut_off
from support.running import python_path
from support.waiting import wait_until

from synkhronos._machine import devices
from synkhronos._machine.devices import module_command
from synkhronos.comm.mpi import folders
from synkhronos.launch import CannotLaunch, mpirun, through
from synkhronos.launch.mpirun import Options
from synkhronos.launch.where import Host

LAUNCH = [sys.executable, "-m", "synkhronos", "launch"]


def run(*arguments, **where):
    """Run `synkhronos launch`; return its exit status, what it printed, and its errors."""
    return launching.run([*LAUNCH, *arguments], **where)


@pytest.fixture
def empty(tmp_path):
    (tmp_path / "empty.py").write_text("")
    return tmp_path


@needs_mpirun
def test_the_line_of_mpirun(empty):
    status, out, err = run(
        *("--hosts", "a:2,b", "--agent", "my ssh", "--mpirun-args", "--mca btl 'tcp,self'"),
        *("--devices", "cpu,cpu", "--follow", "--no-report", "--report", "r"),
        *("--dry-run", "empty.py", "-n", "x y"),
        folder=empty,
        SYNKHRONOS_CHECK="1",
        THEANO_FLAGS="floatX=float32",
    )
    assert (status, err) == (0, "")
    line = shlex.split(out)
    assert line[0].endswith("mpirun")
    assert line[1:5] == ["--host", "a:1,b:1", "-n", "2"]
    assert line[5:9] == ["--map-by", "ppr:1:node", "--bind-to", "none"]
    assert line[line.index("plm_rsh_agent") + 1] == "my ssh"
    exported = {line[number + 1] for number, word in enumerate(line) if word == "-x"}
    assert exported >= {
        "SYNKHRONOS_CHECK",
        "THEANO_FLAGS",
        "SYNKHRONOS_DEVICES=cpu,cpu",
        "SYNKHRONOS_RANKS_OF_MACHINES=2,",
    }
    options = "--follow", "--no-report", "--report", "r"
    program = module_command("synkhronos", "run", *options, "empty.py", "-n", "x y")
    assert line[-len(program) :] == program
    assert line[-len(program) - 3 : -len(program)] == ["--mca", "btl", "tcp,self"]


def test_folders_of_mpirun_go_with_it_and_those_of_killed_launchers_with_the_next(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = folders.of_mpirun
    child = os.fork()
    if child == 0:
        with own({}):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    [left] = tmp_path.iterdir()
    (left / "ompi.5").mkdir()
    with own({}) as first, own({}) as second:
        both = {each["PRTE_MCA_prte_local_tmpdir_base"] for each in (first, second)}
        assert {str(path) for path in tmp_path.iterdir()} == both and len(both) == 2
    code = "import os; print(os.listdir(os.environ['PRTE_MCA_prte_local_tmpdir_base']))"
    assert mpirun.ask([[sys.executable, "-c", code]], 60)[0].stdout == "[]\n"
    daemon = [sys.executable, "-I", folders.__file__, sys.executable, "-c"]
    code = "import os, sys; sys.exit(os.path.isdir(os.environ['PRTE_MCA_prte_remote_tmpdir_base']))"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([*daemon, code], env=environment, timeout=300).returncode == 1
    assert list(tmp_path.iterdir()) == []
    grouped = {"stdout": subprocess.PIPE, "env": environment, "start_new_session": True}
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen([*daemon, code], **grouped) as cancelled:
        assert cancelled.stdout.readline() == b"\n" and list(tmp_path.iterdir())
        os.killpg(cancelled.pid, signal.SIGTERM)  # as scancel does
    assert list(tmp_path.iterdir()) == []
    given = {"PRTE_MCA_prte_tmpdir_base": "/own", "SLURM_OVERLAP": "0"}
    with own(given) as used:
        assert used == given and not list(tmp_path.iterdir())


KILLED = """
import os
import mpi4py
from synkhronos.comm.mpi import folders
with folders.of_segment():
    from mpi4py import MPI
    os.kill(os.getpid(), 9)
"""


@needs_mpirun
@pytest.mark.parametrize("after", ["a launcher", "a process"])
def test_memory_of_a_process_that_was_killed_while_mpi_started_goes_with_the_next(
    tmp_path, monkeypatch, after
):
    """Open MPI left 16 MiB of each in /dev/shm."""
    variable = "OMPI_MCA_btl_sm_backing_directory"
    monkeypatch.setenv(variable, str(tmp_path))
    line = [sys.executable, "-c", KILLED]
    assert subprocess.run(line, env={**os.environ, **FOR_ROOT}, timeout=60).returncode == -9
    [left] = tmp_path.glob("*/sm_segment.*")
    with folders.of_segment() if after == "a process" else folders.of_mpirun(os.environ):
        assert left.exists() == (after == "a launcher")
    assert list(tmp_path.iterdir()) == []
    assert os.environ[variable] == str(tmp_path)


def test_this_machine_alone_needs_no_mpi(tmp_path):
    (tmp_path / "show.py").write_text(
        "import sys, synkhronos as synk\nprint(sys.argv, len(synk.status().ranks)); sys.exit(3)\n"
    )
    none = dict.fromkeys(("SLURM_JOB_NODELIST", "PBS_NODEFILE"))
    found = run("--devices", "cpu,cpu", "show.py", "-n", "5", folder=tmp_path, **none)
    assert found == (3, "['show.py', '-n', '5'] 2\n", "")
    own = f"{socket.gethostname()}:2"
    assert run("--hosts", own, "show.py", folder=tmp_path) == (3, "['show.py'] 2\n", "")
    found = run("-n", "2", "--dry-run", "show.py", "a b", folder=tmp_path, **none)
    line = module_command("synkhronos", "run", "-n", "2", "show.py", "a b")
    assert found[:2] == (0, f"{shlex.join(line)}\n")


@needs_mpirun
@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--hosts", "a", "none.py"], {}, "can't launch: can't open 'none.py': No such file"),
        (["--hosts", "a:x", "empty.py"], {}, "can't launch: --hosts: 'a:x' must have a number"),
        (["--hostfile", "none", "empty.py"], {}, "can't read the hostfile 'none': No such file"),
        (["--hosts", "a:2", "-n", "2", "empty.py"], {}, "a:2 says it too: give one"),
        (["--hosts", "a:2", "--devices", "cpu", "empty.py"], {}, "but --devices names 1"),
        (["--hosts", "a", "--mpirun-args", "'", "empty.py"], {}, "No closing quotation"),
        (["--hosts", "a", "--hostfile", "b", "empty.py"], {}, "not allowed with argument"),
        (["--hosts", "a"], {}, "usage: synkhronos"),
        (["--hosts", "a,b", "--min-hosts", "3", "empty.py"], {}, "more than there are: 2 hosts"),
        (["--restarts", "1", "-"], {}, "a script from standard input can't start again"),
        (["--discover", "echo a", "--hosts", "a", "empty.py"], {}, "so --hosts and --hostfile can"),
        (["--grace", "nan", "--hosts", "a", "empty.py"], {}, "'nan' must be a number of sec"),
    ],
)
def test_mistakes_are_told_in_a_sentence(empty, arguments, variables, message):
    status, out, err = run(*arguments, folder=empty, **variables)
    assert (status, out) == (2, "") and message in err and "Traceback" not in err


@needs_mpirun
@pytest.mark.skipif(os.geteuid() != 0, reason="Open MPI refuses root only")
def test_open_mpi_refuses_root(empty):
    status, _, err = run("--hosts", "a", "empty.py", folder=empty, **dict.fromkeys(FOR_ROOT))
    assert status == 2 and err.count("\n") == 1
    assert "refuses to run as root" in err and "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in err


OPEN_MPI = "print('Open MPI v5.0.11, package: Open MPI user@localhost')"


def test_no_mpirun(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotLaunch, match=r"no mpirun: pip install 'synkhronos\[mpi\]', or"):
        mpirun.find()


@pytest.mark.parametrize(
    ("version", "loaded", "message"),
    [
        ("mpirun (Open MPI) 3.1.4", OPEN_MPI, "belongs to Open MPI 3, but mpi4py loads Open MPI 5"),
        ("HYDRA build details:\n  Version: 4.1", OPEN_MPI, "belongs to MPICH 4, but mpi4py loads"),
        ("my own launcher", OPEN_MPI, "belongs to my own launcher, but mpi4py loads Open MPI 5"),
        ("mpirun (Open MPI) 5.0", "raise ImportError('libmpi.so.40')", r"mpi.so.40.*\[mpi\]'"),
    ],
)
def test_an_mpirun_of_another_mpi(monkeypatch, tmp_path, version, loaded, message):
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<END\n{version}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setattr(mpirun, "find", lambda: str(program))
    monkeypatch.setattr(mpirun, "python_command", lambda code: [sys.executable, "-c", loaded])
    with pytest.raises(CannotLaunch, match=message):
        mpirun.check()


@pytest.mark.parametrize(
    ("module", "whom", "status"), [("numpy", "getpid", -signal.SIGINT), ("mpi4py", "getppid", 130)]
)
@needs_mpirun
def test_a_ctrl_c_before_the_start_prints_nothing(empty, module, whom, status):
    """While the launcher imports, and while it asks which MPI there is."""
    (empty / f"{module}.py").write_text(f"import os, signal\nos.kill(os.{whom}(), signal.SIGINT)")
    found = run("--hosts", "a,b", "empty.py", folder=empty, PYTHONPATH=python_path(empty))
    assert found == (status, "", "")


def test_a_page_that_mpirun_writes_with_pauses_is_taken_out(monkeypatch):
    """mpirun writes it line by line, on a busy machine over seconds: then it was printed."""
    script = through.Script([], [Host("a"), Host("b-2")], Options())
    script.ranks[0].pid, script._mpirun = 77, SimpleNamespace(pid=os.getpid())
    written = []
    monkeypatch.setattr(script, "_write", lambda fd, data: written.append(data))
    edge = b"-" * 74 + b"\n"
    remote = b"  Remote daemon: [prterun-a-9@0,1] on node b-2\n"
    for line in edge, b"PRTE has lost communication with a remote daemon.\n", remote, edge:
        script._take(2, line)
        script._tick(1.0)
    assert b"".join(written) == b"" and script._losses == ["mpirun has lost b-2"]
    script._take(2, edge)  # the script's own
    script._tick(1.0)
    script._tick(1.0)
    assert b"".join(written) == edge


@needs_mpirun
def test_a_machine_without_the_daemon_is_named(tmp_path):
    """All names are this machine here, but the agent finds no prted on one of them."""
    agent = tmp_path / "agent"
    agent.write_text(
        '#!/bin/sh\nif [ "$1" = b ]; then set -- b "$(echo "$2" | sed s,/prted,/none,)"; fi\n'
        'exec sh -c "$2"\n'
    )
    agent.chmod(0o755)
    page = "A daemon failed to report back after being spawned.\n  Remote host:   a\n"
    said = mpirun.why_not_started(page, [Host("a"), Host("b"), Host("c")], Options(str(agent)))
    assert said.startswith("b (") and "/none" in said.partition(")")[0]
    assert "can be reached, but mpirun's daemon can't start there" in said


def test_in_a_job_of_slurm_machines_are_asked_by_srun(tmp_path, monkeypatch):
    program = tmp_path / "srun"
    # An srun that does not share cores would wait for another step of the job.
    program.write_text(
        '#!/bin/sh\n[ "$SLURM_OVERLAP" = 1 ] || exec sleep 600\nfirst=$1\n'
        'while [ $1 != -w ]; do shift; done; shift 2; "$@" && exit; status=$?\n'
        '[ $first = --quiet ] || echo "srun: Job step aborted" >&2; exit $status\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert mpirun.ask_all([Host("b")], Options(), "echo 'no room' >&2; exit 3") == {"b": "no room"}
    assert mpirun.ask_all([Host("b")], Options(), "true") == {}
    assert mpirun.ask_all([Host("b")], Options("false"), "true") == {"b": "exit status 1"}


@needs_mpirun
def test_the_mpirun_of_this_environment_fits():
    mpirun.check()


def test_the_ranks_that_launch_gives_a_machine(monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_RANKS_OF_MACHINES", "3,,1")
    assert devices.resolve(use_gpu=False) == ("cpu",) * 3
    assert devices.resolve(3, use_gpu=False) == ("cpu",) * 3
    with pytest.raises(ValueError, match=r"n_parallel asks for 2 ranks .* was told 3 for this one"):
        devices.resolve(2)
    with pytest.raises(ValueError, match=r"devices asks for 1 rank .* was told 3"):
        devices.resolve(devices=["cpu"])
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert devices.resolve(2, use_gpu=False) == ("cpu",) * 2
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    assert devices.resolve(use_gpu=False) == ("cpu",)
    monkeypatch.setenv("SYNKHRONOS_DEVICES", "cpu,cpu")
    with pytest.raises(ValueError, match="n_parallel=1, but SYNKHRONOS_DEVICES names 2"):
        devices.resolve()
    monkeypatch.setenv("SYNKHRONOS_RANKS_OF_MACHINES", "2,,1")
    monkeypatch.setenv("SYNKHRONOS_DEVICES", "cpu,cpu;cpu;opencl0:0")
    assert devices.resolve() == ("opencl0:0",)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert devices.resolve() == ("cpu", "cpu")
    monkeypatch.setenv("SYNKHRONOS_RANKS_OF_MACHINES", "two")
    with pytest.raises(ValueError, match="'two' must be a number of ranks for each machine"):
        devices.resolve()


class Launched:
    """A launch on test hosts."""

    def __init__(self, hosts, folder, *arguments, names=None, **variables):
        self.hosts = hosts
        self.process = subprocess.Popen(
            hosts.launch(*arguments, hosts=names),
            cwd=folder,
            env=hosts.environment(PYTHONUNBUFFERED="1", **variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def expect(self, line):
        """Check the next line that the script prints; if it is another one, show all."""
        found = self.process.stdout.readline()
        if found != f"{line}\n":
            self.process.terminate()
            pytest.fail(f"{found!r} came for {line!r}, and then {self.wait()}")

    def wait(self, stdin=None):
        """Return the exit status, what was printed, and errors; check that nothing is left."""
        try:
            out, err = self.process.communicate(stdin, timeout=300)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
        assert self.hosts.is_empty(), [self.hosts.programs(i + 1) for i in range(2)]
        return self.process.returncode, out, err


SCRIPT = """
import socket, sys
import numpy as np, theano.tensor as T, synkhronos as synk
n = synk.fork()
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
print(socket.gethostname(), n, sys.argv[1:], float(f(np.arange(10.0))), sys.stdin.read())
print("no newline", end="", file=sys.stderr)
sys.exit(3)
"""


def test_a_script_on_two_hosts(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    text = "a line\n" * 30_000
    one, other = two_hosts.addresses
    names = f"{one}:cpu,{one}:cpu,{other}:cpu"
    launched = Launched(two_hosts, tmp_path, "script.py", "--hosts", "b c", names=names)
    status, out, err = launched.wait(text)
    host = f"synk{two_hosts.net}-1"
    assert (status, err) == (3, "no newline")
    assert out == f"{host} 3 ['--hosts', 'b c'] 45.0 {text}\n"


@pytest.mark.slow("starts mpirun on hosts, and compiles")
def test_the_demo_on_two_hosts(two_hosts, tmp_path):
    demo = Path(__file__).parents[2] / "demos" / "several_machines.py"
    names = f"{two_hosts.addresses[0]}:2,{two_hosts.addresses[1]}:1"
    launched = Launched(two_hosts, tmp_path, demo, "--steps", "20", "--hidden", "8", names=names)
    status, out, err = launched.wait()
    assert (status, err) == (0, "")
    first, second, parallel, serial, last = out.splitlines()
    assert first == f"synk{two_hosts.net}-1: ranks 0, 1"
    assert second == f"synk{two_hosts.net}-2: rank 2"
    assert parallel.split("loss")[1] == serial.split("loss")[1]
    assert float(last.split()[5].rstrip(";")) < 1e-12 and last.endswith("equal on all ranks: True")


@pytest.mark.slow("starts mpirun on hosts three times")
@pytest.mark.parametrize(
    ("script", "status", "out", "err"),
    [
        ("raise ValueError('a reason')", 1, "", "ValueError: a reason\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "", ""),
        ("import os; os._exit(4)", 4, "", ""),
    ],
)
def test_the_exit_status_is_the_scripts(two_hosts, tmp_path, script, status, out, err):
    (tmp_path / "script.py").write_text(f"{script}\n")
    found = Launched(two_hosts, tmp_path, "-n", "1", "script.py").wait()
    assert found[:2] == (status, out) and found[2].endswith(err)
    assert "prterun" not in found[2]


WAITS = """
import signal, sys, time
try:
    print("begun", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    if sys.argv[1] == "stubborn":
        time.sleep(600)
    raise
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("once", 130),
        pytest.param("stubborn", 130, marks=pytest.mark.slow("starts mpirun on hosts")),
        pytest.param("terminate", 143, marks=pytest.mark.slow("starts mpirun on hosts")),
    ],
)
def test_ctrl_c_ends_all(two_hosts, tmp_path, how, status):
    (tmp_path / "script.py").write_text(WAITS)
    launched = Launched(two_hosts, tmp_path, "-n", "2", "script.py", how)
    launched.expect("begun")
    if how == "terminate":
        launched.process.terminate()
    else:
        launched.process.send_signal(signal.SIGINT)
        launched.expect("interrupted")
    if how == "stubborn":
        launched.process.send_signal(signal.SIGINT)
    found, _, err = launched.wait()
    assert found == status
    assert ("KeyboardInterrupt" in err) == (how == "once")


@pytest.mark.slow("starts mpirun on hosts")
@pytest.mark.parametrize(
    ("which", "status"), [("launcher", -signal.SIGKILL), ("mpirun", 1), (1, 137), (2, 143)]
)
def test_a_killed_mpirun_launcher_or_guard_leaves_nothing(two_hosts, tmp_path, which, status):
    """mpirun ended the script without a word if the guard of another host was killed."""
    (tmp_path / "script.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    launched = Launched(two_hosts, tmp_path, "-n", "1", "script.py")
    launched.expect("begun")
    killed = psutil.Process(launched.process.pid)
    said = {"launcher": "", "mpirun": "mpirun has ended before the script.\n"}.get(which)
    if which == "mpirun":
        [killed] = killed.children()
    elif said is None:
        [killed] = launching.daemon_on(two_hosts, which).children()
        how = "was killed by SIGKILL (signal 9), which has ended the run"
        said = f"The guard on synk{two_hosts.net}-{which} {how}.\n"
    killed.kill()
    assert launched.wait() == (status, "", said)


@pytest.mark.slow("starts mpirun on hosts twice")
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "mpirun was killed by SIGKILL (signal 9)"),
        (signal.SIGSTOP, "mpirun was stopped for 2 s"),
    ],
)
def test_an_mpirun_that_a_signal_keeps_from_starting_is_started_again(
    two_hosts, tmp_path, number, how
):
    """As the same hosts answered, it was not."""
    (tmp_path / "script.py").write_text("print(1)\n")
    given = "-n", "1", "--restarts", "1", "--lost-after", "2", "script.py"
    launched = Launched(two_hosts, tmp_path, *given)
    found = []

    def find():  # after the commands that ask hosts
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(launched.process.pid).children():
                line = each.cmdline()  # before its exec a child has that of the launcher
                found.extend([each] if "script.py" in line and "launch" not in line else [])
        return found

    wait_until(find)
    found[0].send_signal(number)
    status, out, err = launched.wait()
    assert (status, out) == (0, "1\n") and f"Lost before: {how}." in err, err


@pytest.mark.parametrize("why", ["no host", "no agent"])
def test_a_host_that_cannot_be_reached(two_hosts, tmp_path, why):
    (tmp_path / "script.py").write_text("print(1)\n")
    names = f"{two_hosts.addresses[0]},10.{two_hosts.net}.0.9"
    if why == "no host":
        status, out, err = Launched(two_hosts, tmp_path, "script.py", names=names).wait()
        assert f"can't launch: 10.{two_hosts.net}.0.9 (Cannot open network namespace" in err
    else:
        agent = ["--agent", "/no/such/ssh"]
        status, out, err = Launched(two_hosts, tmp_path, *agent, "script.py", names=names).wait()
        assert "can't launch" in err
    assert (status, out) == (1, "") and "Traceback" not in err


@pytest.mark.parametrize(
    "restarts", [0, pytest.param(1, marks=pytest.mark.slow("starts mpirun on hosts twice"))]
)
def test_an_agent_that_hangs_is_named_and_left_out(two_hosts, tmp_path, restarts):
    """It had answered the question, and launch waited for its daemon for ever."""
    (tmp_path / "script.py").write_text("print(1)\n")
    first, other = two_hosts.addresses
    limits = "-n", "1", "--wait-start", "6", *(["--restarts", "1"] if restarts else [])
    hangs = two_hosts.in_place_of_daemon(2)
    hangs.write_text("sleep 600\n")
    try:
        status, out, err = Launched(two_hosts, tmp_path, *limits, "script.py").wait()
    finally:
        hangs.unlink()
    why = f"{other} (mpirun's daemon does not answer within 6 s (--wait-start 12 waits longer))"
    if restarts:
        assert (status, out) == (0, "1\n") and f"2 of 2 on {first}, without {why}" in err, err
    else:
        assert (status, out) == (1, "") and f"can't launch: {why} can be reached" in err, err
    wait_until(lambda: not any(str(hangs) in each.info["cmdline"] for each in running()))


def running():
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]]


@pytest.mark.slow("waits for a start")
@pytest.mark.parametrize(("module", "n_named"), [("sitecustomize", 1), ("mpi4py", 2)])
def test_hosts_where_python_or_mpi_does_not_begin_are_named(two_hosts, tmp_path, module, n_named):
    """MPI begins on all hosts at once."""
    (tmp_path / "script.py").write_text("print(1)\n")
    (tmp_path / f"{module}.py").write_text(
        "import socket, sys, time\n"
        "if socket.gethostname().endswith('-2'): time.sleep(600)\n"
        "sys.path.remove(__file__.rpartition('/')[0]); del sys.modules[__name__]\n"
        "if __name__ == 'mpi4py': import mpi4py\n"
    )
    path = {"PYTHONPATH": python_path(tmp_path)}
    status, out, err = Launched(
        two_hosts, tmp_path, "-n", "1", "--wait-start", "10", "script.py", **path
    ).wait()
    names = " and ".join(two_hosts.addresses[-n_named:])
    assert (status, out) == (1, ""), err
    late = f"{names} did not begin within 10 s (--wait-start 20 waits longer)"
    assert err.endswith(f"{late}, which has ended the run.\n"), err


@pytest.mark.slow("starts mpirun on hosts")
def test_a_process_that_is_killed_while_mpi_begins_is_named(two_hosts, tmp_path):
    """The process that has begun MPI printed a traceback, and its machine was told as lost."""
    (tmp_path / "script.py").write_text("import synkhronos as synk\nsynk.fork()\n")
    (tmp_path / "mpi4py.py").write_text(
        "import os, socket, sys\n"
        "if socket.gethostname().endswith('-2'): os.kill(os.getppid(), 9)\n"
        "sys.path.remove(__file__.rpartition('/')[0]); del sys.modules[__name__]\n"
        "import mpi4py\n"
    )
    path = {"PYTHONPATH": python_path(tmp_path)}
    status, _, err = Launched(two_hosts, tmp_path, "-n", "1", "script.py", **path).wait()
    said = f"can't start the ranks: The first process on synk{two_hosts.net}-2 has ended, and"
    assert status == 2 and err.startswith(said) and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("which", "restarts"),
    [
        ("mpirun", 0),
        ("guard", 0),
        *(
            pytest.param(*each, marks=pytest.mark.slow("launches on hosts, perhaps twice"))
            for each in (("mpirun", 1), ("guard", 1), ("prted", 0))
        ),
    ],
)
def test_what_is_stopped_for_long_is_killed_and_the_launcher_ends(
    two_hosts, tmp_path, which, restarts
):
    """The script had ended well, and the launcher waited for ever."""
    (tmp_path / "script.py").write_text(
        "import time, synkhronos as synk\n"
        "print('begun', flush=True); time.sleep(2 - 2 * synk.restart_count())"
    )
    limits = "-n", "1", "--lost-after", "2", *(["--restarts", "1"] if restarts else [])
    launched = Launched(two_hosts, tmp_path, *limits, "script.py")
    launched.expect("begun")
    if which == "mpirun":
        [process] = psutil.Process(launched.process.pid).children()
    else:
        process = launching.daemon_on(two_hosts, 1)
        if which == "guard":
            [process] = process.children()
    process.suspend()
    status, out, err = launched.wait()
    first = f"synk{two_hosts.net}-1"
    how = {
        "mpirun": "mpirun was stopped for 2 s",
        "guard": f"The script's guard on {first} was stopped for 2 s",
        "prted": f"mpirun has lost {first}",
    }
    if restarts:
        assert (status, out) == (0, "begun\n") and f"Lost before: {how[which]}." in err, err
    else:
        assert (status, err) == (1, f"{how[which]}, which has ended the run.\n")


@pytest.mark.slow("ends mpirun after some seconds")
def test_output_is_read_by_head(two_hosts, tmp_path):
    """A reader that goes away ends the script as in a pipe of a shell, and nothing is left."""
    (tmp_path / "script.py").write_text(
        "import time\nfor i in range(100_000): print(i, flush=True); time.sleep(0.001)\n"
    )
    launched = Launched(two_hosts, tmp_path, "-n", "1", "script.py")
    launched.expect("0")
    with launched.process:
        launched.process.stdout.close()
        launched.process.stdin.close()
    wait_until(two_hosts.is_empty)


@pytest.mark.slow("waits until a machine is taken for lost")
def test_a_cable_that_is_cut(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(
        "import time, numpy as np, theano, synkhronos as synk\n"
        "s = theano.shared(np.ones(3))\n"
        "synk.broadcast(s); print('begun', flush=True)\n"
        "try:\n"
        "    while True: synk.all_reduce(s); time.sleep(0.01)\n"
        "except synk.WorkerDied:\n"
        "    print('told', flush=True)\n"
        "    time.sleep(11)\n"  # mpirun took the machine for lost 6 to 14 s after the cut
        "    raise\n"
        "finally:\n"
        "    print('ended', flush=True)\n"
    )
    launched = Launched(two_hosts, tmp_path, "-n", "1", "script.py", **hosts.IMPATIENT)
    launched.expect("begun")
    two_hosts.cut(2)
    try:
        out, err = launched.process.communicate(timeout=300)
        wait_until(lambda: not any(two_hosts.programs(host) for host in (1, 2)))
    finally:
        end_cut_off(two_hosts, launched.process)
    assert (launched.process.returncode, out) == (1, "told\nended\n")
    assert "WorkerDied" in err and f"synk{two_hosts.net}-2" in err
