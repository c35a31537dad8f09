"""Bad input of every public callable: test_bad_input.py makes these calls, docs/conf.py lists them.

A use is a right call; a case replaces one of its arguments with a wrong value. Both are texts,
evaluated with the names that `names` of test_bad_input.py makes.
"""

from dataclasses import dataclass
from typing import Dict

CASES = []


@dataclass(frozen=True)
class Use:
    """A right call of a public callable, and an expression that is true after it."""

    name: str
    arguments: Dict[str, str]
    holds: str
    spelled: str = ""  # the expression that is called, if not the name
    before_fork: bool = False

    def text(self, **wrong):
        """Return the call as text, with some arguments replaced."""
        given = {**self.arguments, **wrong}
        parts = [
            value if name.startswith("*") else f"{name}={value}"
            for name, value in given.items()
            if value
        ]
        return f"{self.spelled or self.name}({', '.join(parts)})"

    def refuses(self, argument, error, *pairs):
        """Add cases for an argument: pairs (text of a wrong value, part of the error message)."""
        for given, phrase in pairs:
            CASES.append(Case(self, argument, error.__name__, given, phrase))


@dataclass(frozen=True)
class Case:
    """A wrong call, which raises TypeError (wrong kind) or ValueError (wrong value)."""

    use: Use
    argument: str
    error: str
    given: str
    phrase: str  # a part of the error message

    @property
    def call(self):
        """The text of the call."""
        return self.use.text(**{self.argument: self.given})

    def __str__(self):
        return self.call


def uses(*names, holds="True", **arguments):
    """Return a use for each of several callables that take the same arguments."""
    return [Use(name, arguments, holds) for name in names]


FORK = Use(
    "synk.fork",
    {"n_parallel": "2", "devices": "['cpu', 'cpu']"},
    "result == 2",
    before_fork=True,
)
FORK.refuses(
    "n_parallel",
    TypeError,
    ("'two'", "n_parallel must be an integer or None"),
    ("1.5", "n_parallel must be an integer or None"),
    ("True", "n_parallel must be an integer or None"),
)
FORK.refuses(
    "n_parallel",
    ValueError,
    ("0", "n_parallel must be at least 1"),
    ("-1", "n_parallel must be at least 1"),
    ("3", "n_parallel=3, but devices names 2 (cpu, cpu)"),
)
FORK.refuses(
    "use_gpu",
    TypeError,
    ("'yes'", "use_gpu must be True, False or None"),
    ("2", "use_gpu must be True, False or None"),
)
FORK.refuses("profile_workers", TypeError, ("X", "profile_workers must be True or False"))
FORK.refuses("follow", TypeError, ("X", "follow must be True or False"))
FORK.refuses("check", TypeError, ("1.5", "check must be an integer"), ("'yes'", "check must be"))
FORK.refuses("check", ValueError, ("-1", "check must be at least 0"))
RANKS = Use("synk.fork", {"n_parallel": "2", "use_gpu": "False"}, "result == 2", before_fork=True)
RANKS.refuses("n_parallel", ValueError, ("2**70", "n_parallel must be at most 4194304"))
RANKS.refuses("n_parallel", TypeError, ("np.True_", "n_parallel must be an integer or None"))
FORK.refuses("use_gpu", ValueError, ("True", "use_gpu=True, but devices names cpu, cpu"))
FORK.refuses("restart", TypeError, ("X", "restart must be True or False"))
FORK.refuses("overlap", TypeError, ("X", "overlap must be True or False"))
FORK.refuses("compress", ValueError, ("'float8'", "compress must be 'float16' or None"))
FORK.refuses(
    "master_rank",
    TypeError,
    ("'0'", "master_rank must be an integer"),
    ("None", "master_rank must be an integer"),
    ("True", "master_rank must be an integer"),
)
FORK.refuses(
    "master_rank",
    ValueError,
    ("2", "master_rank must be from 0 to 1"),
    ("-1", "master_rank must be from 0 to 1"),
)
FORK.refuses(
    "devices",
    TypeError,
    ("'cpu'", "devices must be a list of names"),
    ("['cpu', 3]", "devices must hold names such as 'cpu'"),
    ("{'cpu'}", "devices must be a list of names"),
    ("[b'cpu', b'cpu']", "devices must hold names such as 'cpu'"),
    ("np.array(['cpu', 'cpu'])", "devices must be a list of names"),
)
FORK.refuses(
    "devices",
    ValueError,
    ("[]", "devices is empty"),
    ("['gpu']", "'gpu' is not the name of a device"),
    ("['cpu', 'cuda-1']", "'cuda-1' is not the name of a device"),
)
FORK.refuses(
    "threads_per_rank",
    TypeError,
    ("1.5", "threads_per_rank must be an integer"),
    ("'all'", "threads_per_rank must be an integer"),
)
FORK.refuses(
    "threads_per_rank",
    ValueError,
    ("0", "threads_per_rank must be from 1 to"),
    ("2**70", "threads_per_rank must be from 1 to"),
)

FUNCTION = Use(
    "synk.function",
    {"inputs": "[x]", "outputs": "(x.sum() + s.sum(), 'sum')", "**kwargs": "mode='FAST_COMPILE'"},
    "result(X[:n]) == X[:n].sum() + 6 * n",
)
FUNCTION.refuses(
    "inputs",
    TypeError,
    ("x", "inputs must be a list of Theano variables"),
    ("None", "inputs must be a list of Theano variables"),
    ("['x']", "inputs[0] must be a Theano tensor variable"),
    ("[s]", "inputs[0] is the shared variable s"),
    ("[theano.tensor.constant(1.0)]", "inputs[0] is the constant TensorConstant{1.0}"),
    ("{x}", "inputs must be a list of Theano variables"),
    ("[(x, 1.0, 2.0)]", "inputs[0] must be a Theano variable, an In, or a tuple"),
    ("[theano.sparse.csc_matrix('c')]", "inputs[0] is a sparse matrix in the format csc"),
    ("[theano.In(s)]", "inputs[0] is the shared variable s"),
    ("[theano.In(x, value='three')]", "inputs[0] of type TensorType(float64, vector) can't have"),
    ("[theano.In(x, value=m.container)]", "can't have the value"),
)
FUNCTION.refuses(
    "outputs",
    TypeError,
    ("3", "Output 0 must be a Theano variable"),
    ("[x, 'y']", "Output 1 must be a Theano variable"),
    ("(x, 'sum', 1)", "Output 1 must be a Theano variable"),
    ("[(x,)]", "got a tuple of length 1"),
    ("{1: x}", "The keys of a dict of outputs must be str"),
    ("{'a': 3}", "Output 0 must be a Theano variable"),
    ("{x}", "Output 0 must be a Theano variable"),
    ("d", "Output 0 must be a Theano variable"),
)
FUNCTION.refuses(
    "outputs",
    ValueError,
    ("(x, 'mean')", "'mean' is not a reduce mode"),
    ("[(x, 'c_c_sum')]", "'c_c_sum' is not a reduce mode"),
    ("(x, 3)", "3 is not a reduce mode"),
    ("(x, b'sum')", "b'sum' is not a reduce mode"),
)
FUNCTION.refuses(
    "bcast_inputs",
    TypeError,
    ("x", "bcast_inputs must be a list of Theano variables"),
    ("'FAST_RUN'", "A mode of compilation is given as mode="),
    ("[3]", "bcast_inputs[0] must be a Theano tensor variable"),
)
FUNCTION.refuses(
    "updates",
    TypeError,
    ("{s}", "updates must be a list"),
    ("3", "updates must be a list"),
    ("[(s,)]", "updates[0] must be (shared variable, expression)"),
    ("[s]", "updates[0] must be (shared variable, expression)"),
    ("[(s, 2 * s), (x, x)]", "updates[1] must update a shared variable"),
    ("[(s, 'more')]", "updates[0] must give s an expression"),
    ("[(s, None)]", "updates[0] must give s an expression"),
)
FUNCTION.refuses(
    "updates",
    ValueError,
    ("[(s, s, 'add')]", "'add' is not a reduce mode"),
    ("[(s, s), (s, 2 * s)]", "updates[1] updates s a second time"),
)
FUNCTION.refuses(
    "givens",
    TypeError,
    ("3", "givens must be a dict or a list of pairs"),
    ("x", "givens must be a dict or a list of pairs"),
    ("[3]", "givens must be pairs (variable, replacement), got 3"),
    ("[(s,)]", "givens must be pairs (variable, replacement)"),
    ("{3: x}", "givens must replace variables, got 3"),
)
FUNCTION.refuses(
    "sliceable_shareds",
    TypeError,
    ("s", "sliceable_shareds must be a list of shared variables"),
    ("(s,)", "sliceable_shareds must be a list of shared variables"),
    ("[x]", "sliceable_shareds must hold shared variables"),
)
FUNCTION.refuses(
    "sliceable_shareds", ValueError, ("[m]", "sliceable_shareds has m, which the function does not")
)

