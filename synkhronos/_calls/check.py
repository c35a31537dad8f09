"""Compare the first calls of a function with serial Theano, and warn if results differ.

    whole inputs ──▶ serial Theano, in the master, on copies of the variables ──▶ expected
    the call     ──▶ all ranks                                                ──▶ found
                              each output and update that differs ──▶ a PortingWarning

`SerialComparison` compares as many calls as the user asks for. `FirstCall` is the default: in cheap
calls, it compares the outputs and updates that `proof` has no rule for, and warns only of
differences that the division makes.
"""

import os
from time import perf_counter

import numpy as np

from synkhronos import _host, _systems
from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos._calls.serial import ABOUT_OPS, Serial, difference
from synkhronos._machine.interrupts import raised_here
from synkhronos._machine.log import log
from synkhronos._wording import advise, is_bool, sentence, shown, whole_number

CALLS = 3  # so many calls are compared with check=True
FIRST = "first"  # the default value of `check`: see `FirstCall`
VARIABLE = "SYNKHRONOS_CHECK"
# A call that FIRST compares takes at most so many seconds serially, and the function's variables
# have at most so many bytes, or as many as the inputs.
SECONDS = 0.3
NBYTES = 64 << 20
_TRIES = 3  # one of the first so many calls must be cheap
_CALLS = 100  # only the first so many calls may be compared
_AGAIN = 3  # so many more calls are compared if they are unlike all before


def number_of_calls(name, check):
    """Return the number of calls to compare, for a bool or a number of calls; or FIRST."""
    if is_bool(check):
        return CALLS if check else 0
    if isinstance(check, str):
        if check != FIRST:
            raise TypeError(f'{name} must be "{FIRST}", a bool or a number, got {shown(check)}.')
        return FIRST
    return whole_number(name, check, 0)


def of_environment():
    """Return the number of calls to compare that the environment variable asks for, or FIRST."""
    value = os.environ.get(VARIABLE) or FIRST
    if value != FIRST and not value.isdecimal():
        raise ValueError(
            f"{VARIABLE} must be 0, 1, a number of calls, or {FIRST}, got {shown(value)}."
        )
    return {FIRST: FIRST, "1": CALLS}.get(value) or int(value)


