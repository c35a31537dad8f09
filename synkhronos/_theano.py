"""All that depends on which Theano this is: the only importer of its internals.

master   compile_function -> dump(functions)           pickle, with known variables as ids
worker   load(...) -> run(function, arguments, ...)    no optimizer, and no C compiler, again
"""

import contextlib
import io
import operator
import pickle
import sys
from collections import OrderedDict

import cloudpickle
import numpy as np
import theano
from theano.compile.function_module import Function
from theano.compile.mode import Mode, get_mode
from theano.compile.ops import FromFunctionOp
from theano.compile.sharedvalue import SharedVariable
from theano.configparser import _config_var_list as config_variables
from theano.gof import Constant, Container, Variable
from theano.sandbox import rng_mrg
from theano.tensor import TensorType, raw_random
from theano.tensor.raw_random import RandomStateType

from synkhronos import _compile_cache, _gpuarrays, _portable, _rewriting

# Graphs are pickled recursively: a ResNet-50 training function needs more than 5000 levels.
sys.setrecursionlimit(max(sys.getrecursionlimit(), 50000))
_compile_cache.find_every_module_again()

__all__ = ["Constant", "Mode", "OrderedDict", "SharedVariable", "TensorType", "Variable"]


def float_dtype() -> str:
    """Return Theano's floatX."""
    return theano.config.floatX


def is_mode(name) -> bool:
    """Whether Theano has a mode, or a linker, of this name."""
    try:
        get_mode(name)
    except Exception:  # Theano raises no kind of its own
        return False
    return True


def compile_function(inputs, outputs, **kwargs):
    """Return a compiled Theano function that takes checked arrays and returns a list."""
    givens = kwargs.get("givens") or ()
    pairs = [
        *(kwargs.get("updates") or ()),
        *(givens.items() if hasattr(givens, "items") else givens),
    ]
    computed = [*outputs, *(value for _, value in pairs if isinstance(value, Variable))]
    kwargs["mode"] = _rewriting.mode_for(computed, kwargs.get("mode"))
    function = theano.function(inputs, outputs, **kwargs)
    function.trust_input = True
    return function


def expression_of(function, inputs, outputs, updates, kwargs):
    """Return what a compiled function was made of, for ranks on another kind of device."""
    targets = {target for target, _ in updates}
    defaults = [v for v in updated_variables(function) if v not in targets]
    updates = [*updates, *((variable, variable.default_update) for variable in defaults)]
    return _portable.without_devices(inputs, outputs, updates, kwargs)


def compile_expression(expression):
    """Compile what `expression_of` returned, for the device of this rank."""
    return compile_function(**expression.arguments())


def as_update(variable, value):
    """Return what an update gives a shared variable as an expression of the variable's type."""
    return variable.type.filter_variable(value, allow_convert=False)


def shared_variables(function):
    """Return the shared variables that a compiled function uses or updates."""
    return function.get_shared()


def updated_variables(function):
    """Return the shared variables that a compiled function updates, by default updates too."""
    return [i.variable for i in function.maker.inputs if i.implicit and i.update is not None]


def run(function, arguments, output_subset=None):
    """Call a compiled function; with `output_subset`, compute no more than those outputs."""
    try:
        if output_subset is None:
            return function(*arguments)
        if _takes_subset(type(function.fn)):
            return function(*arguments, output_subset=list(output_subset))
        outputs = function(*arguments)
        return [outputs[index] for index in output_subset]
    except BaseException:
        # After a call that went well Theano lets go of its arguments by itself.
        for container in function.input_storage:
            if container.required:
                container.storage[0] = None
        raise


def _takes_subset(vm_type):
    # The virtual machines that evaluate lazily do; the plain loops take no argument at all.
    return vm_type.__name__ in ("CVM", "Stack")


def cast_input(variable, value, allow_downcast):
    """Return `value` as the array that ``theano.function`` would make of it.

    Raises ``TypeError`` where it would.
    """
    return variable.type.filter(value, strict=False, allow_downcast=allow_downcast)


# Values of shared variables.


def peek(variable):
    """Return a shared variable's own value, not a copy."""
    return variable.container.storage[0]


