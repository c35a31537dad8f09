"""Which functions and shared variables there are, and which of them the workers have.

A function is sent when it is distributed or first called, and a shared variable with the first
function that uses it; after that it is an id. Nothing here keeps them alive: what the user drops is
put on the session's garbage, and forgotten by the workers.
"""

import collections
import itertools
import weakref
from typing import Optional

from synkhronos import _host
from synkhronos._machine import devices
from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log
from synkhronos._rank import commands
from synkhronos._rank.replica import PLAIN, Replica
from synkhronos._wording import sentence

AT_A_TIME = 1000  # references in one command, which must fit into the mailbox


class Registry:
    """The functions and shared variables of one session."""

    def __init__(self, session):
        self._session = session
        self._keys = itertools.count()
        self._functions = weakref.WeakValueDictionary()
        self._data = weakref.WeakValueDictionary()
        self._pending = {}  # key of a function -> its variants that the workers lack
        # Key of a function -> how it is made, for other kinds of devices. Weak: what the user's
        # operations hold may be what holds the function.
        self._recipes = weakref.WeakValueDictionary()
        self._is_mixed = len({devices.kind(device) for device in session.devices}) > 1
        self._variable_keys = weakref.WeakKeyDictionary()

    def add_function(self, function, compiled, description, recipe) -> int:
        """Register a function of the master's; it is sent with the next `distribute`."""
        key = next(self._keys)
        self._session.worker.replicas[key] = Replica(key, description)
        self._recipes[key] = recipe
        self._functions[key] = function
        weakref.finalize(function, self._drop_function, key).atexit = False
        self.add_variant(key, PLAIN, compiled)
        return key

    def add_variant(self, key, variant, compiled) -> None:
        """Register another compiled form of a function."""
        self._session.worker.replicas[key].variants[variant] = compiled
        self._pending.setdefault(key, []).append(variant)

    def _drop_function(self, key):
        self._session.worker.replicas.pop(key, None)
        self._pending.pop(key, None)
        self._session.garbage.add("functions", key)

    def is_pending(self, key: int) -> bool:
        """Whether the workers lack this function."""
        return key in self._pending

    def distribute(self, only: Optional[int] = None) -> None:
        """Send the workers all functions that they lack, or one, with the variables they lack.

        One by one, so that what can't be sent is named, and keeps no other from being sent.
        """
        self._session.require_open()
        for key in [only] if only is not None else list(self._pending):
            variants, replica = self._pending.get(key), self._session.worker.replicas.get(key)
            if variants and replica:
                self._send(key, list(variants), replica)

    def _send(self, key_of_function, variants, replica):
        compiled = {
            (key_of_function, variant): (replica.variants[variant], replica.description)
            for variant in variants
        }
        name = replica.variants[variants[0]].name
        used = [v for function, _ in compiled.values() for v in _host.shared_variables(function)]
        recipe = self._recipes.get(key_of_function) if self._is_mixed else None
        nbytes = self._ship(compiled, used, f"Function {name!r}", recipe)
        self._pending.pop(key_of_function, None)
        log.info("distributed %s, %d bytes", name, nbytes)

    def keys_of(self, variables) -> tuple:
        """Return the keys of shared variables, after sending the workers those that they lack."""
        keys = self._variable_keys
        if any(variable not in keys for variable in variables):
            self._ship({}, variables, "A shared variable")
        return tuple([keys[variable] for variable in variables])

    def _ship(self, compiled, variables, what, recipe=None):
        """Send compiled functions, and the variables that are new; return the number of bytes."""
        recording = self._session.recording
        if recording is None:
            return self._send_pickled(compiled, variables, what, recipe)
        with self._session.lock, recording.call("distribute()"):
            return self._send_pickled(compiled, variables, what, recipe)

    def _send_pickled(self, compiled, variables, what, recipe):
        known = {key: variable for variable, key in self._variable_keys.items()}
        new = {}
        for variable in variables:
            if variable not in self._variable_keys and not any(
                variable is other for other in new.values()
            ):
                new[next(self._keys)] = variable
        try:
            pickled = _host.dump(compiled, known, new)
            portable = None
            if self._is_mixed:
                expressions = {
                    (key, variant): (recipe.expression(variant, function), description)
                    for (key, variant), (function, description) in compiled.items()
                }
                portable = _host.dump(expressions, known, new, portable=True)
        except Exception as error:
            raise TypeError(
                f"{what} can't be sent to the workers, because something in it can't be pickled: "
                f"{sentence(error)}"
            ) from error
        memory = self._session.comm.memory
        parcels = [memory.wrap(data) for data in (pickled, portable) if data]
        self._session.run(commands.LoadFunctions(*[reference for _, reference in parcels]))
        for key, variable in new.items():
            self._variable_keys[variable] = key
            self._session.worker.variables[key] = variable
            forgotten = weakref.finalize(variable, self._session.garbage.add, "variables", key)
            forgotten.atexit = False
            _host.spread_random_state(variable, self._session.master_rank)
        return len(pickled)

    # What the user has. Other threads may add to it meanwhile, so it is copied in one step.

    def functions(self) -> list:
        """Return all functions."""
        return _alive(self._functions.valuerefs())

    def add_data(self, data) -> None:
        """Remember a Data."""
        self._data[next(self._keys)] = data

    def data(self) -> list:
        """Return all Data."""
        return _alive(self._data.valuerefs())

    def variables(self) -> list:
        """Return all shared variables that the workers have."""
        return _alive(self._variable_keys.keyrefs())

    def release(self) -> None:
        """Have all functions let go of the shared memory that they keep."""
        for function in self.functions():
            function._release()


def _alive(references):
    found = [reference() for reference in references]
    return [each for each in found if each is not None]


class Garbage:
    """References that no object of the user's needs any more, by kind.

    The kinds are those of `commands.Forget`, and ``"give_back"``: functions that give a block of
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
        forget = commands.Forget(
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
