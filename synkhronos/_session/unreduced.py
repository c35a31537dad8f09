"""Variables that each rank has updated with its own rows, until a collective reduces them.

    f(x): w -= 0.1 * gradient of own rows ──▶ synk.all_reduce(w) ──▶ the next call: nothing
                                          └────────────────────────▶ the next call: a warning

Only a call that computes with the variable warns: a script may collect each rank's totals in it.
"""

import weakref

from synkhronos import _host, _systems
from synkhronos._wording import advise, count


class Unreduced(dict):
    """The variables of a session that ranks have updated differently, and that are not reduced yet.

    It maps a key to a weak reference to the variable, and the name of the function that updates it.
    Several variables may have one cell: Lasagne clones variables that it updates by default.
    """

    def __init__(self):
        super().__init__()
        self._told = set()

    def note(self, pairs, owner):
        """Note that in a call each rank has updated variables, pairs (key, variable), by itself."""
        for key, variable in pairs:
            if key not in self._told:
                self[key] = weakref.ref(variable), owner

    def forget(self, keys):
        """Forget variables."""
        for key in keys:
            self.pop(key, None)

    def is_set(self, variables):
        """Note that a collective has set variables."""
        cells = {id(_host.cell(each)) for each in variables}
        noted = [(key, variable()) for key, (variable, _) in list(self.items())]
        self.forget([key for key, v in noted if v is None or id(_host.cell(v)) in cells])

    def is_told(self, keys):
        """Note that a warning was about variables already."""
        self._told.update(keys)
        self.forget(keys)

    def tell(self, recipe, compiled, owner):
        """Warn of the variables with which the function that is about to run computes."""
        read = {id(_host.cell(each)): each for each in _host.variables_read(compiled)}
        used = {}
        for key, (reference, updating) in list(self.items()):
            variable = reference()
            own = None if variable is None else read.get(id(_host.cell(variable)))
            if own is not None and recipe.computes_with(own):
                used[key] = variable, updating
        if not used:
            return
        self.is_told(used)
        (variable, updating), *others = sorted(used.values(), key=lambda each: not each[0].name)
        advise(_about_update(variable, updating, owner, [each for each, _ in others]))


def _about_update(variable, updating, owner, others):
    name = variable.name or "variable"
    listed = [each.name for each in others if each.name][:3]
    if len(listed) < len(others):
        listed.append(count(len(others) - len(listed), "other variable"))
    also = f" The same is true of {', '.join(listed)}." if listed else ""
    return (
        f"The update of {variable} in {updating} is not what serial {_host.title} computes, and "
        f"{'the next call' if owner == updating else owner} uses it. Each rank updates with its "
        "own rows: reduce gradients over the ranks with synk.ops.all_reduce(g)"
        f"{_systems.advice('running statistics')}{_systems.advice('own rows')}; or call "
        f"synk.all_reduce({name}) after each call.{also}"
    )
