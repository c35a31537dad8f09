"""Bad input of every public callable: test_bad_input.py makes these calls, docs/conf.py lists them.

A use is a right call; a case replaces one of its arguments with a wrong value. Both are texts,
evaluated with the names that `names` of test_bad_input.py makes.
"""

from dataclasses import dataclass
from typing import Dict

from synkhronos._arithmetic.operations import OPERATIONS

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

    def refuses(self, argument, error, given, phrase):
        """Add a case: an argument, its error, the text of a wrong value, part of the message."""
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
    "synk.fork", {"n_parallel": "2", "devices": "['cpu', 'cpu']"}, "result == 2", before_fork=True
)
FORK.refuses("n_parallel", TypeError, "'two'", "n_parallel must be an integer or None")
FORK.refuses("n_parallel", ValueError, "0", "n_parallel must be at least 1")
FORK.refuses("use_gpu", TypeError, "'yes'", "use_gpu must be True, False or None")
FORK.refuses("profile_workers", TypeError, "X", "profile_workers must be True or False")
FORK.refuses("follow", TypeError, "X", "follow must be True or False")
FORK.refuses("check", TypeError, "1.5", "check must be an integer")
FORK.refuses("check", ValueError, "-1", "check must be at least 0")
FORK.refuses("use_gpu", ValueError, "True", "use_gpu=True, but devices names cpu, cpu")
FORK.refuses("restart", TypeError, "X", "restart must be True or False")
FORK.refuses("overlap", TypeError, "X", "overlap must be True or False")
FORK.refuses("compress", ValueError, "'float8'", "compress must be 'float16' or None")
FORK.refuses("master_rank", TypeError, "'0'", "master_rank must be an integer")
FORK.refuses("master_rank", ValueError, "2", "master_rank must be from 0 to 1")
FORK.refuses("devices", TypeError, "'cpu'", "devices must be a list of names")
FORK.refuses("devices", ValueError, "[]", "devices is empty")
FORK.refuses("threads_per_rank", TypeError, "1.5", "threads_per_rank must be an integer")
FORK.refuses("threads_per_rank", ValueError, "0", "threads_per_rank must be from 1 to")

FUNCTION = Use(
    "synk.function",
    {"inputs": "[x]", "outputs": "(x.sum() + s.sum(), 'sum')", "**kwargs": "mode='FAST_COMPILE'"},
    "result(X[:n]) == X[:n].sum() + 6 * n",
)
FUNCTION.refuses("inputs", TypeError, "x", "inputs must be a list of Theano variables")
FUNCTION.refuses("outputs", TypeError, "3", "Output 0 must be a Theano variable")
FUNCTION.refuses("outputs", ValueError, "(x, 'mean')", "'mean' is not a reduce mode")
FUNCTION.refuses("bcast_inputs", TypeError, "x", "bcast_inputs must be a list of Theano variables")
FUNCTION.refuses("updates", TypeError, "{s}", "updates must be pairs")
FUNCTION.refuses("updates", ValueError, "[(s, s, 'add')]", "'add' is not a reduce mode")
FUNCTION.refuses("givens", TypeError, "3", "givens must be a dict or a list of pairs")
FUNCTION.refuses(
    "sliceable_shareds", TypeError, "s", "sliceable_shareds must be a list of shared variables"
)
FUNCTION.refuses(
    "sliceable_shareds", ValueError, "[m]", "sliceable_shareds has m, which the function does not"
)

FUNCTION.refuses("check", TypeError, "1.5", "check must be an integer")
FUNCTION.refuses("check", ValueError, "-1", "check must be at least 0")
FUNCTION.refuses("axes", TypeError, "1", "axes must be a dict of variables with their axis of rows")
FUNCTION.refuses("axes", ValueError, "{x: 1}", "axes names axis 1 of x, which has 1 dimension")
FUNCTION.refuses(
    "**kwargs", TypeError, "mode=3", "mode must be a Theano mode or the name of one, got 3"
)
FUNCTION.refuses("serial_random", TypeError, "X", "serial_random must be True or False")
FUNCTION.refuses("**kwargs", ValueError, "mode='abc'", "mode must be a Theano mode or the name")

