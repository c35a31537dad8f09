"""The quicker checks of graphs give the results of Theano's own."""

import importlib.util

import pytest
import theano
import theano.tensor as T
from theano.gof import destroyhandler, opt
from theano.tensor import inplace

from synkhronos._host.theano.faster import graph_checks

update_rules = pytest.importorskip("synkhronos.extensions.update_rules")
ResNet = pytest.importorskip("synkhronos.tools.bench.networks").ResNet


def original(module):
    """Return a copy of one of Theano's modules, in which nothing is replaced."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_plain", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@pytest.fixture
def checked(monkeypatch):
    """Compare all checks with Theano's; return the number of checks, by function and result."""
    plain, seen = original(destroyhandler), {}

    def compare(name, ours, convert):
        def both(*args):
            found, expected = outcome(ours, args), outcome(getattr(plain, name), args)
            assert convert(found) == convert(expected)
            key = name, found if isinstance(found, (bool, str)) else None
            seen[key] = seen.get(key, 0) + 1
            if isinstance(found, str):
                raise plain.InconsistencyError(found)
            return found

        monkeypatch.setattr(destroyhandler, name, both)

    compare("_contains_cycle", graph_checks.contains_cycle, bool)
    compare("_build_droot_impact", graph_checks._build_droot_impact, as_lists)
    return seen


def outcome(function, args):
    try:
        return function(*args)
    except destroyhandler.InconsistencyError as error:
        return str(error)


def as_lists(found):
    if isinstance(found, str):
        return found
    roots, views, destroyers = found
    sets = {root: {*each} for root, each in views.items()}
    return roots, sets, destroyers


def test_checks_of_a_network(checked):
    network = ResNet()
    step = update_rules.momentum(network.loss, network.params, 0.01)
    step.update(network.averages)
    theano.function([network.x, network.y], network.loss, updates=step)
    assert checked["_contains_cycle", False] > 10
    assert checked["_build_droot_impact", None] > 10


def validate(inputs, outputs):
    fgraph = theano.gof.FunctionGraph(inputs, outputs)
    fgraph.attach_feature(destroyhandler.DestroyHandler())
    fgraph.destroy_handler.validate(fgraph)


def test_a_cycle_and_two_destroyers_are_found(checked):
    x, y = T.vectors("xy")
    add = inplace.add_inplace
    with pytest.raises(theano.gof.InconsistencyError, match="Multiple destroyers of x"):
        validate([x], [add(x, 1), add(x, 2)])
    with pytest.raises(theano.gof.InconsistencyError, match="cycle"):
        validate([x, y], [add(x, y), add(y, x)])
    assert checked["_contains_cycle", True] == 1


def test_a_changed_graph_is_checked_again():
    x, y = T.vectors("xy")
    total = T.exp(x).sum() * T.exp(y).sum()
    fgraph = theano.gof.FunctionGraph([x, y], [total])
    nodes = fgraph.toposort()
    assert not graph_checks.contains_cycle(fgraph, {})
    for first, second in zip(nodes, nodes[1:]):
        assert graph_checks.contains_cycle(fgraph, {first: [nodes[-1]]})
        follows = original(destroyhandler)._contains_cycle(fgraph, {first: [second]})
        assert graph_checks.contains_cycle(fgraph, {first: [second]}) == follows
    assert not graph_checks.contains_cycle(fgraph, {})


def test_pairs_that_can_not_be_merged_are_a_set_while_nodes_are_merged(monkeypatch):
    found = []

    class Merged(opt.MergeOptimizer):
        def apply(self, fgraph):
            graph_checks._merge(self, fgraph, lambda _, fgraph: found.append(fgraph.merge_feature))

    x = T.vector("x")
    fgraph = theano.gof.FunctionGraph([x], [T.exp(x) + T.exp(x)])
    Merged().optimize(fgraph)
    [feature] = found
    feature.blacklist.append((1, 2))
    assert (1, 2) in feature.blacklist and isinstance(feature.blacklist, set)
    opt.MergeOptimizer().optimize(fgraph)
    assert len(fgraph.apply_nodes) == 2 and feature.blacklist == []
