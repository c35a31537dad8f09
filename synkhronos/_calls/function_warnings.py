"""Warn of functions that compute something else on ranks than serially, or that divide no work.

The graph is examined when a function is made; the first call with the problem gives the warning.
"""

from synkhronos import _host
from synkhronos._wording import advise, count


class FunctionWarnings:
    """The warnings of one function, each given once."""

    def __init__(self, session, definition):
        self._n_ranks = session.n_ranks
        self._compiled, self._inputs, outputs, self._recipe, self._owner = definition
        self._averaged, self._sliced = {}, []
        self.told = set()  # the numbers of outputs that a warning was about
        # Whether to warn of ranks that have no rows, and so do not update; whether this is done.
        self.tells_of_idle, self.told_of_idle = False, False
        if self._n_ranks > 1:
            self._averaged = self._find_averaged_rows(outputs.modes)
            if self._recipe.divides_nothing and not _host.communicates(self._compiled):
                self._sliced = self._recipe.sliced_by_inputs()
        self.is_pending = bool(self._averaged or self._sliced)

    def _find_averaged_rows(self, modes):
        """Return the outputs of mode "avg" that have an item for each row: number -> that axis."""
        rows_of = {**self._inputs.axes_of_rows, **dict.fromkeys(self._recipe.sliceables, 0)}
        if "avg" not in modes or not rows_of:
            return {}
        axes = _host.axes_of_rows(self._compiled, rows_of)
        return {i: axes[i][0] for i, mode in enumerate(modes) if mode == "avg" and axes[i]}

    def tell(self, counts, subset):
        """Give the warnings that apply to a call; `counts` (or None) has the rows of each rank."""
        if counts is None:
            sliced, self._sliced = self._sliced, []
            if sliced:
                self._tell_of_slices(sliced)
        else:
            chosen = [i for i in self._averaged if subset is None or i in subset]
            busy = [rows for rows in counts if rows]
            # Parts of different lengths can't be averaged: the call raises an error that says so.
            if chosen and len(busy) > 1 and len(set(busy)) == 1:
                averaged, self._averaged = self._averaged, {}
                self.told.update(chosen)
                self._tell_of_rows({i: averaged[i] for i in chosen})
        self.is_pending = bool(self._averaged or self._sliced)

    def tell_of_idle_ranks(self, rows):
        """Warn once that ranks without rows skip updates, if the updates depend on no rows."""
        if not self.tells_of_idle or self._n_ranks == 1 or _host.communicates(self._compiled):
            return
        self.tells_of_idle = False
        scattered = [self._inputs.variables[i] for i in self._inputs.axes_of_rows]
        scattered += dict(self._recipe.givens)  # their replacements may depend on rows
        behind = [
            target
            for target, value in self._recipe.updates
            if _host.is_array_variable(target) and not _host.is_computed_from(value, scattered)
        ]
        if behind:
            self.told_of_idle = True
            advise(
                f"{' and '.join(map(str, behind))} of {self._owner} differ"
                f"{'s' if len(behind) == 1 else ''} between the ranks from now on. "
                f"{about_idle_ranks(rows, self._n_ranks)}"
            )

    def _tell_of_slices(self, sliced):
        one = sliced[0].name or "data"
        names = ", ".join(str(variable) for variable in sliced)
        advise(
            f"{self._owner} divides no rows: each of the {count(self._n_ranks, 'rank')} slices "
            f"{names} by its inputs, and does all of the work. To divide the rows, write "
            f"{one}[synk.rows(index, size)] in place of {one}[index * size : (index + 1) * size]."
        )

    def _tell_of_rows(self, averaged):
        numbers = " and ".join(map(str, averaged))
        many = len(averaged) > 1
        axes = set(averaged.values())
        along = "" if axes == {0} else f" and axes={{variable: {max(axes)}}}"
        advise(
            f"Output{'s' if many else ''} {numbers} of {self._owner} {'have' if many else 'has'} "
            "an item for each row, and the mode 'avg': the first items of all ranks are averaged "
            f"with one another, and so on. To get all rows, write (variable, 'gather'){along} in "
            "place of the variable; for a mean, take the mean over the rows in the graph."
        )


def about_idle_ranks(rows, n_ranks):
    """Return the explanation for a call with fewer rows than ranks."""
    return (
        f"Ranks without rows do not run, and do not update: the call has {count(rows, 'row')} for "
        f"{count(n_ranks, 'rank')}. Give it at least as many rows as there are ranks."
    )
