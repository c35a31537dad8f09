"""Commands of the last collectives: one with the same variables and options needs no checks."""

import weakref

_COMMANDS = 64  # that are kept


class Repeated:
    """Keys of variables and commands of collectives, found by the arguments of the call.

    The variables are known by weak references: nothing here keeps them or their values alive.
    """

    def __init__(self):
        # (options, number of variables or 0 for one alone, id of the first) -> (references to them,
        # keys, command)
        self._found = {}

    def find(self, options, shared_vars):
        """Return (keys, command) of an equal call before, or None.

        Parameters
        ----------
        options : tuple or None
            The name of the collective, and what else its command depends on: str, int, bool, and
            references to arrays. None if there is more, which needs checks.
        shared_vars : anything
            The variables as the user gave them, not checked.
        """
        variables, count = _listed(shared_vars)
        if options is None or not variables:
            return None
        known = self._found.get((options, count, id(variables[0])))
        if known is None:
            return None
        references, keys, command = known
        # Another object may have the number of one that is gone, so each is compared.
        for reference, variable in zip(references, variables):
            if reference() is not variable:
                return None
        return keys, command

    def keep(self, options, shared_vars, keys, command):
        """Keep the keys and the command of a call whose arguments were checked."""
        if options is None:
            return
        if len(self._found) >= _COMMANDS:
            self._found.clear()
        variables, count = _listed(shared_vars)
        references = [weakref.ref(variable) for variable in variables]
        self._found[options, count, id(variables[0])] = references, keys, command


def _listed(shared_vars):
    """Return the variables as a list, and their number, or 0 for one that is in no list."""
    if isinstance(shared_vars, (list, tuple)):
        return shared_vars, len(shared_vars)
    return (shared_vars,), 0
