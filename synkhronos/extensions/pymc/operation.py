"""The operation that stands in a model's graph for likelihoods that ranks compute.

    inputs   the number of an evaluator; the shared variables that rows are computed from (see
             `row_sources`); and the frontiers of all terms: the variables at which the model's
             graph ends, and the terms that ranks compute begin (see `terms`)
    outputs  of the kind "value": the log-likelihood, a scalar
             "gradients": this, and its gradients for all inputs in one flat vector
             "products": the derivative along a direction, which is one more input, and the Hessian
             times it

The gradients come with the value, so PyTensor's gradient of this operation computes nothing: it
takes them apart, and the gradient of the gradients is an operation of the kind "products". Where
nothing uses the gradients, a rewrite asks for the value alone.

The evaluator's number is an input, in a shared variable, and no constant: numba's cache on disk
finds machine code by the graph and its constants, so all blocks and processes share the code.
"""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import optdb
from pytensor.gradient import DisconnectedType, grad_not_implemented
from pytensor.graph.basic import Apply
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.link.jax.ops import JAXOp
from pytensor.link.numba.dispatch.basic import register_funcify_and_cache_key

from synkhronos._host.pytensor.numba_operations import calling_python
from synkhronos.extensions.pymc.evaluator import Evaluator, evaluate
from synkhronos.extensions.pymc.terms import is_float


class Likelihood(JAXOp):  # in JAX PyTensor calls `perform_jax`; the class imports no JAX
    """The log-likelihood of terms, its gradients, or products with its Hessian: see its kinds."""

    __props__ = ("evaluator", "kind")

    name = None

    def __init__(self, evaluator: Evaluator, kind: str = "gradients"):
        self.evaluator, self.kind = evaluator, kind
        self.n_given = 1 + len(evaluator.sources.variables)  # inputs before the frontiers

    def __call__(self, *frontier, **kwargs):
        """Return the variables of the outputs; the last input of products is the direction."""
        evaluator = self.evaluator
        given = evaluator.number_in_graphs, *evaluator.sources.variables
        return super().__call__(*given, *frontier, **kwargs)

    def make_node(self, number, *others):
        """Return a node of the graph."""
        number = pt.as_tensor_variable(number, dtype="int64")
        outputs = [pt.scalar("likelihood", dtype="float64")]
        if self.kind != "value":
            outputs.append(pt.vector("gradients", dtype="float64"))
        return Apply(self, [number, *map(pt.as_tensor_variable, others)], outputs)

    def perform(self, node, inputs, outputs):
        """Evaluate the likelihood, in modes that run Python."""
        (number, *sources), values = inputs[: self.n_given], inputs[self.n_given :]
        vector = evaluate(int(number), self.kind, self.evaluator.flat(values), sources)
        outputs[0][0] = np.asarray(vector[0])
        if self.kind != "value":
            outputs[1][0] = vector[1:]

    def perform_jax(self, *inputs):
        """Evaluate the likelihood in a function of JAX."""
        from synkhronos.extensions.pymc.in_jax import likelihood

        given = inputs[1 : self.n_given], inputs[self.n_given :]
        vector = likelihood(self.evaluator, self.kind, *given)
        return vector if self.kind == "value" else (vector[0], vector[1:])

    def connection_pattern(self, node):
        """Say that all outputs depend on data, and on those frontiers that are floats."""
        _number, *others = node.inputs
        return [
            [False] * len(node.outputs),
            *([is_float(each)] * len(node.outputs) for each in others),
        ]

    def pullback(self, inputs, outputs, output_gradients):
        """Return the gradients for all inputs, which were computed with the value.

        Raises NotImplementedError for third derivatives, and for second ones that PyTensor lacks.
        """
        if self.kind == "products":
            raise NotImplementedError(
                "Ranks compute no third derivatives of a likelihood. Derive outside of the "
                "`with likelihood(...):` block."
            )
        first, second = output_gradients
        flat = pt.zeros_like(outputs[1])
        if not isinstance(first.type, DisconnectedType):
            flat += outputs[1] * first
        if not isinstance(second.type, DisconnectedType):
            self.evaluator.check_second_derivatives()
            flat += Likelihood(self.evaluator, "products").make_node(*inputs, second).outputs[1]
        found, begin = [DisconnectedType()()], 0
        for i, each in enumerate(inputs[1 : self.n_given], 1):
            why = "Ranks compute no gradients by data. Derive outside of the likelihood() block."
            no_gradient = grad_not_implemented(self, i, each, why)
            found.append(no_gradient if is_float(each) else DisconnectedType()())
        for each in inputs[self.n_given :]:
            if not is_float(each):
                found.append(DisconnectedType()())
                continue
            end = begin + each.size
            found.append(flat[begin:end].reshape(each.shape, ndim=each.ndim).astype(each.dtype))
            begin = end
        return found

    def do_constant_folding(self, fgraph, node):
        """Refuse: data may change."""
        return False


@node_rewriter([Likelihood])
def leave_out_gradients(fgraph, node):
    """Compute no gradients where nothing uses them."""
    if node.op.kind != "gradients" or fgraph.clients[node.outputs[1]]:
        return False
    value = Likelihood(node.op.evaluator, "value").make_node(*node.inputs)
    return {node.outputs[0]: value.out}


# Late: other rewrites first remove variables that nothing uses, with their gradients.
optdb.register(
    "synkhronos_leave_out_gradients",
    dfs_rewriter(leave_out_gradients),
    "fast_run",
    "fast_compile",
    position=47.0,
)


@register_funcify_and_cache_key(Likelihood)
def _likelihood_in_numba(op, node, **kwargs):
    # Python gets one array and returns one: each array that is passed takes a microsecond. For a
    # scalar, and a vector whose length is not known, and rows of one shared variable:
    #   def likelihood(number, source_0, value_0, value_1):
    #       flat = np.empty(1 + value_0.size + value_1.size)
    #       flat[0] = value_1.shape[0]
    #       place = 1
    #       flat[place] = value_0.item()
    #       place += 1
    #       for each in value_1.flat:
    #           flat[place] = each
    #           place += 1
    #       which = number.item()
    #       with objmode(vector='float64[::1]'):
    #           vector = evaluate(which, 'gradients', flat, (source_0,))
    #       return np.asarray(vector[0]), vector[1:]
    unknown = op.evaluator.unknown
    sources = [f"source_{i}" for i in range(op.n_given - 1)]
    names = [f"value_{i}" for i in range(len(node.inputs) - op.n_given)]
    sizes = " + ".join([str(len(unknown)), *(f"{name}.size" for name in names)])
    arguments = ", ".join(["number", *sources, *names])
    lines = [f"def likelihood({arguments}):", f"    flat = np.empty({sizes})"]
    lines += [
        f"    flat[{place}] = value_{i}.shape[{axis}]" for place, (i, axis) in enumerate(unknown)
    ]
    lines.append(f"    place = {len(unknown)}")
    for name, value in zip(names, node.inputs[op.n_given :], strict=True):
        if value.ndim == 0:
            lines += [f"    flat[place] = {name}.item()", "    place += 1"]
        else:
            lines += [f"    for each in {name}.flat:", "        flat[place] = each"]
            lines += ["        place += 1"]
    arrays = "".join(f"{each}, " for each in sources)
    returned = "np.asarray(vector[0])" + ("" if op.kind == "value" else ", vector[1:]")
    lines += [
        "    which = number.item()",
        "    with objmode(vector='float64[::1]'):",
        f"        vector = evaluate(which, {op.kind!r}, flat, ({arrays}))",
        f"    return {returned}",
    ]
    return calling_python("\n".join(lines), evaluate)
