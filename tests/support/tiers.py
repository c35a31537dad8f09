"""Which tests are in the quick tier: ``make test`` leaves out what is `slow` or `thorough`.

A test with parameters is there with each value of each of them, on the first layout of its file.
All other combinations are `thorough`, so are in ``make test-all`` only. A test that is marked
`every` is there with all combinations on that layout, if the matrix itself has found a defect; one
that is marked `sample` with so many, if each takes seconds.
"""

import collections


def beyond_the_sample(items):
    """Return those items that are a test's further combinations of parameters and layouts."""
    by_test = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            by_test[item.parent, item.originalname].append(item)
    return [item for each in by_test.values() for item in _rest(each)]


def _rest(items):
    layouts = {item: item.callspec.params.get("layout") for item in items}
    first = next(iter(layouts.values()))
    here = [item for item in items if layouts[item] == first]
    rest = [item for item in items if layouts[item] != first]
    if here[0].get_closest_marker("every"):
        return rest
    fewer = here[0].get_closest_marker("sample")
    if fewer:
        chosen = here[:: -(-len(here) // fewer.args[0])]
        return rest + [item for item in here if item not in chosen]
    chosen = set(_with_each_value([_values(item) for item in here]))
    return rest + [item for number, item in enumerate(here) if number not in chosen]


def _values(item):
    """Return what a test is given: a name of parameters that come together, and their values."""
    params = {name: id(value) for name, value in item.callspec.params.items() if name != "layout"}
    together = [marker.args[0] for marker in item.iter_markers("parametrize")]
    together = [names.split(",") if isinstance(names, str) else names for names in together]
    found = set()
    for names in [[name.strip() for name in names] for names in together]:
        found.add((tuple(names), tuple(params.pop(name) for name in names)))
    return found | set(params.items())


def _with_each_value(rows):
    """Return the numbers of some rows that together have all that is in any row.

    >>> _with_each_value([{("a", 0), ("b", 0)}, {("a", 0), ("b", 1)}, {("a", 1), ("b", 1)}])
    [0, 2]
    """
    missing, chosen = set().union(*rows), []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(rows[number] & missing))
        chosen.append(best)
        missing -= rows[best]
    return chosen or [0]
