"""What ends an all-reduce in a graph from outside: a death, and Ctrl-C."""

import os
import signal
import time

import numpy as np
import pytest
import theano.tensor as T
from support.helpers import Call, function

import synkhronos as synk


@pytest.mark.parametrize("where", ["before", "while the others wait"])
def test_a_worker_that_dies_is_reported_by_all_it_takes(no_session, where):
    synk.fork(3)
    master = os.getpid()

    def die(value):
        if os.getpid() != master and value[0] == 2:
            time.sleep(0 if where == "before" else 0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    x = T.dvector("x")
    f = function([x], synk.ops.all_reduce(Call(die)(x).sum()))
    assert f(np.zeros(3)) == 0
    with pytest.raises(synk.WorkerDied) as caught:
        f(np.arange(3.0))
    assert (caught.value.rank, caught.value.exitcode) == (2, -signal.SIGKILL)
    assert "Apply node" not in str(caught.value)