FUNCTION.refuses("check", TypeError, ("1.5", "check must be an integer"))
FUNCTION.refuses("check", ValueError, ("-1", "check must be at least 0"))
FUNCTION.refuses(
    "axes",
    TypeError,
    ("1", "axes must be a dict of variables with their axis of rows"),
    ("[(x, 0)]", "axes must be a dict of variables with their axis of rows"),
    ("{'x': 0}", "axes must name tensor variables, got 'x'"),
    ("{anything: 0}", "axes must name tensor variables"),
    ("{x: 0.0}", "The axis of x in axes must be an integer"),
    ("{x: True}", "The axis of x in axes must be an integer"),
    ("{x: None}", "The axis of x in axes must be an integer"),
)
FUNCTION.refuses(
    "axes",
    ValueError,
    ("{x: 1}", "axes names axis 1 of x, which has 1 dimension"),
    ("{x: -2}", "axes names axis -2 of x, which has 1 dimension"),
    ("{x: -2**70}", "The axis of x in axes must be at least -32"),
    ("{y: 0}", "axes names y, which is neither one of the inputs that are scattered nor an output"),
    ("{s: 0}", "axes names s, which is neither one of the inputs that are scattered nor an output"),
)
FUNCTION.refuses(
    "**kwargs",
    TypeError,
    ("mode=3", "mode must be a Theano mode or the name of one, got 3"),
    ("mode=x", "mode must be a Theano mode or the name of one, got x"),
)
FUNCTION.refuses("serial_random", TypeError, ("X", "serial_random must be True or False"))
FUNCTION.refuses("**kwargs", ValueError, ("mode='abc'", "mode must be a Theano mode or the name"))

ROWS = Use("synk.rows", {"index": "1", "size": "2", "length": "3"}, "result.eval().tolist() == [2]")
for name in ("index", "size", "length"):
    ROWS.refuses(
        name,
        TypeError,
        ("1.0", f"{name} must be an integer, or a variable of integers without axes"),
        ("True", f"{name} must be an integer, or a variable of integers without axes"),
        ("'one'", f"{name} must be an integer, or a variable of integers without axes"),
        ("x", f"{name} must be an integer, or a variable of integers without axes, got x of type"),
        ("number", f"{name} must be an integer, or a variable of integers without axes"),
        ("anything", f"{name} must be an integer, or a variable of integers without axes"),
    )
    ROWS.refuses(
        name,
        ValueError,
        ("-1", f"{name} must be from 0 to 9223372036854775807, got -1"),
        ("2**70", f"{name} must be from 0 to 9223372036854775807"),
    )
ROWS.refuses("index", TypeError, ("None", "index must be an integer"))
ROWS.refuses("size", TypeError, ("None", "size must be an integer"))

CALL = Use("Function.__call__", {"*args": "X"}, "[int(v) for v in result] == [10, 4]", "f")
PICK = Use("Function.__call__", {"batch_s": "[0, 3]"}, "result == 3", "picked")
for use in (CALL, Use("Function.as_theano", {"*args": "X"}, CALL.holds, "f.as_theano")):
    use.refuses(
        "*args",
        TypeError,
        ("", "Function 'f' takes 1 input (x), got 0"),
        ("X, X", "Function 'f' takes 1 input (x), got 2"),
        ("np.ones((5, 2))", "Input 'x' of Function 'f' takes TensorType(float64, vector)"),
        ("3.0", "Input 'x' of Function 'f' takes TensorType(float64, vector)"),
        ("None", "Input 'x' of Function 'f' takes TensorType(float64, vector)"),
        ("'ab'", "Input 'x' of Function 'f' takes TensorType(float64, vector)"),
        ("[1j]", "Input 'x' of Function 'f' takes TensorType(float64, vector)"),
        ("{1: 2}", "Input 'x' of Function 'f' takes TensorType(float64, vector)"),
        ("s", "Input 'x' of Function 'f' takes TensorType(float64, vector), got the variable s"),
        ("[x]", "Input 'x' of Function 'f' takes TensorType(float64, vector)"),
        ("[10**400]", "Input 'x' of Function 'f' takes TensorType(float64, vector)"),
        ("synk.data(np.ones((5, 1)))", "A Data is never cast"),
        ("synk.data(np.ones(5, 'float32'))", "A Data is never cast"),
    )
    use.refuses("**kwargs", TypeError, ("x=X", "takes 1 input (x), got 2"))
    use.refuses(
        "output_subset",
        TypeError,
        ("0", "output_subset must be a list of integers"),
        ("['a']", "output_subset must be a list of integers"),
        ("[True]", "output_subset must be a list of integers"),
        ("[np.True_]", "output_subset must be a list of integers"),
        ("{0}", "output_subset must be a list of integers"),
        ("np.array([0])", "output_subset must be a list of integers"),
    )
    use.refuses(
        "output_subset",
        ValueError,
        ("[2]", "output_subset must hold numbers from 0 to 1"),
        ("[-1]", "output_subset must hold numbers from 0 to 1"),
        ("[2**70]", "output_subset must hold numbers from 0 to 1"),
    )
