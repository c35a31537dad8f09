"""Conditions that each call of a divided function must meet."""

import numpy as np

from synkhronos import _host
from synkhronos._wording import count


class Conditions:
    """The conditions of one function, whose calls send the inputs `variables`.

    A call must have `n_rows` rows (None: any number); the expressions `remainders` of the shapes of
    its inputs must be 0; and with `is_whole` it can't be cut into slices. ValueError is raised for
    remainders that depend on the values of inputs.
    """

    def __init__(self, variables, n_rows, remainders, is_whole):
        self._variables, self._n_rows, self._is_whole = variables, n_rows, is_whole
        self._remainders = None
        self._right = set()  # the shapes that were checked: only new ones are computed with
        if remainders:
            self._remainders = _host.compile_function(
                variables,
                remainders,
                mode=_host.Mode("py", "fast_run"),  # optimized, so that shapes need no values
                on_unused_input="ignore",
                no_default_updates=True,
            )
            used = _host.input_of_values(self._remainders, len(variables))
            if used is not None:
                raise ValueError(f"has a shape that depends on the values of {used}")

    def __bool__(self):
        return bool(self._is_whole or self._remainders or self._n_rows is not None)

    def check(self, owner, shapes, rows, num_slices):
        """Raise ValueError if a call breaks a condition; `shapes` has its inputs' shapes."""
        if self._is_whole and num_slices > 1:
            raise ValueError(
                f"num_slices={num_slices}, but {owner} computes something of all rows together, "
                "which its slices don't add up to: such as a mean over those that a mask leaves, "
                "or a batch normalization. Leave num_slices out; or make it with "
                'per_rank="loss", for the average of each slice\'s own loss.'
            )
        if self._n_rows not in (None, rows):
            raise ValueError(
                f"{owner} reshapes to {count(self._n_rows, 'row')}, or declares so many as the "
                f"batch size of a convolution, but the call has {rows}. Write x.shape[0] of an "
                "input x in place of the number, or None in an input_shape."
            )
        if self._remainders is None or shapes in self._right:
            return
        pairs = zip(self._variables, shapes)
        zeros = [np.broadcast_to(np.zeros((), each.dtype), shape) for each, shape in pairs]
        if any(self._remainders(*zeros)):
            raise ValueError(
                f"{owner} reshapes its rows so that ranks can't keep them whole, with inputs of "
                f"the shapes {', '.join(map(str, shapes))}. Reshape to (x.shape[0], ...)."
            )
        self._right.add(shapes)
