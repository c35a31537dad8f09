"""Registry of the functions and shared variables that the workers have or need.

The master sends a function when it is distributed or first called, and a shared variable with the
first function that uses it; after that only its key. The registry has weak references: when the
user drops a function or a variable, its finalizer adds the key to the session's garbage, and the
ranks forget it before the next command.
"""

import collections
import itertools
import weakref
from typing import Optional

from synkhronos import _host
from synkhronos._machine import devices
from synkhronos._machine.interrupts import interrupts_held, raised_here
from synkhronos._machine.log import log
from synkhronos._session import commands
from synkhronos._session.replica import PLAIN, Replica
from synkhronos._wording import sentence
from synkhronos.errors import WorkerError

AT_A_TIME = 1000  # references in one command, at most: it must fit into the mailbox
BYTES_AT_A_TIME = 64 << 20  # of variables: one command sends no more functions from then on


class Registry:
    """The functions and shared variables of one session."""

    def __init__(self, session):
        self._session = session
        self._keys = itertools.count()
        self._functions = weakref.WeakValueDictionary()
        self._data = weakref.WeakValueDictionary()
        self.pending = {}  # key of a function -> its variants that the workers lack
        # Key of a function -> its Recipe. Weak: the user's operations in a recipe may hold the
        # function.
        self._recipes = weakref.WeakValueDictionary()
        self._is_mixed = len({devices.kind(device) for device in session.devices}) > 1
        self._variable_keys = weakref.WeakKeyDictionary()
        self._finalizers = {}  # key of a function -> its finalizer
        self.n_distributed = 0  # all functions that the workers have ever got

    def add_function(self, function, compiled, description, recipe) -> int:
        """Register a function; the next `distribute` sends it. Return its key."""
        key = next(self._keys)
        self._session.worker.replicas[key] = Replica(key, description)
        self._recipes[key] = recipe
        self._functions[key] = function
        # It keeps the registry and the session alive until the function is dropped, or `release`.
        finalizer = self._finalizers[key] = weakref.finalize(function, self._drop_function, key)
        finalizer.atexit = False
        self.add_variant(key, PLAIN, compiled)
        return key

    def add_variant(self, key, variant, compiled) -> None:
        self._session.worker.replicas[key].variants[variant] = compiled
        self.pending.setdefault(key, []).append(variant)

    def _drop_function(self, key):
        # A finalizer may run at any moment: each step is one atomic operation of a dict or deque.
        self._session.worker.replicas.pop(key, None)
        self.pending.pop(key, None)
        self._finalizers.pop(key, None)
        self._session.garbage.add("functions", key)

    def distribute(self, only: Optional[int] = None) -> None:
        """Send the workers all functions that they lack, or one, with the variables they lack."""
        self._session.require_open()
        for keys in [[only]] if only is not None else self._groups(list(self.pending)):
            try:
                self._send(keys)
            except (TypeError, WorkerError):
                if len(keys) == 1:
                    raise
                for key in keys:  # so the error names the one that can't be sent
                    self._send([key])

    def _groups(self, keys):
        """Yield lists of functions to send together, of limited size with their new variables."""
        group, nbytes, counted = [], 0, {}
        for key in keys:
            replica = self._session.worker.replicas.get(key)
            compiled = list(replica.variants.values()) if replica else []
            for variable in itertools.chain(*(each.get_shared() for each in compiled)):
                if variable not in self._variable_keys and id(variable) not in counted:
                    counted[id(variable)] = variable  # keep it, so that no other gets its id
                    nbytes += getattr(_host.peek(variable), "nbytes", 0)
            group.append(key)
            if nbytes > BYTES_AT_A_TIME or len(group) == AT_A_TIME or self._is_mixed:
                yield group
                group, nbytes = [], 0
        if group:
            yield group

    def _send(self, keys):
        compiled, used, names = {}, [], {}
        for key in keys:
            variants, replica = self.pending.get(key), self._session.worker.replicas.get(key)
            if not (variants and replica):
                continue  # the user has dropped it
            for variant in list(variants):
                function = replica.variants[variant]
                compiled[key, variant] = function, replica.description
                used += function.get_shared()
            names[key] = str(replica.variants[variants[0]].name)
        if not names:
            return
        listed = ", ".join(names.values())
        what = f"Function {listed!r}" if len(names) == 1 else f"{len(names)} functions"
        nbytes = self._ship(compiled, used, what)
        for key in names:
            self.n_distributed += PLAIN in self.pending.pop(key, ())
        log.info("distributed %s, %d bytes", listed, nbytes)

    def keys_of(self, variables) -> tuple:
        """Return the keys of shared variables; first send the workers those that they lack."""
        keys = self._variable_keys
        if any(variable not in keys for variable in variables):
            self._ship({}, variables, "A shared variable")
        return tuple([keys[variable] for variable in variables])

    def is_sent(self, variable) -> bool:
        return variable in self._variable_keys

    def _ship(self, compiled, variables, what):
        """Send compiled functions, and the variables that are new; return the number of bytes."""
        recording = self._session.recording
        if recording is None:
            return self._send_pickled(compiled, variables, what)
        with self._session.lock, recording.call("distribute()"):
            return self._send_pickled(compiled, variables, what)

    def _send_pickled(self, compiled, variables, what):
        known = {key: variable for variable, key in self._variable_keys.items()}
        lacking = {id(each): each for each in variables if each not in self._variable_keys}
        new = {next(self._keys): variable for variable in lacking.values()}
        try:
            pickled = _host.dump(compiled, known, new)
            portable = None
            if self._is_mixed:
                expressions = {
                    (key, variant): (self._recipes[key].expression(variant, function), description)
                    for (key, variant), (function, description) in compiled.items()
                }
                portable = _host.dump(expressions, known, new, portable=True)
        except raised_here(Exception) as error:
            raise TypeError(
                f"{what} can't be sent to the workers, because something in it can't be pickled: "
                f"{sentence(error)}"
            ) from error
        memory = self._session.comm.memory
        # Only this frame holds the blocks: their memory is freed on return.
        blocks = [memory.wrap(data) for data in (pickled, portable) if data]
        self._session.run(commands.LoadFunctions(*[reference for _, reference in blocks]))
        # Now the workers have them. After a Ctrl-C before this line, the next call sends the
        # variables again, with new keys.
        with interrupts_held():
            for key, variable in new.items():
                self._session.worker.variables[key] = variable
                finalizer = weakref.finalize(variable, self._session.garbage.add, "variables", key)
                finalizer.atexit = False
                _host.spread_random_state(variable, self._session.master_rank)
                self._session.changes.watch(key, variable)
                self._variable_keys[variable] = key
        return len(pickled)

    def is_updated(self, variable) -> bool:
        """Return whether a function updates this shared variable."""
        return any(variable in recipe.updated for recipe in list(self._recipes.values()))

    def functions(self) -> list:
        return _alive(self._functions.valuerefs())

    def add_data(self, data) -> None:
        self._data[next(self._keys)] = data

    def data(self) -> list:
        return _alive(self._data.valuerefs())

    def has_data(self) -> bool:
        return any(each.alloc_size for each in self.data())

    def variables(self) -> list:
        return _alive(self._variable_keys.keyrefs())

    def unwatch(self) -> None:
        """Stop noticing what the script sets."""
        for variable in self.variables():
            _host.unwatch(variable)

    def free_staged(self) -> None:
        """Free the shared memory that functions keep for plain inputs, which each call copies."""
        for function in self.functions():
            # A function that another thread is making has no session and no memory yet.
            if getattr(function, "_session", None) is self._session:
                function._release()

    def release(self) -> None:
        """Free the shared memory that functions keep for plain inputs; forget the functions."""
        self.free_staged()
        for finalizer in list(self._finalizers.values()):
            finalizer.detach()
        self._finalizers.clear()


