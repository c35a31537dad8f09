"""A script that logs the files and sockets that a session opens, from fork to close."""

WATCHED = """
import os, sys
log = os.open("events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def watch(event, arguments):
    if event.startswith("socket.") and event != "socket.gethostname":
        os.write(log, f"{event} {arguments}\\n".encode())
    elif event == "open" and isinstance(arguments[0], str) and arguments[2] & writing:
        if arguments[0] == os.devnull or arguments[0].startswith(theano.config.base_compiledir):
            return  # Theano's own files
        os.write(log, f"open {arguments[0]} {arguments[2]}\\n".encode())

import numpy as np, theano, theano.tensor as T
import synkhronos as synk
from theano.sandbox.rng_mrg import MRG_RandomStreams
if os.environ["FALLBACK"]:
    del os.O_TMPFILE
# Theano compiles a test program before its first function, in files of its own.
x = T.dvector("x")
theano.function([x], x + 1)([1.0])
sys.addaudithook(watch)
synk.fork(3)
mode = theano.Mode("py", None)  # without C code, so that Theano writes no files of its own
s = theano.shared(np.arange(4.0), "s")
random = MRG_RandomStreams(1).uniform((2,))
f = synk.function([x], [x.sum(), random.sum()], updates=[(s, s + x.sum())], mode=mode)
synk.distribute()
d = synk.data(np.ones(7))
f(d), f(np.ones(7), num_slices=2), f(d, batch=[1, 2])
s.set_value(np.ones(3)); synk.broadcast(s)
synk.scatter(s, np.arange(6.0)); synk.gather(s), synk.all_gather(s), synk.all_reduce(s)
synk.set_value(1, s, [1.0, 2.0]); synk.get_value(2, s)
synk.close()
open("seen", "w").close()
"""
