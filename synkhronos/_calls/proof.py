"""Prove from a function's graph that its modes and reductions make the values of serial Theano.

the graph ──▶ relation of each rank's value to the serial one (`_host.examine`)
another mode makes the serial value, or none does ──▶ a warning when the function is made
ranks update a variable differently               ──▶ a warning by the call that uses it
no rule applies                                   ──▶ `check` compares numbers
"""

from synkhronos import _host, _systems
from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos._machine.interrupts import raised_here
from synkhronos._machine.log import log
from synkhronos._wording import advise, count, without_folder


class Proof:
    """The proof of one function, as far as there are rules."""

    def __init__(self, definition):
        self._compiled, _, self._outputs, self._recipe, self._owner = definition
        self.told = set()  # the numbers of outputs that a warning was about
        self.apart = []  # the shared variables that each rank updates with its own rows
        # Outputs, by number, and updated shared variables that no rule applies to; for each its
        # pair (cause, reason).
        self.open_outputs, self.open_updates, self._reasons = [], [], []
        self._mistakes, self._mistaken, self._wrong = [], set(), []
        try:
            relations = self._recipe.examine() if self._recipe.rows() else None
        except raised_here(Exception) as error:
            log.debug("The graph of %s could not be examined.", self._owner, exc_info=error)
            relations = None
            modes = enumerate(self._outputs.modes)
            self.open_outputs = [output for output, mode in modes if mode is not None]
            self._reasons = [(None, "")]
        if relations is not None:
            self._sort(relations)

    def _sort(self, relations):
        self._mistakes = relations.mistakes
        self._mistaken = {each.variable for each in relations.mistakes}
        of_outputs = zip(self._outputs.modes, relations.outputs, relations.are_rows)
        for output, (mode, relation, has_rows) in enumerate(of_outputs):
            is_reduced = mode in OPERATIONS and not has_rows
            if mode is None or relation.is_equal:
                continue
            is_unclear = relation.is_own and is_reduced and mode not in ("avg", "sum")
            if relation.is_open or is_unclear:
                self._leave_open(self.open_outputs, output, relation)
            elif has_rows or (is_reduced and relation.right_mode != mode):
                self._wrong.append((output, relation))
        for target, relation, differs in relations.updates:
            if _host.is_random_state(target):
                continue
            is_averaged = getattr(target.tag, "is_reduced_after_call", False)
            if is_averaged and relation.is_own and not relation.is_mixed:
                self._mistakes = [*self._mistakes, _host.Mistake(target, "avg", relation)]
            if differs:
                self.apart.append(target)
            elif relation.is_open:
                self._leave_open(self.open_updates, target, relation)

    def _leave_open(self, where, what, relation):
        if relation.cause not in self._mistaken:  # else a warning is about it
            where.append(what)
            self._reasons.append((relation.cause, relation.reason))

    @property
    def open(self):
        """Outputs, by number, and updates without a rule."""
        return [*self.open_outputs, *self.open_updates]

    def tell_of_mode(self):
        """Warn if an output or update has no rule and can't be compared in this mode."""
        if self.open and _host.is_watched(self._compiled):
            variable, reason = self._reasons[0]
            reason = f": it {reason}" if reason else ""
            advise(
                f"{self._owner} may compute something else than serial {_host.title}: there is no "
                f"rule for a part of it{place_of(variable)}{reason}, and in this mode its numbers "
                "are not compared either. Run it once in the default mode."
            )

    def tell(self):
        """Warn of each output mode, and each reduction, that does not make the serial value."""
        mistakes, wrong = self._mistakes, self._wrong
        self._mistakes, self._wrong = [], []
        if mistakes:
            same = [i for i, each in wrong if each.right_mode is None]
            if mistakes[0].relation.right_mode is None and not mistakes[0].relation.is_mixed:
                self.told.update(same)
            self._advise_of(mistakes, [i for i in same if i in self.told])
        for output, relation in wrong:
            if output not in self.told:
                self.told.add(output)
                advise(
                    f"Output {output} of {self._owner}, mode {self._outputs.modes[output]!r}, is "
                    f"not what serial {_host.title} computes: {self._about_output(relation)}"
                )

    def _about_output(self, relation):
        mode = relation.right_mode
        if mode is not None:
            what = f"a {OPERATIONS[mode].title} over"
            if relation.is_proportional:
                what = "proportional to the number of"
            return f"it is {what} the rows. Write (output, {mode!r}) in its place."
        if relation.is_mixed:
            return (
                f"each rank adds a term that depends on no rows{place_of(relation.cause)}, as a "
                "penalty on the parameters: make it an output of its own, of mode None."
            )
        names = ", ".join(map(str, self._recipe.rows()))
        return (
            f"each rank {_computes(relation)}, and no mode makes the value of all rows. Reduce "
            "what goes into it, as in T.sqrt(synk.ops.all_reduce(errors.mean())); or write "
            f"(output, None) in a function with bcast_inputs=[{names}] in place of inputs."
        )

    def _advise_of(self, mistakes, outputs):
        first, *others = mistakes
        relation, mode = first.relation, first.relation.right_mode
        also = [f"{count(len(others), 'other reduction')}"] * bool(others)
        also += [f"output {i}" for i in outputs]
        also = f" The same is true of {', '.join(also)}." if also else ""
        what = f"ops.all_reduce(g, {first.op!r})"
        if isinstance(first.variable, _host.SharedVariable):
            what = f"What ranks average after each call, {first.variable},"
        what = f"{what} in {self._owner} is not what serial {_host.title}"
        if mode in ("sum", "avg"):
            kind, op = ("sum", ", 'sum'") if mode == "sum" else ("mean", "")
            why = (
                f"The gradient of a {kind} over the rows{place_of(first.variable)} takes "
                f"synk.ops.all_reduce(g{op})."
            )
        elif relation.is_mixed:
            why = (
                f"A term that depends on no rows{place_of(relation.cause)}, as a penalty on the "
                "parameters, is reduced with a sum over rows. Add its gradient after the reduction:"
                " synk.ops.all_reduce(T.grad(loss, w), 'sum') + T.grad(penalty, w)."
            )
        elif _operation(relation) == "clip":
            why = (
                f"Each rank clips its own gradients{place_of(relation.cause)}. Clip them after the "
                "reduction, as in T.clip(synk.ops.all_reduce(g), -1, 1)."
            )
        else:
            why = (
                f"Each rank {_computes(relation)}. Divide by what all ranks have, as in "
                "(m * errors).mean() / synk.ops.all_reduce(m.mean())"
                f"{_systems.advice('any loss')}."
            )
        advise(f"{what} computes. {why}{also}")


def _computes(relation):
    """Return the words for the operation that each rank does on its own rows."""
    return (
        f"computes {_operation(relation)} of what it has of its own rows{place_of(relation.cause)}"
    )


def _operation(relation):
    node = relation.cause.owner if relation.cause is not None else None
    return "something" if node is None else _host.operation_name(node)


def place_of(variable):
    """Return " (file.py:12)", the line of the script that made a variable, if it is known."""
    line = _host.line_of(variable) if variable is not None else ""
    return f" ({without_folder(line)})" if line else ""
