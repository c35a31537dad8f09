"""All objects of some classes, found while other threads go on.

A list of all objects refers to tuples that other threads are making. They can't grow then: such a
thread gets a SystemError. So here no thread runs while there is such a list: it is made, gone
through and dropped inside one call of C.
"""

import gc
from itertools import chain, compress, repeat


def instances_of(*kinds: type) -> list:
    """Return all objects of these classes, without those of subclasses."""
    twice = chain.from_iterable(map(repeat, _all_objects(), repeat(2)))
    # For each object one of the two is looked at, and the other one selected.
    is_wanted = map(set(kinds).__contains__, map(type, twice))
    return list(compress(twice, is_wanted))


def classes_of_all() -> set:
    """Return the classes that have objects."""
    return set(map(type, _all_objects()))


def _all_objects():
    """Return an iterator that makes the list when it begins, and drops it at its end."""
    return chain.from_iterable(map(gc.get_objects, [None]))