def _alive(references):
    # `references` is a copy, made in one step, because other threads may add to the registry.
    objects = [reference() for reference in references]
    return [each for each in objects if each is not None]


class Garbage:
    """References that the user's objects no longer need."""

    def __init__(self):
        # Finalizers add to it at any moment, in any thread. So no method takes a lock: a finalizer
        # that interrupts the method would wait for it for ever.
        self.released = collections.deque()

    def add(self, kind: str, ref) -> None:
        """Keep a reference, of a kind of `commands.Forget`, until `collect`.

        Or, of the kind "give_back", a function that frees memory, until no worker can read it.
        """
        self.released.append((kind, ref))

    def collect(self, gate, run_on_all, worker) -> None:
        """Run `Forget` on all ranks, for at most AT_A_TIME references that were released."""
        if gate.is_in_call:
            gate.drain()
        # By number, because an iterator would raise if a finalizer adds a reference.
        n_released = min(len(self.released), AT_A_TIME)
        released = [self.released[number] for number in range(n_released)]
        kinds = "references", "functions", "variables"
        forget = commands.Forget(
            **{each: tuple(ref for kind, ref in released if kind == each) for each in kinds}
        )
        run_on_all(gate, forget, worker)
        # All workers have ended every call that could read the memory. After a Ctrl-C in the
        # command, the next one forgets the references again, which does no harm.
        with interrupts_held():
            for _ in released:
                self._drop_first()

    def give_back(self) -> None:
        """Free all memory, after the last worker has ended; drop all references."""
        while self.released:
            self._drop_first()

    def _drop_first(self):
        kind, value = self.released.popleft()
        if kind == "give_back":
            value()
