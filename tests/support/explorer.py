"""An explorer of every interleaving of a few processes that share memory.

A process is a generator: it yields each step that it takes outside its own variables, and is sent
the result. The explorer makes a finite automaton of it, whose state is the generator's line and the
values of its variables. Breadth first, it visits all states of all processes and the memory between
them. Processors delay stores like x86: each process has a first-in-first-out buffer of stores, and
no other process sees a store until it reaches memory, at any time.

Only lines and variables tell states apart, so a process must put a result into a variable, or use
it before the next yield.
"""

from collections import deque
from typing import NamedTuple

READ, WRITE, FENCE, WAKE, POLL, EMPTY_PIPE = "read", "write", "fence", "wake", "poll", "empty pipe"
DEATHS, KILL, EXIT, CHOOSE, STEP = "look for deaths", "kill all", "exit", "choose", "step"
NOTE, PEEK, ENDED, VIOLATED = "note", "peek", "ended", "violated"
WOKEN, DIED = 1, 2  # bits of the result of poll
INTERRUPT = "Ctrl-C"


class Violation(BaseException):
    """A property does not hold; the message ends with the steps that lead there."""


def read(cell):
    return READ, cell


def write(cell, value):
    return WRITE, cell, value


def choose(*options):
    """Continue with each of these options; all but the first count as errors."""
    return CHOOSE, options


def note(cell, value):
    """Write a cell that only properties read: at once, past the buffer, without a step."""
    return NOTE, cell, value


def peek(cell):
    """Read a cell from memory for a property, without a step."""
    return PEEK, cell


class Automaton:
    """The states of a generator, as numbers, each with the request that it yields there."""

    def __init__(self, program):
        self._program = program
        self._numbers, self._histories, self._edges = {}, [], {}
        self.requests = []
        self.first = self._reach(())

    def after(self, state, response):
        """Return the state after `state`, if the request there has this result."""
        edge = state, response
        found = self._edges.get(edge)
        if found is None:
            found = self._edges[edge] = self._reach((*self._histories[state], response))
        return found

    def _reach(self, history):
        generator = self._program()
        try:
            request = next(generator)
            for response in history:
                if response is INTERRUPT:
                    request = generator.throw(KeyboardInterrupt())
                else:
                    request = generator.send(response)
            place = _place(generator)
        except StopIteration as end:
            place = request = ENDED, end.value
        except Violation as violation:
            place = request = VIOLATED, str(violation)
        number = self._numbers.setdefault(place, len(self.requests))
        if number == len(self.requests):
            self.requests.append(request)
            self._histories.append(history)
        assert self.requests[number] == request, "variables do not tell these states apart"
        return number


def _place(generator):
    """Return the state of a generator: the lines and the variables of all its frames."""
    frames = []
    while generator is not None:
        variables = tuple(sorted((k, _plain(v)) for k, v in generator.gi_frame.f_locals.items()))
        frames.append((generator.__name__, generator.gi_frame.f_lasti, variables))
        generator = generator.gi_yieldfrom
    return tuple(frames)


def _plain(value):
    if isinstance(value, BaseException):
        return type(value).__name__
    if isinstance(value, dict):
        return tuple(sorted((k, _plain(v)) for k, v in value.items()))
    if hasattr(value, "__dict__"):
        return _plain(vars(value))
    return value


class State(NamedTuple):
    """A state of all processes and memory, and the numbers of mishaps that may still come."""

    memory: tuple
    places: tuple  # of each process: a state of its automaton, or None after its end
    buffers: tuple  # of each process: its stores (cell, value) not yet in memory, the oldest first
    woken: tuple  # of each process: whether its pipe holds anything
    crashes: int
    interrupts: int
    errors: int


