"""The choice of tests for the quick tier: ``make test`` leaves out `slow` and `thorough` ones.

The quick tier has each value of each parameter of a test, on the first layout of its file. All
other combinations are `thorough`, so only ``make test-all`` runs them. The marker `every` keeps all
combinations on that layout, for matrices that have found a defect; the marker `sample` keeps
some of them, for tests that take seconds each.
"""

import collections


def beyond_the_sample(items):
    """Return the items with combinations of parameters and layouts that are not sampled."""
    by_test = collections.defaultdict(list)
    for item in items:
        marked = item.get_closest_marker("slow") or item.get_closest_marker("thorough")
        if hasattr(item, "callspec") and not marked:
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
    """Return pairs (name, value) of a test's parameters; those parametrized together are one."""
    params = {name: id(value) for name, value in item.callspec.params.items() if name != "layout"}
    together = [marker.args[0] for marker in item.iter_markers("parametrize")]
    together = [names.split(",") if isinstance(names, str) else names for names in together]
    found = set()
    for names in [[name.strip() for name in names] for names in together]:
        found.add((tuple(names), tuple(params.pop(name) for name in names)))
    return found | set(params.items())


def _with_each_value(rows):
    """Return the numbers of a few rows that together have every member of any row.

    >>> _with_each_value([{("a", 0), ("b", 0)}, {("a", 0), ("b", 1)}, {("a", 1), ("b", 1)}])
    [0, 2]
    """
    if all(len(row) == 1 for row in rows):
        return sorted({value: number for number, [value] in [*enumerate(rows)][::-1]}.values())
    missing, chosen = set().union(*rows), []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(rows[number] & missing))
        chosen.append(best)
        missing -= rows[best]
    return chosen or [0]