def replace(variable, value) -> None:
    """Make `value` the value of a shared variable, cast to its dtype, with no copy on a host.

    A variable on a device takes a copy of it, in its present memory if the shape is the same.
    """
    storage = variable.container.storage
    if not lives_on_device(variable):
        storage[0] = np.asarray(value, dtype=variable.dtype)
    elif _gpuarrays.is_on_device(value):
        storage[0] = value
    else:
        value = np.asarray(value, dtype=variable.dtype)
        if storage[0].shape == value.shape:
            _gpuarrays.write(storage[0], value)
        else:
            storage[0] = _gpuarrays.to_device(value)


def replace_object(variable, value) -> None:
    """Make `value` the value of a shared variable that holds no array, such as a random state."""
    variable.container.value = value


@contextlib.contextmanager
def lend(variable, rows):
    """Have a shared variable hold some of its rows for a while.

    Compiled functions read the value from the variable's storage cell at every call, so this takes
    no other function. What an update stores in the meantime stays.
    """
    storage = variable.container.storage
    whole = storage[0]
    storage[0] = rows
    try:
        yield
    finally:
        if storage[0] is rows:
            storage[0] = whole


def is_array_variable(variable) -> bool:
    """Whether a variable holds an array, of NumPy or on a device."""
    return isinstance(variable.type, TensorType) or lives_on_device(variable)


def lives_on_device(variable) -> bool:
    """Whether the values of a variable are on a device; 0-d and complex ones seldom are."""
    return _gpuarrays.is_device_type(variable.type)


def on_host(variable):
    """Return a variable of the host for one on a device, and any other as it is."""
    if not lives_on_device(variable):
        return variable
    return TensorType(variable.dtype, variable.broadcastable)(name=variable.name)


def on_device(variable):
    """Return a variable moved to this rank's device."""
    return variable.transfer(None)


def is_random_state(variable) -> bool:
    """Whether a shared variable holds the state of a random number generator."""
    return isinstance(variable.type, RandomStateType) or _is_mrg_state(variable)


# How functions travel.


class _Pickler(cloudpickle.Pickler):
    """Writes shared variables, their containers and the cells that hold their values as ids.

    The containers of a compiled function are its own, but they hold the variables' own cells.
    """

    def __init__(self, file, id_of):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._id_of = id_of

    def persistent_id(self, obj):
        if isinstance(obj, (SharedVariable, Container, list)):
            return self._id_of(obj)
        return None

    def reducer_override(self, obj):
        if isinstance(obj, Function):
            # Theano's own way sends the values of shared variables along, for each function again,
            # and fails where the receiver has other ones.
            return _rebuild_function, (obj.maker, list(obj.input_storage))
        if isinstance(obj, FromFunctionOp):
            # By value: Theano's way, by name, fails for what was made after the fork.
            parts = ("fn", "infer_shape")
            function, infer_shape = (getattr(obj, f"_FromFunctionOp__{part}") for part in parts)
            return FromFunctionOp, (function, obj.itypes, obj.otypes, infer_shape)
        if isinstance(obj, RandomStateType):
            # Two of them are never equal, so that each process must have one only.
            return operator.attrgetter("random_state_type"), (raw_random,)
        if type(obj).__name__ == "fortran":
            # SciPy's BLAS routines, which Theano uses where it has no BLAS to link.
            # All they say of themselves is their signature: "a = dger(alpha,x,y,[...".
            return _fortran_routine, (obj.__doc__.split("(")[0].split()[-1],)
        return super().reducer_override(obj)


def _rebuild_function(maker, input_storage):
    function = maker.create(input_storage, trustme=True)
    function.trust_input = True
    return function


def _fortran_routine(name):
    import scipy.linalg.blas

    return getattr(scipy.linalg.blas, name)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, variables):
        super().__init__(file)
        self._variables = variables

    def persistent_load(self, pid):
        kind, key = pid
        variable = self._variables[key]
        if kind == "variable":
            return variable
        return variable.container if kind == "container" else variable.container.storage


