"""Replace the row numbers in a function's graph by inputs, whose values the master computes.

    data[rows(index, size)]          as the user writes it
    data[numbers]                    as it is compiled: `numbers` is a scattered input

The user does not see this input, which comes after all others. At each call the master computes its
value, and ranks divide, select and slice it like any other array.
"""

from synkhronos import _host
from synkhronos._calls.arguments import Inputs
from synkhronos._calls.parameters import Input
from synkhronos._wording import count, sentence


def take_out(source):
    """Return a `Source` with inputs in place of row numbers, and a list of these inputs.

    Set the variables of `source.outputs` in place. The master reads inputs that ranks keep from its
    own storages.
    """
    outputs, updates, givens = source.outputs, source.updates, source.keywords["givens"]
    expressions = [*outputs.variables, *(new for _, new in [*updates, *givens])]
    kept = [(each.variable, each.storage) for each in source.inputs if each.storage is not None]
    expressions, numbers, are_used = _host.without_row_numbers(
        expressions, [*givens, *kept], [each.variable for each in source.inputs]
    )
    if not numbers:
        return source, numbers
    new = iter(expressions)
    outputs.variables = [next(new) for _ in outputs.variables]
    updates = [(target, next(new)) for target, _ in updates]
    keywords = {**source.keywords, "givens": [(variable, next(new)) for variable, _ in givens]}
    if are_used:
        keywords["on_unused_input"] = "ignore"  # only the master uses the index
    return source._replace(updates=updates, keywords=keywords), numbers


def make_inputs(given, numbers, owner):
    """Return the inputs of a function, whose name is `owner`."""
    return InputsWithRowNumbers(given, numbers, owner) if numbers else Inputs(given, owner)


class InputsWithRowNumbers(Inputs):
    """The inputs of a function: `given` by the user, and then those for row numbers."""

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
