"""Servers and workers as processes of one run: what they compute, through the store."""

import re

import pytest
from support import nodes

from synkhronos.parameter_server import errors

KVSTORE = """
import sys
import numpy as np
from synkhronos import parameter_server as ps

kind, rule = sys.argv[1:]
store = ps.create(kind)
store.init("w", np.zeros((2, 3), np.float32))
if rule == "sgd":  # also after the first key, as with KVStore
    from synkhronos.extensions import update_rules
    store.set_optimizer(update_rules.sgd, learning_rate=1.0)
found = []
for _ in range(3):
    store.push("w", [np.full((2, 3), store.rank + 1, np.float32)] * 2)
    pulled = store.pull("w").wait()
    assert (pulled == pulled[0, 0]).all()
    found.append(int(pulled[0, 0]))
try:
    if rule == "sgd":
        store.set_optimizer(update_rules.sgd, learning_rate=1.0)
    else:
        store.set_updater(print)
except ps.OutOfTurn as error:
    print("told", error, flush=True)
if rule == "none":  # float16 is added in float32: 2048 + 1 + 1, and the mean of infinite sums
    store.set_param("push_op[mean]", "mean")
    halves = np.float16([0 if store.rank else 2048]), np.float16([60000])
    store.init(["sum", "mean"], list(halves))
    store.push(["sum", "mean"], [[halves[0], np.float16([store.rank > 0])], [halves[1]] * 2])
    got = [each.tolist() for each in store.pull(["sum", "mean"]).wait()]
    assert got == [[2050.0], [60000.0]], got
store.barrier(60)
last = int(store.pull("w").wait()[1, 2])
print("worker", store.rank, found, last, flush=True)
store.close()
"""


def numbers(run):
    return [[int(each) for each in re.findall(r"-?\d+", line)] for line in run.said("worker ")]


@pytest.mark.parametrize(
    ("rule", "expected"), [("sgd", [-12, -24, -36, -36]), ("none", [12, 12, 12, 12])]
)
@pytest.mark.slow("starts several processes")
def test_dist_sync_of_kvstore(tmp_path, rule, expected):
    """Three workers push two arrays of their rank + 1 each: the numbers of MXNet's KVStore."""
    run = nodes.run(tmp_path, KVSTORE, "dist_sync", rule, workers=3)
    assert numbers(run) == [[rank, *expected] for rank in range(3)]
    told = "told set_updater() and set_optimizer() must come before the first push."
    assert run.said("told ") == [told] * 3


MISSING = """
import numpy as np
from synkhronos import parameter_server as ps

store = ps.create("dist_sync")
store.init("w", np.zeros(3))
if store.rank == 0:
    store.push("w", np.ones(3))
    try:
        store.pull("w").wait(timeout=1)
    except ps.RoundTimeout as error:
        print("told", error, flush=True)
store.barrier(60)
if store.rank != 0:
    store.push("w", np.ones(3))
print("got", store.pull("w").wait(60).tolist(), flush=True)
store.close()
"""


@pytest.mark.slow("waits for a timeout of several processes")
def test_workers_that_have_not_pushed_are_named(tmp_path):
    run = nodes.run(tmp_path, MISSING, workers=2)
    [told] = run.said("told ")
    assert re.search(r"round 1: worker 1 on \S+ has not pushed\.", told)
    assert run.said("got ") == ["got [2.0, 2.0, 2.0]"] * 2


@pytest.mark.slow("starts several processes, and compiles")
def test_dist_async_of_kvstore(tmp_path):
    """Each pull holds all own pushes, and any number of the others'."""
    found = numbers(nodes.run(tmp_path, KVSTORE, "dist_async", "sgd", workers=3))
    for rank, (number, *values, last) in enumerate(found):
        assert (number, last) == (rank, -36)
        assert [value <= -2 * (rank + 1) * n for n, value in enumerate(values, 1)] == [True] * 3
        assert values == sorted(values, reverse=True) and min(values) >= -36