BY_NAME = Use("Function.__call__", {"**kwargs": "x=X"}, CALL.holds, "f")
BY_NAME.refuses("**kwargs", ValueError, ("z=X", "Function 'f' has no input 'z'. It takes: x"))
CALL.refuses(
    "batch",
    TypeError,
    ("1.0", "batch must be an integer, a slice"),
    ("'3'", "batch must be an integer, a slice"),
    ("True", "batch must be an integer, a slice"),
    ("np.True_", "batch must be an integer, a slice"),
    ("np.array(True)", "batch must be an integer, a slice"),
    ("{1, 2}", "batch must be an integer, a slice"),
    ("b'ab'", "batch must be an integer, a slice"),
    ("iter([1])", "batch must be an integer, a slice"),
    ("x", "batch must be an integer, a slice"),
    ("d", "batch must be an integer, a slice"),
    ("slice('a')", "batch=slice(None, 'a', None) is not a slice of rows"),
    ("slice(True, None)", "batch=slice(True, None, None) is not a slice of rows: bools are no"),
    ("slice(0, np.True_)", "is not a slice of rows: bools are no bounds"),
    ("slice(0, x)", "batch=slice(0, x, None) is not a slice of rows"),
)
CALL.refuses(
    "batch",
    ValueError,
    ("6", "batch=6 asks for the first 6 rows, but there are 5"),
    ("-1", "batch=-1 asks for the first -1 rows"),
    ("[5]", "batch asks for row 5, but there are 5 rows"),
    ("[-6]", "batch asks for row -6, but there are 5 rows"),
    ("slice(0, 9)", "batch=slice(0, 9, None) reaches beyond the rows"),
    ("slice(0, 5, 0)", "batch=slice(0, 5, 0) is not a slice of rows"),
    ("range(6)", "batch asks for row 5, but there are 5 rows"),
    ("[[1]]", "batch must have one dimension"),
    ("[1.0]", "batch must hold integers or bools"),
    ("[True] * 4", "batch is a mask of 4 bools, but there are 5 rows"),
    ("[True]", "batch is a mask of 1 bool, but there are 5 rows"),
    ("[True, 2]", "batch must hold integers or bools, not both"),
    ("[np.True_, 2]", "batch must hold integers or bools, not both"),
    ("np.ma.array([1, 2], mask=[0, 1])", "batch has masked items, which are no rows"),
    ("[None]", "batch must hold integers or bools, got dtype object"),
    ("[x]", "batch must hold integers or bools, got dtype object"),
    ("[float('nan')]", "batch must hold integers or bools, got dtype float64"),
    ("np.zeros(2, [('a', int)])", "batch must hold integers or bools"),
    ("2**70", "asks for the first 1180591620717411303424 rows"),
    ("range(2**70, 2**70 + 1)", "batch asks for row 1180591620717411303424, but there are 5 rows"),
)
CALL.refuses("batch_s", TypeError, ("[0]", "batch_s was given, but Function 'f' has no"))
PICK.refuses("batch", TypeError, ("1.0", "batch must be an integer, a slice"))
PICK.refuses(
    "batch",
    ValueError,
    ("[0]", "To select rows of its sliceable_shareds write batch_s= in place of batch="),
)
PICK.refuses(
    "batch_s",
    TypeError,
    ("5", "batch_s must be a slice, a list or array"),
    ("'a'", "batch_s must be a slice, a list or array"),
    ("[0, slice(1)]", "batch_s mixes numbers and selections"),
    ("[slice(1)] * (n + 1)", "batch_s must be one selection for all ranks, or one for each"),
    ("[1.5]", "batch_s (rank 0) must hold integers or bools"),
    ("{0}", "batch_s must be a slice, a list or array"),
    ("np.True_", "batch_s must be a slice, a list or array"),
    ("x", "batch_s must be a slice, a list or array"),
    ("slice(True, 2)", "batch_s (rank 0)=slice(True, 2, None) is not a slice of rows"),
    ("[True, 2]", "batch_s (rank 0) must hold integers or bools, not both"),
    ("[{0}] * n", "batch_s (rank 0) must hold integers or bools"),
)
PICK.refuses(
    "batch_s",
    ValueError,
    ("[9]", "batch_s (rank 0) asks for row 9, but there are 4 rows"),
    ("slice(0, 9)", "batch_s (rank 0)=slice(0, 9, None) reaches beyond"),
)
CALL.refuses(
    "num_slices",
    ValueError,
    ("0", "num_slices must be an integer >= 1"),
    ("1.5", "num_slices must be an integer >= 1"),
    ("'two'", "num_slices must be an integer >= 1"),
    ("None", "num_slices must be an integer >= 1"),
    ("True", "num_slices must be an integer >= 1"),
    ("np.True_", "num_slices must be an integer >= 1"),
    ("float('nan')", "num_slices must be an integer >= 1"),
    ("x", "num_slices must be an integer >= 1"),
)

BUILD = Use("Function.build_inputs", {"*args": "X"}, "result[4] == 4", "f.build_inputs")
BUILD.refuses(
    "*args",
    TypeError,
    ("", "Function 'f' takes 1 input (x), got 0"),
    ("np.ones((5, 2))", "Data 'x' has 1 dimension, but the value has 2"),
    ("'ab'", "Data 'x' must hold numbers or bools"),
    ("s", "Data 'x' must hold numbers or bools"),
    ("np.ma.masked_less(X, 2)", "Data 'x' can't hold the masked items"),
)
BUILD.refuses("**kwargs", TypeError, ("x=X", "takes 1 input (x), got 2"))
BUILD.refuses(
    "minibatch",
    ValueError,
    ("[True, False]", "minibatch must be one bool or one for each of 1 input"),
)

COPY = Use("Function.copy", {"name": "'g'"}, "result.name == 'g'", "f.copy")
COPY.refuses(
    "swap",
    TypeError,
    ("[(s, t)]", "swap must be a dict of shared variables"),
    ("{x: s}", "swap must hold shared variables, got x"),
    ("{s: 3}", "swap must hold shared variables, got 3"),
)
COPY.refuses("swap", ValueError, ("{s: t}", "swap has s, which the function does not use"))
COPY.refuses("delete_updates", TypeError, ("X", "delete_updates must be True or False"))
COPY.refuses("share_memory", TypeError, ("X", "share_memory must be True or False"))

DATA = Use("synk.data", {"value": "X"}, "result.shape == (5,) and result[4] == 4")
DATA.refuses(
    "value",
    TypeError,
    ("'ab'", "must hold numbers or bools"),
    ("[[1], [1, 2]]", "must hold numbers or bools in rows of one length"),
    ("np.array([None])", "must hold numbers or bools"),
    ("x", "must hold numbers or bools"),
    ("{1, 2}", "must hold numbers or bools"),
    ("b'ab'", "must hold numbers or bools"),
    ("np.zeros(2, [('a', int)])", "must hold numbers or bools"),
    ("np.zeros(2, 'datetime64[s]')", "must hold numbers or bools"),
    ("[2**70]", "must hold numbers or bools, no integers of more than 64 bits"),
    ("np.ma.masked_less(X, 2)", "can't hold the masked items of the value"),
    ("None", "data() needs a dtype and a number of dimensions"),
)
DATA.refuses(
    "var",
    TypeError,
    ("'x'", "var must be a Theano tensor variable"),
    ("3", "var must be a Theano tensor variable"),
    ("X", "var must be a Theano tensor variable"),
    ("d", "var must be a Theano tensor variable"),
    ("anything", "var must be a Theano tensor variable"),
    ("m", "Data 'm' has 2 dimensions, but the value has 1"),
)
DATA.refuses(
    "dtype",
    TypeError,
    ("'floaty'", "dtype must be the name of a NumPy dtype"),
    ("'datetime64[s]'", "dtype must be one of numbers or bools"),
    ("object", "dtype must be one of numbers or bools"),
    ("'int32'", "This Data is of dtype int32, to which float64 can't be cast up"),
)
DATA.refuses(
    "ndim",
    TypeError,
    ("1.5", "ndim must be an integer"),
    ("'1'", "ndim must be an integer"),
    ("True", "ndim must be an integer"),
    ("np.True_", "ndim must be an integer"),
    ("x", "ndim must be an integer"),
    ("2", "This Data has 2 dimensions, but the value has 1"),
)
DATA.refuses(
    "ndim",
    ValueError,
    ("-1", "ndim must be from 0 to 32"),
    ("33", "ndim must be from 0 to 32"),
    ("2**70", "ndim must be from 0 to 32"),
)
DATA.refuses("shape", TypeError, ("'nonsense'", "shape must be a sequence of integers"))
DATA.refuses(
    "shape",
    ValueError,
    ("(2, 2)", "shape=(2, 2) was given beside a value of shape (5,)"),
    ("()", "shape=() was given beside a value of shape (5,)"),
)
for use in (DATA, BUILD):
    for name in ("force_cast", "minibatch"):
        use.refuses(name, TypeError, ("X", f"{name} must be True or False"))
