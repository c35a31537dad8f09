"""Theano's operation Print says in the calls of several ranks which rank prints.

In interpreters of their own: workers print to the standard output of their process.
"""

import numpy as np
import pytest

BEGIN = """
import sys
import numpy as np
import theano, theano.tensor as T
from theano.printing import Print
import synkhronos as synk

def printed(op, value):
    print(f"{op.message}: {value.tolist()} by a function of the script")

x = T.dvector("x")
shown = Print("x", attrs=("__str__", "size"))
own = Print("own", global_fn=printed)
rows = np.arange(6.0)

def sums():
    # A scan of its own for each function: Theano compiles what is inside of one scan once.
    inside, _ = theano.scan(lambda row: Print("row")(row), sequences=x)
    return [shown(x).sum(), own(x).sum(), inside.sum()]

plain = theano.function([x], sums(), mode="FAST_COMPILE")
"""


def lines(rows, title=""):
    """Return the lines that Theano prints for some rows, with a title in front of each message."""
    return [
        f"{title}x __str__ = {np.array(rows)}",
        f"{title}x size = {len(rows)}",
        f"{title}own: {rows} by a function of the script",
        *[f"{title}row __str__ = {row}" for row in rows],
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "n, master, parts",
    [(2, 0, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), (3, 1, [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])],
)
def test_print_says_its_rank(script, n, master, parts):
    done = script(
        BEGIN
        + f"""
synk.fork({n}, master_rank={master})
f = synk.function([x], [(each, "sum") for each in sums()], mode="FAST_COMPILE")
assert f(rows) == [15, 15, 15]
synk.close()
"""
    )
    expected = [line for rank, rows in enumerate(parts) for line in lines(rows, f"[rank {rank}] ")]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.slow("starts Python, which compiles in C")
def test_other_functions_print_as_before(script):
    done = script(
        BEGIN
        + """
synk.fork(2)
f = synk.function([x], [(each, "sum") for each in sums()], mode="FAST_COMPILE")
later = theano.function([x], sums(), mode="FAST_COMPILE")
for alone in (plain, later, f.as_theano):
    alone(rows)
synk.close()
for alone in (plain, later):
    alone(rows)
synk.fork(1)
f = synk.function([x], [(each, "sum") for each in sums()], mode="FAST_COMPILE")
f(rows)
synk.close()
"""
    )
    assert done.stdout.splitlines() == 6 * lines([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
