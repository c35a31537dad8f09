"""How a rank's own value is related to the serial one: a sum, an average, or neither.

    err ** 2 (rows) ──▶ sum (adds up) ──▶ / x.shape[0] (an average of the ranks) ──▶ "avg" is right
    m * err (rows)  ──▶ sum (adds up) ──▶ / m.sum() (neither)                    ──▶ no mode is

With n of N rows, numbers on a rank are often a power of N / n times the serial ones, such as the
gradient of a mean for each row: this power is the degree of a relation. `relating` has the rules by
which relations follow from one another.
"""

from typing import Any, NamedTuple, Optional

# How a rank's own value is related to the serial one, s; d is the degree.
SCALED = "scaled"  # own = s (N / n) ** d; of rows, for each row
ADDS = "adds"  # the sum of own (n / N) ** d over the ranks is s: a sum for 0, an average for 1
MERGED = "merged"  # s is the largest, or the smallest, of the own values, or their product
LENGTHS = "lengths"  # a shape, whose one item is the number of rows
OWN = "own"  # none of these
OPEN = "open"  # no rule says
MIXED = "mixed"  # the reason of OWN: a sum over rows plus a value that all ranks have


class Relation(NamedTuple):
    """The relation of a rank's own value to the serial one."""

    kind: str
    degree: int = 0
    mode: str = ""  # of what is merged: "max", "min" or "prod"
    axis: int = 0  # the position of the number of rows in a shape, of so many lengths
    n_lengths: Optional[int] = None
    cause: Any = None  # the variable at which a value became the rank's own, or open
    reason: str = ""  # why it is open, or the rank's own
    is_filled: bool = False  # whether all rows have the same value

    @property
    def is_equal(self):
        """Whether each rank has the serial value, or its rows of it."""
        return self.kind == SCALED and self.degree == 0

    @property
    def is_proportional(self):
        """Whether it is the serial value times a power of the rank's share of the rows."""
        return self.kind == SCALED

    @property
    def is_own(self):
        """Whether it is the rank's own, and no reduction makes the serial value of it."""
        return self.kind == OWN

    @property
    def is_mixed(self):
        """Whether ranks add something that all of them have to a sum over their rows."""
        return self.is_own and self.reason == MIXED

    @property
    def is_open(self):
        """Whether no rule says what it is."""
        return self.kind == OPEN

    @property
    def right_mode(self):
        """The mode that makes the serial value, if it is not of rows; None if no mode does."""
        if self.kind == ADDS:
            return {0: "sum", 1: "avg"}.get(self.degree)
        if self.kind == MERGED:
            return self.mode
        if self.kind == SCALED:
            return {0: "avg", -1: "sum"}.get(self.degree)
        return None


EQUAL = Relation(SCALED)


def no_rule(cause=None, reason=""):
    """Return the relation of a variable without a rule; `cause` is the first such variable."""
    return Relation(OPEN, cause=cause, reason=reason)


def worst_of(given):
    """Return the first relation that is the rank's own or open, else None."""
    for kind in (OPEN, OWN):
        for each in given:
            if each.kind == kind:
                return each
    return None


def summed(relation):
    """Return the relation of a sum over rows that have a relation."""
    if relation.kind != SCALED:
        return relation
    if relation.is_filled:
        return Relation(SCALED, relation.degree - 1)
    return Relation(ADDS, relation.degree)


def _as_sum(relation):
    """Return the relation to a sum of a value that all ranks have: ADDS."""
    return Relation(ADDS, relation.degree + 1) if relation.kind == SCALED else relation


def joint(given):
    """Return the relation of a result that is linear in several values together, as a sum is."""
    worst = worst_of(given)
    if worst is not None:
        return worst
    if len(given) > 1 and any(each.kind == MERGED for each in given):
        return Relation(OWN)  # the largest sum is not the sum of the largest
    if any(each.kind == ADDS for each in given):
        given = [_as_sum(each) for each in given]
    first = given[0]._replace(is_filled=all(each.is_filled for each in given))
    if all(each[:3] == first[:3] for each in given):
        return first
    degrees = {each.degree for each in given if each.kind == ADDS}
    return Relation(OWN, reason=MIXED if degrees == {0, 1} else "")


def product(given):
    """Return the relation of a result that is linear in each of several values, as a product is."""
    worst = worst_of(given)
    if worst is not None:
        return worst
    if any(each.kind not in (SCALED, ADDS) for each in given):
        return Relation(OWN)
    degree, n_sums = sum(each.degree for each in given), sum(r.kind == ADDS for r in given)
    if n_sums > 1:
        return Relation(OWN)
    return Relation(ADDS if n_sums else SCALED, degree)
