"""Row numbers that a function computes from its inputs: the master computes them for all ranks.

    data[rows(index, size)]          as the user writes it
    data[numbers]                    as it is compiled: `numbers` is an input that is scattered

The user does not see this input, which comes after all others. At each call the master computes
its value, and from there it is an array like any other: ranks divide, select and slice it.
"""

from synkhronos import _host
from synkhronos._calls.arguments import Inputs
from synkhronos._calls.parameters import Input
from synkhronos._master.staging import StagedInput
from synkhronos._wording import count, sentence


def take_out(inputs, outputs, updates, keywords):
    """Replace the row numbers in the expressions of a function by inputs.

    `inputs` is a list of `Input`; the master reads those that ranks keep from its own keepers.

    Returns
    -------
    updates : list of pairs
    keywords : dict
        For ``theano.function``, the givens among them.
    numbers : list of RowNumbers
        The inputs; empty in most functions.

    The variables of `outputs` are replaced in place.
    """
    givens = keywords["givens"]
    pairs = list(givens.items() if isinstance(givens, dict) else givens or ())
    expressions = [*outputs.variables, *(new for _, new in updates), *(new for _, new in pairs)]
    kept = [(each.variable, each.keeper) for each in inputs if each.keeper is not None]
    variables = [each.variable for each in inputs]
    expressions, numbers, are_used = _host.without_row_numbers(
        expressions, [*pairs, *kept], variables
    )
    if not numbers:
        return updates, keywords, numbers
    n_outputs, n_updates = len(outputs.variables), len(updates)
    outputs.variables = expressions[:n_outputs]
    new = expressions[n_outputs:]
    updates = [(target, value) for (target, _), value in zip(updates, new)]
    pairs = [(variable, value) for (variable, _), value in zip(pairs, new[n_updates:])]
    keywords = {**keywords, "givens": pairs}
    if are_used:
        keywords["on_unused_input"] = "ignore"  # the index itself is used by the master alone
    return updates, keywords, numbers


class InputsWithRowNumbers(Inputs):
    """The inputs of a function, the user's and then those for row numbers.

    Parameters
    ----------
    given : Inputs
        Those of the user.
    numbers : list of RowNumbers
    """

    def __init__(self, given, numbers, owner):
        hidden = [Input(each.variable, None, True) for each in numbers]
        super().__init__([*given.sent, *hidden], owner)
        self._given = given
        self.given = given.given
        self._numbers = numbers
        whole = [
            variable
            for variable, is_scattered in zip(given.variables, given.is_scattered)
            if not is_scattered
        ]
        self._whole = [given.variables.index(variable) for variable in whole]
        self._readers = []
        for each in numbers:
            try:
                readers = [_host.compile_number(number, whole) for number in each.operands]
            except ValueError as error:
                raise ValueError(
                    f"rows() in {owner} {sentence(error)[:-1]}: its arguments must be integers, "
                    "shared variables, or expressions of inputs that each rank gets whole: those "
                    "without axes, and bcast_inputs."
                ) from None
            self._readers.append(readers)

    def join(self, session):
        """Use the shared memory of a session from now on."""
        super().join(session)
        self._given.join(session)

    def bind(self, args, kwargs):
        """Return one value for each input: those given, and the row numbers."""
        return self._with_numbers(self._given.bind(args, kwargs))

    def bind_ahead(self, args, kwargs):
        """Return the arguments of a call that follows."""
        return self._with_numbers(self._given.bind_ahead(args, kwargs))

    def bind_here(self, args, kwargs):
        """Return the arguments of a call in the master alone."""
        return self._with_numbers(self._given.bind_here(args, kwargs))

    def bind_data(self, args, kwargs):
        """Return a value for each input that the user gives, of which Data are made."""
        return self._given.bind_data(args, kwargs)

    def get(self, position):
        """Return the value of an input between calls."""
        return self._given.get(position)

    def set(self, position, value):
        """Set the value of an input in the next call."""
        self._given.set(position, value)

    def _with_numbers(self, values):
        whole = [self._given.array(position, values[position]) for position in self._whole]
        numbers = zip(self._numbers, self._readers)
        return [*values, *[self._compute(each, readers, whole) for each, readers in numbers]]

    def _compute(self, numbers, readers, whole):
        operands = [read(whole) for read in readers]
        try:
            rows = _host.numbers_of_rows(*operands)
        except ValueError as error:
            raise ValueError(f"{self._owner}: {sentence(error)}") from None
        for variable in numbers.indexed:
            length = _host.peek(variable).shape[0]
            if len(rows) and rows[-1] >= length:
                index, size = operands[:2]
                raise ValueError(
                    f"rows({index}, {size}) in {self._owner} ends at row {rows[-1]}, but "
                    f"{variable} has {count(length, 'row')}. For a last minibatch of fewer rows, "
                    f"write rows(index, size, length={length})."
                )
        return rows

    def locate(self, position, value):
        """Return the reference to the value of one input, in shared memory."""
        if position < len(self._given.variables):
            return self._given.locate(position, value)
        staged = self._staged.get(position)
        if staged is None:
            staged = self._staged[position] = StagedInput(self._session, self._dtypes[position], 1)
        return staged.put(value)

    def array(self, position, value):
        """Return the value of one input, for a call in the master alone."""
        if position < len(self._given.variables):
            return self._given.array(position, value)
        return value

    def release(self):
        """Give the shared memory of plain arrays and of row numbers back."""
        super().release()
        self._given.release()

    def name_of(self, position):
        """Return the name of an input."""
        if position < len(self._given.variables):
            return self._given.name_of(position)
        return "rows()"

    def label(self, position):
        """Return the first words of an error message about one input."""
        if position < len(self._given.variables):
            return self._given.label(position)
        return f"rows() in {self._owner}"

    def __str__(self):
        return str(self._given)
