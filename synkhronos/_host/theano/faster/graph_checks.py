"""Quicker checks of a graph, which Theano's optimizer makes after nearly each change.

In a ResNet-50 with 4,000 operations these checks took half of the optimizer's time. The results are
those of Theano's own functions.
"""

import functools
import weakref

from theano.gof import InconsistencyError, destroyhandler, graph, opt


def install() -> None:
    """Let Theano use these checks in this process."""
    if destroyhandler._contains_cycle is not contains_cycle:
        destroyhandler._contains_cycle = contains_cycle
        destroyhandler._build_droot_impact = _build_droot_impact
        graph.io_toposort = _io_toposort(graph.io_toposort)
        opt.MergeFeature.blacklist = property(_blacklist, _set_blacklist)


class _Pairs(set):
    """A set where Theano has a list, which it searches for each pair of nodes that it may merge."""

    append = set.add

    def __reduce__(self):
        return list, (list(self),)


def _blacklist(feature):
    return vars(feature)["blacklist"]


def _set_blacklist(feature, pairs):
    vars(feature)["blacklist"] = _Pairs(pairs)


# Of each graph: node -> a number that grew along all dependencies when the graph had no cycle.
_numbers_of: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def contains_cycle(fgraph, orderings) -> bool:
    """Return whether a graph has a cycle, with the nodes that `orderings` puts before others."""
    numbers = _numbers_of.get(fgraph)
    if numbers is not None and _grow(numbers, fgraph.apply_nodes, orderings):
        return False
    missing, after, ready = {}, {}, []  # how many nodes a node waits for; those that wait for it
    for node in fgraph.apply_nodes:
        before = [x.owner for x in node.inputs if x.owner is not None]
        before.extend(orderings.get(node, ()))
        missing[node] = len(before)
        if not before:
            ready.append(node)
        for each in before:
            after.setdefault(each, []).append(node)
    numbers = {}
    while ready:
        node = ready.pop()
        numbers[node] = float(len(numbers))
        for each in after.get(node, ()):
            missing[each] -= 1
            if not missing[each]:
                ready.append(each)
    if len(numbers) < len(missing):
        return True
    _numbers_of[fgraph] = numbers
    return False


def _grow(numbers, nodes, orderings):
    """Return whether numbers grow along all dependencies; number the nodes that are new."""
    for node in nodes:
        if node not in numbers:
            before = [numbers.get(x.owner, -1) for x in node.inputs]
            clients = [client for x in node.outputs for client, _ in x.clients]
            after = [numbers[client] for client in clients if client in numbers]
            low = max(before, default=-1)
            numbers[node] = (low + min(after, default=low + 2)) / 2
    for node in nodes:
        number = numbers[node]
        for x in node.inputs:
            if x.owner is not None and numbers[x.owner] >= number:
                return False
    return all(
        numbers[before] < numbers[node] for node, some in orderings.items() for before in some
    )


def _build_droot_impact(handler):
    """Return three dicts: variable -> what it views at last, that -> its views, and destroyer."""
    roots, views, destroyers = {}, {}, {}
    for node in handler.destroyers:
        for positions in node.op.destroy_map.values():
            if len(positions) != 1:
                raise NotImplementedError
            root = node.inputs[positions[0]]
            while root in handler.view_i:
                root = handler.view_i[root]
            if root in roots:
                raise InconsistencyError(f"Multiple destroyers of {root}")
            destroyers[root] = node
            found = [root]
            for each in found:
                found.extend(handler.view_o.get(each, ()))
            views[root] = dict.fromkeys(found)
            roots.update(dict.fromkeys(found, root))
    return roots, views, destroyers


def _io_toposort(original):
    @functools.wraps(original)
    def io_toposort(inputs, outputs, orderings=None, clients=None):
        if type(inputs) is not set or orderings or clients is not None:
            return original(inputs, outputs, orderings, clients)
        # Theano copies the set, which has all variables of a graph, for each new node.
        computed, order = set(), []
        todo = [x.owner for x in reversed(outputs) if x.owner]
        while todo:
            node = todo.pop()
            if node.outputs[0] in computed or node.outputs[0] in inputs:
                continue
            unknown = (x for x in node.inputs if x not in computed and x not in inputs)
            missing = [x.owner for x in unknown if x.owner]
            if missing:
                todo += [node, *missing]
            else:
                computed.update(node.outputs)
                order.append(node)
        return order

    return io_toposort
