"""The contract of model files: the attributes and methods that rules use, checked in one place.

A model is an instance of the user's class. The keywords of its methods differ between model files;
the functions here call each method with the keywords that it takes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import numbers
import re
import sys
from typing import Any, Iterator, Mapping

import numpy as np

from synkhronos import _host
from synkhronos._machine.deep_recursion import LEVELS, recurses_deep
from synkhronos._wording import advise
from synkhronos.rules.compatible import import_model
from synkhronos.rules.model_variables import variables_of

ATTRIBUTES = {
    "params": "a list of Theano shared variables, the parameters to train",
    "data": "an object with n_batch_train and n_batch_val",
    "epoch": "the number of the present epoch; initialise it to 0",
    "n_epochs": "the number of epochs to train",
    "n_subb": "the number of sub-batches in a batch; 1 if batches are not divided",
}
METHODS = {
    "compile_iter_fns": "compiles the functions of train_iter and val_iter",
    "train_iter": "train_iter(count, recorder) trains with one sub-batch",
    "val_iter": "val_iter(count, recorder) validates with one sub-batch",
    "reset_iter": "reset_iter(mode) goes back to the first batch; mode is 'train' or 'val'",
    "adjust_hyperp": "adjust_hyperp(epoch) sets the learning rate of the next epoch",
    "cleanup": "cleanup() ends what the model has started",
}


def _noting(method):
    @functools.wraps(method)
    def noting(self, name, *default):
        self.read.add(name)
        return method(self, name, *default)

    return noting


class Config(dict):
    """The dict that a model's constructor gets; `read` has the names that it has looked up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: set = set()

    __getitem__, __contains__ = _noting(dict.__getitem__), _noting(dict.__contains__)
    get, pop = _noting(dict.get), _noting(dict.pop)


def load_class(modelfile: str, modelclass: str) -> type:
    """Import a model's file, a dotted name or a path; return the class of the model.

    Raise ImportError or FileNotFoundError if there is no such file, or no such class in it.
    """
    module = import_model(modelfile)
    model_type = getattr(module, modelclass, None)
    if not isinstance(model_type, type):
        classes = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        raise ImportError(
            f"{modelfile} has no class {modelclass!r}"
            + (f"; it has {', '.join(classes)}." if classes else ", nor any other.")
        )
    return model_type


def make_model(
    modelclass: type, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Any, Config]:
    """Construct a model, with the settings of the user; return it and the config that it got.

    A setting is an entry of the config. If the model has an attribute of this name, that gets the
    value too, unless it is a symbolic variable; ``data.n_batch_train`` is an attribute of the
    model's data. Raise ValueError for a setting that is neither looked up nor an attribute.
    """
    own_config = Config({**config, **settings})
    try:
        model = modelclass(own_config)
    except TypeError as error:
        if not _takes_config(modelclass):
            raise TypeError(
                f"{modelclass.__name__} must take one argument, a dict (config): {error}."
            ) from error
        raise
    for name, value in settings.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            owner = getattr(owner, part, None)
        present = getattr(owner, last, None)
        if isinstance(present, _host.SharedVariable):
            present.set_value(np.asarray(value, present.dtype))
        elif hasattr(owner, last) and not isinstance(present, _host.Variable):
            setattr(owner, last, value)
        elif name not in own_config.read:
            raise ValueError(
                f"{name}={value!r}: {modelclass.__name__} has no attribute {name!r}, and does not "
                "look it up in its config."
            )
    return model, own_config


def _takes_config(modelclass):
    try:
        inspect.signature(modelclass).bind({})
    except TypeError:
        return False
    except ValueError:  # no signature to be had
        return True
    return True


def check(model: Any, is_compiled: bool = False) -> None:
    """Check all that rules use of a model; raise TypeError with a line for each missing thing.

    Data with a method ``batch_data`` need a number of batches only once the model `is_compiled`.
    """
    problems = []
    for name, meaning in ATTRIBUTES.items():
        if getattr(model, name, None) is None:
            problems.append(f"it has no attribute {name}: {meaning}.")
    for name, meaning in METHODS.items():
        if not callable(getattr(model, name, None)):
            problems.append(f"it has no method {name}: {meaning}.")
    params = getattr(model, "params", None)
    if params is not None:
        problems += _problems_of_params(params)
    data = getattr(model, "data", None)
    may_come = not is_compiled and callable(getattr(data, "batch_data", None))
    for name in ("n_batch_train", "n_batch_val"):
        if may_come and not hasattr(data, name):
            continue
        value = getattr(data, name, None)
        if data is not None and not isinstance(value, numbers.Real):
            problems.append(f"its data has no number {name} (it has {value!r}).")
    for name in ("n_epochs", "n_subb"):
        value = getattr(model, name, None)
        if value is not None and not (
            isinstance(value, numbers.Real) and 0 <= value < float("inf")
        ):
            problems.append(f"its {name} must be a finite number, it is {value!r}.")
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise TypeError(f"{type(model).__name__} can't be trained:\n{lines}")


def _problems_of_params(params):
    if not isinstance(params, (list, tuple)):
        return [f"its params must be a list of shared variables, not {type(params).__name__}."]
    if not params:
        return ["its list params is empty."]
    if len({id(each) for each in params}) < len(params):
        return ["its list params has a variable twice."]
    others = [each for each in params if not isinstance(each, _host.SharedVariable)]
    if others:
        return [f"its params must be shared variables, not {each!r}." for each in others[:3]]
    return [
        f"its params must be of floats, but {each} is of {each.dtype}: what counts or indexes is "
        "no parameter to train. Leave it out of params."
        for each in params
        if np.dtype(each.dtype).kind != "f"
    ]


