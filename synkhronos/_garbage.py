"""What the master has released, and the workers are told of with the next command."""

import collections
import itertools

from synkhronos import _commands
from synkhronos._process import interrupts_held

AT_A_TIME = 1000  # the message must fit into the mailbox


class Garbage:
    """References that no object of the user's needs any more, by kind.

    The kinds are those of `_commands.Forget`, and ``"give_back"``: functions that give a segment's
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
        dropped = {"segments": [], "functions": [], "variables": [], "give_back": []}
        for kind, value in released:
            dropped[kind].append(value)
        del dropped["give_back"]
        forget = _commands.Forget(**{kind: tuple(refs) for kind, refs in dropped.items()})
        with gate.call(forget):
            forget.run(worker)
        with interrupts_held():
            self.give_back(len(released))

    def give_back(self, count=None) -> None:
        """Give back the memory of the first `count` or all, which no worker reads any more."""
        while self._released and count != 0:
            kind, value = self._released.popleft()
            if kind == "give_back":
                value()
            count = count and count - 1
