"""The model files of the package in one process: made, checked and driven as a rank does it."""

import contextlib
import inspect
from pathlib import Path

import numpy as np
import theano
from theano.compile import mode
from theano.gof.op import Op
from theano.tensor.nnet.corr import BaseCorrMM
from theano.tensor.signal.pool import AveragePoolGrad, MaxPoolGrad, Pool

from support import compiling
from synkhronos.rules import bsp, contract, snapshots
from synkhronos.rules.recorder import Recorder

MODELS = Path(__file__).parents[2] / "synkhronos" / "rules" / "compatible" / "zoo"
HAVE_NO_PYTHON_CODE = (
    BaseCorrMM,
    Pool,
    MaxPoolGrad,
    AveragePoolGrad,
)  # or code that fails with today's NumPy


@contextlib.contextmanager
def little_compiled():
    """Compile C code for convolutions and pooling only; compute all else in Python."""
    linker = theano.gof.vm.VM_Linker(use_cloop=False, c_thunks=False)
    kept = {kind: vars(kind).get("make_thunk") for kind in HAVE_NO_PYTHON_CODE}
    optimizer = mode.predefined_optimizers["fast_compile"]
    with compiling.by_default(theano.Mode(linker, optimizer)):
        for kind in kept:
            kind.make_thunk = _compiled
        try:
            yield
        finally:
            for kind, method in kept.items():
                if method is None:
                    del kind.make_thunk
                else:
                    kind.make_thunk = method


def _compiled(self, node, storage_map, compute_map, no_recycling, impl=None):
    return Op.make_thunk(self, node, storage_map, compute_map, no_recycling, impl="c")


def load(file, name):
    """Import a model file; return the class of its model."""
    return contract.load_class(str(MODELS / f"{file}.py"), name)


def build(file, name, rank=0, size=1, **settings):
    """Return a model of a file as a rank makes it, with its contract checked."""
    modelclass = load(file, name)
    config = {"verbose": False, "rank": rank, "size": size}
    model, _ = contract.make_model(modelclass, config, settings)
    contract.check(model)
    assert isinstance(model.params, list) and len(set(model.params)) == len(model.params)
    assert not set(model.params) & set(model.statistics)
    assert set(contract.statistics_of(model)) == set(model.statistics)
    parameters = inspect.signature(model.compile_iter_fns).parameters.values()
    kinds = {each.kind for each in parameters}
    assert kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return model


def start(model, sync_type="avg"):
    """Compile a model's functions; return a recorder, and the history for snapshots."""
    contract.compile_functions(model, sync_type)
    return watch(model)


def watch(model):
    """Return a recorder, and the history for snapshots, of a model whose functions are compiled."""
    return Recorder(None, 10**6, model.name, verbose=False), snapshots.History(model)


def train(model, recorder, epoch=0):
    """Train for an epoch; return the means of cost and error."""
    model.epoch = epoch
    recorder.start_epoch()
    seen = []
    with _listening(recorder, "train_error", seen):
        for batch in range(model.data.n_batch_train):
            for _ in range(model.n_subb):
                model.train_iter(batch, recorder)
                bsp.finish_step(model, True)
    model.reset_iter("train")
    return np.mean(seen, axis=0)


def validate(model, recorder):
    """Return the means of cost, error and top-5 error, and the last answer of val_iter."""
    seen, answer = [], None
    with _listening(recorder, "val_error", seen):
        for _ in range(model.data.n_batch_val * model.n_subb):
            answer = model.val_iter(0, recorder)
    model.reset_iter("val")
    return np.mean(seen, axis=0), answer


@contextlib.contextmanager
def _listening(recorder, name, seen):
    """Append what a method of the recorder is told, but for the count."""
    method = getattr(recorder, name)

    def listen(count, *values):
        seen.append([float(each) for each in values])
        method(count, *values)

    setattr(recorder, name, listen)
    try:
        yield
    finally:
        delattr(recorder, name)


def end_epoch(model, recorder, epoch=0):
    """Adjust the learning rate and print, as rules do at the end of an epoch."""
    model.adjust_hyperp(epoch)
    contract.print_info(model, recorder, True)


def values(variables):
    return [np.array(each.get_value()) for each in variables]