ROWS = Use("synk.rows", {"index": "1", "size": "2", "length": "3"}, "result.eval().tolist() == [2]")
for name in ("index", "size", "length"):
    ROWS.refuses(
        name, TypeError, "1.0", f"{name} must be an integer, or a variable of integers without axes"
    )
    ROWS.refuses(name, ValueError, "-1", f"{name} must be from 0 to 9223372036854775807, got -1")

CALL = Use("Function.__call__", {"*args": "X"}, "[int(v) for v in result] == [10, 4]", "f")
PICK = Use("Function.__call__", {"batch_s": "[0, 3]"}, "result == 3", "picked")
for use in (CALL, Use("Function.as_theano", {"*args": "X"}, CALL.holds, "f.as_theano")):
    use.refuses("*args", TypeError, "", "Function 'f' takes 1 input (x), got 0")
    use.refuses("**kwargs", TypeError, "x=X", "takes 1 input (x), got 2")
    use.refuses("output_subset", TypeError, "0", "output_subset must be a list of integers")
    use.refuses("output_subset", ValueError, "[2]", "output_subset must hold integers of ")
BY_NAME = Use("Function.__call__", {"**kwargs": "x=X"}, CALL.holds, "f")
BY_NAME.refuses("**kwargs", ValueError, "z=X", "Function 'f' has no input 'z'. It takes: x")
CALL.refuses("batch", TypeError, "1.0", "batch must be an integer, a slice")
CALL.refuses("batch", ValueError, "6", "batch=6 asks for the first 6 rows, but there are 5")
CALL.refuses("batch_s", TypeError, "[0]", "batch_s was given, but Function 'f' has no")
PICK.refuses("batch", TypeError, "1.0", "batch must be an integer, a slice")
PICK.refuses(
    "batch",
    ValueError,
    "[0]",
    "To select rows of its sliceable_shareds write batch_s= in place of batch=",
)
PICK.refuses("batch_s", TypeError, "5", "batch_s must be a slice, a list or array")
PICK.refuses("batch_s", ValueError, "[9]", "batch_s (rank 0) asks for row 9, but there are 4 rows")
CALL.refuses("num_slices", ValueError, "0", "num_slices must be an integer >= 1")

BUILD = Use("Function.build_inputs", {"*args": "X"}, "result[4] == 4", "f.build_inputs")
BUILD.refuses("*args", TypeError, "", "Function 'f' takes 1 input (x), got 0")
BUILD.refuses("**kwargs", TypeError, "x=X", "takes 1 input (x), got 2")
BUILD.refuses(
    "minibatch",
    ValueError,
    "[True, False]",
    "minibatch must be one bool or one for each of 1 input",
)

COPY = Use("Function.copy", {"name": "'g'"}, "result.name == 'g'", "f.copy")
COPY.refuses("swap", TypeError, "[(s, t)]", "swap must be a dict of shared variables")
COPY.refuses("swap", ValueError, "{s: t}", "swap has s, which the function does not use")
COPY.refuses("delete_updates", TypeError, "X", "delete_updates must be True or False")
COPY.refuses("share_memory", TypeError, "X", "share_memory must be True or False")

DATA = Use("synk.data", {"value": "X"}, "result.shape == (5,) and result[4] == 4")
DATA.refuses("value", TypeError, "'ab'", "must hold numbers or bools")
DATA.refuses("var", TypeError, "'x'", "var must be a Theano tensor variable")
DATA.refuses("dtype", TypeError, "'floaty'", "dtype must be the name of a NumPy dtype")
DATA.refuses("ndim", TypeError, "1.5", "ndim must be an integer")
DATA.refuses("ndim", ValueError, "-1", "ndim must be from 0 to 32")
DATA.refuses("shape", TypeError, "'nonsense'", "shape must be a sequence of integers")
DATA.refuses("shape", ValueError, "(2, 2)", "shape=(2, 2) was given beside a value of shape (5,)")
for use in (DATA, BUILD):
    for name in ("force_cast", "minibatch"):
        use.refuses(name, TypeError, "X", f"{name} must be True or False")
