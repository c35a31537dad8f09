"""Model files of demos/models in one process: imported, checked and driven as a rank does it."""

import contextlib
import inspect
from pathlib import Path

import numpy as np
import theano
from theano.compile import mode
from theano.gof.op import Op
from theano.tensor.nnet.corr import BaseCorrMM
from theano.tensor.signal.pool import MaxPoolGrad, Pool

from support import compiling
from synkhronos.rules import compatible
from synkhronos.rules.recorder import Recorder

MODELS = Path(__file__).parents[2] / "demos" / "models"

ATTRIBUTES = ["params", "data", "epoch", "n_epochs", "n_subb", "shared_lr", "name", "current_info"]
METHODS = ["compile_iter_fns", "train_iter", "val_iter", "reset_iter", "adjust_hyperp", "cleanup"]


@contextlib.contextmanager
def little_compiled():
    """Compile C code for convolutions and pooling only, which have no Python code that works."""
    linker = theano.gof.vm.VM_Linker(use_cloop=False, c_thunks=False)
    kinds, before = (BaseCorrMM, Pool, MaxPoolGrad), {}
    with compiling._by_default(theano.Mode(linker, mode.predefined_optimizers["fast_compile"])):
        for kind in kinds:
            before[kind] = kind.__dict__.get("make_thunk")
            kind.make_thunk = _compiled
        try:
            yield
        finally:
            for kind, method in before.items():
                if method is None:
                    del kind.make_thunk
                else:
                    kind.make_thunk = method


def _compiled(self, node, storage_map, compute_map, no_recycling, impl=None):
    return Op.make_thunk(self, node, storage_map, compute_map, no_recycling, impl="c")


def build(file, name, **config):
    """Return a model of a file, with its contract checked."""
    module = compatible.import_model(str(MODELS / f"{file}.py"))
    model = getattr(module, name)({"verbose": False, "rank": 0, "size": 1, **config})
    missing = [each for each in ATTRIBUTES if not hasattr(model, each)]
    missing += [each for each in METHODS if not callable(getattr(model, each, None))]
    assert not missing
    assert isinstance(model.params, list) and isinstance(model.data.n_batch_train, int)
    assert all(isinstance(each, theano.compile.SharedVariable) for each in model.params)
    assert len(set(model.params)) == len(model.params)
    assert not set(model.params) & set(model.statistics)
    signature = inspect.signature(model.compile_iter_fns)
    kinds = {each.kind for each in signature.parameters.values()}
    assert kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return model


def compile_for(model, sync_type="avg"):
    """Compile a model's functions as a rank of BSP does."""
    model.sync_type = sync_type
    model.compile_iter_fns(sync_type=sync_type)
    return Recorder(None, 1000, model.name, verbose=False)


def epoch(model, recorder, number=0):
    """Train and validate for an epoch, as a rank of BSP does; return costs, and those to validate.

    A step is finished before the validation, as BSP does it after each exchange.
    """
    model.epoch = number
    before = len(recorder.train_cost), len(recorder.val_cost)
    recorder.start_epoch()
    for batch in range(model.data.n_batch_train):
        for _ in range(model.n_subb):
            model.train_iter(batch, recorder)
            getattr(getattr(model, "train_iter_fn", None), "finish", lambda: None)()
    model.reset_iter("train")
    answer = validate(model, recorder)
    model.adjust_hyperp(number)
    if hasattr(model, "print_info"):
        model.print_info(recorder, verbose=False)
    return answer


def validate(model, recorder):
    """Return the mean cost, error and top-5 error of all batches, and val_iter's last answer."""
    seen, answer = [], None
    kept = recorder.val_error
    recorder.val_error = lambda count, *values: seen.append([float(each) for each in values])
    try:
        for batch in range(model.data.n_batch_val):
            for _ in range(model.n_subb):
                answer = model.val_iter(batch, recorder)
    finally:
        recorder.val_error = kept
    model.reset_iter("val")
    return np.mean(seen, axis=0), answer


def values(variables):
    return [np.array(each.get_value()) for each in variables]