LIKE = Use("synk.data", {"var": "x"}, "result.shape == (0,) and result.name == 'x'")
LIKE.refuses("dtype", TypeError, ("'float32'", "was given beside var=x, of dtype float64"))
LIKE.refuses("ndim", TypeError, ("2", "ndim=2 was given beside var=x, of 1 dimension"))
LIKE.refuses("shape", ValueError, ("(2, 3)", "Data 'x' has 1 dimension: its shape can't be"))
ZEROS = Use(
    "synk.data", {"dtype": "'int8'", "shape": "(2, 3)"}, "result.data.tolist() == [[0] * 3] * 2"
)
ZEROS.refuses(
    "shape",
    TypeError,
    ("3", "shape must be a sequence of integers"),
    ("(2, 'a')", "shape must be a sequence of integers"),
    ("(2, 1.5)", "shape must be a sequence of integers"),
    ("(2, True)", "shape must be a sequence of integers"),
    ("(2, np.True_)", "shape must be a sequence of integers"),
    ("(2, None)", "shape must be a sequence of integers"),
    ("b'ab'", "shape must be a sequence of integers"),
    ("{2, 3}", "shape must be a sequence of integers"),
    ("{2: 3}", "shape must be a sequence of integers"),
    ("iter([2, 3])", "shape must be a sequence of integers"),
    ("np.array([[2, 3]])", "shape must be a sequence of integers"),
    ("x", "shape must be a sequence of integers, got x"),
    ("s", "shape must be a sequence of integers, got s"),
    ("d", "shape must be a sequence of integers, got <Data 'd'"),
)
ZEROS.refuses(
    "shape",
    ValueError,
    ("(2, -1)", "its shape can't be (2, -1)"),
    ("[1] * 33", "shape must have at most 32 dimensions, got 33"),
    ("(2**62, 2, 0)", "No array of int8 can have the shape"),
    ("(2**62, 8)", "No array of int8 can have the shape"),
    ("(10**400,)", "No array of int8 can have the shape"),
)

KEPT = "d.data.tolist() == X.tolist()"
CONDITION = Use("Data.condition_data", {"input_data": "X"}, f"(result == X).all() and {KEPT}")
SET = Use("Data.set_value", {"input_data": "X"}, KEPT)
LENGTH = Use("Data.set_length", {"length": "5"}, KEPT)
SHAPE = Use("Data.set_shape", {"shape": "(5,)"}, KEPT)
CONDITION, SET, LENGTH, SHAPE = (
    Use(use.name, use.arguments, use.holds, "d." + use.name.split(".")[1])
    for use in (CONDITION, SET, LENGTH, SHAPE)
)
for use in (CONDITION, SET):
    use.refuses(
        "input_data",
        TypeError,
        ("np.ones((5, 2))", "Data 'd' has 1 dimension, but the value has 2"),
        ("np.ones(5, complex)", "to which complex128 can't be cast up"),
        ("'ab'", "Data 'd' must hold numbers or bools"),
        ("None", "Data 'd' must hold numbers or bools"),
        ("[1j]", "Data 'd' is of dtype float64, which can't hold 1j"),
        ("[[1], [1, 2]]", "Data 'd' must hold numbers or bools in rows of one length"),
        ("x", "Data 'd' must hold numbers or bools"),
        ("{1, 2}", "Data 'd' must hold numbers or bools"),
        ("[10**400]", "Data 'd' must hold numbers or bools, no integers of more than 64 bits"),
        ("np.ma.masked_less(X, 2)", "Data 'd' can't hold the masked items"),
    )
    use.refuses("force_cast", TypeError, ("X", "force_cast must be True or False"))
NO_ROWS = Use("Data.set_length", {"length": "5"}, KEPT, "synk.data(np.zeros((2, 0))).set_length")
NO_ROWS.refuses("length", ValueError, ("2**62", "No array of float64 can have the shape"))
LENGTH.refuses(
    "length",
    TypeError,
    ("np.True_", "length must be an integer"),
    ("x", "length must be an integer"),
    ("[3]", "length must be an integer"),
    ("1.5", "length must be an integer"),
    ("'3'", "length must be an integer"),
    ("True", "length must be an integer"),
    ("None", "length must be an integer"),
)
LENGTH.refuses(
    "length",
    ValueError,
    ("0", "length must be at least 1"),
    ("-1", "length must be at least 1"),
    ("2**62", "No array of float64 can have the shape"),
    ("2**70", "No array of float64 can have the shape"),
)
SHAPE.refuses(
    "shape",
    TypeError,
    ("3", "shape must be a sequence of integers"),
    ("(1.5,)", "shape must be a sequence of integers"),
    ("'ab'", "shape must be a sequence of integers"),
    ("b'a'", "shape must be a sequence of integers"),
    ("{5}", "shape must be a sequence of integers"),
    ("(True,)", "shape must be a sequence of integers"),
    ("x", "shape must be a sequence of integers, got x"),
)
SHAPE.refuses(
    "shape",
    ValueError,
    ("(2, 2)", "Data 'd' has 1 dimension: its shape can't be (2, 2)"),
    ("(-1,)", "its shape can't be (-1,)"),
    ("(2**62,)", "No array of float64 can have the shape"),
)
for use in (DATA, BUILD, SET, LENGTH, SHAPE):
    use.refuses(
        "oversize",
        TypeError,
        ("'much'", "oversize must be a number from 1 to 2"),
        ("None", "oversize must be a number from 1 to 2"),
        ("True", "oversize must be a number from 1 to 2"),
        ("'1.5'", "oversize must be a number from 1 to 2"),
        ("x", "oversize must be a number from 1 to 2"),
    )
    use.refuses(
        "oversize",
        ValueError,
        ("0.5", "oversize must be from 1 to 2"),
        ("3", "oversize must be from 1 to 2"),
        ("float('nan')", "oversize must be from 1 to 2"),
        ("10**400", "oversize must be from 1 to 2"),
    )

