"""The values that a function's inputs have between calls: ``f.value`` and ``f.container``."""


class Values:
    """The values of inputs, by name, variable or position, and of shared variables: ``f.value``."""

    def __init__(self, function, inputs, shared):
        self._function, self._inputs, self._shared = function, inputs, shared

    def __getitem__(self, item):
        position, variable = self._find(item)
        return variable.get_value() if position is None else self._inputs.get(position)

    def __setitem__(self, item, value):
        position, variable = self._find(item)
        if position is None:
            raise TypeError(
                f"{variable} is a shared variable of {self._function}: set it on all ranks with "
                "synkhronos.broadcast(variable, value)."
            )
        if self._inputs.given[position].storage is not None:
            self._function._require_session()
        self._inputs.set(position, value)

    def __contains__(self, item):
        try:
            self._find(item)
        except TypeError:
            return False
        return True

    def _find(self, item):
        """Return the position of an input and None, or None and a shared variable."""

        def is_item(variable, name):
            return item is variable or (isinstance(item, str) and item == name)

        given = self._inputs.given
        positions = [
            position
            for position, each in enumerate(given)
            if is_item(each.variable, each.name) or (isinstance(item, int) and item == position)
        ]
        if len(positions) > 1:
            raise TypeError(f"{self._function} has several inputs of the name {item!r}.")
        if positions:
            return positions[0], None
        for variable in self._shared:
            is_storage = any(variable is each.storage for each in given)
            if is_item(variable, variable.name) and not is_storage:
                return None, variable
        raise TypeError(
            f"{self._function} has no input or shared variable {item!r}. It takes: {self._inputs}."
        )


class Containers:
    """The same values, each behind an object with a `value`: ``f.container``."""

    def __init__(self, values):
        self._values = values

    def __getitem__(self, item):
        self._values[item]  # raises TypeError for an unknown item
        return Container(self._values, item)

    def __contains__(self, item):
        return item in self._values


class Container:
    """One input of a function, whose `value` can be read, and set on all ranks."""

    def __init__(self, values, item):
        self._values, self._item = values, item

    @property
    def value(self):
        """The value of the input, as in ``f.value[...]``."""
        return self._values[self._item]

    @value.setter
    def value(self, value):
        self._values[self._item] = value

    data = value

    def __repr__(self):
        return f"<{self.value!r}>"
