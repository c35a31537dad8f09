"""Run scenarios of one group, in a process of their own: `check.py` starts it.

Each scenario appends two lines to the file of events: that it begins, and how it ended. So the file
names the one that hangs or crashes.
"""

import json
import logging
import os
import sys
import time
import traceback

import scenarios


def main(request):
    """Run the scenarios that the request names, or all; return whether the session lived."""
    with open(request["events"], "a", buffering=1) as events:

        def tell(**event):
            print(json.dumps(event), file=events, flush=True)

        module = scenarios.load(request["group"])
        found = scenarios.find(module)
        names = [name for name in found if name not in request["done"]]
        forks = getattr(module, "FORKS", False)
        tell(names=names, forks=forks)
        run = scenarios.Run(request["devices"], request["quick"])
        if forks and not attempt(tell, "fork", fork, run, limit=300):
            return
        for name in names:
            attempt(tell, name, found[name], run, found[name].limit)
            if forks and session_is_over():
                break
        if forks:
            attempt(tell, "close", close, run, limit=60)


def attempt(tell, name, function, run, limit):
    """Run one scenario; return whether it passed."""
    run.figures = {}
    sys.stdout.flush()
    tell(begin=name, limit=limit, said=os.fstat(sys.stdout.fileno()).st_size)
    began = time.perf_counter()
    status, detail, error = "ok", "", ""
    try:
        detail = function(run) or ""
    except scenarios.Skip as reason:
        status, detail = "skip", str(reason)
    except scenarios.Known as reason:
        status, detail = "known", str(reason)
    except Exception as failure:
        status, error = "FAIL", traceback.format_exc()
        detail = f"{type(failure).__name__}: {failure}".strip().splitlines()[0]
    seconds = time.perf_counter() - began
    tell(end=name, status=status, seconds=seconds, detail=detail, error=error, figures=run.figures)
    return status == "ok"


def fork(run):
    """Start the ranks."""
    import synkhronos as synk

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("synkhronos")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    synk.fork(devices=run.devices)
    log.removeHandler(handler)
    return "; ".join(said)


def session_is_over():
    """Whether a worker has died: what is left of the group needs another process."""
    import theano

    import synkhronos as synk

    try:
        synk.get_shapes(theano.shared(0.0))
    except synk.WorkerDied:
        return True
    return False


def close(run):
    """End the session."""
    import synkhronos as synk

    synk.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