VALUES = "[v.tolist() for v in synk.gather(s)] == [[0, 1, 2, 3]] * n"
BROADCAST = Use("synk.broadcast", {"shared_vars": "s", "values": "np.arange(4.0)"}, VALUES)
SCATTER = Use(
    "synk.scatter",
    {"shared_vars": "t", "values": "X"},
    "synk.gather(t, nd_up=0).tolist() == X.tolist()",
)
GATHER = Use("synk.gather", {"shared_vars": "s"}, "result.tolist() == [[0, 1, 2, 3]] * n")
ALL_GATHER = Use(
    "synk.all_gather",
    {"shared_vars": "t"},
    "synk.get_lengths(t) == [len(t.get_value())] * n and synk.scatter(t, X) is None",
)
REDUCE = Use("synk.reduce", {"shared_vars": "s"}, VALUES)
ALL_REDUCE = Use("synk.all_reduce", {"shared_vars": "s"}, VALUES)
SET_VALUE = Use(
    "synk.set_value", {"rank": "n - 1", "shared_vars": "s", "values": "np.arange(4.0)"}, VALUES
)
GET_VALUE = Use(
    "synk.get_value", {"rank": "n - 1", "shared_vars": "s"}, "result.tolist() == [0, 1, 2, 3]"
)
LENGTHS = Use("synk.get_lengths", {"shared_vars": "s"}, "result == [4] * n")
SHAPES = Use("synk.get_shapes", {"shared_vars": "s"}, "result == [(4,)] * n")
COLLECTIVES = (BROADCAST, SCATTER, GATHER, ALL_GATHER, REDUCE, ALL_REDUCE, SET_VALUE, GET_VALUE)
COLLECTIVES += (LENGTHS, SHAPES)
for use in COLLECTIVES:
    verb = use.name.split(".")[1]
    use.refuses(
        "shared_vars",
        TypeError,
        ("None", f"{verb}() takes a Theano shared variable or a list of them"),
        ("'s'", f"{verb}() takes a Theano shared variable or a list of them"),
        ("x", f"{verb}() takes a Theano shared variable or a list of them"),
        ("[s, X]", f"{verb}() takes a Theano shared variable or a list of them"),
        ("[s, [m]]", f"{verb}() takes a Theano shared variable or a list of them"),
        ("{s}", f"{verb}() takes a Theano shared variable or a list of them"),
        ("{s: X}", f"{verb}() takes a Theano shared variable or a list of them"),
        ("np.array([s])", f"{verb}() takes a Theano shared variable or a list of them"),
        ("d", f"{verb}() takes a Theano shared variable or a list of them"),
        ("anything", f"{verb}() can't take anything, of type"),
    )
    use.refuses(
        "shared_vars",
        ValueError,
        ("[]", f"{verb}() got an empty list of shared variables"),
        ("[s, m, s]", f"{verb}() got s twice"),
    )
for use in (SCATTER, ALL_GATHER, LENGTHS):
    use.refuses("shared_vars", TypeError, ("number", "an axis 0, which number does not have"))
for use in (BROADCAST, SCATTER, SET_VALUE):
    verb, name = use.name.split(".")[1], use.arguments["shared_vars"]
    use.refuses(
        "values",
        TypeError,
        ("np.ones((2, 2))", f"{verb}() can't give {name}, of type"),
        ("'ab'", f"{verb}() can't give {name}, of type"),
        ("[1j]", f"{verb}() can't give {name}, of type"),
        ("[[1.0], [1.0, 2.0]]", f"{verb}() can't give {name}, of type"),
        ("synk.data(np.ones(4, 'float32'))", "a Data must have the variable's dtype"),
        ("np.ma.masked_less(X[:4], 2)", "a shared variable can't hold its masked items"),
        ("x", f"{verb}() can't give {name}, of type"),
        ("w", f"{verb}() can't give {name}, of type"),
        ("{1: 2}", f"{verb}() can't give {name}, of type"),
        ("[10**400]", "must hold numbers or bools, no integers of more than 64 bits"),
    )
for use in (SCATTER, SET_VALUE):
    use.refuses(
        "values", TypeError, ("None", "of type TensorType(float64, vector), the value None")
    )
    use.refuses(
        "batch",
        TypeError,
        ("1.0", "batch must be an integer, a slice"),
        ("'3'", "batch must be an integer, a slice"),
        ("True", "batch must be an integer, a slice"),
        ("np.True_", "batch must be an integer, a slice"),
        ("{1}", "batch must be an integer, a slice"),
        ("slice(True, None)", "is not a slice of rows: bools are no bounds"),
    )
    use.refuses(
        "batch",
        ValueError,
        ("[True, 2]", "batch must hold integers or bools, not both"),
        ("9", "batch=9 asks for the first 9 rows"),
        ("[9]", "batch asks for row 9, but there are"),
        ("[[1]]", "batch must have one dimension"),
        ("[0.5]", "batch must hold integers or bools"),
    )
for use in (SET_VALUE, GET_VALUE):
    use.refuses(
        "rank",
        TypeError,
        ("'0'", "rank must be an integer"),
        ("None", "rank must be an integer"),
        ("1.0", "rank must be an integer"),
        ("True", "rank must be an integer"),
        ("np.True_", "rank must be an integer"),
        ("[0]", "rank must be an integer"),
        ("x", "rank must be an integer"),
    )
    use.refuses(
        "rank",
        ValueError,
        ("-1", "rank must be from 0 to"),
        ("n", "rank must be from 0 to"),
        ("2**70", "rank must be from 0 to"),
    )
for use in (REDUCE, ALL_REDUCE):
    use.refuses(
        "op",
        ValueError,
        ("'mean'", "op must be one of avg, sum, prod, min, max"),
        ("None", "op must be one of avg, sum, prod, min, max"),
        ("3", "op must be one of avg, sum, prod, min, max"),
        ("['sum']", "op must be one of avg, sum, prod, min, max"),
        ("b'sum'", "op must be one of avg, sum, prod, min, max"),
        ("x", "op must be one of avg, sum, prod, min, max"),
    )
    use.refuses("shared_vars", TypeError, ("i", "can't average i, of dtype int64"))
for use in (BROADCAST, ALL_GATHER, REDUCE, ALL_REDUCE):
    use.refuses("nccl", TypeError, ("X", "nccl must be True or False"))
REDUCE.refuses("in_place", TypeError, ("X", "in_place must be True or False"))
GATHER.refuses(
    "nd_up",
    ValueError,
    ("True", "takes as nd_up 1 (stack along a new axis) or 0"),
    ("1.0", "takes as nd_up 1 (stack along a new axis) or 0"),
    ("np.array([1])", "takes as nd_up 1 (stack along a new axis) or 0"),
    ("2", "takes as nd_up 1 (stack along a new axis) or 0"),
    ("'1'", "takes as nd_up 1 (stack along a new axis) or 0"),
    ("None", "takes as nd_up 1 (stack along a new axis) or 0"),
)

