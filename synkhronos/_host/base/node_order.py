"""Orders of the nodes of a graph, as constraints on it."""

import collections

from synkhronos._host.base.chosen_library import Feature, sorted_nodes


def n_needed(nodes, before):
    """Return for each node how many nodes it needs, itself included.

    ``before(node)`` returns those that it needs directly, which come before it in `nodes`.
    """
    needed = {}
    for number, node in enumerate(nodes):
        needed[node] = 1 << number  # the bits of all nodes that it needs
        for each in before(node):
            needed[node] |= needed[each]
    return {node: bin(bits).count("1") for node, bits in needed.items()}


def owners(node):
    """Return the nodes that compute the inputs of a node."""
    return [x.owner for x in node.inputs if x.owner is not None]


class InOrder(Feature):
    """A constraint on a graph: its nodes come in the order that `arranged` returns."""

    def constrain(self, fgraph) -> None:
        """Add the constraint, unless it contradicts others."""
        fgraph.attach_feature(self)
        try:
            fgraph.toposort()
        except ValueError:
            fgraph.remove_feature(self)

    def arranged(self, nodes, before):
        """Return the nodes in another order in which each comes after those that it needs.

        ``before(node)`` returns the nodes that it needs.
        """
        raise NotImplementedError

    def orderings(self, fgraph):
        """Return, for each node, the node before it."""
        others = collections.defaultdict(list)
        for feature in fgraph._features:
            if feature is not self and hasattr(feature, "orderings"):
                for node, before in (feature.orderings(fgraph) or {}).items():
                    others[node] += before
        nodes = sorted_nodes(fgraph, dict(others))

        def before(node):
            return owners(node) + others.get(node, [])

        chain = self.arranged(nodes, before)
        return collections.OrderedDict(
            (node, [previous]) for previous, node in zip(chain, chain[1:])
        )
