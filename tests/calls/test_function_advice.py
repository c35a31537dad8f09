"""``synk.advise``: the ways that it measures, what it chooses, and that it changes nothing."""

import html
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support import host_library, running
from support.waiting import wait_until
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.__main__ import main
from synkhronos._machine import devices
from synkhronos._machine.load import Load
from synkhronos.errors import SessionError
from synkhronos.tools.advice import Advice, Way, choose, layouts

FILE = """
    import numpy as np
    import synkhronos as synk
    from synkhronos._host import tensor as T

    def make():
        synk.fork(2)
        x = T.matrix("x")
        f = synk.function([x], (x * 2, "gather"), name="double")
        return f, (np.ones((9, 3), x.dtype),), {"batch": 7}

    def wrong():
        return make()[0], ()

    nothing = list
"""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)


def outputs_of(advised):
    """Return what two ranks compute in some calls, in the middle of which advice is asked for."""
    advice, found = None, []
    synk.fork(2)
    x, kept = T.dvector("x"), T.dscalar("kept")
    w = theano.shared(np.arange(3.0), "w")
    inputs, draws = [x], [RandomStreams(5).uniform((1,))]
    if not host_library.ON_PYTENSOR:  # which has neither
        inputs.append(theano.In(kept, value=1.0, update=kept + w.sum()))
        draws += [MRG_RandomStreams(5).uniform((1,)), kept]
    outputs, updates = [(x * w.sum() * sum(draws), "gather")], [(w, w * 1.5 + draws[0].sum())]
    step = synk.function(inputs, outputs, updates=updates)
    data = synk.data(np.arange(12.0))
    for call in range(4):
        if call == 2 and advised:
            advice = synk.advise(step, (data,), {"batch": [5, 1, 7, 2, 3]}, seconds=0.01)
            # An input that ranks keep is set in the processes that measure alone.
            synk.advise(step, (data, 100.0)[: len(inputs)], seconds=0.01)
        found += step(data, batch=slice(call, call + 6))
        found.append(synk.gather(w, nd_up=1))
    assert synk.status().state == "open"
    synk.close()
    return found, advice, step


def test_it_measures_and_changes_nothing(no_session):
    expected, _, _ = outputs_of(advised=False)
    found, advice, step = outputs_of(advised=True)
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)
    assert advice.rows == 5 and advice.cores == 2
    ways = [(0, 1), (0, 2), (1, 2), (2, 1)]
    assert list(advice.seconds) == list(advice.slowest) == ways
    assert all(0 < best <= advice.slowest[way] for way, best in advice.seconds.items())
    assert (advice.ranks, advice.threads) in ways and advice.lines in str(advice)
    assert all(html.escape(line) in advice._repr_html_() for line in advice._notes())
    assert advice._repr_html_().count("<tr>") == 1 + len(ways)
    # Without a session, too. One row is for one rank.
    assert list(synk.advise(step, ([1.0],), seconds=0.01).seconds) == ways[:3]


def advice_of(*seconds, **more):
    ways = (0, 1), (0, 2), (1, 2), (2, 1)
    found = dict(zip(ways, seconds))
    given = {"slowest": found, "others": Load(0.0), **more}
    return Advice("/home/me/train.py:7", 128, 2, found, **given)


@pytest.mark.parametrize(
    "seconds, way",
    [
        ((4.0, 2.5, 2.5, 2.6), (1, 2)),
        ((4.0, 2.5, 2.5, 2.45), (1, 2)),  # 2 %: noise
        ((4.0, 2.5, 2.5, 2.4), (2, 1)),
        ((4.0, 2.4, 2.45, 2.6), (1, 2)),  # the serial function is as fast
        ((2.0, 2.0, 2.1, 2.2), (0, 1)),
        ((2.1, 2.0, 2.1, 2.2), (0, 2)),
    ],
)
def test_the_fewest_ranks_that_are_as_fast_are_chosen(seconds, way):
    assert choose(advice_of(*seconds).seconds) == way
    assert choose(dict(reversed(advice_of(*seconds).seconds.items()))) == way


def test_ways_are_those_of_the_cores_and_the_rows():
    assert [*map(tuple, layouts(8, 3, 3))] == [(0, 8), (1, 8), (2, 4), (3, 2)]
    assert [*map(tuple, layouts(6, 99, 6))] == [(0, 6), (1, 6), (2, 3), (4, 1), (6, 1)]
    assert devices.default_threads(1) == 2  # so synk.fork(1) is a rank with both