CHECKPOINT = Use(
    "synk.save", {"path": "checkpoint", "functions_or_variables": "[w]"}, "checkpoint.exists()"
)
RESTORED = Use(
    "synk.load",
    {"path": "str(checkpoint)", "functions_or_variables": "w"},
    "synk.get_value(n - 1, w).tolist() == [1, 1]",
)
for use in (CHECKPOINT, RESTORED):
    use.refuses(
        "path",
        TypeError,
        ("3", "path must be the name of a file that ends with .npz, got 3"),
        ("None", "path must be the name of a file that ends with .npz, got None"),
        ("b'a.npz'", "path must be the name of a file that ends with .npz, got b'a.npz'"),
    )
    use.refuses(
        "path",
        ValueError,
        ("''", "path must end with .npz, got ''"),
        ("'run'", "path must end with .npz, got 'run'"),
    )
    use.refuses(
        "functions_or_variables",
        TypeError,
        ("3", "functions_or_variables must be a function of synkhronos.function(), a shared"),
        ("x", "functions_or_variables must be a function of synkhronos.function(), a shared"),
        (
            "[w, 'w']",
            "functions_or_variables must be a function of synkhronos.function(), a shared",
        ),
        ("{w}", "functions_or_variables must be a function of synkhronos.function(), a shared"),
        ("[anything]", "works on arrays, sparse matrices and random states"),
    )
    use.refuses(
        "functions_or_variables",
        ValueError,
        ("[]", "functions_or_variables has no shared variable to"),
        ("f", "functions_or_variables has no shared variable to"),
        ("[f, f]", "functions_or_variables has no shared variable to"),
    )
RESTORED.refuses(
    "functions_or_variables",
    ValueError,
    ("[w, s]", "functions_or_variables has 2 variables, but"),
    ("s", "variable 0 is 's' (float64, 1-d), and 'w' (float64, 1-d) in the file"),
)

IN_GRAPH = Use("synk.ops.all_reduce", {"x": "x"}, "result.eval({x: X}).tolist() == X.tolist()")
IN_GRAPH.refuses(
    "x",
    TypeError,
    ("3", "all_reduce() takes a tensor variable"),
    ("X", "all_reduce() takes a tensor variable"),
    ("[x]", "all_reduce() takes a tensor variable"),
    ("anything", "all_reduce() takes a tensor variable"),
    ("i", "all_reduce can't average i, of dtype int64"),
)
IN_GRAPH.refuses(
    "op",
    ValueError,
    ("'mean'", "op must be one of avg, sum, prod, min, max"),
    ("None", "op must be one of avg, sum, prod, min, max"),
    ("b'sum'", "op must be one of avg, sum, prod, min, max"),
    ("x", "op must be one of avg, sum, prod, min, max"),
)

# `loss` depends on `w`, a shared vector.
NO_PARAMS = (
    (TypeError, "w", "params must be a list of shared variables"),
    (TypeError, "3", "params must be a list of shared variables"),
    (TypeError, "[x]", "params must be a list of shared variables"),
    (TypeError, "[i]", "params must be of floats, got i"),
    (ValueError, "[]", "params is empty"),
    (ValueError, "[w, w]", "params has w twice"),
)
NO_LOSS = (
    (TypeError, "3", "loss must be a scalar variable"),
    (TypeError, "'loss'", "loss must be a scalar variable"),
    (TypeError, "w * 2", "loss must be a scalar of floats"),
    (TypeError, "i.sum()", "loss must be a scalar of floats"),
    (ValueError, "number * 2", "it has no derivative by ['w']"),
)


def refuse_all(use, argument, lines):
    for error, given, phrase in lines:
        use.refuses(argument, error, (given, phrase))


HYPERPARAMETERS = {
    "sgd": {"learning_rate": "0.5"},
    "momentum": {"learning_rate": "0.5", "momentum": "0.9"},
    "nesterov_momentum": {"learning_rate": "0.5", "momentum": "0.9"},
    "adagrad": {"learning_rate": "1.0", "epsilon": "1e-6"},
    "rmsprop": {"learning_rate": "1.0", "rho": "0.9", "epsilon": "1e-6"},
    "adadelta": {"learning_rate": "1.0", "rho": "0.95", "epsilon": "1e-6"},
    "adam": {"learning_rate": "0.01", "beta1": "0.9", "beta2": "0.999", "epsilon": "1e-8"},
    "adamax": {"learning_rate": "0.01", "beta1": "0.9", "beta2": "0.999", "epsilon": "1e-8"},
}
for module, first in (("rules", "loss_or_grads"), ("updates", "loss")):
    holds = "w in dict(result)" if module == "rules" else "w in dict(result[1])"
    for rule, numbers in HYPERPARAMETERS.items():
        use = Use(f"{module}.{rule}", {first: "loss", "params": "[w]", **numbers}, holds)
        refuse_all(use, first, NO_LOSS)
        refuse_all(use, "params", NO_PARAMS)
        for name in numbers:
            use.refuses(
                name,
                TypeError,
                ("'fast'", "Hyperparameters must be numbers or scalar variables"),
                ("None", "Hyperparameters must be numbers or scalar variables"),
                ("[1, 2]", "Hyperparameters must be numbers or scalar variables"),
                ("x", "Hyperparameters must be scalars, got x of type"),
            )
        if module == "rules":
            use.refuses(
                first,
                TypeError,
                ("[3]", "loss_or_grads must be a list of tensor variables, got 3 in it"),
            )
            use.refuses(
                first,
                ValueError,
                ("[w, w]", "loss_or_grads must have one gradient for each of 1 param"),
                ("[]", "loss_or_grads must have one gradient for each of 1 param"),
            )
FLAT = Use(
    "updates.sgd_nonflat", {"loss": "loss", "params": "[w]", "learning_rate": "0.5"}, "result"
)
FLAT.refuses(
    "learning_rate", TypeError, ("'fast'", "Hyperparameters must be numbers or scalar variables")
)
for use in (FLAT, *uses("updates.flat_unflat_grads", "updates.nonflat_grads", holds="result",
                        loss="loss", params="[w]")):  # fmt: skip
    refuse_all(use, "loss", NO_LOSS)
    refuse_all(use, "params", NO_PARAMS)
for module, first in (("rules", "updates"), ("updates", "param_updates")):
    for name in ("apply_momentum", "apply_nesterov_momentum"):
        use = Use(
            f"{module}.{name}",
            {first: "[(w, w - 1)]", "params": "[w]", "momentum": "0.5"},
            "w in dict(result)",
        )
        use.refuses(
            first,
            TypeError,
            ("3", "updates must be pairs (shared variable, expression) in a list"),
            ("[w]", "updates must be pairs (shared variable, expression)"),
            ("[(x, x)]", "updates must update shared variables"),
            ("[(w, 'more')]", "updates gives w the value 'more', which is no expression"),
        )
        use.refuses(
            "params",
            TypeError,
            ("w", "params must be a list of shared variables"),
            ("[x]", "params must be a list of shared variables"),
        )
        use.refuses(
            "params", ValueError, ("[s]", "params must be among the variables of updates; s is not")
        )
        use.refuses(
            "momentum",
            TypeError,
            ("'fast'", "Hyperparameters must be numbers or scalar variables"),
            ("None", "Hyperparameters must be numbers or scalar variables"),
        )
SIZE = Use("updates.vars_flat_size", {"shared_vars": "[s, m]"}, "result == 10")
UNFLATTEN = Use("updates.unflatten_vars", {"flat": "x", "shared_vars": "[s]"}, "len(result) == 1")
for use in (SIZE, UNFLATTEN):
    use.refuses(
        "shared_vars",
        TypeError,
        ("s", "shared_vars must be a list of shared variables"),
        ("3", "shared_vars must be a list of shared variables"),
        ("[x]", "shared_vars must be a list of shared variables"),
    )