class SerialComparison:
    """The comparison of one function's first calls with serial Theano: `left` more calls."""

    def __init__(self, definition, left, proof=None):
        self._definition, self.left, self._proof = definition, left, proof
        self._compiled, self._inputs, self._outputs, self._recipe, self._owner = definition
        self._told = set()

    def join(self, session, key, advice):
        """Compare calls in a session, where the function has this key and these warnings."""
        self._session, self._key, self._advice = session, key, advice
        advice.tells_of_idle = True

    def run(self, call, values, subset, batch, batch_s, num_slices):
        """Run `call` on all ranks, compare it with serial Theano, and return its results."""
        self.left -= 1
        with self._session.call("check"):
            problem = None
            try:
                serial = Serial(self._session, self._definition, subset, values, batch)
                serial.read_variables(batch_s)
                serial.whole(0)
            except raised_here(Exception) as error:
                # Wrong arguments raise in the call below, too: the user should see that error.
                problem = f"serial {_host.title} raised {sentence(error)}"
        results = call()
        if problem is not None:
            self._tell("serial", f"{self._owner} was not checked: {problem}")
            return results
        with self._session.call("check"):
            found = self._outputs.unpack(results, subset)
            differences = [*self._differing_outputs(serial, found)]
            differences += self._differing_updates(serial)
        for what, message in differences:
            self._tell(what, message)
        return results

    def _tell(self, what, message):
        if what not in self._told:
            self._told.add(what)
            if isinstance(what, _host.SharedVariable):
                self._session.changes.unreduced.mark_told(self._session.registry.keys_of([what]))
            advise(message)

    def _differing_outputs(self, serial, everything):
        """Yield, for each output that differs, its number and a message."""
        for place, (output, found) in enumerate(zip(serial.outputs, everything)):
            if not self._compares(output):
                continue
            how = self._difference(serial, place, found)
            if how is None:
                continue
            cause = (
                serial.cause_in_variables()
                or serial.cause_in_mode(place)
                or serial.cause_in_random_numbers()
                or serial.cause_in_order(place)
                or serial.cause_in_parts()
            )
            yield (
                output,
                f"Output {output} of {self._owner}, mode {serial.modes[place]!r}, is not what "
                f"serial {_host.title} computes: {how}. {cause}",
            )

    def leaves_out(self):
        """Return whether the function is not compared in its session."""
        return False

    def _compares(self, output):
        """Return whether to compare an output: it isn't if a warning was about it."""
        is_told = self._proof is not None and output in self._proof.told
        return output not in self._told and not is_told

    def _difference(self, serial, place, found):
        """Return by how much an output differs, in words; None if there is nothing to tell."""
        return difference(found, serial.whole(0)[0][place])

    def _differing_updates(self, serial):
        """Yield, for each update that differs, its variable and a message."""
        _, updated = serial.whole(0)
        beside = serial.largest_change(updated)
        for variable, expected in updated.items():
            is_reduced_later = getattr(variable.tag, "is_reduced_after_call", False)
            if variable in serial.apart or is_reduced_later or _host.is_random_state(variable):
                continue
            found = serial.values_of_all_ranks(variable)
            before = serial.before[variable]
            differences = [difference(value, expected, before, beside) for value in found]
            how = next(filter(None, differences), None)
            if how is None:
                continue
            idle = serial.cause_in_idle_ranks(differences)
            if idle and self._advice.told_of_idle:
                self._told.add(variable)
                continue
            cause = (
                serial.cause_in_variables()
                or serial.cause_in_random_numbers()
                or idle
                or _cause_in_updates(variable, found, expected, before)
            )
            yield variable, self._about_update(variable, how, cause)

    def _about_update(self, variable, how, cause):
        return (
            f"The update of {variable} in {self._owner} is not what serial {_host.title} "
            f"computes: {how}. {cause}"
        )


