"""A run on servers that is saved, and goes on in another run, as if it had not been stopped."""

import numpy as np
import pytest
import theano
from support import nodes

from synkhronos.extensions import update_rules

pytestmark = pytest.mark.slow("starts several processes, three times")

SCRIPT = """
import sys
import numpy as np
from synkhronos import parameter_server as ps
from synkhronos.extensions import update_rules

folder, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
SHAPES = {"large": (60, 50), "small": (5,)}  # the large one is divided over both servers
with ps.create("dist_sync") as store:
    store.set_optimizer(update_rules.adam, learning_rate=0.1)
    if first == 0:
        store.init(list(SHAPES), [np.ones(shape) for shape in SHAPES.values()])
    else:
        store.load_weights(folder + "/weights.npz")
        if store.rank == 0:
            store.load_optimizer_states(folder + "/states.npz")
    store.barrier(60)
    for number in range(first, last):
        random = np.random.RandomState(1000 * number + store.rank)
        for key, shape in SHAPES.items():
            store.push(key, random.normal(size=shape))
    weights = {key: store.pull(key).wait(60) for key in SHAPES}
    store.barrier(60)
    if store.rank == 0:
        np.savez(folder + f"/after_{last}.npz", **weights)
        store.save_weights(folder + "/weights.npz")
        store.save_optimizer_states(folder + "/states.npz")
    store.barrier(60)
"""


@pytest.mark.usefixtures("quickly_compiled")
def test_a_resumed_run_has_the_weights_of_serial_training(tmp_path):
    for first, last in ((0, 3), (3, 6)):
        nodes.run(tmp_path, SCRIPT, tmp_path, first, last, servers=2, workers=2)
    shapes = {"large": (60, 50), "small": (5,)}
    variables = {key: theano.shared(np.ones(shape), key) for key, shape in shapes.items()}
    grads = [variable.type() for variable in variables.values()]
    updates = update_rules.adam(grads, list(variables.values()), learning_rate=0.1)
    step = theano.function(grads, updates=updates)
    for number in range(6):
        randoms = [np.random.RandomState(1000 * number + rank) for rank in (0, 1)]
        step(*(sum(each.normal(size=shape) for each in randoms) for shape in shapes.values()))
        if number in (2, 5):
            found = np.load(tmp_path / f"after_{number + 1}.npz")
            for key, variable in variables.items():
                np.testing.assert_allclose(found[key], variable.get_value(), rtol=1e-12)
    run = nodes.run(tmp_path, SCRIPT, tmp_path, 3, 6, servers=1, workers=1, status=1)
    assert "has the states of 2 servers, but there is 1: each has" in run.output