UNFLATTEN.refuses("flat", TypeError, ("3", "flat must be a tensor variable"))
FLATTEN = Use("updates.flatten_vars", {"variables": "[s, m]"}, "len(result.eval()) == 10")
FLATTEN.refuses(
    "variables",
    TypeError,
    ("s", "variables must be a list of tensor variables"),
    ("3", "variables must be a list of tensor variables"),
    ("[3]", "variables must be a list of tensor variables, got 3 in it"),
)
FLATTEN.refuses("variables", ValueError, ("[]", "variables is empty"))
INTO = Use("updates.flatten_vars", {"variables": "[(s, 4)]", "into": "x"}, "result.ndim == 1")
INTO.refuses("into", TypeError, ("3", "into must be a tensor variable"))
INTO.refuses(
    "variables",
    TypeError,
    ("[s]", "variables must be a list of pairs (tensor variable, number of elements)"),
    ("[(3, 4)]", "variables must be a list of pairs (tensor variable, number of elements)"),
    ("[(s, 'four')]", "The number of elements in variables must be an integer"),
    ("[(s, 4.0)]", "The number of elements in variables must be an integer"),
)
INTO.refuses(
    "variables",
    ValueError,
    ("[(s, -1)]", "The number of elements in variables must be from 0"),
    ("[(s, 2**70)]", "The number of elements in variables must be from 0"),
)

STEP = Use(
    "train.make_train_step",
    {
        "inputs": "[x]",
        "loss": "loss + x.mean()",
        "params": "[w]",
        "update_rule": "rules.sgd",
        "**kwargs": "learning_rate=0.0",
    },
    "abs(result(X) - 7) < 1e-6",
)
STEP.refuses("inputs", TypeError, ("x", "inputs must be a list of Theano variables"))
STEP.refuses("outputs", TypeError, ("3", "outputs must be a list"))
STEP.refuses(
    "averages",
    TypeError,
    ("3", "averages must be pairs (shared variable, expression) in a list"),
    ("[s]", "averages must be pairs (shared variable, expression)"),
    ("[(x, x)]", "averages must update shared variables"),
    ("[(s, 'more')]", "averages gives s the value 'more', which is no expression"),
)
STEP.refuses(
    "options",
    TypeError,
    ("3", "options must be a dict of keywords"),
    ("{'updates': []}", "options can't have ['updates'], which make_train_step gives"),
)
STEP.refuses("store", TypeError, ("3", "store must be a store"), ("'local'", "store must be a"))
STEP.refuses("devid", TypeError, ("0", "devid: only with a store"))
STEP.refuses("keys", TypeError, ("['a']", "keys: only with a store"))
STEP.refuses("batch_rows", TypeError, ("10", "batch_rows: only with a store"))
STEP.refuses(
    "averages",
    ValueError,
    ("[(s, s), (s, s)]", "averages must update each variable once, but s comes twice"),
    ("[(w, w)]", "must update each variable once, but w comes"),
)
PARALLEL = Use(
    "train.parallel_updates",
    {"loss": "loss", "params": "[w]", "update_rule": "rules.sgd", "**kwargs": "learning_rate=0.1"},
    "list(result) == [w]",
)
AVERAGED = Use("train.average_gradients", {"loss": "loss", "params": "[w]"}, "len(result) == 1")
for use in (STEP, PARALLEL, AVERAGED):
    refuse_all(use, "loss", NO_LOSS)
    refuse_all(use, "params", NO_PARAMS)
    use.refuses("max_norm", ValueError, ("0", "max_norm must be above zero"))
    use.refuses("max_norm", TypeError, ("'a'", "max_norm must be a number or a scalar variable"))
for use in (STEP, PARALLEL):
    use.refuses(
        "update_rule",
        TypeError,
        ("3", "update_rule must be a function (grads, params, ...)"),
        ("'sgd'", "update_rule must be a function (grads, params, ...)"),
        (
            "updates.sgd",
            "update_rule must take gradients: use synkhronos.extensions.update_rules.sgd",
        ),
        ("lambda grads, params, learning_rate: 3", "What the update rule returns must be pairs"),
        ("lambda grads, params, learning_rate: [w]", "What the update rule returns must be pairs"),
    )
CLIP = Use("train.clip_by_global_norm", {"grads": "[x]", "max_norm": "2.0"}, "len(result) == 1")
CLIP.refuses(
    "grads",
    TypeError,
    ("3", "grads must be a list of tensor variables"),
    ("x", "grads must be a list of tensor variables"),
    ("[3]", "grads must be a list of tensor variables, got 3 in it"),
)
CLIP.refuses("max_norm", TypeError, ("'a'", "max_norm must be a number or a scalar variable"))
CLIP.refuses("max_norm", ValueError, ("-1", "max_norm must be above zero"))
AVERAGES = Use("train.average_updates", {"updates": "[(s, 2 * s)]"}, "list(result) == [s]")
AVERAGES.refuses(
    "updates",
    TypeError,
    ("3", "updates must be pairs (shared variable, expression) in a list"),
    ("[s]", "updates must be pairs (shared variable, expression)"),
    ("[(x, x)]", "updates must update shared variables"),
    ("[(s, 'more')]", "updates gives s the value 'more', which is no expression"),
)
AVERAGES.refuses("updates", ValueError, ("[(s, s), (s, s)]", "updates must update each variable"))
WARM_UP = Use("train.warm_up", {"rate": "0.1", "factor": "8", "steps": "4"}, "result.ndim == 0")
for name in ("rate", "factor"):
    WARM_UP.refuses(name, TypeError, ("'fast'", f"{name} must be a number or a scalar variable"))
WARM_UP.refuses(
    "steps",
    TypeError,
    ("1.5", "steps must be an integer"),
    ("'4'", "steps must be an integer"),
    ("np.True_", "steps must be an integer"),
)
WARM_UP.refuses(
    "steps", ValueError, ("0", "steps must be from 1 to"), ("2**70", "steps must be from 1 to")
)
for use in uses(
    "train.make_train_function",
    "train.make_train_function_theano",
    holds="abs(result(X[:2], X[:2]) - 6) < 1e-6",
    loss="loss + x.mean() - y.mean() + 1",
    params="[w]",
    x="x",
    y="y",
    update_rule="updates.sgd",
    **{"**kwargs": "learning_rate=0.0"},
):
    refuse_all(use, "loss", NO_LOSS)
    refuse_all(use, "params", NO_PARAMS)
    for name in ("x", "y"):
        use.refuses(name, TypeError, ("3", f"{name} must be a tensor variable"))
        use.refuses(name, TypeError, ("'rows'", f"{name} must be a tensor variable"))
    use.refuses(
        "update_rule",
        TypeError,
        ("3", "update_rule must be one of extensions.updates"),
        ("rules.sgd", "update_rule must return (grad_updates, param_updates, grad_shared)"),
    )

# Keras, where it is installed.

KERAS = {
    "keras.parallelize": (TypeError, "parallelize() takes a model of Keras"),
    "keras.restore": (ValueError, "restore() takes a model that parallelize() was given"),
    "keras.broadcast": (ValueError, "broadcast() takes a model that parallelize() was given"),
}
for name, (error, phrase) in KERAS.items():
    Use(name, {"model": "model"}, "True").refuses(
        "model", error, ("3", phrase), ("None", phrase), ("'model'", phrase)
    )
