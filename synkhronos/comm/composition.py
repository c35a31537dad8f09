"""Composition of two transports: the upper one inherits here all methods that the base does."""

import functools

from synkhronos.comm import Arrays, Outputs, Variables


def _by_the_base(interface):
    """Return a subclass of an interface whose methods all call those of its `base`."""

    def make(name):
        @functools.wraps(getattr(interface, name))
        def method(self, *args):
            return getattr(self._base, name)(*args)

        return method

    def __init__(self, base):
        self._base = base

    names = [name for name in vars(interface) if not name.startswith("_")]
    methods = {name: make(name) for name in names}
    for method in methods.values():
        method.__isabstractmethod__ = False  # which `wraps` has copied
    return type(f"{interface.__name__}Over", (interface,), {"__init__": __init__, **methods})


VariablesOver = _by_the_base(Variables)
OutputsOver = _by_the_base(Outputs)
ArraysOver = _by_the_base(Arrays)
