"""Row numbers that a function computes from its inputs: the master computes them for all ranks.

    data[rows(index, size)]          as the user writes it
    data[numbers]                    as it is compiled: `numbers` is an input that is scattered

The user does not see this input, which comes after all others. At each call the master computes
its value, and from there it is an array like any other: ranks divide, select and slice it.
"""

from synkhronos import _host
from synkhronos._calls.arguments import Inputs
from synkhronos._calls.parameters import Input
from synkhronos._wording import count, sentence


def take_out(inputs, outputs, updates, keywords):
    """Replace the row numbers in the expressions of a function by inputs.

    `inputs` is a list of `Input`; the master reads those that ranks keep from its own storages.

    Returns
    -------
    updates : list of pairs
    keywords : dict
        For ``theano.function``, the givens among them.
    numbers : list of RowNumbers
        The inputs; empty in most functions.

    The variables of `outputs` are replaced in place.
    """
    pairs = keywords["givens"]
    expressions = [*outputs.variables, *(new for _, new in [*updates, *pairs])]
    kept = [(each.variable, each.storage) for each in inputs if each.storage is not None]
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
    given : list of Input
        Those of the user.
    numbers : list of RowNumbers
    """

    def __init__(self, given, numbers, owner):
        super().__init__(given, owner, [Input(each.variable, "rows()", True) for each in numbers])
        self._numbers = numbers
        self._whole = [i for i in range(self._n_bound) if not self.is_scattered[i]]
        whole = [self.variables[i] for i in self._whole]
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

    def bind(self, args, kwargs, here=False, ahead=False):
        """Return one value for each input: those given, and the row numbers."""
        values = super().bind(args, kwargs, here, ahead)
        whole = [self.array(position, values[position]) for position in self._whole]
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