for name in ("sync_batch_norm", "serial_random"):
    Use("keras.parallelize", {"model": "model"}, "True").refuses(
        name, TypeError, ("np.arange(5)", f"{name} must be True or False")
    )

PROFILE = Use("synk.profile", {"room": "100"}, "result is not None")
PROFILE.refuses("room", TypeError, ("2.5", "room must be an integer"), ("True", "room must be"))
PROFILE.refuses("room", ValueError, ("0", "room must be at least 1, got 0"))
SAVE = Use("Profile.save", {"file": "file"}, "file.unlink() is None", spelled="recorded.save")
PLOT = Use("Profile.plot", {"file": "None", "last": "1"}, "result.axes", spelled="recorded.plot")
for use, phrase in ((SAVE, ".json (a trace) or .txt (the summary)"), (PLOT, "one of .")):
    use.refuses("file", TypeError, ("3", "file must be a path, got 3"))
    use.refuses("file", TypeError, ("b'a.json'", "file must be a path, got b'a.json'"))
    use.refuses("file", ValueError, ("''", f"file must end in {phrase}"))
    use.refuses("file", ValueError, ("'trace'", f"file must end in {phrase}"))
    use.refuses("file", ValueError, ("'trace.csv'", f"file must end in {phrase}"))
SAVE.refuses("file", TypeError, ("None", "file must be a path, got None"))
PLOT.refuses("last", TypeError, ("2.5", "last must be an integer"), ("'all'", "last must be"))
PLOT.refuses("last", ValueError, ("0", "last must be at least 1, got 0"))

for use in uses("synk.parallel", n_parallel="None", check="True"):
    use.refuses("n_parallel", TypeError, ("'two'", "n_parallel must be an integer"))
    use.refuses("n_parallel", ValueError, ("0", "n_parallel must be at least 1"))
    use.refuses("n_parallel", ValueError, ("5", "n_parallel=5, but there is a session of"))
    use.refuses("check", TypeError, ("'yes'", "check must be"))
    use.refuses("check", ValueError, ("-1", "check must be at least 0"))
    use.refuses("devices", ValueError, ("['cpu']", "devices was given, but there is a session"))
    use.refuses("threads_per_rank", ValueError, ("2", "threads_per_rank was given, but there is"))

# Uses that raise SessionError without a session.
NEEDS_WORKERS = (FUNCTION, DATA, *COLLECTIVES, Use("synk.distribute", {}, "result is None"))
NEEDS_WORKERS += (STEP, PROFILE, CHECKPOINT, RESTORED)
# Methods of a session's objects that raise SessionError after close().
NEEDS_ITS_SESSION = (CALL, BUILD, COPY, SET, LENGTH, SHAPE)
WITHOUT_WORKERS = {
    "synk.fork": "starts them; while there is a session it raises SessionError",
    "synk.close": "says in the log that there is nothing to end",
    "synk.get_n_gpu": "asks the machine",
    "synk.parallel": "the block forks and closes",
    "synk.status": "tells that there is no session",
    "synk.ops": "makes expressions",
    "synk.rows": "makes an expression",
    "Function.as_theano": "runs in the master",
    "Function.get_shared": "asks the master",
    "Data.condition_data": "computes in the master",
    "Data.free_memory": "gives back what there is",
    "Profile": "reads what was recorded",
    "rules": "makes expressions",
    "updates": "makes expressions",
    "train": "makes expressions, but for make_train_step and make_train_function",
    "keras": "see test_keras.py",
}

# Parameters that take any value.
ANY_VALUE = {
    "profile_workers": "its truth counts",
    "follow": "its truth counts",
    "max_n_var": "ignored",
    "max_dim": "ignored",
    "nccl": "its truth counts",
    "in_place": "its truth counts",
    "force_cast": "its truth counts",
    "minibatch": "its truth counts, but in build_inputs",
    "name": "its str() is shown in messages",
}
PASSED_ON = {
    "train.StoredStep has_outputs": "make_train_step, which makes it",
    "train.StoredStep batch_rows": "make_train_step, which makes it",
    "train.StoredStep with_rows": "make_train_step, which makes it",
    "train.StoredStep inputs": "make_train_step, which makes it",
    "train.StoredStep functions": "make_train_step, which makes it",
    "train.StoredStep exchange": "make_train_step, which makes it",
    "synk.function **kwargs": "theano.function",
    "Function.copy profile": "theano.function",
    "train.make_train_step *args": "the rule",
    "train.make_train_step **kwargs": "the rule",
    "train.parallel_updates *args": "the rule",
    "train.parallel_updates **kwargs": "the rule",
    "train.make_train_function *args": "the rule",
    "train.make_train_function **kwargs": "the rule",
    "train.make_train_function_theano *args": "the rule",
    "train.make_train_function_theano **kwargs": "the rule",
}
EXCEPTIONS = ("PortingWarning", "SessionError", "SharedMemoryFull", "WorkerDied", "WorkerError")

TITLES = {
    "synk.fork": "Sessions",
    "synk.function": "Functions",
    "synk.data": "Data",
    "synk.broadcast": "Collectives",
    "synk.save": "Checkpoints",
    "synk.parallel": "Libraries and scripts as they are",
    "synk.profile": "Profiling",
    "synk.ops.all_reduce": "Operations of graphs",
    "rules.sgd": "Rules: synkhronos.extensions.update_rules",
    "updates.sgd": "Rules in two steps: synkhronos.extensions.updates",
    "train.make_train_step": "Training: synkhronos.extensions.train",
    "keras.parallelize": "Keras: synkhronos.extensions.keras",
}
AT_MOST = 3  # values in a row of a table


def tables():
    """Return the tables of docs/bad_input.rst, one for each callable.

    A row has an argument, some values that it refuses with the same message, and this message: of
    all messages of an argument, the most frequent TypeError and the most frequent ValueError.
    """
    modules = ("synk.ops", "rules", "updates", "train", "keras")

    def module(case):
        starts = [name for name in modules if case.use.name.startswith(name + ".")]
        return modules.index(starts[0]) + 1 if starts else 0

    refused = {}  # name: argument: error: message: values
    for case in sorted(CASES, key=module):
        errors = refused.setdefault(case.use.name, {}).setdefault(case.argument, {})
        values = errors.setdefault(case.error, {}).setdefault(case.phrase, [])
        values.append(f"``{case.given}``" if case.given else "nothing")
    lines = []
    for name, arguments in refused.items():
        if name in TITLES:
            lines += [TITLES[name], "-" * len(TITLES[name]), ""]
        lines += [f".. list-table:: ``{name}``", "   :header-rows: 1", "   :widths: 18 32 50", ""]
        rows = [("argument", "refused, for example", "error")]
        for argument, errors in arguments.items():
            for error, messages in sorted(errors.items()):
                message, values = max(messages.items(), key=lambda item: len(item[1]))
                shown, message = ", ".join(values[:AT_MOST]), message.replace("*", "\\*")
                rows.append((f"``{argument}``", shown, f"{error}: {message}"))
        lines += ["   * " + "\n     ".join(f"- {cell}" for cell in row) for row in rows] + [""]
    return "\n".join(lines)