class FirstCall(SerialComparison):
    """The comparison of one function's cheap calls, for outputs and updates without a rule.

    The ranks run the call first, and its time limits that of serial Theano. The first three cheap
    calls are compared, then calls with other numbers of rows, of labels or of items in masks.
    """

    def __init__(self, definition, left, proof):
        super().__init__(definition, _CALLS, proof)
        self._tries = _TRIES
        self._n_compared = 0
        self._seen = set()  # `likeness` of the calls that were compared
        self._was_equal = False  # whether all ranks had the same variables before a call

    def run(self, call, values, subset, batch, batch_s, num_slices):
        """Run `call`, compare it with serial Theano if it is cheap, and return its results."""
        self.left -= 1
        serial = self._trying(self._prepared, values, subset, batch, num_slices)
        begin = perf_counter()
        results = call()
        is_slow = (perf_counter() - begin) * self._session.n_ranks > SECONDS
        if serial is None or (serial and is_slow):
            self._tries -= 1
            if not self._tries and not self._n_compared:
                self.left = 0
        elif serial:
            for what, message in self._trying(self._compared, serial, results, num_slices) or ():
                self._tell(what, message)
            if self._n_compared >= CALLS + _AGAIN or self._told.issuperset(self._proof.open):
                self.left = 0
        return results

    def leaves_out(self):
        """Return whether nothing can be compared, or running twice may have an effect."""
        session, recipe, inputs = self._session, self._recipe, self._inputs
        variables = self._compiled.get_shared()
        return bool(
            self._proof is None
            or not self._proof.open
            or session.recording is not None
            or set(session.devices) != {"cpu"}
            or recipe.sliceables
            or not any(inputs.is_scattered)
            or any(each.storage is not None for each in inputs.given)
            or any(map(_host.is_random_state, variables))
            or not all(map(_host.is_array_variable, variables))
            or not _host.is_repeatable(self._compiled)
        )

    def _trying(self, step, *arguments):
        """Return what a step of the comparison returns; None if it raises."""
        try:
            with self._session.call("check"):
                return step(*arguments)
        except raised_here(Exception) as error:
            message = "%s was not compared with serial %s."
            log.debug(message, self._owner, _host.title, exc_info=error)
            return None

    def _prepared(self, values, subset, batch, num_slices):
        """Return the `Serial` of a call; None if it can't be compared, False if one like it was."""
        if num_slices != 1 and _host.communicates(self._compiled):
            return None
        if self._key in self._session.registry.pending:
            self._session.registry.distribute(self._key)  # before the time of the call is taken
        serial = Serial(self._session, self._definition, subset, values, batch)
        inputs, used = serial.nbytes()
        if serial.rows() < self._session.n_ranks or used > max(inputs, NBYTES):
            return None
        self._likeness = serial.likeness()
        if self._likeness in self._seen and self._n_compared >= CALLS:
            return False
        # Equal once is enough: an earlier call may have made the ranks' variables differ.
        self._was_equal = self._was_equal or serial.are_equal_on_ranks()
        if not self._was_equal:
            return None
        if num_slices != 1:  # all rows may not fit into memory, but a slice of all ranks does
            n_ranks = self._session.n_ranks
            serial.take_first(max(-(-serial.rows() // num_slices), 2 * n_ranks))
        serial.read_variables(None, are_equal=True)
        return serial

    def _compared(self, serial, results, num_slices):
        """Return a pair (output or variable, message) for each difference."""
        expected, updated = serial.whole(0)
        if num_slices == 1:
            found = self._outputs.unpack(results, serial.subset)
        else:  # compare parts of the first rows, and no updates
            combined = [serial.combined(0, place) for place in range(len(expected))]
            found = [other if one is None else one for one, other in zip(combined, expected)]
            updated = {}
        differences = list(self._differing_outputs(serial, found))
        if not differences and not self._told:
            differences = list(self._differing_open_updates(serial, updated))
        is_at_rest = updated and not serial.largest_change(updated)
        is_zero = any(m in OPERATIONS and not each.any() for m, each in zip(serial.modes, expected))
        if not (is_at_rest or is_zero):  # a wrong mode may give 0, too, as for counts of rare items
            self._seen.add(self._likeness)
            self._n_compared += 1
        return differences

    def _differing_open_updates(self, serial, updated):
        """Yield the updates that are equal on all ranks, but differ from serial Theano's."""
        beside = serial.largest_change(updated)
        for variable in self._proof.open_updates:
            if variable not in updated or variable in self._told:
                continue
            before, expected = serial.before[variable], updated[variable]
            found = np.array(_host.peek(variable))
            how = difference(found, expected, before, beside)
            if how and not serial.is_rounding(variable, found, expected):
                yield variable, self._about_update(variable, how, ABOUT_OPS)

    def _compares(self, output):
        is_open = output in self._proof.open_outputs and output not in self._advice.told
        return is_open and super()._compares(output)

    def _difference(self, serial, place, found):
        mode, expected = serial.modes[place], serial.whole(0)[0][place]
        how = difference(found, expected)
        if how is None:
            # Integers can be equal by chance: the largest label, say, may be the same in all parts.
            may_be_chance = mode in OPERATIONS and expected.dtype.kind in "iub"
            return serial.difference_in_other_orders(place, found) if may_be_chance else None
        is_of_each = isinstance(found, list) or found.size == self._session.n_ranks * expected.size
        if mode == "gather" and is_of_each:  # the user wants the value of each rank
            return None
        is_rounding = serial.is_rounding(place, found, expected)
        return how if not is_rounding and serial.is_of_division(place, found) else None


def _cause_in_updates(variable, found, expected, before):
    """Return the cause and the remedy for a variable that each rank updates with its own rows."""
    cause = (
        "Each rank updates with its own rows: reduce gradients over the ranks with "
        f"synk.ops.all_reduce(g){_systems.advice('own rows')}"
    )
    average = sum(found) / len(found) if len({v.shape for v in found}) == 1 else None
    if average is not None and not difference(average, expected, before=before):
        name = variable.name or "variable"
        cause += f"; or call synk.all_reduce({name}) after each call"
    return cause + "."
