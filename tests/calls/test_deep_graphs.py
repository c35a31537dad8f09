"""Deep graphs are compiled and sent; Python's limit of recursion stays as it is without ranks."""

import pytest
from support import host_library

BEGIN = f"""
import sys, threading
import numpy as np
import theano, theano.tensor as T
before = sys.getrecursionlimit()
import synkhronos as synk

MODE = {host_library.MODE!r}
x = T.dvector("x")

def chain(y, length, sin=T.sin):
    for number in range(length):
        y = y + 1.0 if number % 2 else sin(y)
    return y

def works(f, length, rows=np.arange(4.0)):
    np.testing.assert_allclose(f(rows), chain(rows, length, np.sin), rtol=1e-12)

def deep(length):
    return synk.function([x], (chain(x, length), "gather"), mode=MODE)

def in_small_thread(do):
    done = []
    threading.stack_size(256 << 10)
    thread = threading.Thread(target=lambda: done.append(do()))
    thread.start()
    threading.stack_size(0)
    thread.join()
    assert done, "the thread raised"
    return done[0]
"""


def test_the_limit_is_that_without_ranks(script):
    done = script(
        BEGIN
        + """
class Endless:
    def __getattr__(self, name):
        return getattr(self, name + "")
    def __eq__(self, other):
        return other == self
    def __lt__(self, other):
        return sorted([self, other])[0] is self

def makes_an_error():
    one, other = Endless(), Endless()
    recursions = [lambda: one.name, lambda: one == other]
    if before <= 1000:  # PyTensor's 3,000 are too many for this one, without ranks too
        recursions.append(lambda: sorted([one, other]))
    for recurse in recursions:
        try:
            recurse()
        except RecursionError:
            pass

synk.fork(2)
f = synk.function([x], (x * 2, "gather"), mode=MODE)
assert f([1.0, 2.0]).tolist() == [2, 4]
makes_an_error()
in_small_thread(lambda: 0)
assert sys.getrecursionlimit() == before, sys.getrecursionlimit()
"""
    )
    assert done.stdout == ""


DEEP = {
    "function": """
synk.fork(2)
works(deep(4000), 4000)
""",
    "training step": """
from synkhronos.extensions import train, update_rules
synk.fork(2)
w = theano.shared(np.ones(3), "w")
loss = chain(w * x.sum(), 700).sum()
options = {"mode": theano.Mode("py", None)}
step = train.make_train_step([x], loss, [w], update_rules.sgd, learning_rate=0.1, options=options)
assert np.isfinite(step(np.ones(4)))
""",
    "thread with a small stack": """
in_small_thread(lambda: synk.fork(2))
works(in_small_thread(lambda: deep(1000)), 1000)
f = deep(1001)
in_small_thread(lambda: works(f, 1001) or True)
""",
}


@pytest.mark.slow("compiles thousands of operations")
@pytest.mark.parametrize("what", DEEP)
def test_a_deep_graph(script, what, request):
    if what == "training step":
        request.getfixturevalue("extensions")
    end = "assert sys.getrecursionlimit() == before and threading.stack_size() == 0"
    script(BEGIN + DEEP[what] + end)
