"""The kinds of values that a variable of a serial graph has on the ranks: see `dividing`."""

SAME = "same"  # all ranks have the value that serial Theano has
ROWS = "rows"  # each rank has its rows of that value, along one axis
PART = "part"  # the values of all ranks add up to it
LENGTH = "length"  # a number that is proportional to the rank's number of rows
SHAPE = "shape"  # a vector, with a length at one position and else the same
POSITIONS = "positions"  # the numbers of the rank's rows, from 0 on each rank
STREAM = "stream"  # a random state
UNKNOWN = "unknown"  # no rule says; an error only if an operation needs it
