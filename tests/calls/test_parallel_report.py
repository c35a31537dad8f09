"""`parallel_report` says which functions run on all ranks, why others don't, and what to write."""

import os
import threading
import time
import warnings

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.layouts import ON_DEVICES

import synkhronos as synk
from synkhronos import PortingWarning
from synkhronos.profiling import parallel as report_module

pytestmark = [
    pytest.mark.skipif(ON_DEVICES, reason="graphs of the CPU"),
    pytest.mark.usefixtures("no_session", "quickly_compiled"),
]
ROWS = np.arange(12.0).reshape(6, 2)


class Slow(theano.Op):
    """An operation without a rule, that takes some time."""

    __props__ = ()

    def make_node(self, x):
        return theano.gof.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, output_storage):
        time.sleep(0.4)
        output_storage[0][0] = inputs[0].copy()


def of_report():
    return {each.name: each for each in synk.parallel_report().functions}


def test_calls_are_counted_where_they_ran():
    x, w = T.dmatrix("x"), theano.shared(1.0, "w")
    with synk.parallel(2):
        step = theano.function([x], x.sum() * w, updates=[(w, w + 1)], name="step")
        turned = theano.function([x], x[::-1], name="turned")
        theano.function([x], x + 1, name="never called")
        for rows in (ROWS, ROWS, ROWS[:1]):
            step(rows)
        turned(ROWS)
        inside = of_report()
    step(ROWS)
    after = of_report()
    assert {name: (f.is_divided, f.calls, f.calls_on_ranks) for name, f in inside.items()} == {
        "step": (True, 3, 2),
        "turned": (False, 1, 0),
        "never called": (True, 0, 0),
    }
    assert "fewer rows than there are ranks" in inside["step"].reason
    assert "selected by their number" in inside["turned"].reason
    assert "argument batch" in inside["turned"].instead
    assert (after["step"].calls, after["step"].calls_on_ranks) == (4, 2)
    assert "the session has been closed" in after["step"].reason
    assert 0 < inside["step"].seconds_on_ranks < inside["step"].seconds < after["step"].seconds


def test_the_table_has_all_functions_and_the_cpu_of_each_rank():
    x = T.dmatrix("x")
    with synk.parallel(3):
        busy = theano.function([x], T.exp(T.tanh(x)).sum(), name="busy")
        theano.function([x], x[::-1], name="turned")
        rows = np.zeros((300, 10_000))
        for _ in range(5):
            busy(rows)
        now = synk.parallel_report()
        text = repr(now)
    assert now.n_ranks == 3 and len(now.cpu_seconds) == 3
    # What the ranks used stays known after their end; the workers' is what they had used then.
    assert synk.parallel_report().cpu_seconds[1] >= now.cpu_seconds[1] > 0
    assert text.startswith("Synkhronos: 1 of 2 functions ran on all 3 ranks (100% of the ")
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[lines.index("Functions") + 2 :][:2]] == [
        "busy",
        "turned",
    ]
    assert "67%" in text and "To have them divided" in text
    assert "<td>busy</td>" in now._repr_html_()


def test_functions_of_one_line_are_counted_together():
    x = T.dmatrix("x")
    with synk.parallel(2):
        for each in (x.sum(), x.max(), x.min()):
            theano.function([x], each)(ROWS)
    [line] = synk.parallel_report().functions
    assert line.calls == line.calls_on_ranks == 3


def test_a_new_session_begins_a_new_report():
    x = T.dmatrix("x")
    with synk.parallel(2):
        theano.function([x], x.sum(), name="first")
    with synk.parallel(2):
        theano.function([x], x.sum(), name="second")
    assert list(of_report()) == ["second"]
    synk.fork(2)
    for name in ("third", "fourth"):
        with synk.parallel():
            theano.function([x], x.sum(), name=name)
    assert set(of_report()) == {"third", "fourth"}


def test_a_session_with_all_workers_elsewhere_begins_a_new_report():
    one, other = (threading.Barrier(1) for _ in range(2))  # any objects
    pids = [os.getpid(), None, None]
    recorder = report_module.BlockCounter(one, pids)
    assert recorder.is_of(one, [*pids]) and not recorder.is_of(other, pids)
    assert not recorder.is_of(one, [os.getpid(), 1, None])


def test_a_slow_call_in_the_master_alone_warns_once(monkeypatch):
    monkeypatch.setattr(report_module, "SLOW_SECONDS", float("inf"))
    x = T.dmatrix("x")
    with synk.parallel(2):
        slow = theano.function([x], Slow()(x), name="slow")
        divided = theano.function([x], T.exp(x).sum(), name="divided")
        divided(ROWS)
        divided(ROWS[:1])  # which compiles it for one process
        monkeypatch.setattr(report_module, "SLOW_SECONDS", 0.3)
        with pytest.warns(
            PortingWarning, match="slow took .* alone: it computes Slow of rows"
        ) as w:
            np.testing.assert_array_equal(slow(ROWS), ROWS)
        assert w[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            slow(ROWS)
            divided(ROWS[:1])


def test_a_call_that_raises_is_counted_too_and_raises_what_theano_raises():
    x, i = T.dmatrix("x"), T.lscalar("i")
    with synk.parallel(2):
        f = theano.function([x, i], x[::-1][i], name="f")
        with pytest.raises(IndexError):
            f(ROWS, 100)
    assert of_report()["f"].calls == 1


def test_functions_that_no_call_has_ended_of():
    with synk.parallel(2):
        x = T.dmatrix("x")
        theano.function([x], x.sum(), name="f")
        assert "1 of 1 function can run on all 2 ranks; no call" in repr(synk.parallel_report())


def test_without_a_block_it_says_so(monkeypatch):
    from synkhronos._session.current import Current

    monkeypatch.setattr(Current, "report", None)
    assert repr(synk.parallel_report()) == "Synkhronos: no block of parallel()"
