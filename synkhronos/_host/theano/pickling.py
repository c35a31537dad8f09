"""Pickle compiled functions: shared variables that a worker already has travel as their ids.

master   dump(functions)     a shared variable that the worker has: its id; a new one: its value too
worker   load(data)          compiled functions: neither the optimizer nor the C compiler runs again
"""

import io
import operator
import pickle
import sys

import cloudpickle
from theano.compile.function_module import Function
from theano.compile.ops import FromFunctionOp
from theano.compile.sharedvalue import SharedVariable
from theano.configparser import _config_var_list as config_variables
from theano.gof import Container
from theano.tensor import raw_random
from theano.tensor.raw_random import RandomStateType

from synkhronos._host.theano.functions import compile_expression
from synkhronos._host.theano.portable import Expression, Value, values_of

# Graphs are pickled recursively: a ResNet-50 training function needs more than 5000 levels.
sys.setrecursionlimit(max(sys.getrecursionlimit(), 50000))


class _Pickler(cloudpickle.Pickler):
    """Writes shared variables, their containers and the cells that hold their values as ids.

    A compiled function has containers of its own, but they share the variables' cells.
    """

    def __init__(self, file, id_of):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._id_of = id_of

    def persistent_id(self, obj):
        if isinstance(obj, (SharedVariable, Container, list)):
            return self._id_of(obj)
        return None

    def reducer_override(self, obj):
        # Not isinstance: a function of this package says that it is one of Theano's.
        if issubclass(type(obj), Function):
            # Theano would send the values of shared variables with each function, and would fail if
            # the receiver has other values.
            return _rebuild_function, (obj.maker, list(obj.input_storage))
        if isinstance(obj, FromFunctionOp):
            # By value. Theano pickles by name, which fails for functions made after the fork.
            parts = ("fn", "infer_shape")
            function, infer_shape = (getattr(obj, f"_FromFunctionOp__{part}") for part in parts)
            return FromFunctionOp, (function, obj.itypes, obj.otypes, infer_shape)
        if isinstance(obj, RandomStateType):
            # Two instances are never equal, so each process must use the one of its module.
            return operator.attrgetter("random_state_type"), (raw_random,)
        if type(obj).__name__ == "fortran":
            # SciPy's BLAS routines, which Theano uses if it has no BLAS to link. Their name is only
            # in the signature that their docstring begins with: "a = dger(alpha,x,y,[...".
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
        Whether the receiver's variables are on another kind of device.
    """
    for function, _ in functions.values():
        if isinstance(function, Function):
            _drop_kernels(function)
    ids = {}
    file = io.BytesIO()
    for variables in (known, new):
        # New variables are dumped whole, after the ids of the known ones are there: a new variable
        # may refer to a known one.
        if variables is new:
            sent = values_of(new, known) if portable else new
            _Pickler(file, lambda obj: ids.get(id(obj))).dump(sent)
        for key, variable in variables.items():
            ids[id(variable)] = ("variable", key)
            ids[id(variable.container)] = ("container", key)
            ids[id(variable.container.storage)] = ("storage", key)
    _Pickler(file, lambda obj: ids.get(id(obj))).dump(functions)
    return pickle.dumps(_compile_config()) + file.getvalue()


def _drop_kernels(function):
    """Drop the kernels that OpenCL reductions keep on their nodes: they can't be pickled.

    The reductions make them again.
    """
    for node in function.maker.fgraph.apply_nodes:
        node.__dict__.pop("@cache_reduction_k", None)
        inner = getattr(node.op, "fn", None)  # the function of a scan, or an OpFromGraph
        if isinstance(inner, Function):
            _drop_kernels(inner)


def _compile_config():
    """Return the settings that are part of the keys of the compile cache."""
    return {v.fullname: v.__get__(True, None) for v in config_variables if v.in_c_key}


def _set_config(values):
    """Set the master's settings, which its script may have changed after the fork.

    If a setting differed, this process would compile every module again.
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
        variables[key] = sent.make(variables) if isinstance(sent, Value) else sent
    functions = _Unpickler(file, variables).load()
    for key, (function, rest) in functions.items():
        if isinstance(function, Expression):
            functions[key] = compile_expression(function), rest
    return functions, tuple(new)
