"""The likelihood that ranks compute, in functions of JAX: it calls back into Python.

    JAX's code ──▶ pure_callback: points ──▶ evaluator, one after the other ──▶ JAX's code

JAX derives by itself. It learns that the derivative of the log-likelihood along a direction is the
gradient times the direction, and that of the gradient the Hessian times the direction. So value and
gradient come of one callback, as they do in PyTensor.

PyMC makes constants of shared variables: ranks get rows of those. Where they are arguments, as in
functions of PyTensor and nutpie, JAX computes their checksums in each call. If no known values have
these, a second callback gets the values.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from synkhronos.extensions.pymc.row_sources import are_equal, checksums
from synkhronos.extensions.pymc.terms import is_float

_called = functools.partial(jax.pure_callback, vmap_method="broadcast_all")


def likelihood(evaluator, kind, sources, values):
    """Return the result of an evaluation of a kind: one vector, or a scalar for "value".

    `sources` are the values of the shared variables that rows are computed from.
    Chains that JAX samples at once, on devices or in batches, take turns on the ranks.
    """
    lengths = [values[i].shape[axis] for i, axis in evaluator.unknown]
    kinds = [
        np.full(np.size(value), is_float(each)) for each, value in zip(evaluator.parameters, values)
    ]
    [moving] = np.nonzero(np.concatenate(kinds))  # the places of floats
    own = jnp.result_type(float)  # 32 bits, unless JAX has been told to compute with 64
    known, sums = _known(evaluator.sources, sources)

    def evaluated(kind, flat):
        def evaluate(flat, own_sources):
            points = np.asarray(flat, "float64")
            try:
                found = [
                    evaluator.evaluate(kind, np.concatenate([lengths, point]), own_sources)
                    for point in points.reshape(-1, points.shape[-1])
                ]
            except BaseException as error:
                # JAX raises its own error with this one's text. The first has caused the others.
                evaluator.unheard = evaluator.unheard or error
                raise
            evaluator.unheard = None  # a caller that goes on has handled the error
            return np.reshape(found, (*points.shape[:-1], 1 + len(moving))).astype(own)

        def evaluate_known(flat, sums):
            own_sources = known(np.asarray(sums))
            if own_sources is None:
                return np.zeros(out.shape, own), np.zeros((), bool)
            return evaluate(flat, own_sources), np.ones((), bool)

        def evaluate_given(flat, *values):
            return evaluate(flat, tuple(map(np.array, values)))

        out = jax.ShapeDtypeStruct((1 + len(moving),), own)
        if sums is None:
            return _called(lambda flat: evaluate(flat, known), out, flat)

        @jax.custom_batching.sequential_vmap  # `cond` would compute both ways for a batch
        def evaluate_one(flat, sums, *sources):
            is_known = jax.ShapeDtypeStruct((), bool)
            vector, is_known = _called(evaluate_known, (out, is_known), flat, sums)
            of_given = functools.partial(_called, evaluate_given, out)
            return jax.lax.cond(is_known, lambda *_: vector, of_given, flat, *sources)

        return evaluate_one(flat, sums, *sources)

    @jax.custom_jvp
    def gradients(flat):
        return evaluated("gradients", flat)

    @gradients.defjvp
    def along_direction(primals, tangents):
        [flat], [along] = primals, tangents
        product = evaluated("products", jnp.concatenate([flat, along[moving]]))
        return gradients(flat), product

    @jax.custom_jvp
    def value(flat):
        return gradients(flat)[0]

    @value.defjvp
    def slope(primals, tangents):
        [flat], [along] = primals, tangents
        vector = gradients(flat)
        return vector[0], vector[1:] @ along[moving]

    flat = jnp.concatenate([jnp.ravel(each).astype(own) for each in values])
    if kind == "products":
        return evaluated(kind, flat)
    return value(flat) if kind == "value" else gradients(flat)


def _known(sources, values):
    """Return values in NumPy's arrays, and None.

    For values that JAX gets as arguments, return a function that returns them, or None, for
    checksums; and these.
    """
    present = sources.present()
    if not any(isinstance(each, jax.core.Tracer) for each in values):
        own = tuple(map(np.array, values))
        return present if are_equal(own, present) else own, None
    dtypes = [str(each.dtype) for each in values]
    sums = jnp.concatenate([checksums(each, jnp) for each in values])
    return lambda sums: sources.matching(sums, dtypes, present), sums
