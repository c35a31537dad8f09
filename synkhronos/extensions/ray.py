"""The machines of a Ray cluster: list them, and run commands on them in place of ssh.

    $ ray="python -m synkhronos.extensions.ray"
    $ synkhronos launch --discover "$ray" --agent "$ray" train.py

Without arguments this module prints the machines of the cluster, this one first. With a machine and
a command it runs that there, as ssh does, in a Ray task. The daemon of mpirun, which stays as long
as the session, takes all CPUs and GPUs of its machine, so that Ray gives them to nobody else.

Ray lists the machines and starts the processes; its dashboard shows the tasks. Calls don't use Ray:
their messages go between machines as in any session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Mapping, Sequence

from synkhronos._host import pythons

_FREE_SECONDS = 60.0  # until all CPUs and GPUs of a machine must be free
_DAEMON = "prted"  # of mpirun
_UNREACHED = 255  # the exit status of ssh, too
_THREADS = "OMP_NUM_THREADS"  # Ray sets it in tasks


def main(arguments: Sequence[str]) -> int:
    """Print the machines, or run a command on one of them; return the exit status."""
    ray = _connected()
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: node["NodeID"] != here)
    nodes = {node["NodeManagerAddress"]: node for node in alive}
    if not arguments:
        print("\n".join(nodes))
        return 0
    host, *words = arguments
    if host not in nodes:
        print(f"{host} is not in the Ray cluster, which has {', '.join(nodes)}", file=sys.stderr)
        return _UNREACHED
    return _run(ray, nodes[host], " ".join(words))


def _connected() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        sys.exit(f"Ray is not installed: {pythons.install('ray')}")
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        sys.exit(f"no Ray cluster can be reached from here: {error}")
    return ray


def _run(ray: Any, node: Mapping[str, Any], command: str) -> int:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    is_daemon = _DAEMON in command
    cpus, gpus = (is_daemon * node["Resources"].get(name, 0) for name in ("CPU", "GPU"))
    there = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
    options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0, "scheduling_strategy": there}
    remote = ray.remote(**options)
    if not ray.wait([remote(lambda: None).remote()], timeout=_FREE_SECONDS)[0]:
        print(
            f"{node['NodeManagerAddress']}: its {cpus:g} CPUs and {gpus:g} GPUs were not free for "
            f"{_FREE_SECONDS:g} s; `ray status` says what is in use",
            file=sys.stderr,
        )
        return _UNREACHED
    task = remote(_in_shell).options(name="synkhronos")
    status, printed = ray.get(task.remote(command, os.environ.get(_THREADS)))
    print(printed, end="")
    return status


def _in_shell(command, threads):
    given = {} if threads is None else {_THREADS: threads}
    kept = {name: value for name, value in os.environ.items() if name != _THREADS}
    done = subprocess.run(
        ["sh", "-c", command],
        env={**kept, **given},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
