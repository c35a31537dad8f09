"""The likelihood that ranks compute, in functions of JAX: it calls back into Python.

    JAX's code ──▶ pure_callback: points ──▶ evaluator, one after the other ──▶ JAX's code

JAX derives by itself. It learns that the derivative of the log-likelihood along a direction is the
gradient times the direction, and that of the gradient the Hessian times the direction. So value and
gradient come of one callback, as they do in PyTensor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from synkhronos.extensions.pymc.terms import is_float


def likelihood(evaluator, kind, values):
    """Return the result of an evaluation of a kind: one vector, or a scalar for "value".

    Chains that JAX samples at once, on devices or in batches, take turns on the ranks.
    """
    lengths = [values[i].shape[axis] for i, axis in evaluator.unknown]
    kinds = [
        np.full(np.size(value), is_float(each)) for each, value in zip(evaluator.parameters, values)
    ]
    [moving] = np.nonzero(np.concatenate(kinds))  # the places of floats
    own = jnp.result_type(float)  # 32 bits, unless JAX has been told to compute with 64

    def evaluated(kind, flat):
        def evaluate(flat):
            points = np.asarray(flat, "float64")
            try:
                found = [
                    evaluator.evaluate(kind, np.concatenate([lengths, point]))
                    for point in points.reshape(-1, points.shape[-1])
                ]
            except BaseException as error:
                # JAX raises its own error with this one's text. The first has caused the others.
                evaluator.unheard = evaluator.unheard or error
                raise
            evaluator.unheard = None  # a caller that goes on has handled the error
            return np.reshape(found, (*points.shape[:-1], 1 + len(moving))).astype(own)

        out = jax.ShapeDtypeStruct((1 + len(moving),), own)
        return jax.pure_callback(evaluate, out, flat, vmap_method="broadcast_all")

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