LIKE = Use("synk.data", {"var": "x"}, "result.shape == (0,) and result.name == 'x'")
LIKE.refuses("dtype", TypeError, "'float32'", "was given beside var=x, of dtype float64")
LIKE.refuses("ndim", TypeError, "2", "ndim=2 was given beside var=x, of 1 dimension")
LIKE.refuses("shape", ValueError, "(2, 3)", "Data 'x' has 1 dimension: its shape can't be")
ZEROS = Use(
    "synk.data", {"dtype": "'int8'", "shape": "(2, 3)"}, "result.data.tolist() == [[0] * 3] * 2"
)
ZEROS.refuses("shape", TypeError, "3", "shape must be a sequence of integers")
ZEROS.refuses("shape", ValueError, "(2, -1)", "its shape can't be (2, -1)")

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
        "input_data", TypeError, "np.ones((5, 2))", "Data 'd' has 1 dimension, but the value has 2"
    )
    use.refuses("force_cast", TypeError, "X", "force_cast must be True or False")
LENGTH.refuses("length", TypeError, "1.5", "length must be an integer")
LENGTH.refuses("length", ValueError, "0", "length must be at least 1")
SHAPE.refuses("shape", TypeError, "3", "shape must be a sequence of integers")
SHAPE.refuses("shape", ValueError, "(2, 2)", "Data 'd' has 1 dimension: its shape can't be (2, 2)")
for use in (DATA, BUILD, SET, LENGTH, SHAPE):
    use.refuses("oversize", TypeError, "'much'", "oversize must be a number from 1 to 2")
    use.refuses("oversize", ValueError, "0.5", "oversize must be from 1 to 2")

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
        "None",
        f"{verb}() takes a Theano shared variable or a list of them",
    )
    use.refuses("shared_vars", ValueError, "[]", f"{verb}() got an empty list of shared variables")
for use in (SCATTER, ALL_GATHER, LENGTHS):
    use.refuses("shared_vars", TypeError, "number", "an axis 0, which number does not have")
for use in (BROADCAST, SCATTER, SET_VALUE):
    verb, name = use.name.split(".")[1], use.arguments["shared_vars"]
    use.refuses("values", TypeError, "np.ones((2, 2))", f"{verb}() can't give {name}, of type")
for use in (SCATTER, SET_VALUE):
    use.refuses("values", TypeError, "None", "of type TensorType(float64, vector), None: ")
    use.refuses("batch", TypeError, "1.0", "batch must be an integer, a slice")
    use.refuses("batch", ValueError, "[True, 2]", "batch must hold integers or bools, not both")
for use in (SET_VALUE, GET_VALUE):
    use.refuses("rank", TypeError, "'0'", "rank must be an integer")
    use.refuses("rank", ValueError, "-1", "rank must be from 0 to")
for use in (REDUCE, ALL_REDUCE):
    use.refuses("op", ValueError, "'mean'", f"op must be one of {', '.join(OPERATIONS)}")
    use.refuses("shared_vars", TypeError, "i", "can't average i, of dtype int64")
for use in (BROADCAST, ALL_GATHER, REDUCE, ALL_REDUCE):
    use.refuses("nccl", TypeError, "X", "nccl must be True or False")
REDUCE.refuses("in_place", TypeError, "X", "in_place must be True or False")
GATHER.refuses("nd_up", ValueError, "True", "takes as nd_up 1 (stack along a new axis) or 0")

CHECKPOINT = Use(
    "synk.save", {"path": "checkpoint", "functions_or_variables": "[w]"}, "checkpoint.exists()"
)
RESTORED = Use(
    "synk.load",
    {"path": "str(checkpoint)", "functions_or_variables": "w"},
    "synk.get_value(n - 1, w).tolist() == [1, 1]",
)
RESUMED = Use(
    "synk.resume",
    {"path": "run", "functions_or_variables": "[w, np.random.RandomState(1)]", "every": "0"},
    "not result.restored and result.step == 0",
)
RESUMED.refuses("every", TypeError, "None", "every must be a number of seconds, got None")
RESUMED.refuses("every", ValueError, "-1", "every must not be negative, got -1")
RESUMED.refuses("keep", TypeError, "1.5", "keep must be an integer, got 1.5")
RESUMED.refuses("keep", ValueError, "0", "keep must be at least 1, got 0")
RESUMED.refuses("unequal", TypeError, "None", "unequal must be one of refuse, keep, average")
RESUMED.refuses("unequal", ValueError, "'mean'", "unequal must be one of refuse, keep, average")
RESUMED.refuses("preemptible", TypeError, "X", "preemptible must be True or False")
for use in (CHECKPOINT, RESTORED, RESUMED):
    use.refuses(
        "path", TypeError, "3", "path must be the name of a file that ends with .npz, got 3"
    )
    use.refuses("path", ValueError, "''", "path must end with .npz, got ''")
    use.refuses(
        "functions_or_variables",
        TypeError,
        "3",
        "functions_or_variables must be a function of synkhronos.function(), a shared",
    )
    use.refuses(
        "functions_or_variables",
        ValueError,
        "[]",
        "functions_or_variables has no shared variable to",
    )
