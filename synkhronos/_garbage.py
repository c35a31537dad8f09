"""What the master has released, and the workers are told of with the next command."""

import collections
import itertools

from synkhronos import _commands
from synkhronos._process import interrupts_held

AT_A_TIME = 1000  # the message must fit into the mailbox


class Garbage:
    """References that no object of the user's needs any more, by kind.

    The kinds are those of `_commands.Forget`, and ``"give_back"``: functions that give a block of
    memory back, to be called when no worker can be reading it.
    """

    def __init__(self):
        # Finalizers add to it at any moment, in any thread; so nothing here takes a lock.
        self._released = collections.deque()

    def __bool__(self):
        return bool(self._released)

    def add(self, kind: str, ref) -> None:
        """Keep a reference until it is collected."""
        self._released.append((kind, ref))

    def collect(self, gate, worker) -> None:
        """Have all ranks forget what was released, or some of it where it is very much."""
        if gate.is_open:
            gate.drain()
        released = list(itertools.islice(self._released, AT_A_TIME))
        kinds = "references", "functions", "variables"
        forget = _commands.Forget(
            **{each: tuple(ref for kind, ref in released if kind == each) for each in kinds}
        )
        with gate.call(forget):
            forget.run(worker)
        with interrupts_held():
            for _ in released:
                self._drop_first()

    def give_back(self) -> None:
        """Give all memory back, when there are no workers left; forget the rest."""
        while self._released:
            self._drop_first()

    def _drop_first(self):
        kind, value = self._released.popleft()
        if kind == "give_back":
            value()
