"""Orders of the nodes of a graph: as a constraint on it, and that of pushes to a parameter server.

    Await 0 ──▶ new W0 ──▶ layer 0 ─┐                         ┌─▶ gradient of W0 ──▶ Push 0
                     Await 1 ──▶ new W1 ──▶ layer 1 ──▶ loss ─┴─▶ gradient of W1 ──▶ Push 1
    ─────────────────────────────────── time ───────────────────────────────────▶
      wait 0, layer 0, wait 1, layer 1, loss, gradient 1, push 1, gradient 0, push 0, the rest

An Await waits for what the Push of the call before has asked for. A host library's own order of
nodes would wait for everything at the beginning, and compute many gradients late. Each push comes
as early as possible here, each wait as late.

An operation reaches the parameter server through a port, an object with these attributes:

    position      the place of its array in the order of first use: 0 is used first
    push(array)   begin to send the array, and ask for the result, which may land in the array
    wait()        return the result of the last push

References
----------
Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on
GPU Clusters", USENIX ATC 2017, section 3.1: wait-free backpropagation.
"""

import collections

import numpy as np

from synkhronos._host.base.library import Feature, sorted_nodes


def in_push_order(nodes, before, push, wait):
    """Return the nodes in the order of the picture.

    Parameters
    ----------
    nodes : list
        In any order in which a node comes after those that it needs.
    before : callable
        ``before(node)`` returns the nodes that it needs.
    push, wait : type
        The host library's classes of Push and Await. The last input of a Push is the token of the
        operation that comes before it.
    """
    place = {node: number for number, node in enumerate(nodes)}
    count, last_wait = n_needed(nodes, before), {}
    for node in nodes:
        own = node.op.port.position if isinstance(node.op, wait) else -np.inf
        last_wait[node] = max([own, *(last_wait[each] for each in before(node))])
    # What needs the fewest operations can be pushed first: in a network, the last layers.
    pushes = [node for node in nodes if isinstance(node.op, push)]
    pushes.sort(key=lambda node: (count[node], place[node]))
    arranged = {}  # as a set that keeps its order
    for push_node in pushes:
        stack = [(push_node, False)]
        while stack:
            node, is_ready = stack.pop()
            if node in arranged:
                continue
            if is_ready:
                arranged[node] = True
                continue
            stack.append((node, True))
            # The part that waits for the last array is computed last, so it is the first to stack.
            token = node.inputs[-1].owner if isinstance(node.op, push) else None
            new = [each for each in before(node) if each not in arranged]
            new.sort(key=lambda each: (each is token, last_wait[each], place[each]), reverse=True)
            stack += [(each, False) for each in new]
    return [*arranged, *(node for node in nodes if node not in arranged)]


def n_needed(nodes, before):
    """Return, for each node, how many nodes it needs, itself included; arguments as above."""
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
    """A constraint on a graph: nodes come in the order in which `arranged` returns them."""

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
