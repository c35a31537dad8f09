"""Whatever is wrong is refused in a sentence, and leaves everything as it was: see bad_input.py."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import signal
import tempfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import bad_input, compiling, host_library
from support.bad_input import CASES
from support.helpers import function
from support.layouts import Layout, forked
from support.leaks import nothing_left
from support.waiting import wait_until

import synkhronos as synk
from synkhronos.extensions import rules, train, updates
from synkhronos.functions import Function
from synkhronos.inputs import Data
from synkhronos.profiling import Profile

X = np.arange(5.0)
CONF = Path(__file__).parents[2] / "docs" / "conf.py"
CHECKPOINT = Path(tempfile.gettempdir(), f"synkhronos-{os.getpid()}.npz")
HAS_KERAS = importlib.util.find_spec("keras") is not None


@pytest.fixture(autouse=True, scope="module")
def no_checkpoint_left():
    yield
    CHECKPOINT.unlink(missing_ok=True)


def names(n=None):
    """Return what the texts of the cases name; with a session of n ranks, also its objects."""
    x, w = T.dvector("x"), theano.shared(np.ones(2), "w")
    s = theano.shared(np.arange(4.0), "s")
    found = {"synk": synk, "np": np, "rules": rules, "updates": updates, "train": train}
    found.update(X=X, n=n or 2, x=x, y=T.dvector("y"), s=s, w=w, loss=(w**2).sum() + 3)
    found["t"] = theano.shared(X.copy(), "t")
    found["m"] = theano.shared(np.ones((2, 3), "float32"), "m")
    found["i"], found["number"] = theano.shared(np.arange(3), "i"), theano.shared(2.0, "number")
    found["checkpoint"], found["run"] = CHECKPOINT, CHECKPOINT.with_suffix(".run.npz")
    if n:
        found["f"] = function([x], [(x.sum(), "sum"), (x.max(), "max")], name="f")
        found["picked"] = function([], (s.sum(), "max"), sliceable_shareds=[s], name="picked")
        found["d"] = synk.data(X, name="d")
        synk.scatter(found["t"], X)
        with synk.profile(room=100) as found["recorded"]:
            found["f"](X)
        found["file"] = Path(tempfile.gettempdir(), f"synkhronos-{os.getpid()}.json")
        synk.save(CHECKPOINT, found["w"])
        found["picked"](), synk.broadcast([found[v] for v in "swmi"])
    return found


@contextlib.contextmanager
def in_session(layout):
    with forked(layout) as ranks:
        known = {**names(layout.ranks), "session": ranks.session}
        yield known
        known.clear()


def evaluate(text, known):
    return eval(text, dict(known))


def state(known):
    """Return all that a wrong call must not change, on every rank."""
    variables = [known[name] for name in ("s", "t", "m", "i", "w")]
    values = [synk.get_value(rank, variables) for rank in range(known["n"])]
    return [[v.tolist() for v in each] for each in values], known["d"].data.tolist()


def check_message(case, message, known):
    assert host_library.said(case.phrase) in message.replace("PyTensor", "Theano")
    assert message.endswith(".") and len(message.split()) >= 4, "it is no sentence"
    words = [word.rstrip("s") for word in case.argument.strip("*").split("_") if len(word) > 3]
    named = any(word in message.lower() for word in (case.argument, *words))
    assert named or any(form in message for form in forms(case, known)), "about what?"
    for internal in (r"(?<![\w'\"])_[a-z]\w*", "NoneType", "has no attribute", "KeyError", "File "):
        assert not re.search(internal, message)
    for module in re.findall(r"synkhronos\.(\w+)", message):
        assert module in (*synk.__all__, "extensions"), f"it names the module {module}"


def forms(case, known):
    """Yield how a message may show what came."""
    if case.argument.startswith("*"):
        yield from ("takes 1 input", "mode must", "input 'z'")
    else:
        yield from forms_of(evaluate(case.given, known))


def forms_of(value):
    yield from (repr(value), str(value), type(value).__name__)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield from (str(value.shape), str(value.dtype))
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from forms_of(item)


def refuse(case, known):
    """Make a wrong call, and look at its error."""
    kind = {"TypeError": TypeError, "ValueError": ValueError}[case.error]
    with pytest.raises(kind) as caught:
        evaluate(case.call, known)
    assert type(caught.value) is kind
    check_message(case, str(caught.value), known)


def use_rightly(use, known):
    result = evaluate(use.text(), known)
    assert evaluate(use.holds, {**known, "result": result})


LAYOUTS = [Layout(2)]
ATTRIBUTES = ["f.name", "f.output_modes", "f.update_modes", "d.data", "d.dtype", "d.ndim"]
ATTRIBUTES += ["d.shape", "d.size", "d.alloc_size", "d.name", "d.minibatch"]
IN_SESSION = [c for c in CASES if not c.use.before_fork and not c.use.name.startswith("keras.")]


def refuse_and_change_nothing(case, known):
    before, sequence = state(known), known["session"].gate.sequence
    refuse(case, known)
    # Selecting from sliceable shared variables begins with a question for their lengths.
    assert known["session"].gate.sequence - sequence <= (case.use is bad_input.PICK)
    assert state(known) == before
    use_rightly(case.use, known)


@pytest.fixture(scope="class")
def known(layout):
    # Some names have no argument for the mode: nothing here is about compiled code.
    with compiling.quickly(), in_session(layout) as known:
        yield known


class TestInASession:
    @pytest.mark.parametrize("case", IN_SESSION, ids=str)
    def test_a_wrong_call_is_refused_and_changes_nothing(self, known, case):
        refuse_and_change_nothing(case, known)

    @pytest.mark.parametrize("attribute", ATTRIBUTES)
    def test_attributes_can_not_be_replaced(self, known, attribute):
        owner, name = attribute.split(".")
        before = getattr(known[owner], name)
        with pytest.raises(AttributeError):
            setattr(known[owner], name, "int8")
        if isinstance(before, list):
            getattr(known[owner], name).append("min")  # to a copy
        assert np.all(getattr(known[owner], name) == before)
        use_rightly(bad_input.CALL, known)


@pytest.mark.parametrize("case", [c for c in CASES if c.use.before_fork], ids=str)
@pytest.mark.sample(8)
def test_a_wrong_fork_starts_nothing(no_session, case):
    with nothing_left():
        refuse(case, names())
    use_rightly(case.use, names())


@pytest.mark.skipif(not HAS_KERAS, reason="needs Keras")
def test_wrong_models_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    float_type = theano.config.floatX
    try:
        with forked(Layout(2)) as ranks:
            keras = importlib.import_module("synkhronos.extensions.keras")
            for case in CASES:
                if case.use.name.startswith("keras."):
                    refuse(case, {"keras": keras, "np": np, "model": None})
            f = function([], (ranks.n * theano.shared(1.0), "sum"))
            assert f() == 4
    finally:
        theano.config.floatX = float_type


# Wrong states.


def refused_in_state(use, known, kind, match):
    with pytest.raises(kind, match=match) as caught:
        evaluate(use.text(), known)
    assert type(caught.value) is kind and str(caught.value).endswith(".")


@pytest.mark.usefixtures("quickly_compiled")
def test_before_fork_and_in_a_second_one(no_session):
    known = names()
    for use in bad_input.NEEDS_WORKERS:
        refused_in_state(use, known, synk.SessionError, r"needs workers: call synkhronos.fork\(\)")
    synk.close()
    assert synk.fork(2) == 2
    known = {**known, **names(2)}
    refused_in_state(bad_input.FORK, known, synk.SessionError, "only fork once")
    for use in bad_input.NEEDS_WORKERS:
        use_rightly(use, known)


def test_after_close(no_session):
    synk.fork(2)
    known = names(2)
    synk.close()
    for use in bad_input.NEEDS_WORKERS:
        refused_in_state(use, known, synk.SessionError, r"needs workers: call synkhronos.fork\(\)")
    for use in bad_input.NEEDS_ITS_SESSION:
        refused_in_state(use, known, synk.SessionError, r"synkhronos.fork\(\)")
    assert known["d"].data.tolist() == X.tolist() and known["f"].as_theano(X)[0] == 10
    synk.fork(2)
    for use in bad_input.NEEDS_ITS_SESSION:
        if use is not bad_input.BUILD:  # it makes a new Data
            refused_in_state(use, known, synk.SessionError, "session that was closed")
    old, known = known["d"], names(2)
    for give in (lambda: known["f"](old), lambda: synk.broadcast(known["s"], old)):
        with pytest.raises(synk.SessionError, match="session that was closed"):
            give()
    for use in bad_input.NEEDS_ITS_SESSION:
        use_rightly(use, known)


@pytest.mark.faults
@pytest.mark.usefixtures("quickly_compiled")
def test_in_a_broken_session(no_session):
    synk.fork(2)
    known = names(2)
    from synkhronos.session import current

    [worker] = current("this test")._processes.values()
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not worker.is_alive())
    with pytest.raises(synk.WorkerDied):
        known["f"](X)
    for use in (*bad_input.NEEDS_WORKERS, *bad_input.NEEDS_ITS_SESSION):
        refused_in_state(use, known, synk.WorkerDied, "The session has ended")
    assert known["d"].data.tolist() == X.tolist() and known["f"].as_theano(X)[0] == 10
    synk.close()
    synk.fork(2)
    known = names(2)
    for use in (*bad_input.NEEDS_WORKERS, *bad_input.NEEDS_ITS_SESSION):
        use_rightly(use, known)


# The table is complete, and the documentation shows it.


def public():
    """Yield the name and the object of everything public that can be called."""
    for name in synk.__all__:
        if name == "ops":
            yield from ((f"synk.ops.{each}", getattr(synk.ops, each)) for each in synk.ops.__all__)
        elif name not in bad_input.EXCEPTIONS:
            yield f"synk.{name}", getattr(synk, name)
    for kind in (Function, Data, Profile):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") or name == "__call__":
                yield f"{kind.__name__}.{name}", method
    modules = {"rules": rules, "updates": updates, "train": train}
    if HAS_KERAS:
        modules["keras"] = importlib.import_module("synkhronos.extensions.keras")
    for prefix, module in modules.items():
        yield from ((f"{prefix}.{name}", getattr(module, name)) for name in module.__all__)


STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def passed_on(name, argument):
    """Return the ways in which PASSED_ON may name an argument."""
    return name, f"{name} {argument}", f"{name.partition('.')[0]} {argument}"


def test_every_argument_of_everything_public_is_in_the_table():
    there = {(case.use.name, case.argument) for case in CASES}
    missing = []
    for name, called in public():
        for parameter in inspect.signature(called).parameters.values():
            argument = STARS.get(parameter.kind, "") + parameter.name
            if argument == "self" or (name, argument) in there or argument in bad_input.ANY_VALUE:
                continue
            if bad_input.PASSED_ON.keys().isdisjoint(passed_on(name, argument)):
                missing.append(f"{name}: {argument}")
    assert not missing, (
        "tests/support/bad_input.py has no case for these arguments, nor says why they take "
        f"anything: {missing}. Add a Use with what it refuses, or a line to ANY_VALUE."
    )


def test_every_public_callable_has_its_states():
    uses = (*bad_input.NEEDS_WORKERS, *bad_input.NEEDS_ITS_SESSION)
    there = {use.name for use in uses} | set(bad_input.WITHOUT_WORKERS)
    missing = [
        name for name, _ in public() if name not in there and name.rpartition(".")[0] not in there
    ]
    assert not missing, (
        "tests/support/bad_input.py does not say what these do before a fork and after a close: "
        f"{missing}. Add them to NEEDS_WORKERS, or to WITHOUT_WORKERS with the reason."
    )


def test_the_table_names_nothing_that_is_gone():
    there = {}
    for name, called in public():
        parameters = inspect.signature(called).parameters.values()
        there[name] = {STARS.get(p.kind, "") + p.name for p in parameters}
    for case in CASES:
        if HAS_KERAS or not case.use.name.startswith("keras."):
            assert case.argument in there[case.use.name], case
    ways = {way for name in there for each in there[name] for way in passed_on(name, each)}
    given = {each for each in bad_input.PASSED_ON if HAS_KERAS or not each.startswith("keras.")}
    assert given <= ways
    everything = set().union(*there.values())
    assert set(bad_input.ANY_VALUE) <= everything


def test_the_page_has_a_row_for_every_refused_argument():
    shown = {}
    for table in bad_input.tables().split(".. list-table:: ``")[1:]:
        name, _, rows = table.partition("``")
        assert name not in shown, f"{name} has two tables"
        shown[name] = set(re.findall(r"   \* - ``(\S+)``\n     - .+\n     - (\w+Error): ", rows))
    there = {}
    for case in CASES:
        there.setdefault(case.use.name, set()).add((case.argument, case.error))
    assert shown == there


def test_the_documentation_appends_the_tables_to_their_page():
    conf = runpy.run_path(str(CONF))
    assert conf["BAD_INPUT"].samefile(bad_input.__file__)
    page, other = ["Introduction"], ["Introduction"]
    conf["add_tables"](Mock(), "bad_input", page)
    conf["add_tables"](Mock(), "failure", other)
    assert page == [f"Introduction\n\n{bad_input.tables()}"] and other == ["Introduction"]