def dump(functions, known, new, portable=False) -> bytes:
    """Pickle functions, sending the variables of `known` as ids and those of `new` whole.

    Parameters
    ----------
    functions : dict
        Anything picklable -> (compiled function, or expression, anything picklable).
    known, new : dict
        Id -> shared variable.
    portable : bool
        Whether the receiver has its variables on another kind of device.
    """
    for function, _ in functions.values():
        if isinstance(function, Function):
            _drop_kernels(function)
    ids = {}
    file = io.BytesIO()
    for variables in (known, new):
        # New variables are dumped in between: whole, but what they refer to as ids.
        if variables is new:
            sent = _portable.values_of(new, known) if portable else new
            _Pickler(file, lambda obj: ids.get(id(obj))).dump(sent)
        for key, variable in variables.items():
            ids[id(variable)] = ("variable", key)
            ids[id(variable.container)] = ("container", key)
            ids[id(variable.container.storage)] = ("storage", key)
    _Pickler(file, lambda obj: ids.get(id(obj))).dump(functions)
    return pickle.dumps(_compile_config()) + file.getvalue()


def _drop_kernels(function):
    """Drop what OpenCL reductions keep on their nodes and can't be pickled; they make it again."""
    for node in function.maker.fgraph.apply_nodes:
        node.__dict__.pop("@cache_reduction_k", None)
        inner = getattr(node.op, "fn", None)  # of a scan, or an OpFromGraph
        if isinstance(inner, Function):
            _drop_kernels(inner)


def _compile_config():
    """Return the settings that are part of the key of compiled code."""
    return {v.fullname: v.__get__(True, None) for v in config_variables if v.in_c_key}


def _set_config(values):
    """Take the settings of the master, which its script may have changed after the fork.

    Where one differed, every module would be compiled again.
    """
    for variable in config_variables:
        name = variable.fullname
        if name in values and variable.__get__(True, None) != values[name]:
            variable.__set__(None, values[name])


def load(data, variables):
    """Undo `dump`: add the new variables to `variables`, and return the functions and their ids."""
    file = io.BytesIO(data)
    _set_config(pickle.load(file))
    new = _Unpickler(file, variables).load()
    for key, sent in new.items():
        variables[key] = sent.make(variables) if isinstance(sent, _portable.Value) else sent
    functions = _Unpickler(file, variables).load()
    for key, (function, rest) in functions.items():
        if isinstance(function, _portable.Expression):
            functions[key] = compile_expression(function), rest
    return functions, tuple(new)


# Random numbers.


def spread_random_state(variable, rank: int) -> None:
    """Move a random state to the stream of its own that `rank` draws from; rank 0 keeps it.

    The state of MRG_RandomStreams jumps ahead ``rank * 2**154`` numbers (its own streams are
    ``2**134`` apart, and its period is ``2**185``; L'Ecuyer and Touzin, 2000). The state of
    RandomStreams is seeded anew from its present one and the rank.
    """
    if rank == 0:
        return
    if isinstance(variable.type, RandomStateType):
        state = variable.get_value(borrow=True)
        key = state.get_state()[1]
        position = state.get_state()[2]
        seed = np.random.SeedSequence([*key.tolist(), position, rank])
        variable.set_value(np.random.RandomState(np.random.MT19937(seed)), borrow=True)
    elif _is_mrg_state(variable):
        states = np.asarray(variable.get_value())
        variable.set_value(_jump(states, rank).astype(states.dtype))


def _is_mrg_state(variable):
    if getattr(variable.tag, "is_rng", False):
        return is_array_variable(variable)
    update = getattr(variable, "default_update", None)
    owner = getattr(update, "owner", None)
    return owner is not None and isinstance(owner.op, rng_mrg.mrg_uniform_base)


def _jump(states, rank):
    matrices = [
        (_power(rng_mrg.A1p134, rank << 20, rng_mrg.M1), rng_mrg.M1),
        (_power(rng_mrg.A2p134, rank << 20, rng_mrg.M2), rng_mrg.M2),
    ]
    halves = np.split(states.astype(object), 2, axis=-1)
    return np.concatenate(
        [half.dot(matrix.T) % modulus for half, (matrix, modulus) in zip(halves, matrices)],
        axis=-1,
    )


def _power(matrix, exponent, modulus):
    base = np.asarray(matrix).astype(object)
    result = np.eye(len(base), dtype=int).astype(object)
    while exponent:
        if exponent & 1:
            result = result.dot(base) % modulus
        base = base.dot(base) % modulus
        exponent >>= 1
    return result