def compile_functions(model: Any, sync_type: str, tells: bool = False) -> None:
    """Call ``compile_iter_fns``, which takes ``sync_type``, any keywords, or nothing.

    If it `tells`, a line of standard error names each function that it compiles.
    """
    # theanompi.lib.opt looks here: model files pass it the number of workers only.
    model.sync_type = sync_type
    compile_deep = recurses_deep(model.compile_iter_fns, LEVELS)  # it may be unsafe to call twice
    keywords = {"sync_type": sync_type} if _accepts(model.compile_iter_fns, "sync_type") else {}
    with _told(model) if tells else contextlib.nullcontext():
        compile_deep(**keywords)


@contextlib.contextmanager
def _told(model):
    compile_one, number = _host.library.function, itertools.count(1)

    @functools.wraps(compile_one)
    def tell(*args, **kwargs):
        total = getattr(model, "_synkhronos_functions", None)  # of `opt`, which knows it
        which = f"{next(number)} of {total}" if total else next(number)
        sys.stderr.write(f"compiling function {which}: up to a minute, the first time only\n")
        return compile_one(*args, **kwargs)

    _host.library.function = tell
    try:
        yield
    finally:
        _host.library.function = compile_one


def print_info(model: Any, recorder: Any, verbose: bool) -> None:
    """Call ``print_info`` if the model has it, with or without ``verbose``."""
    method = getattr(model, "print_info", None)
    if method is None:
        return
    if _accepts(method, "verbose"):
        method(recorder, verbose=verbose)
    elif verbose:
        method(recorder)


def _accepts(function, keyword):
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.name == keyword or each.kind is each.VAR_KEYWORD for each in parameters)


def check_exchanged_velocities(model: Any) -> None:
    """Check the two lists that ``cdd`` exchanges; raise TypeError with what to write instead."""
    sent, received = getattr(model, "vels", None), getattr(model, "vels2", None)
    if not sent or not received:
        raise TypeError(
            f"{type(model).__name__} can't be trained with sync_type 'cdd': compile_iter_fns() "
            "must leave the lists vels and vels2 of shared variables, as "
            "theanompi.lib.opt.pre_model_iter_fn does. For a model with updates of its own use "
            "sync_type 'avg'."
        )
    if len(sent) != len(received):
        raise TypeError(
            f"vels and vels2 of {type(model).__name__} must be of the same length, they have "
            f"{len(sent)} and {len(received)} variables."
        )
    if not callable(getattr(getattr(model, "train_iter_fn", None), "finish", None)):
        advise(
            f"{type(model).__name__} applies each exchanged velocity at the beginning of the next "
            "iteration: the last step of an epoch is pending in validation and snapshots. "
            "theanompi.lib.opt.pre_model_iter_fn applies it at once."
        )


def lengths_of(model: Any) -> dict[str, int]:
    """Return the numbers of epochs and sub-batches, which must be equal on all ranks."""
    return {name: int(getattr(model, name)) for name in ("n_epochs", "n_subb")}


def statistics_of(model: Any) -> list:
    """Return the shared variables of a model's running statistics: those of batch normalization.

    A model may list them in ``statistics``. Otherwise they are found by the names that Lasagne and
    Keras give them. Raise TypeError if the model lists integers, which have no average.
    """
    listed = getattr(model, "statistics", None)
    if listed is not None:
        for each in listed:
            if np.dtype(each.dtype).kind != "f":
                raise TypeError(
                    f"statistics must be shared variables of floats, which ranks average, but "
                    f"{each} is of {each.dtype}: leave it out."
                )
        return list(listed)
    names = re.compile(
        r"(^|[./_])(mean|inv_std|running_(mean|var\w*)|moving_(mean|variance))(:\d+)?$"
    )
    params = {id(each) for each in model.params}
    return [
        each
        for each in variables_of(model)
        if id(each) not in params
        and each.name
        and names.search(each.name)
        and np.dtype(each.dtype).kind == "f"
    ]


def learning_rate(model: Any) -> float:
    """Return the present learning rate; not a number for a model without ``shared_lr``."""
    variable = getattr(model, "shared_lr", None)
    return float(variable.get_value()) if variable is not None else float("nan")


class ScaledRate:
    """The learning rate of a model, times a factor that the model does not know of.

    The rate is the model's shared variable ``shared_lr``, which may have a `factor` already.

    >>> from types import SimpleNamespace
    >>> from synkhronos._host import library
    >>> model = SimpleNamespace(shared_lr=library.shared(0.1))
    >>> rate = ScaledRate(model)
    >>> rate.set_factor(4)
    >>> with rate.taken_out():
    ...     model.shared_lr.set_value(0.01)
    >>> model.shared_lr.get_value()
    array(0.04)
    """

    def __init__(self, model: Any, factor: float = 1.0) -> None:
        self._variable = getattr(model, "shared_lr", None)
        if self._variable is None:
            raise TypeError(
                f"{type(model).__name__} has no shared_lr, a shared variable with the learning "
                "rate, which the warm-up multiplies: give it one, or set scale_lr to False."
            )
        self.factor = factor
        self._own = self._scaled = None  # without the factor, and with it

    def set_factor(self, factor: float) -> None:
        """Replace the factor."""
        rate = self._variable.get_value()
        if self._scaled is None or not np.array_equal(rate, self._scaled):  # the model has set it
            self._own = rate / self.factor
        self._scaled = np.asarray(self._own * factor, self._variable.dtype)
        self._variable.set_value(self._scaled)
        self.factor = factor

    @contextlib.contextmanager
    def taken_out(self) -> Iterator[None]:
        """Take the factor out of the rate inside a with block, where the model may set its rate."""
        factor = self.factor
        self.set_factor(1.0)
        yield
        self.set_factor(factor)
