"""Functions as expressions, for ranks on another kind of device than the master's.

    compiled for the master's kind ──▶ pickled as it is ──▶ ranks of the same kind
    expression ──▶ without devices ──▶ pickled ──▶ compiled by each rank of another kind

Without devices: operations that move arrays to a device or from it are left out, and a placeholder
stands for each shared variable, because its type on the rank differs from its type on the master.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from theano import shared
from theano.tensor import as_tensor_variable, constant

from synkhronos._host.theano import device_arrays
from synkhronos._host.theano.library import Constant, SharedVariable, ancestors, io_toposort
from synkhronos._host.theano.variables import is_array_variable, on_host
from synkhronos._machine.interrupts import raised_here
from synkhronos._wording import sentence

# Arguments that concern the master's variables, or what the master has reported already.
_LEFT_OUT = ("givens", "no_default_updates", "profile", "on_unused_input")
_MOVES = ("HostFromGpu", "GpuFromHost", "GpuToGpu")


class Expression(NamedTuple):
    """The arguments of ``theano.function``, with placeholders for the shared variables."""

    placeholders: List[Tuple[Any, Any]]  # placeholder, shared variable
    others: Dict[str, Any]  # all arguments but givens

    def arguments(self):
        """Return the keyword arguments of ``theano.function``, with this rank's variables."""
        givens = [
            (placeholder, as_tensor_variable(each) if is_array_variable(each) else each)
            for placeholder, each in self.placeholders
        ]
        return {**self.others, "givens": givens}


def without_devices(inputs, outputs, updates, kwargs) -> Expression:
    """Return the expression of a function, with all default updates among its updates."""
    rewriter = _Rewriter()
    givens = kwargs.get("givens") or []
    pairs = list(givens.items() if hasattr(givens, "items") else givens)
    # As in Theano, givens are not replaced inside of the values of other givens.
    strict = kwargs.get("rebuild_strict", True)
    given = rewriter.rewrite([_as_given(variable, value, strict) for variable, value in pairs])
    rewriter.begin_with({variable: value for (variable, _), value in zip(pairs, given)})
    values = [target.type.filter_variable(value, allow_convert=False) for target, value in updates]
    new = rewriter.rewrite([*outputs, *values])
    used = set(ancestors(new))
    others = {key: value for key, value in kwargs.items() if key not in _LEFT_OUT}
    others.update(inputs=list(inputs), outputs=new[: len(outputs)], no_default_updates=True)
    others["updates"] = [(each, x) for (each, _), x in zip(updates, new[len(outputs) :])]
    others["on_unused_input"] = "ignore"
    placeholders = [(p, variable) for variable, p in rewriter.placeholders.items() if p in used]
    return Expression(placeholders, others)


def _as_given(variable, value, strict):
    try:
        return variable.type.filter_variable(value)
    except TypeError:
        if strict:
            raise
        return as_tensor_variable(value)  # of another type than the variable, as the user allows


class _Rewriter:
    """Rewrites variables without devices, each one once."""

    def __init__(self):
        self.placeholders = {}
        self._new = {}

    def begin_with(self, new):
        """Begin anew, with `new` (variable -> its replacement); placeholders stay."""
        self._new = new

    def rewrite(self, variables):
        """Return the variables without devices."""
        for node in io_toposort([], variables):
            if all(output in self._new for output in node.outputs):
                continue
            inputs = [self._leaf(variable) for variable in node.inputs]
            if type(node.op).__name__ in _MOVES:
                self._new.setdefault(node.outputs[0], inputs[0])
            elif any(old is not new for old, new in zip(node.inputs, inputs)):
                self._rebuild(node, inputs)
            else:
                self._refuse_device(node, node.outputs)
        return [self._leaf(variable) for variable in variables]

    def _rebuild(self, node, inputs):
        try:
            outputs = node.clone_with_new_inputs(inputs, strict=False).outputs
        except raised_here(Exception) as error:
            raise TypeError(
                f"{node.op} does not take arrays of the host: {sentence(error)}"
            ) from error
        self._refuse_device(node, outputs)
        for old, new in zip(node.outputs, outputs):
            self._new.setdefault(old, new)

    def _refuse_device(self, node, outputs):
        if any(device_arrays.is_device_type(output.type) for output in outputs):
            raise TypeError(f"{node.op} only runs on devices, and not all ranks have one.")

    def _leaf(self, variable):
        if variable in self._new:
            return self._new[variable]
        if isinstance(variable, SharedVariable):
            if variable not in self.placeholders:
                self.placeholders[variable] = on_host(variable).type(name=variable.name)
            return self.placeholders[variable]
        if isinstance(variable, Constant) and device_arrays.is_device_type(variable.type):
            return constant(np.asarray(variable.data))
        return variable


class PortableValue(NamedTuple):
    """A shared variable, for a rank that keeps it on another kind of device."""

    name: Optional[str]
    value: Any
    broadcastable: Optional[Tuple[bool, ...]]  # None if the value is no array
    is_random: bool
    is_equal: bool  # whether it is a random state that stays equal on all ranks
    clone_of: Optional[int]  # the key of a variable with the same container

    def make(self, variables):
        """Return a variable on the device of this rank, or on the host."""
        if self.clone_of is not None:
            return variables[self.clone_of].clone()
        of_array = {} if self.broadcastable is None else {"broadcastable": self.broadcastable}
        variable = shared(self.value, name=self.name, **of_array)
        variable.tag.is_rng = self.is_random
        variable.tag.is_equal_on_ranks = self.is_equal
        return variable


def values_of(new, known):
    """Return key -> `PortableValue` for the new variables; both arguments map keys to variables."""
    holders = {id(variable.container): key for key, variable in known.items()}
    values = {}
    for key, variable in new.items():
        holder = holders.setdefault(id(variable.container), key)
        is_clone = holder != key  # Lasagne's batch normalization makes clones
        values[key] = PortableValue(
            variable.name,
            None if is_clone else variable.get_value(borrow=True),
            tuple(variable.broadcastable) if is_array_variable(variable) else None,
            getattr(variable.tag, "is_rng", False),
            getattr(variable.tag, "is_equal_on_ranks", False),
            holder if is_clone else None,
        )
    return values
