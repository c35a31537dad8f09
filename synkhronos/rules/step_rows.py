"""The rows of a model's steps, by which averages over ranks are weighted.

a model that says so         ``step_rows``, set in ``train_iter``
theanompi.lib.opt            counts them: ``train_iter_fn.rows``
inputs of ``train_iter_fn``  ┐
shared variables that        ├▶ the length of their first axis, if it is one for all
``train_iter`` sets          ┘
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from synkhronos import _host
from synkhronos._machine.log import log
from synkhronos.rules.model_variables import updated_variables, variables_of


class StepRows:
    """Finds the number of rows in the last step of a compiled model.

    Without `looks` it is known only if the model counts them.
    """

    def __init__(self, model: Any, tells: bool = True, looks: bool = True) -> None:
        self._model, self._tells = model, tells
        self._lengths: dict[Any, int] = {}  # of what train_iter gives to functions
        function = getattr(model, "train_iter_fn", None)
        if hasattr(function, "rows") or not looks:
            return
        if isinstance(function, _host.CompiledFunction):
            with contextlib.suppress(AttributeError):  # it is a property
                model.train_iter_fn = _Counting(function, self._lengths)
        trained = {id(each) for each in [*model.params, *updated_variables(model)]}
        for each in variables_of(model):
            if id(each) not in trained and _host.is_array_variable(each):
                _host.watch(each, lambda each=each: _note(self._lengths, each, _host.peek(each)))

    def begin(self) -> None:
        """Forget the lengths of a validation."""
        self._lengths.clear()

    def of_last_step(self) -> float:
        """Return the number of rows; 1 if it is not known, with one warning."""
        counted = getattr(self._model, "step_rows", None)
        if counted is not None:
            if not 0 < float(counted) < np.inf:
                raise ValueError(
                    f"step_rows must be the number of rows of a step, above 0, got {counted!r}."
                )
            return float(counted)
        counted = getattr(getattr(self._model, "train_iter_fn", None), "rows", None)
        found = set(self._lengths.values()) if counted is None else {counted}
        self._lengths.clear()  # a variable that is set once must not count for later steps
        if len(found) == 1:
            return float(found.pop())
        if self._tells:
            self._tells = False
            log.warning(
                f"{type(self._model).__name__} does not say how many rows a step has, so all ranks "
                "weigh the same: right only if all batches have as many rows. If some have fewer, "
                "set self.step_rows = len(x) in train_iter()."
            )
        return 1


class _Counting:
    """A compiled function that notes the lengths of its inputs."""

    def __init__(self, function, lengths):
        self._function, self._lengths = function, lengths

    def __call__(self, *args, **kwargs):
        for name, value in [*enumerate(args), *kwargs.items()]:
            _note(self._lengths, name, value)
        return self._function(*args, **kwargs)

    def __getitem__(self, name):
        return self._function[name]

    def __reduce_ex__(self, protocol):  # copies and pickles are of the function itself
        return self._function.__reduce_ex__(protocol)

    def __getattr__(self, name):
        return getattr(self.__dict__["_function"], name)


def _note(lengths, name, value):
    shape = getattr(value, "shape", None)
    shape = np.shape(value) if shape is None else shape
    if shape:
        lengths[name] = shape[0]
