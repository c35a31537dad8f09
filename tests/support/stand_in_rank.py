"""A rank that does what a test says, in place of the rules' own, and the launcher that starts it.

python -m support.stand_in_rank rule BSP --devices cpu,cpu model.py Model --set does=waits
"""

import json
import os
import signal
import sys
import time
import traceback


def rank(job):
    """Run as one rank of a job; `does` of its settings says what."""
    from synkhronos._machine.processes import tell_guard_of_mpi
    from synkhronos.comm.mpi import folders

    with folders.of_segment():  # as in a rank of the rules
        from mpi4py import MPI

    tell_guard_of_mpi()
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    settings, number = job["settings"], world.rank
    does = settings.get("does", "ends")
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(time.monotonic()))
    print(f"rank {number} of {world.size}: {job['devices'][number]}, {job['cores']}", flush=True)
    print(f"an error of rank {number}", file=sys.stderr, flush=True)
    if does == "shows":
        print("environment", os.environ.get("THEANO_FLAGS"), os.environ.get("SYNKHRONOS_SHOWN"))
        print("no newline", end="", flush=True)
    if does == "saves" or settings.get("saves"):
        world.Barrier()
        if number == 0:
            os.makedirs(job["options"]["snapshot_path"], exist_ok=True)
            open(os.path.join(job["options"]["snapshot_path"], "snapshot_0003.npz"), "w").close()
        world.Barrier()
    world.gather(None, world.size - 1)  # all have printed, and only the last one waits for others
    if number == world.size - 1:
        if does == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if does == "exits":
            os._exit(7)
        if does == "raises":
            try:
                raise ValueError("a reason")
            except ValueError:
                traceback.print_exc()
                os._exit(1)
        if does == "aborts":
            world.Abort(5)
    if does in ("is killed", "exits", "raises", "aborts"):
        try:
            world.recv(source=world.size - 1)
        except Exception as error:
            print(f"rank {number} has noticed: {error}", flush=True)
        os._exit(0)
    if does in ("waits", "is stubborn"):
        world.Barrier()
        print("begun", flush=True)
        while not asked or does == "is stubborn":
            time.sleep(0.02)
        time.sleep(0.5 * number)  # its snapshot takes longer
        print(f"rank {number} was asked {len(asked)} times", flush=True)
        MPI.Finalize()
        sys.exit(130)


def main(arguments):
    """Run the launcher with ranks of this module."""
    if arguments[0] == "rank":
        return rank(json.loads(arguments[1]))
    from synkhronos.__main__ import main
    from synkhronos.tools import rule, tmlauncher

    def command(asked, cores):
        return [sys.executable, "-u", os.path.abspath(__file__), "rank", asked.job(cores).as_json()]

    rule.worker_command = command
    if arguments[0] == "tmlauncher":
        return tmlauncher.main(arguments[1:])
    return main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
