"""Find all objects of some classes, while other threads run.

`gc.get_objects` returns a list that also refers to tuples that other threads are still building. A
thread that enlarges such a tuple gets a SystemError. So the list is made, read and dropped within
one call of C code, in which no other thread runs.
"""

import gc
from itertools import chain, compress, repeat


def instances_of(*kinds: type) -> list:
    """Return all objects of these classes, without those of subclasses."""
    # Each object comes twice: the class of the first is compared, and the second is selected.
    twice = chain.from_iterable(map(repeat, _all_objects(), repeat(2)))
    is_wanted = map(set(kinds).__contains__, map(type, twice))
    return list(compress(twice, is_wanted))


def classes_of_all() -> set:
    """Return the classes that have objects."""
    return set(map(type, _all_objects()))


def _all_objects():
    """Return an iterator that makes the list of all objects first, and drops it at its end."""
    return chain.from_iterable(map(gc.get_objects, [None]))