def test_the_text_says_what_to_write_and_what_to_doubt(monkeypatch):
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: False)
    title = host_library.NAME.replace("pytensor", "PyTensor").replace("theano", "Theano")
    text = str(advice_of(0.004, 0.0025, 0.002, 0.0026))
    assert text.startswith("train.py:7: a call with 128 rows, 2 cores\n")
    assert "\n  1       2        2.000       2.000    2.00\n" in text
    assert text.endswith(
        f"\nBest: 1 rank with 2 threads each, 2.00 times as fast as serial {title} with one "
        "thread\n"
        "    synk.fork(1)  # or synk.fork() and SYNKHRONOS_DEVICES=cpu"
    )
    assert advice_of(4, 3, 2, 1).lines.startswith("synk.fork(2)  # or")
    assert advice_of(1, 2, 2, 2).lines.endswith("and OMP_NUM_THREADS=1")
    assert advice_of(1, 2, 2, 2).lines.startswith(f"{host_library.NAME}.function(...) in place")
    slowest, others = {(0, 1): 4, (0, 2): 3, (1, 2): 2.5, (2, 1): 1}, Load(1.0, ((0.9, "cc", 9),))
    said = str(advice_of(4, 3, 2, 1, slowest=slowest, others=others)).splitlines()[-2:]
    assert said[0] == "Rounds of the same way differ by up to 25 %."
    assert said[1].startswith("Other programs kept 1.00 of ") and "cc (pid 9) 0.90" in said[1]
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    assert advice_of(4, 3, 2, 1).lines.startswith("synk.fork(2, use_gpu=False)")
    assert str(Way(2, 1)) == "2 ranks with 1 thread each"


def test_what_it_can_not_measure_is_refused(no_session, monkeypatch):
    synk.fork(2)
    x, rows = T.dvector("x"), theano.shared(np.ones(6))
    f, apart = synk.function([x], x.sum()), synk.function([], rows.sum(), sliceable_shareds=[rows])
    whole = synk.function([], x.sum(), bcast_inputs=[x])
    fixed = synk.function([x], T.dot(x, np.arange(4.0)))
    for step, args, kwargs, error, phrase in (
        (f, ([],), {}, ValueError, "args must have rows"),
        (f, ([1.0], [2.0]), {}, TypeError, "takes 1 input"),
        (f, ([1.0],), {"batch": 2}, ValueError, "batch=2 asks for"),
        (f, ([1.0],), {"num_slices": 0}, ValueError, "num_slices must be"),
        (whole, ([1.0, 2.0],), {}, ValueError, "divides no inputs"),
        (apart, (), {}, ValueError, "sliceable shared variables"),
        (fixed, (np.ones(4),), {}, SessionError, r"advise\(\), 2 ranks with 1 thread each: "),
    ):
        with pytest.raises(error, match=phrase):
            synk.advise(step, args, kwargs, seconds=0.01)
    monkeypatch.setattr(f._session, "devices", ("cuda0", "cuda1"))
    with pytest.raises(SessionError, match="each GPU has one rank"):
        synk.advise(f, ([1.0],))
    monkeypatch.undo()


def test_a_file_is_measured(no_session, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(FILE))
    arguments = ["--seconds", "0.01", "--busy-ok"]
    assert main(["bench", "advise", f"{file}:make", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["function"] == "double" and found["rows"] == 7
    assert [(each["ranks"], each["threads"]) for each in found["ways"]] == [
        (0, 1), (0, 2), (1, 2), (2, 1)
    ]  # fmt: skip
    for name, said in {
        "wrong": "wrong: Function 'double' takes 1 input (x), got 0.",
        "nothing": "must return (step, args)",
        "none": "has no function none",
    }.items():
        assert main(["bench", "advise", f"{file}:{name}", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "advise", "none.py:make", *arguments]) == 2
    sys.modules.pop("mine")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_ended(tmp_path, number):
    (tmp_path / "mine.py").write_text(textwrap.dedent(FILE))
    code = "import mine, synkhronos as synk; synk.advise(*mine.make(), seconds=1000)"
    given = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    path = running.python_path(tmp_path)
    given.update(env={**os.environ, **running.IN_PYTHON, "PYTHONPATH": path})
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **given) as command:
        # With one core there are two ways, beside the worker.
        wait_until(lambda: len(psutil.Process(command.pid).children()) >= 3)
        found = psutil.Process(command.pid).children(recursive=True)
        os.killpg(command.pid, number) if number == signal.SIGINT else command.send_signal(number)
    wait_until(lambda: not any(each.is_running() for each in found))