LARGE = """
import hashlib, sys, threading
import numpy as np
from synkhronos import parameter_server as ps

store = ps.create("dist_sync", devices=[4, 7])
rank, shapes = store.rank, {"large": (40, 5000), 3: (10,), "small": (1, 3), "mean": (2000,)}
dtypes = {3: "int64", "large": "float64"}
store.set_param("push_op[mean]", "mean")
store.set_param("push_op[3]", "max")
digest = hashlib.sha256()

def values(key, worker, device, version):
    made = np.random.RandomState(1000 * worker + 10 * device + version)
    return (1000 * made.randn(*shapes[key])).astype(dtypes.get(key, "float32"))

def reduced(key, version):
    own = [[values(key, worker, d, version) for d in (4, 7)] for worker in range(2)]
    if key == 3:
        return np.max([each for pair in own for each in pair], axis=0)
    sums = [first + second for first, second in own]
    if key == "mean":
        return (sums[0] / 2 + sums[1] / 2) / 2
    return sums[0] + sums[1]

def device(number):
    for key, shape in shapes.items():
        store.init_key(shape, key, number, dtypes.get(key, "float32"))
    for version in (1, 2, 3):
        out = {}
        for key in shapes:
            array = values(key, rank, number, version)
            store.push(array, key, number, priority=-version)
            out[key] = np.empty_like(array)
            store.pull_req(out[key], key, number, priority=-version)
        for key in shapes:
            store.pull_wait(key, number, timeout=60)
            np.testing.assert_allclose(out[key], reduced(key, version), rtol=1e-5, atol=1e-3)
            if number == 4:
                digest.update(out[key].tobytes())

threads = [threading.Thread(target=device, args=(number,)) for number in (4, 7)]
failed = []
threading.excepthook = lambda args: failed.append(args.exc_value)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
print("equal", digest.hexdigest(), flush=True)
print("kept", store.num_servers, store.num_workers, store.type)
store.close()
"""


@pytest.mark.slow("starts several processes, twice")
def test_keys_of_many_sizes_on_two_servers(tmp_path):
    """Workers with two devices each: one sum of a worker, then one of workers.

    Both workers have equal bits, and so has a repeated run.
    """
    runs = [nodes.run(tmp_path, LARGE, servers=2, workers=2) for _ in range(2)]
    first, second = runs[0].said("equal ")
    assert first == second
    assert runs[1].said("equal ") == [first, second]
    for run in runs:
        assert run.said("kept") == ["kept 2 2 dist_sync"] * 2


UPDATERS = """
import time
import cloudpickle
import numpy as np
from synkhronos import parameter_server as ps
from synkhronos.parameter_server.remote.link import MoverLink

class Counting(ps.Updater):
    def init_model(self, key, weight):
        super().init_model(key, weight)
        assert weight.ndim == 1 and self.parameters == {"rate": "2"}
        weight[...] = 100 + self.rank
        self.n = {**getattr(self, "n", {}), key: 0}
    def update(self, key, gradient):
        if gradient[0] < 0:
            raise ArithmeticError("a negative gradient")
        self.weights[key] += gradient
        self.n[key] += 1
    def states(self):
        return {key: {"n": np.array(n)} for key, n in self.n.items()}
    def set_states(self, states):
        self.n = {key: int(values["n"]) for key, values in states.items()}

link = MoverLink.connect("dist_async")
rank = link.rank

def pull(number, version):
    link.request(number, version)
    [(found, same, error)] = link.next(60)
    assert (found, same) == (number, version)
    if error is not None:
        raise error
    return link.incoming(number, version).copy()

if rank == 1:
    link.init_key(0, "a", (5,), "float32", "sum")
    link.push(0, 1)  # waits for the updater of worker 0
link.set_updater(cloudpickle.dumps(Counting()), {"rate": "2"})
if rank == 0:
    link.init_key(0, "a", (5,), "float32", "sum")
link.init_key(1, "b", (2001,), "float64", "sum")
first = pull(1, 0)
assert set(first) == {100, 101} and (first[:1000] == 100).all() and (first[1000:] == 101).all()
link.barrier(60)
if rank == 0:
    link.record(True)
    for version in range(1, 21):
        link.outgoing(1, version)[...] = version
        link.push(1, version)
        assert (pull(1, version) == first + version * (version + 1) / 2).all()
    spans = sorted(link.spans(60), key=lambda span: span[2])  # MPI tells late of what is sent
    assert [each[:2] for each in spans] == [("send", "b"), ("receive", "b")] * 20
    assert all(begin <= end and nbytes == 2001 * 8 for _, _, begin, end, nbytes in spans)
    assert spans[0][2] < spans[1][3] < time.monotonic()
    link.record(False)
    link.outgoing(1, 21)[...] = -1
    link.push(1, 21)
    try:
        pull(1, 21)
    except ps.CallbackFailed as error:
        print("told", "ArithmeticError: a negative gradient" in str(error), "key 'b'" in str(error))
    assert link.spans(60) == []
    states = link.states(60)
    link.set_states(states, 60)
    assert link.states(60) == states and len(states) == 2
    try:
        link.set_states(states[:1])
    except ValueError as error:
        print("told", error)
link.barrier(60)
assert (pull(1, 21 if rank == 0 else 0) == first + 210).all()
if rank == 0:
    link.init_key(2, "c", (3,), "float32", "sum")
    link.request(2, 0)
    assert link.next(60) == [(2, 0, None)]  # so the server knows the key
link.barrier(60)
if rank == 1:
    link.init_key(2, "c", (4,), "float32", "sum")
    for _ in range(2):
        link.request(2, 0)
        for number, version, error in link.next(60):
            print("told", version, type(error).__name__, error, flush=True)
link.close(60)
try:
    MoverLink.connect("dist_async")
except ps.ParameterServerError as error:
    print("told", error)
"""