RESTORED.refuses(
    "functions_or_variables", ValueError, "[w, s]", "functions_or_variables has 2 variables, but"
)

IN_GRAPH = Use("synk.ops.all_reduce", {"x": "x"}, "result.eval({x: X}).tolist() == X.tolist()")
IN_GRAPH.refuses("x", TypeError, "3", "all_reduce() takes a tensor variable")
IN_GRAPH.refuses("op", ValueError, "'mean'", f"op must be one of {', '.join(OPERATIONS)}")
IN_GRAPH.refuses("x", TypeError, "i", "can't average i, of dtype int64")

# `loss` depends on `w`, a shared vector.
NO_PARAMS = (
    (TypeError, "w", "params must be a list of shared variables"),
    (ValueError, "[]", "params is empty"),
)
NO_LOSS = (
    (TypeError, "3", "loss must be a scalar variable"),
    (ValueError, "number * 2", "it has no derivative by ['w']"),
)


def refuse_all(use, argument, lines):
    for error, given, phrase in lines:
        use.refuses(argument, error, given, phrase)


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
                name, TypeError, "'fast'", "Hyperparameters must be numbers or scalar variables"
            )
        if module == "rules":
            phrase = "loss_or_grads must have one gradient for each of 1 param"
            use.refuses(first, ValueError, "[w, w]", phrase)
FLAT = Use(
    "updates.sgd_nonflat", {"loss": "loss", "params": "[w]", "learning_rate": "0.5"}, "result"
)
FLAT.refuses(
    "learning_rate", TypeError, "'fast'", "Hyperparameters must be numbers or scalar variables"
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
            first, TypeError, "3", "updates must be pairs (shared variable, expression) in a list"
        )
        use.refuses("params", TypeError, "w", "params must be a list of shared variables")
        use.refuses(
            "params", ValueError, "[s]", "params must be among the variables of updates; s is not"
        )
        use.refuses(
            "momentum", TypeError, "'fast'", "Hyperparameters must be numbers or scalar variables"
        )
SIZE = Use("updates.vars_flat_size", {"shared_vars": "[s, m]"}, "result == 10")
UNFLATTEN = Use("updates.unflatten_vars", {"flat": "x", "shared_vars": "[s]"}, "len(result) == 1")
for use in (SIZE, UNFLATTEN):
    use.refuses("shared_vars", TypeError, "s", "shared_vars must be a list of shared variables")
