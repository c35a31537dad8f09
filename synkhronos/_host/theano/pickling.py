"""Pickle compiled functions: shared variables that a worker already has travel as their ids.

master   dump(functions)     a shared variable that the worker has: its id; a new one: its value too
worker   load(data)          compiled functions: neither the optimizer nor the C compiler runs again
"""

import functools
import json
import operator
import pickle

from theano.compile.function_module import Function, FunctionMaker
from theano.compile.ops import FromFunctionOp
from theano.configparser import _config_var_list as config_variables
from theano.gof import FunctionGraph
from theano.gof.opt import MergeFeature
from theano.gof.utils import scratchpad
from theano.tensor import raw_random
from theano.tensor.opt import ShapeFeature

from synkhronos._host.base.pickles import Pickler, dump_with, load_with
from synkhronos._host.theano import cudnn
from synkhronos._host.theano.compiling import compile_function
from synkhronos._host.theano.faster import compile_cache
from synkhronos._host.theano.portable import Expression, PortableValue, values_of


class _TheanoPickler(Pickler):
    """Writes functions without what only optimizations need."""

    def __init__(self, file, ids):
        super().__init__(file, ids)
        self._traces = {}
        self._optimized = {}  # id of a function's graph, or of an input -> this object

    def reducer_override(self, obj):
        # Not isinstance: `__class__` of this package's functions is Theano's Function, too.
        if issubclass(type(obj), Function):
            # Theano would send the values of shared variables with each function, and would fail if
            # the receiver has other values.
            if type(obj.maker) is FunctionMaker:
                maker = obj.maker
                self._optimized.update((id(each), each) for each in [maker.fgraph, *maker.inputs])
            modules = compile_cache.modules_of(obj)
            return _rebuild_function, (obj.maker, list(obj.input_storage), modules)
        if id(obj) in self._optimized:
            return _without_optimizer(obj)
        if type(obj) is scratchpad and "trace" in obj.__dict__:
            return self._reduce_tag(obj)
        if isinstance(obj, FromFunctionOp):
            # By value. Theano pickles by name, which fails for functions made after the fork.
            parts = ("fn", "infer_shape")
            function, infer_shape = (getattr(obj, f"_FromFunctionOp__{part}") for part in parts)
            return FromFunctionOp, (function, obj.itypes, obj.otypes, infer_shape)
        if isinstance(obj, raw_random.RandomStateType):
            # Two instances are never equal, so each process must use the one of its module.
            return operator.attrgetter("random_state_type"), (raw_random,)
        if type(obj).__name__ == "fortran":
            # SciPy's BLAS routines, which Theano uses if it has no BLAS to link. Their name is only
            # in the signature that their docstring begins with: "a = dger(alpha,x,y,[...".
            import scipy.linalg.blas

            name = obj.__doc__.split("(")[0].split()[-1]
            return operator.attrgetter(name), (scipy.linalg.blas,)
        return super().reducer_override(obj)

    def _reduce_tag(self, tag):
        # The lines of the script that made a variable, for messages of errors. Pickled as objects,
        # they would be a third of a function's pickle.
        rest = {name: value for name, value in tag.__dict__.items() if name != "trace"}
        try:
            trace = json.dumps(tag.trace)
        except TypeError:  # not of strings and numbers
            return tag.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return _rebuild_tag, (self._traces.setdefault(trace, trace), rest)


def _rebuild_tag(trace, rest):
    tag = scratchpad()
    tag.__dict__.update(rest, trace=_read_trace(trace))
    return tag


@functools.lru_cache(maxsize=1000)
def _read_trace(trace):
    return [[tuple(line) for line in lines] for lines in json.loads(trace)]


def _without_optimizer(part):
    """Reduce a graph that is optimized, or an input, without what only optimizations need."""
    make, arguments, state, *rest = part.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    state = dict(state)
    if isinstance(part, FunctionGraph):
        left_out = MergeFeature, ShapeFeature  # shapes of all variables, as graphs
        state["_features"] = [each for each in part._features if type(each) not in left_out]
        for name in "merge_feature", "shape_feature":
            state.pop(name, None)
    elif part.update is not None:
        # The graph has the expression; here any variable says that there is one.
        state["update"] = part.variable
    return (make, arguments, state, *rest)


def _rebuild_function(maker, input_storage, modules):
    with compile_cache.given_modules(modules):
        function = maker.create(input_storage, trustme=True)
    function.trust_input = True
    return function


def dump(functions, known, new, portable=False) -> bytes:
    """Pickle functions, with ids for variables of `known`, for any kind of device if `portable`."""
    for function, _ in functions.values():
        if isinstance(function, Function):
            _drop_kernels(function)
    values = values_of(new, known) if portable else None
    # These settings are part of the keys of the compile cache.
    config = {v.fullname: v.__get__(True, None) for v in config_variables if v.in_c_key}
    settings = config, () if portable else (cudnn.facts(),)
    return dump_with(_TheanoPickler, settings, functions, known, new, values)


def _drop_kernels(function):
    """Drop kernels that can't be pickled: OpenCL reductions keep them on nodes, and remake them."""
    for node in function.maker.fgraph.apply_nodes:
        node.__dict__.pop("@cache_reduction_k", None)
        inner = getattr(node.op, "fn", None)  # the function of a scan, or an OpFromGraph
        if isinstance(inner, Function):
            _drop_kernels(inner)


def _adopt(settings):
    """Set the master's settings: if one differed, this process would compile all modules again."""
    values, of_cudnn = settings
    for theirs in of_cudnn:
        cudnn.refuse_other(theirs)
    for variable in config_variables:
        name = variable.fullname
        if name in values and variable.__get__(True, None) != values[name]:
            variable.__set__(None, values[name])


def load(data, variables):
    """Undo `dump`: add the new variables to `variables`, and return the functions and their ids."""
    return load_with(_adopt, _compiled, data, variables, _made)


def _made(sent, variables):
    return sent.make(variables) if isinstance(sent, PortableValue) else sent


def _compiled(function):
    is_expression = isinstance(function, Expression)
    return compile_function(**function.arguments()) if is_expression else function
