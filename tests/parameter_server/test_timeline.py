"""Profiles of a store: spans and their table."""

import time

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.parameter_server import on_threads

from synkhronos import parameter_server as ps
from synkhronos.extensions import train, update_rules


@pytest.fixture
def store():
    with ps.create("local", devices=[0, 1]) as store:
        for device in (0, 1):
            store.init_key((3,), "small", device)
            store.init_key((100000,), "large", device)
        yield store


def one_round(store, device, key, callback=None):
    array = np.ones(3 if key == "small" else 100000, "float32")
    store.push(array, key, device)
    store.pull_req(array, key, device, callback=callback)
    store.pull_wait(key, device)


def in_threads(store, key, callback=None):
    on_threads([0, 1], lambda device: one_round(store, device, key, callback))


def test_spans_of_two_devices(store):
    before = time.monotonic()
    with store.profile() as recorded:
        in_threads(store, "large", callback=lambda: time.sleep(0.01))
    after = time.monotonic()
    spans = recorded.spans
    assert all(before <= span.begin <= span.end <= after for span in spans)
    assert {"device 0", "device 1"} <= {span.track for span in spans}
    pushes = [span for span in spans if span.name == "push"]
    assert len(pushes) == 4 and {span.key for span in pushes} == {"large"}
    callbacks = [span for span in spans if span.name == "callback"]
    assert len(callbacks) == 2 and min(s.end - s.begin for s in callbacks) >= 0.01
    assert len([span for span in spans if span.name == "reduce"]) >= 1
    assert {span.name for span in spans} <= set(ps.StoreProfile._colours)


def test_nothing_is_recorded_before_and_after_the_block(store):
    in_threads(store, "small")
    with store.profile() as recorded:
        assert recorded.spans == [] and "being recorded" in repr(recorded)
    in_threads(store, "small")
    assert recorded.spans == [] and "ended" in repr(recorded)
    assert store._engine.recording is None
    with store.profile() as again:
        in_threads(store, "small")
    assert len([span for span in again.spans if span.name == "push"]) == 4


def test_two_profiles_at_once_and_one_before_init_are_refused(store):
    with store.profile(), pytest.raises(ps.OutOfTurn, match="being recorded already"):
        store.profile().__enter__()
    with ps.create("local") as other, pytest.raises(ps.OutOfTurn, match="call init"):
        other.profile().__enter__()


def test_a_failed_call_is_recorded_too(store):
    with store.profile() as recorded:
        store.push(np.ones(3, "float32"), "small", 0)
        with pytest.raises(ps.OutOfTurn):
            store.push(np.ones(3, "float32"), "small", 0)
    assert [span.name for span in recorded.spans].count("push") == 2
    store.push(np.ones(3, "float32"), "small", 1)


def test_one_caller_has_a_row_of_its_own():
    with ps.create("local") as store:
        store.init(["a", "b"], [np.zeros(2), np.zeros(3)])
        with store.profile() as recorded:
            store.pushpull(["a", "b"], [[np.ones(2)] * 2, [np.ones(3)] * 2]).wait()
            store.push("a", np.ones(2))
            store.pull("a").wait()
    assert {span.track for span in recorded.spans} == {"caller"}
    assert [span.key for span in recorded.spans if span.name == "push"] == ["a", "b", "a", "a"]


def test_a_table_has_a_row_for_each_thread(store):
    with store.profile() as recorded:
        in_threads(store, "large")
    first, head, *rows = recorded.summary().splitlines()
    assert first.endswith("s of worker 0 of 1, 1 key")
    assert head.split()[:3] == ["milliseconds", "compute", "push"]
    assert rows[0].startswith("device 0 ") and rows[1].startswith("device 1 ")
    assert "</tr><tr><td>device 1</td><td>" in recorded._repr_html_()


@pytest.mark.usefixtures("quickly_compiled")
def test_a_step_of_training_shows_pushes_in_the_order_of_the_graph():
    x, params = T.dmatrix("x"), [theano.shared(np.ones((3, 3)), f"w{k}") for k in range(3)]
    layer = x
    for param in params:
        layer = T.tanh(T.dot(layer, param))
    with ps.create("local", devices=[0]) as store:
        step = train.make_train_step(
            [x], layer.mean(), params, update_rules.sgd, 0.1, store=store, batch_rows=2
        )
        step(np.ones((2, 3)))
        with store.profile() as recorded:
            step(np.ones((2, 3)))
    keys = [span.key for span in recorded.spans if span.name == "push"]
    assert list(dict.fromkeys(keys)) == ["w2", "w1", "w0"]
    assert any(span.name == "compute" for span in recorded.spans)


class Link:
    """Stands in for the end of a job's process that sends; it forgets what is not asked for."""

    is_on = False

    def record(self, is_on):
        self.is_on = is_on

    def spans(self):
        kept = [("send", "small", 1.0, 2.0, 12), ("send", "large", 1.5, 2.5, 400000)]
        return [*kept, ("receive", "small", 2.0, 3.0, 12)] if self.is_on else []


def test_the_process_that_sends_has_rows(store):
    store._link = Link()
    try:
        with store.profile() as recorded:
            assert store._link.is_on
        assert not store._link.is_on
    finally:
        store._link = None
    assert [(span.track, span.name, span.nbytes) for span in recorded.spans] == [
        ("sending", "send", 12),
        ("sending", "send", 400000),
        ("receiving", "receive", 12),
    ]
    rows = [line.split() for line in recorded.summary().splitlines()[1:]]
    assert rows == [
        ["milliseconds", "send", "receive"],
        ["sending", "1500.00", "0.00"],
        ["receiving", "0.00", "1000.00"],
    ]