UNFLATTEN.refuses("flat", TypeError, "3", "flat must be a tensor variable")
FLATTEN = Use("updates.flatten_vars", {"variables": "[s, m]"}, "len(result.eval()) == 10")
FLATTEN.refuses("variables", TypeError, "s", "variables must be a list of tensor variables")
FLATTEN.refuses("variables", ValueError, "[]", "variables is empty")
INTO = Use("updates.flatten_vars", {"variables": "[(s, 4)]", "into": "x"}, "result.ndim == 1")
INTO.refuses("into", TypeError, "3", "into must be a tensor variable")
INTO.refuses(
    "variables",
    TypeError,
    "[s]",
    "variables must be a list of pairs (tensor variable, number of elements)",
)
INTO.refuses(
    "variables", ValueError, "[(s, -1)]", "The number of elements in variables must be from 0"
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
STEP.refuses("inputs", TypeError, "x", "inputs must be a list of Theano variables")
STEP.refuses("outputs", TypeError, "3", "outputs must be a list")
STEP.refuses("per_rank", ValueError, "'layers'", "per_rank must be one of")
STEP.refuses("per_rank", TypeError, "X", "per_rank must be one of")
STEP.refuses(
    "averages", TypeError, "3", "averages must be pairs (shared variable, expression) in a list"
)
STEP.refuses("options", TypeError, "3", "options must be a dict of keywords")
STEP.refuses("store", TypeError, "3", "store must be a store")
STEP.refuses("devid", TypeError, "0", "devid: only with a store")
STEP.refuses("keys", TypeError, "['a']", "keys: only with a store")
STEP.refuses("batch_rows", TypeError, "10", "batch_rows: only with a store")
STEP.refuses(
    "averages",
    ValueError,
    "[(s, s), (s, s)]",
    "averages must update each variable once, but s comes twice",
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
    use.refuses("max_norm", ValueError, "0", "max_norm must be above zero")
    use.refuses("max_norm", TypeError, "'a'", "max_norm must be a number or a scalar variable")
for use in (STEP, PARALLEL):
    use.refuses(
        "update_rule", TypeError, "3", "update_rule must be a function (grads, params, ...)"
    )
CLIP = Use("train.clip_by_global_norm", {"grads": "[x]", "max_norm": "2.0"}, "len(result) == 1")
CLIP.refuses("grads", TypeError, "3", "grads must be a list of tensor variables")
CLIP.refuses("max_norm", TypeError, "'a'", "max_norm must be a number or a scalar variable")
CLIP.refuses("max_norm", ValueError, "-1", "max_norm must be above zero")
AVERAGES = Use("train.average_updates", {"updates": "[(s, 2 * s)]"}, "list(result) == [s]")
AVERAGES.refuses(
    "updates", TypeError, "3", "updates must be pairs (shared variable, expression) in a list"
)
AVERAGES.refuses("updates", ValueError, "[(s, s), (s, s)]", "updates must update each variable")
WARM_UP = Use("train.warm_up", {"rate": "0.1", "factor": "8", "steps": "4"}, "result.ndim == 0")
for name in ("rate", "factor"):
    WARM_UP.refuses(name, TypeError, "'fast'", f"{name} must be a number or a scalar variable")
WARM_UP.refuses("steps", TypeError, "1.5", "steps must be an integer")
WARM_UP.refuses("steps", ValueError, "0", "steps must be from 1 to")
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
        use.refuses(name, TypeError, "3", f"{name} must be a tensor variable")
    use.refuses("update_rule", TypeError, "3", "update_rule must be one of extensions.updates")

# Keras, where it is installed.

KERAS = {
    "keras.parallelize": (TypeError, "parallelize() takes a model of Keras"),
    "keras.restore": (ValueError, "restore() takes a model that parallelize() was given"),
    "keras.broadcast": (ValueError, "broadcast() takes a model that parallelize() was given"),
}
for name, (error, phrase) in KERAS.items():
    Use(name, {"model": "model"}, "True").refuses("model", error, "3", phrase)
Use("keras.resume", {"model": "model", "path": "'run.npz'"}, "True").refuses(
    "model", ValueError, "3", "resume() takes a model that parallelize() was given"
)
for name in ("sync_batch_norm", "serial_random"):
    Use("keras.parallelize", {"model": "model"}, "True").refuses(
        name, TypeError, "np.arange(5)", f"{name} must be True or False"
    )

PROFILE = Use("synk.profile", {"room": "100"}, "result is not None")
PROFILE.refuses("room", TypeError, "2.5", "room must be an integer")
PROFILE.refuses("room", ValueError, "0", "room must be at least 1, got 0")
STATUS = Use("synk.status", {"live": "False"}, "result.ranks")
STATUS.refuses("live", TypeError, "X", "live must be True or False")
SAVE = Use("Profile.save", {"file": "file"}, "file.unlink() is None", spelled="recorded.save")
PLOT = Use("Profile.plot", {"file": "None", "last": "1"}, "result.axes", spelled="recorded.plot")
for use, phrase in ((SAVE, ".json (a trace) or .txt (the summary)"), (PLOT, "one of .")):
    use.refuses("file", TypeError, "3", "file must be a path, got 3")
    use.refuses("file", ValueError, "''", f"file must end in {phrase}")
PLOT.refuses("last", TypeError, "2.5", "last must be an integer")
PLOT.refuses("last", ValueError, "0", "last must be at least 1, got 0")

ADVISE = Use("synk.advise", {"step": "f", "args": "(X,)", "seconds": "0.01"}, "result.rows == 5")
ADVISE.refuses("step", TypeError, "loss", "step must be a function that synk.function()")
ADVISE.refuses("step", ValueError, "picked", "step has sliceable shared variables")
ADVISE.refuses("args", TypeError, "X", "args must be a tuple of a call's arguments, got array")
ADVISE.refuses("args", ValueError, "(X[:0],)", "args must have rows to divide")
ADVISE.refuses("kwargs", TypeError, "'batch'", "kwargs must be a dict")
ADVISE.refuses("seconds", TypeError, "'long'", "seconds must be a number, got 'long'")
ADVISE.refuses("seconds", ValueError, "0", "seconds must be a number above 0, got 0")

for use in uses("synk.parallel", n_parallel="None", check="True"):
    use.refuses("n_parallel", TypeError, "'two'", "n_parallel must be an integer")
    use.refuses("n_parallel", ValueError, "0", "n_parallel must be at least 1")
    use.refuses("check", TypeError, "'yes'", "check must be")
    use.refuses("check", ValueError, "-1", "check must be at least 0")
    use.refuses("devices", ValueError, "['cpu']", "devices was given, but there is a session")
    use.refuses("threads_per_rank", ValueError, "2", "threads_per_rank was given, but there is")

# Uses that raise SessionError without a session.
NEEDS_WORKERS = (FUNCTION, DATA, *COLLECTIVES, Use("synk.distribute", {}, "result is None"))
NEEDS_WORKERS += (STEP, PROFILE, CHECKPOINT, RESTORED, RESUMED)
# Methods of a session's objects that raise SessionError after close().
NEEDS_ITS_SESSION = (CALL, BUILD, COPY, SET, LENGTH, SHAPE)
WITHOUT_WORKERS = {
    "synk.fork": "starts them; while there is a session it raises SessionError",
    "synk.close": "says in the log that there is nothing to end",
    "synk.get_n_gpu": "asks the machine",
    "synk.restart_count": "reads a variable",
    "synk.advise": "measures in sessions of its own",
    "synk.parallel": "the block forks and closes",
    "synk.parallel_report": "reads what was counted",
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
# Of a callable, of one of its arguments, or of an argument in a module.
PASSED_ON = {
    "keras.resume path": "synk.resume",
    "keras.resume **options": "synk.resume",
    "train.StoredStep": "make_train_step, which makes it",
    "synk.function **kwargs": "theano.function",
    "Function.copy profile": "theano.function",
    "train *args": "the rule",
    "train **kwargs": "the rule",
}
EXCEPTIONS = ("PortingWarning", "SessionError", "SharedMemoryFull", "WorkerDied", "WorkerError")

TITLES = {
    "synk.fork": "Sessions",
    "synk.function": "Functions",
    "synk.data": "Data",
    "synk.broadcast": "Collectives",
    "synk.save": "Checkpoints",
    "synk.advise": "Advice",
    "synk.parallel": "Libraries and scripts as they are",
    "synk.profile": "Profiling",
    "synk.ops.all_reduce": "Operations of graphs",
    "rules.sgd": "Rules: synkhronos.extensions.update_rules",
    "updates.sgd": "Rules in two steps: synkhronos.extensions.updates",
    "train.make_train_step": "Training: synkhronos.extensions.train",
    "keras.parallelize": "Keras: synkhronos.extensions.keras",
}


def tables():
    """Return the tables of docs/bad_input.rst, one for each callable.

    A row has an argument, a value that it refuses, and words of the message: the first TypeError of
    an argument, and the first ValueError.
    """
    modules = ("synk.ops", "rules", "updates", "train", "keras")

    def module(case):
        starts = [name for name in modules if case.use.name.startswith(name + ".")]
        return modules.index(starts[0]) + 1 if starts else 0

    refused = {}  # name: argument: error: its first case
    for case in sorted(CASES, key=module):
        errors = refused.setdefault(case.use.name, {}).setdefault(case.argument, {})
        errors.setdefault(case.error, case)
    lines = []
    for name, arguments in refused.items():
        if name in TITLES:
            lines += [TITLES[name], "-" * len(TITLES[name]), ""]
        lines += [f".. list-table:: ``{name}``", "   :header-rows: 1", "   :widths: 18 32 50", ""]
        rows = [("argument", "refused, for example", "error")]
        for argument, errors in arguments.items():
            for error, case in sorted(errors.items()):
                given = f"``{case.given}``" if case.given else "nothing"
                message = case.phrase.replace("*", "\\*")
                rows.append((f"``{argument}``", given, f"{error}: {message}"))
        lines += ["   * " + "\n     ".join(f"- {cell}" for cell in row) for row in rows] + [""]
    return "\n".join(lines)