class Explorer:
    """All states that can be reached; `states` and `steps` count them.

    Parameters
    ----------
    programs : list of callable
        Each returns a new generator of one process.
    cells : dict
        The first value of each cell, of the notes too.
    owners : dict
        The only process that writes a cell: it always reads its own last value there.
    master : int
        The process that learns of deaths, kills and is interrupted; the others learn of its death.
    check_rest : callable
        Takes the requests of the processes (None for ended ones) and the cells, in a state where no
        process can take a step; returns what is wrong, or None if that is a proper end.
    crashes, interrupts, errors : int
        The greatest number of each.
    heartbeat : bool
        Whether a poll may also end by itself. If not, a process that no process wakes is stuck.
    stores : int
        The size of the buffer of stores.
    ends : bool
        Whether to look for states that lead to no end; takes twice the memory.
    """

    def __init__(
        self,
        programs,
        cells,
        owners,
        master,
        check_rest,
        crashes=0,
        interrupts=0,
        errors=0,
        heartbeat=False,
        stores=1,
        ends=True,
    ):
        self._automata = [Automaton(program) for program in programs]
        self._number = {cell: i for i, cell in enumerate(cells)}
        self._owners, self._master = owners, master
        self._check_rest, self._heartbeat, self._room = check_rest, heartbeat, stores
        n = len(programs)
        first = State(
            tuple(cells.values()),
            tuple(automaton.first for automaton in self._automata),
            ((),) * n,
            (False,) * n,
            crashes,
            interrupts,
            errors,
        )
        self._before = {first: None}
        self._sources = {} if ends else None  # of each state: the states before it
        self._rests = []
        self.steps = 0

    @property
    def states(self):
        """The number of states that were found."""
        return len(self._before)

    def run(self):
        """Visit every state; raise Violation at the first that breaks a property."""
        [first] = self._before
        waiting = deque([first])
        while waiting:
            state = waiting.popleft()
            can_go_on = False
            for rank, _, after, is_own in self._moves(state):
                self.steps += 1
                if is_own:
                    can_go_on = True
                    if self._sources is not None:
                        self._sources.setdefault(after, []).append(state)
                if after not in self._before:
                    self._before[after] = state
                    waiting.append(after)
                    request = self._request(after, rank)
                    if request is not None and request[0] == VIOLATED:
                        self._tell(request[1], after)
            if self._heartbeat or not can_go_on:
                cells = {cell: state.memory[i] for cell, i in self._number.items()}
                wrong = self._check_rest([self._request(state, r) for r in self._ranks()], cells)
                if not wrong:
                    self._rests.append(state)
                elif not can_go_on:
                    self._tell(wrong, state)
        if self._sources is not None:
            self._check_ends()
        return self

    def _check_ends(self):
        ending = set(self._rests)
        waiting = deque(ending)
        while waiting:
            for source in self._sources.get(waiting.popleft(), ()):
                if source not in ending:
                    ending.add(source)
                    waiting.append(source)
        for state in self._before:
            if state not in ending:
                self._tell("livelock: this has no end", state)

    def _ranks(self):
        return range(len(self._automata))

    def _request(self, state, rank):
        place = state.places[rank]
        return None if place is None else self._automata[rank].requests[place]

    def _tell(self, wrong, state):
        lines = []
        while self._before[state] is not None:
            before = self._before[state]
            rank, what = next(move[:2] for move in self._moves(before) if move[2] == state)
            if what == "store":
                cell, value = before.buffers[rank][0]
                what = f"store {list(self._number)[cell]} {value}"
            elif isinstance(what, tuple):
                (kind, *arguments), response = what
                arrow = [] if response is None else ["->", response]
                what = " ".join(map(str, (kind, *arguments, *arrow)))
            lines.append(f"  rank {rank}: {what}")
            state = before
        raise Violation("\n".join([wrong, *reversed(lines)]))

    def _moves(self, state):
        """Return the next steps: (rank, what, next state, whether it is a step and no mishap)."""
        requests = [self._request(state, rank) for rank in self._ranks()]
        for rank, request in enumerate(requests):
            if request is not None and self._is_private(state, rank, request):
                # No other process sees when this step is taken, so it is taken now only.
                return self._settled(self._own_moves(state, rank, request))
        moves = []
        for rank, request in enumerate(requests):
            if state.buffers[rank]:
                moves.append((rank, "store", self._store(state, rank), True))
            if request is None or request[0] in (ENDED, VIOLATED):
                continue
            moves += self._own_moves(state, rank, request)
            if state.crashes:
                # Its buffered stores are lost: it died before them.
                after = self._gone(state, rank)._replace(crashes=state.crashes - 1)
                moves.append((rank, "dies", after, False))
        return self._settled(moves)

    def _settled(self, moves):
        """Extend each move by the private steps with one outcome that follow it."""
        settled = []
        for rank, what, state, is_own in moves:
            request = self._request(state, rank)
            while request is not None and self._is_private(state, rank, request):
                following = self._own_moves(state, rank, request)
                if len(following) > 1:
                    break
                state = following[0][2]
                request = self._request(state, rank)
            settled.append((rank, what, state, is_own))
        return settled

    def _is_private(self, state, rank, request):
        kind = request[0]
        if kind == READ:
            return self._owners.get(request[1]) == rank
        if kind == WRITE:
            return len(state.buffers[rank]) < self._room
        if kind == FENCE:
            return not state.buffers[rank]
        return kind in (STEP, CHOOSE)

    def _own_moves(self, state, rank, request):
        moves = []
        if rank == self._master and state.interrupts:
            after = state._replace(interrupts=state.interrupts - 1)
            moves.append((rank, INTERRUPT, self._go_on(after, rank, INTERRUPT), False))
        kind = request[0]
        if kind == READ:
            outcomes = [(self._value(state, rank, request[1]), state)]
        elif kind == WRITE:
            outcomes = []
            if len(state.buffers[rank]) < self._room:
                store = self._number[request[1]], request[2]
                buffers = _put(state.buffers, rank, (*state.buffers[rank], store))
                outcomes = [(None, state._replace(buffers=buffers))]
        elif kind == FENCE:
            outcomes = [] if state.buffers[rank] else [(None, state)]
        elif kind == POLL:
            ready = WOKEN * state.woken[rank] + DIED * self._hears_of_death(state, rank)
            outcomes = [(ready, state)] if ready or self._heartbeat else []
        else:
            outcomes = self._rare(state, rank, request)
        for response, after in outcomes:
            moves.append((rank, (request, response), self._go_on(after, rank, response), True))
        return moves

    def _rare(self, state, rank, request):
        """Return the outcomes (response, state) of a request of the kinds that are rare."""
        kind = request[0]
        if kind == CHOOSE:
            first, *others = request[1]
            if not state.errors:
                return [(first, state)]
            after = state._replace(errors=state.errors - 1)
            return [(first, state), *((option, after) for option in others)]
        if kind == WAKE:
            return [(None, state._replace(woken=_put(state.woken, request[1], True)))]
        if kind == EMPTY_PIPE:
            return [(None, state._replace(woken=_put(state.woken, rank, False)))]
        if kind == DEATHS:
            return [(self._hears_of_death(state, rank), state)]
        if kind == KILL:
            for other in self._ranks():
                if other != rank:
                    state = self._gone(state, other)
        return [(None, state)]

    def _hears_of_death(self, state, rank):
        if rank != self._master:
            return state.places[self._master] is None
        return None in state.places

    def _value(self, state, rank, cell):
        number = self._number[cell]
        for stored, value in reversed(state.buffers[rank]):
            if stored == number:
                return value
        return state.memory[number]

    def _store(self, state, rank):
        (cell, value), *rest = state.buffers[rank]
        return state._replace(
            memory=_put(state.memory, cell, value),
            buffers=_put(state.buffers, rank, tuple(rest)),
        )

    def _gone(self, state, rank):
        return state._replace(
            places=_put(state.places, rank, None), buffers=_put(state.buffers, rank, ())
        )

    def _go_on(self, state, rank, response):
        """Return the state after the process has taken the response and made its notes."""
        automaton = self._automata[rank]
        place = automaton.after(state.places[rank], response)
        memory = state.memory
        while automaton.requests[place][0] in (NOTE, PEEK):
            kind, cell, *value = automaton.requests[place]
            number = self._number[cell]
            if kind == NOTE:
                memory = _put(memory, number, value[0])
            place = automaton.after(place, memory[number])
        if automaton.requests[place][0] == EXIT:
            return self._gone(state, rank)
        places = _put(state.places, rank, place)
        return State(memory, places, *state[2:])


def _put(values, position, value):
    return (*values[:position], value, *values[position + 1 :])
