"""Calls to profile, what of a profile is theirs, and what a profile may leave behind."""

import theano.tensor as T

from support.helpers import function, worker
from synkhronos import _recorder, collectives
from synkhronos import session as _session
from synkhronos._replica import Replica
from synkhronos._staging import StagedInput
from synkhronos.functions import Function

STRANGE = ["two\nlines", "tab\tand\x1b[31m", "lone \ud800", "$\\frac{", "", "x" * 5000, "größe"]


def total(name="total"):
    x = T.dmatrix("x")
    return function([x], [(x.sum(), "sum"), (x * 2, "gather")], name=name)


def of(recorded, name):
    calls = recorded.calls
    return calls[calls["name"] == name]


def methods():
    """Return those of all classes of which a profile replaces some, on this rank."""
    classes = [Replica, Function, StagedInput, *_recorder.COLLECTIVES, collectives]
    return [dict(vars(each)) for each in classes]


def instrumented():
    """Return all that has other methods on this rank while a profile is on."""
    session, own = _session._Current.session, worker()
    found = [*vars(own.gate), *vars(own.comm)]
    if session is not None:
        found += [*vars(session), *vars(session.registry)]
    return sorted(found), methods()
