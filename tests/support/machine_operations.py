"""An operation whose rank gets into trouble, in a module that all machines can import; calls."""

import os
import signal
import time

import numpy as np
import theano.tensor as T
from theano.compile.ops import as_op

NOTHING, RAISE, KILL, SLEEP, STOP, NARROW = range(6)
SECONDS = 8  # that a rank sleeps


@as_op(itypes=[T.dvector], otypes=[T.dvector])
def trouble(x):
    """Return `x`; its first number says what happens before."""
    what = int(x[0]) if len(x) else NOTHING
    if what == RAISE:
        raise RuntimeError("on purpose")
    if what == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == SLEEP:
        time.sleep(SECONDS)
    if what == STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == NARROW:
        return x.astype("float32")  # which breaks a promise
    return x


def attempt(call, *args):
    """Call a function; print the sum of its result, or its error, and whether that was in time."""
    begin = time.monotonic()
    try:
        result = call(*args)
    except BaseException as error:
        seconds = time.monotonic() - begin
        when = "in time" if seconds < SECONDS - 1 else f"after {seconds} s"
        problem = str(error).splitlines()[:1]
        print(type(error).__name__, getattr(error, "rank", None), problem, when, flush=True)
    else:
        print("went well", np.sum(result), flush=True)
