"""A rank that does what a test says, in place of the rules' own, and the launcher that starts it.

python -m support.stand_in_rank rule BSP --devices cpu,cpu model.py Model --set does=waits
"""

import os
import signal
import sys
import time
import traceback


def rank(job):
    """Run as one rank of a job; `does` of its settings says what."""
    from synkhronos.parameter_server.group import membership

    group = membership.join()
    number, last = group.rank, group.size - 1
    does = job.settings.get("does", "ends")
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(time.monotonic()))
    print(f"rank {number} of {group.size}: {job.devices[number]}, {job.cores}", flush=True)
    print(f"an error of rank {number}", file=sys.stderr, flush=True)
    if does == "shows":
        print("environment", os.environ.get("THEANO_FLAGS"), os.environ.get("SYNKHRONOS_SHOWN"))
        print("no newline", end="", flush=True)
    if does == "saves" or job.settings.get("saves"):
        group.barrier()
        if number == 0:
            os.makedirs(job.options["snapshot_path"], exist_ok=True)
            open(os.path.join(job.options["snapshot_path"], "snapshot_0003.npz"), "w").close()
    group.barrier()  # all have printed
    if does in ("is killed", "exits", "raises", "aborts"):
        if number == last:
            fail(does, group)
        while (came := group.receive()) != (last, None):
            pass
        print(f"rank {number} has noticed that rank {came[0]} has died", flush=True)
        if job.rule == "BSP":
            return membership.FOLLOWS
    if does in ("waits", "is stubborn"):
        print("begun", flush=True)
        while not asked or does == "is stubborn":
            time.sleep(0.02)
        time.sleep(0.5 * number)  # its snapshot takes longer
        print(f"rank {number} was asked {len(asked)} times", flush=True)
    group.close()
    return 130 if asked else 0


def fail(does, group):
    """End this process in some way."""
    if does == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "raises":
        try:
            raise ValueError("a reason")
        except ValueError:
            traceback.print_exc()
    if does == "aborts":
        group.abort()
    sys.stderr.flush()
    os._exit({"exits": 7, "raises": 1, "aborts": 5}[does])


def main(arguments):
    """Run the launcher with ranks of this module."""
    if arguments[0] == "rank":
        from synkhronos.rules.job import Job

        return rank(Job.from_json(arguments[1]))
    from synkhronos.__main__ import main
    from synkhronos.rules import command as rule

    def command(asked, cores):
        return [sys.executable, "-u", os.path.abspath(__file__), "rank", asked.job(cores).as_json()]

    rule.worker_command = command
    return main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