@pytest.mark.slow("starts several processes")
def test_updaters_of_servers(tmp_path):
    run = nodes.run(tmp_path, UPDATERS, servers=2, workers=2)
    said = run.said("told ")
    assert said.count("told True True") == 1
    assert "told there are states of 1 servers, but this run has 2" in run.output
    said = "ValueError key 'c' has the shape (4,), float32 and the operation 'sum' here"
    assert said in run.output
    assert run.output.count("makes one in a run") == 2
    assert "server 0: update of key 'b' (worker 0) has failed: a negative gradient" in run.output


@pytest.mark.slow("starts several processes")
def test_workers_must_agree_on_a_kind(tmp_path):
    script = """
import json, os
from synkhronos import parameter_server as ps

rank = json.loads(os.environ["SYNKHRONOS_PARAMETER_SERVER"])["rank"]
try:
    ps.create(["dist_sync", "dist_async"][rank])
    print("made", flush=True)
except ValueError as error:
    print("told", error, flush=True)
"""
    run = nodes.run(tmp_path, script)
    assert run.said("made")[0] == "made" and len(run.said("told ")) == 1
    assert "all workers of a run must make the same kind" in run.said("told ")[0]


def test_a_store_needs_the_launcher():
    from synkhronos import parameter_server as ps

    with pytest.raises(
        errors.ParameterServerError, match="synkhronos launch --servers 1 --workers 2 SCRIPT"
    ):
        ps.create("dist_sync")


@pytest.mark.slow("starts several processes")
def test_a_worker_that_stops_to_wait_does_not_count_at_a_barrier(tmp_path):
    script = """
import time
import numpy as np
from synkhronos import parameter_server as ps

store = ps.create("dist_sync")
store.init("w", np.zeros(1))
if store.rank == 0:
    try:
        store.barrier(0.2)
    except ps.RoundTimeout:
        print("timeout", flush=True)
    store.push("w", [np.ones(1)])
    store.pull("w").wait(60)  # worker 1 is at the barrier, or soon
    time.sleep(0.5)
    print("left alone", flush=True)
    time.sleep(0.2)  # lines of two processes come in any order
    store.barrier(60)
else:
    store.push("w", [np.ones(1)])
    store.pull("w").wait(60)
    store.barrier(60)
    print("passed", flush=True)
store.close()
"""
    run = nodes.run(tmp_path, script)
    lines = [line.strip() for line in run.lines]
    assert lines.index("timeout") < lines.index("left alone") < lines.index("passed")
