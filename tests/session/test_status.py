"""The status tells what there is, in every state, and waits for nobody."""

import gc
import html.parser
import os
import sys

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support.helpers import Call, function, until
from support.layouts import ON_DEVICES
from support.threads import in_thread
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import _systems
from synkhronos._session.current import Current

on_hosts = pytest.mark.skipif(ON_DEVICES, reason="values are on devices")


def named(entries, name):
    [found] = [entry for entry in entries if entry.name == name]
    return found


def test_ranks_are_processes_with_memory(ranks):
    now = synk.status()
    assert now.state == "open"
    assert now.master_rank == ranks.master
    assert [each.rank for each in now.ranks] == list(range(ranks.n))
    assert [each.device for each in now.ranks] == list(ranks.session.devices)
    assert [each.is_master for each in now.ranks].index(True) == ranks.master
    assert now.ranks[ranks.master].pid == os.getpid()
    children = {child.pid for child in psutil.Process().children()}
    assert {each.pid for each in now.ranks} - {os.getpid()} <= children
    for each in now.ranks:
        resident = psutil.Process(each.pid).memory_info().rss
        assert abs(each.resident - resident) < 0.2 * resident
        assert each.process in ("running", "sleeping")


def test_shared_memory_counts_once_what_all_have_mapped(ranks):
    gc.collect()
    x = T.dmatrix("x")
    f = function([x], (x.sum(), "sum"))
    f(np.ones((8, 1)))
    before = synk.status()
    data = synk.data(np.ones((8, 125_000)), name="rows")
    f(data)
    now = synk.status()
    size = 8e6 if home(ranks) == "shared memory" else 0
    assert size <= now.shared - before.shared < size + 1e6
    for old, new in zip(before.ranks, now.ranks):
        assert size <= new.shared - old.shared < size + 1e6
    assert named(now.data, "rows").nbytes == 8e6
    del data
    gc.collect()
    f(np.ones((8, 1)))
    now = synk.status()
    assert now.shared - before.shared < 1e6
    assert "rows" not in [each.name for each in now.data]


def test_functions_and_whether_the_workers_have_them(ranks):
    shared = theano.shared(np.ones(3), "weights")
    x = T.dvector("x")
    f = function([x], (x.sum() * shared.sum(), "sum"), name="new one")
    assert not named(synk.status().functions, "new one").is_distributed
    before = synk.status().commands
    f(np.ones(8))
    now = synk.status()
    assert named(now.functions, "new one").is_distributed
    assert named(now.functions, "new one").shared_variables == ("weights",)
    assert now.commands >= before + 2  # sent, and run
    del f
    gc.collect()
    assert "new one" not in [each.name for each in synk.status().functions]


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.slow("starts an interpreter")
def test_a_function_without_a_name_has_the_line_of_the_script(ranks, extensions):
    x, w = T.dvector("x"), theano.shared(np.ones(3), "w")
    loss = (x.mean() * w.sum()) ** 2
    steps = [
        extensions.train.make_train_step([x], loss, [w], extensions.rules.sgd, 0.1),
        synk.function([x], loss, mode="FAST_COMPILE"),
    ]
    names = [each.name for each in synk.status().functions][-2:]
    assert names == [step.name for step in steps]
    assert all(name.rpartition(":")[0] == __file__ for name in names)


def home(ranks):
    """Return where values lie that all ranks see: one rank alone shares no memory."""
    return "private memory" if ranks.n == 1 else "shared memory"


@on_hosts
def test_homes_of_shared_variables(ranks):
    private = theano.shared(np.ones((3, 2), "float32"), "private")
    reduced = theano.shared(np.ones((4, 2)), "reduced")
    random = theano.shared(np.random.RandomState(1), "random")
    x = T.dvector("x")
    f = function([x], (x.sum() * private.sum(), "sum"), name="uses")
    synk.all_reduce(reduced)
    synk.broadcast(random)
    variables = synk.status().shared_variables
    assert f is not None
    found = named(variables, "private")
    assert (found.dtype, found.shape, found.nbytes) == ("float32", (3, 2), 24)
    assert found.home == "private memory"
    assert named(variables, "reduced").home == home(ranks)
    assert named(variables, "random").shape is None
    assert named(variables, "random").home == "private memory"


class Tables(html.parser.HTMLParser):
    """Collects the tags and the text of each cell."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, text):
        if self.tags[-1:] == ["td"]:
            self.cells[-1] += text


def test_the_tables_say_what_the_attributes_say_whatever_the_names_are(ranks):
    name = "<script>alert('&')</script>"
    data, table = synk.data(np.ones(3), name=name), synk.data(np.ones((125, 1000)), name="table")
    f = function([], [], name=name)
    now = synk.status()
    assert named(now.data, name) and named(now.functions, name)
    assert data is not None and table is not None and f is not None
    lines, tables = repr(now).splitlines(), Tables(now._repr_html_())
    assert lines[0].startswith(f"Synkhronos: open; {ranks.n} rank")
    assert f"  {name}  " in repr(now) and "script" not in tables.tags
    assert (tables.cells.count(name), tables.cells.count("table")) == (2, 1)
    [line] = [line for line in lines if line.startswith("  table ")]
    assert line.split() == ["table", "float64", "(125,", "1000)", "1.0", "MB", *home(ranks).split()]
    for rank in now.ranks:
        assert [line for line in lines if f"  {rank.pid}  " in line]


def test_a_call_under_way_is_not_waited_for(ranks, tmp_path):
    go_on = tmp_path / "go on"
    x = T.dvector("x")
    f = function([x], (Call(until(go_on))(x).sum(), "sum"), name="waits")
    go_on.touch()
    f(np.ones(8))
    go_on.unlink()
    call = in_thread(f, np.ones(8))
    try:
        wait_until(lambda: synk.status().state == "in a call")
    finally:
        go_on.touch()
        call.result(60)
    assert synk.status().state == "open"


def test_functions_inside_operations_are_not_those_of_the_script(ranks, monkeypatch):
    monkeypatch.setattr(Current, "report", None)  # that other tests have left
    for system in _systems.there():
        if system.compiles_in:
            monkeypatch.delitem(sys.modules, system.compiles_in, raising=False)
    x, v = T.dmatrix("x"), T.dvector("v")
    before = synk.status()
    states, _ = theano.scan(lambda now, h: h + now, x.T, T.zeros((x.shape[0],)))
    f = function([x], (theano.OpFromGraph([v], [2 * v])(states[-1]), "gather"))
    assert f(np.ones((4, 3))).tolist() == [6] * 4
    assert synk.status().n_alone == before.n_alone
    alone = theano.function([v], v.sum())
    now = synk.status()
    assert (now.n_alone, now.n_distributed) == (before.n_alone + 1, before.n_distributed + 1)
    assert alone([1.0]) == 1
