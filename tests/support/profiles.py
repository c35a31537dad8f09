"""Calls to profile, their records, and checks that a profile leaves nothing behind."""

import theano.tensor as T

from support.helpers import function
from synkhronos import session as _session

STRANGE = ["two\nlines", "tab\tand\x1b[31m", "lone \ud800", "$\\frac{$", "", "x" * 5000, "größe"]


def total(name="total"):
    x = T.dmatrix("x")
    return function([x], [(x.sum(), "sum"), (x * 2, "gather")], name=name)


def of(recorded, name):
    calls = recorded.calls
    return calls[calls["name"] == name]


def the_session():
    return _session._Current.session


def recorders(own):
    """Return the recorders of a rank; all are None unless a profile is on."""
    return [own.recorder, own.gate.recorder]


def nothing_records(session):
    """Return whether no part of a profile is left on the master."""
    return session.recording is None and recorders(session.worker) == [None, None]
