"""Run a command of ``synkhronos`` on test hosts, with a fast cable or a slow one; needs root.

    PYTHONPATH=tests .venv/bin/python -m support.on_hosts --rate 100mbit 2 bench machines
    PYTHONPATH=tests .venv/bin/python -m support.on_hosts --ranks 2 2 launch script.py

The hosts are there until the command has ended. It gets the options ``--hosts``, ``--agent`` and
``--mpirun-args``. MPI's processes of one host share memory, as on a real one; and since all hosts
have the same cores, they give them up while they wait.
"""

import argparse
import subprocess
import sys

from support import hosts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", help="of each cable, such as 100mbit (default: what it can)")
    parser.add_argument("--ranks", type=int, help="of each host, in --hosts")
    parser.add_argument("number", type=int, help="of hosts")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="bench machines, or benchmarks overlap"
    )
    args = parser.parse_args()
    with hosts.up(args.number) as these:
        if args.rate:
            for i in range(args.number):
                these.slow(i + 1, args.rate)
        return subprocess.call(line(these, args.command, args.ranks), env=these.environment())


def line(these, command, ranks=None):
    """Return the command line of a command that takes the options of `synkhronos launch`."""
    agent, network = these.reached_by[1], these.reached_by[3]
    network = network.replace("tcp,self", "tcp,sm,self") + " --mca mpi_yield_when_idle 1"
    names = [f"{each}:{ranks}" if ranks else each for each in these.addresses]
    options = ["--hosts", ",".join(names), "--agent", agent, "--mpirun-args", network]
    module = [] if command[0] == "benchmarks" else ["synkhronos"]
    at = 1 if command[0] == "launch" else len(command)  # what follows the script is the script's
    return [sys.executable, "-m", *module, *command[:at], *options, *command[at:]]


if __name__ == "__main__":
    sys.exit(main())
