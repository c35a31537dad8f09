"""The checks of a graph after nearly each rewrite, half of the optimizer's time, made quicker."""

from theano.gof import InconsistencyError, destroyhandler, opt


def install() -> None:
    """Let Theano use these checks in this process."""
    destroyhandler._contains_cycle = contains_cycle
    destroyhandler._build_droot_impact = _build_droot_impact
    opt.MergeOptimizer.apply = _merge


def contains_cycle(fgraph, orderings) -> bool:
    """Return whether a graph has a cycle, with the nodes that `orderings` puts before others."""
    missing, after, ready = {}, {}, []  # how many nodes a node waits for; those that wait for it
    for node in fgraph.apply_nodes:
        before = [x.owner for x in node.inputs if x.owner is not None]
        before.extend(orderings.get(node, ()))
        missing[node] = len(before)
        if not before:
            ready.append(node)
        for each in before:
            after.setdefault(each, []).append(node)
    for node in ready:  # which grows
        for each in after.get(node, ()):
            missing[each] -= 1
            if not missing[each]:
                ready.append(each)
    return len(ready) < len(missing)


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


def _merge(self, fgraph, original=opt.MergeOptimizer.apply):
    fgraph.merge_feature.blacklist = _Pairs()  # Theano puts a list there again at the end
    return original(self, fgraph)


class _Pairs(set):  # Theano searches a list for each pair of nodes that it may merge
    append = set.add
