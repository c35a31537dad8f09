"""The conformance suite of groups: what each method does, on all kinds and numbers of ranks."""

import os
import re
import signal
import time
from unittest import mock

import numpy as np
import psutil
import pytest
from support.expected import combined, dtypes_of, tolerance
from support.groups import Machines, MachinesJob, crew_of, has_ended, run
from support.launching import needs_mpirun
from support.waiting import wait_until

from synkhronos._arithmetic import operations
from synkhronos._arithmetic.operations import OPERATIONS, ReduceOperation
from synkhronos._machine.log import log
from synkhronos.comm import Aborted
from synkhronos.parameter_server.group import one_machine as shared_group
from synkhronos.parameter_server.group.carrier import GroupCarrier
from synkhronos.parameter_server.group.interface import RankLost, WaitedTooLong

ON_MACHINES = [
    pytest.param(
        Machines(ranks), marks=[needs_mpirun, pytest.mark.mpi, pytest.mark.slow("starts mpirun")]
    )
    for ranks in ([[0], [1]], [[0, 2], [1]], [[0, 1], [2, 3]], [[0], [1], [2]])
]
all_sizes = pytest.mark.parametrize("size", [1, 2, 3, 4, *ON_MACHINES], ids=repr)
several = pytest.mark.parametrize("size", [2, 3, 4, *ON_MACHINES], ids=repr)
DTYPES = ["float16", "float32", "float64", "complex64", "int8", "int64", "uint8", "bool"]


@pytest.fixture(autouse=True, scope="module")
def jobs():
    yield
    MachinesJob.end_all()


def of(rank, dtype, size=1000):
    """Return the array of a rank: numbers of which sums and products are exact."""
    return ((np.arange(size) + rank) % 4 + 1).astype(dtype)


@all_sizes
def test_who_is_where(size):
    found = run(size, lambda group: (group.rank, group.size, len(group.hosts), group.losses))
    assert found == [(rank, size, size, {}) for rank in range(size)]


@all_sizes
def test_values_are_gathered_in_the_order_of_ranks(size):
    values = [None, "text", {"a": [1.5]}, b"x" * 3_000_000, np.arange(5)]

    def gather(group):
        return [group.all_gather((group.rank, value)) for value in values]

    for found in run(size, gather):
        for value, everyone in zip(values, found):
            assert [rank for rank, _ in everyone] == list(range(size))
            assert all(np.array_equal(each, value) for _, each in everyone)


@all_sizes
def test_a_rank_that_is_ahead_overwrites_nothing(size):
    def gather(group):
        found = []
        for number in range(200):
            if number % size == group.rank:
                time.sleep(0.0005)
            found.append(group.all_gather(number * 10 + group.rank))
        return found

    wanted = [[number * 10 + rank for rank in range(size)] for number in range(200)]
    assert run(size, gather) == [wanted] * size


@all_sizes
def test_one_value_goes_to_all(size):
    root = size - 1
    found = run(size, lambda group: group.broadcast(f"of {group.rank}", root))
    assert found == [f"of {root}"] * size


@all_sizes
def test_reductions_are_those_of_numpy_with_the_same_bits_on_all_ranks(size):
    cases = [(op, dtype) for op in OPERATIONS for dtype in dtypes_of(op, DTYPES)]

    def reduce(group):
        found = {}
        for op, dtype in cases:
            for length in (1000, 1, 0, 70_001):
                array = group.allocate(length, dtype)
                array[...] = of(group.rank, dtype, length)
                group.all_reduce(array, op)
                found[op, dtype, length] = array.copy()
        return found

    everyone = run(size, reduce)
    for (op, dtype, length), array in everyone[0].items():
        parts = [of(rank, dtype, length) for rank in range(size)]
        wide = [part.astype("float32") for part in parts] if dtype == "float16" else parts
        total = combined("sum", wide) / size if op == "avg" else combined(op, wide)
        np.testing.assert_allclose(array, total.astype(dtype), rtol=tolerance(op, dtype))
        assert all(array.tobytes() == each[op, dtype, length].tobytes() for each in everyone)


@all_sizes
def test_reductions_in_16_bits(size):
    """Also by an operator that must not get scaled numbers, in each process."""
    added = {"logsumexp": ReduceOperation(np.logaddexp, lambda dtype: -np.inf, kinds="f")}

    def reduce(group):
        operations.OPERATIONS.update(added)
        array, found = group.allocate(1000, "float32"), {}
        for op in operations.OPERATIONS:
            array[...] = of(group.rank, "float32") + 8
            group.all_reduce(array, op, sixteen_bits=True)
            found[op] = array.copy()
        return found

    class Carrier(GroupCarrier):
        def __init__(self, *arguments):
            operations.OPERATIONS.update(added)
            super().__init__(*arguments)

    reduce.carrier = Carrier
    with mock.patch.dict(OPERATIONS, added):
        for found in run(size, reduce):
            for op, array in found.items():
                total = combined(op, [of(rank, "float64") + 8 for rank in range(size)])
                np.testing.assert_allclose(array, total / (size if op == "avg" else 1), rtol=1e-3)


@all_sizes
def test_arrays_of_different_sizes_are_refused(size):
    def allocate(group):
        with pytest.raises(ValueError, match="other arguments on other ranks"):
            group.allocate(5 + group.rank, "float32")
        return group.all_gather(1)  # the group goes on

    if size > 1:
        assert run(size, allocate) == [[1] * size] * size


@all_sizes
def test_messages_come_in_order_and_once(size):
    """Each rank sends to all, itself too, small and large arrays, and all kinds of objects."""
    count = 30

    def talk(group):
        for number in range(count):
            large = np.full(20_000 * (number % 3), number, "float32")
            for rank in range(size):
                group.send(rank, number, large, {"rows": np.arange(number)})
        found = {rank: [] for rank in range(size)}
        while sum(map(len, found.values())) < count * size:
            rank, (number, large, more) = group.receive(30.0)
            assert (large == number).all() and len(large) == 20_000 * (number % 3)
            assert np.array_equal(more["rows"], np.arange(number))
            found[rank].append(number)
        group.barrier()  # none leaves before
        return found

    assert run(size, talk) == [{rank: list(range(count)) for rank in range(size)}] * size


@all_sizes
def test_shared_memory_is_sent_without_a_copy(size):
    def talk(group):
        array = group.allocate(100_000, "float64")
        array[...] = group.rank
        group.barrier()
        for rank in range(size):
            if rank != group.rank:
                group.send(rank, array[500:])
        total = 0.0
        for _ in range(size - 1):
            _, (other,) = group.receive(30.0)
            assert other.shape == (99_500,)
            total += other.mean()
        group.barrier()
        return total

    assert run(size, talk) == [sum(range(size)) - rank for rank in range(size)]


@all_sizes
def test_nothing_has_come(size):
    assert run(size, lambda group: (group.receive(0.01), group.barrier())) == [(None, None)] * size


@several
def test_a_message_of_one_rank_is_waited_for(size):
    """Others may have sent something, or left; a rank that is silent, or has left, is told."""

    def wait(group):
        if group.rank:
            group.barrier()
            group.send(0, "late" if group.rank == size - 1 else "early")
            return group.receive_from(0)
        group.patience = 0.1
        with pytest.raises(WaitedTooLong, match=rf"waited 0 s for the {size - 1}th"):
            group.receive_from(size - 1, f"the {size - 1}th")
        group.patience = 30.0
        group.barrier()
        found = group.receive_from(size - 1)
        for rank in range(1, size):
            group.send(rank, "bye")
        with pytest.raises(RankLost, match=f"rank {size - 1} has died"):
            group.receive_from(size - 1)
        return found

    assert run(size, wait) == [("late",), *[("bye",)] * (size - 1)]


@all_sizes
def test_a_rank_that_leaves_is_told_and_not_lost(size):
    def leave(group):
        if group.rank:
            group.send(0, "last", np.zeros(50_000))
            return None
        found = [group.receive(30.0) for _ in range(2 * (size - 1))]
        last = {rank for rank, message in found if message is None}
        return last, group.losses

    found = run(size, leave)
    if size > 1:
        assert found[0] == ({*range(1, size)}, {})


@pytest.mark.parametrize("size", ON_MACHINES[-1:], ids=repr)
def test_a_rank_may_leave_before_others_have_the_last_answer(size):
    def gather(group):
        return group.all_gather(group.rank)

    class Carrier(GroupCarrier):
        """On machine 1 it gets the question of machine 2 after the end of rank 0."""

        late = None

        def from_machine_asked(self, machine, number, question):
            if (self.machine, machine) == (1, 2):
                self.late = machine, number, question
            else:
                super().from_machine_asked(machine, number, question)

        def from_machine_gone(self, machine, rank, why):
            if machine == 2:  # a question comes before the end of its rank
                self.take_late()
            super().from_machine_gone(machine, rank, why)
            if rank == 0:
                time.sleep(0.2)  # rank 1 has read of it
                self.take_late()

        def take_late(self):
            if self.late:
                super().from_machine_asked(*self.late)
                self.late = None

    gather.carrier = Carrier
    assert run(size, gather) == [[0, 1, 2]] * 3


@several
def test_a_death_ends_collectives_and_is_told_after_the_last_message(size):
    def work(group):
        if group.rank == size - 1:
            group.send(0, "before")
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankLost) as raised:
            group.barrier()
        assert raised.value.rank == size - 1 and "has died" in str(raised.value)
        came = []
        while not came or came[-1] is not None:
            rank, message = group.receive(10.0)
            came += [message] * (rank == size - 1)  # others may have left by now
        assert came == [("before",)] * (group.rank == 0) + [None]
        group.send(size - 1, "to nobody", np.zeros(50_000))
        return group.losses

    with crew_of(size, work) as crew:
        assert crew.results() == [{size - 1: "has died"}] * (size - 1) + [None]


@several
def test_a_barrier_to_which_all_have_come_ends_well_although_one_dies_then(size):
    # Not on the machine of rank 0, which speaks for its machine and is stopped.
    dies = size.ranks[-1][-1] if isinstance(size, Machines) else size - 1

    def work(group):
        pids = group.all_gather(os.getpid())
        if group.rank == dies:
            time.sleep(0.2)  # until rank 0 sleeps in the barrier
            stopped = psutil.Process(pids[0])
            stopped.suspend()
            wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
            group.barrier()
            os._exit(0)
        group.barrier()
        while not group.losses:
            group.receive(10.0)
        return group.losses

    with crew_of(size, work) as crew:
        pids = crew.pids
        wait_until(lambda: has_ended(pids[dies]))
        os.kill(pids[0], signal.SIGCONT)
        wanted = [None if rank == dies else {dies: "has died"} for rank in range(size)]
        assert crew.results() == wanted


@several
def test_others_go_on_without_a_rank_that_was_lost(size):
    def work(group):
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        found, has_ended = [], False
        while not has_ended:
            rank, message = group.receive(10.0)
            has_ended = (rank, message) == (1, None)
            found += [int(message[1][0])] if message else []
        others = [rank for rank in range(size) if rank not in (1, group.rank)]
        for rank in others:
            group.send(rank, "hello", np.full(40_000, group.rank))
        while len(found) < len(others):
            found.append(int(_next_message(group)[1][0]))
        return sum(found)

    with crew_of(size, work) as crew:
        alive = {*range(size)} - {1}
        wanted = [sum(alive) - rank if rank != 1 else None for rank in range(size)]
        assert crew.results() == wanted


@several
def test_a_rank_that_raises_ends_the_collectives_of_all(size):
    """None leaves before all have heard: then it would be lost."""
    others = [rank for rank in range(size) if rank != 1]

    def work(group):
        if group.rank == 1:
            group.abort()
            heard = [_next_message(group) for _ in others]
            for rank in others:
                group.send(rank, "bye")
            return heard
        for _ in range(2):
            with pytest.raises(Aborted):
                group.all_gather(group.rank)
        group.send(1, "heard")
        return _next_message(group)

    bye = ("bye",)
    assert run(size, work) == [bye, [("heard",)] * (size - 1), *[bye] * (size - 2)]


@several
def test_a_wait_has_an_end(size):
    def work(group):
        if group.rank:
            return _next_message(group)
        group.patience = 0.5
        with pytest.raises(WaitedTooLong, match=r"waited 0 s for rank \d.*stopped"):
            group.barrier()
        for rank in range(1, size):
            group.send(rank, "go on")
        return None

    assert run(size, work) == [None] + [("go on",)] * (size - 1)


@several
def test_a_long_wait_is_told(size):
    def work(group):
        shared_group.WARN_SECONDS = 0.2
        if group.rank:
            assert _next_message(group) == ("warned",)
            return group.barrier()
        said = []

        def tell_all(record):
            said.append(record.getMessage())
            for rank in range(1, size) if len(said) == 1 else ():
                group.send(rank, "warned")
            return True

        log.addFilter(tell_all)
        group.barrier()
        assert re.match(r"has waited \d+ s for rank \d", said[0]) and "goes on after" in said[-1]
        return None

    run(size, work)


@all_sizes
def test_memory_of_messages_is_used_again(size):
    def talk(group):
        before = _descriptors()
        for _ in range(100):
            group.send((group.rank + 1) % size, np.zeros(100_000))
            assert group.receive(30.0) is not None
        group.receive(0.2)  # gives back what the last one has held
        return _descriptors() - before

    assert all(more <= 25 for more in run(size, talk))


@several
@pytest.mark.parametrize("leaves", [True, False])
def test_large_messages_outlive_their_sender(size, leaves):
    def work(group):
        if group.rank == 1:
            group.send(0, np.full(100_000, 7.0))
            group.send(0, "last word")
            if leaves:
                group.close(0.0)
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank:
            return None
        time.sleep(0.3)
        for _ in range(3):
            group.send(1, "too late")  # what came before is not lost
        found = []
        while not found or found[-1] is not None:
            rank, message = group.receive(10.0)
            found += [message] * (rank == 1)
        (array,), word, _ = found
        assert word == ("last word",)
        return array.shape, group.losses

    with crew_of(size, work) as crew:
        assert crew.results()[0] == ((100_000,), {} if leaves else {1: "has died"})


@several
def test_a_value_that_is_gathered_outlives_its_sender(size):
    def work(group):
        found = group.gather(np.full(1_000_000, group.rank))
        return found if found is None else [int(each[-1]) for each in found]

    assert run(size, work) == [[*range(size)]] + [None] * (size - 1)


@several
def test_what_does_not_fit_into_a_socket_goes_on_in_a_barrier(size):
    def work(group):
        others = [rank for rank in range(size) if rank != group.rank]
        for rank in others:
            group.send(rank, b"x" * 5_000_000)  # in the message itself, as it is no array
        if group.rank == 0:
            group.barrier()
        came = [len(_next_message(group)[0]) for _ in others]
        if group.rank:
            group.barrier()
        return came

    assert run(size, work) == [[5_000_000] * (size - 1)] * size


@several
def test_another_array_on_other_ranks_is_refused_on_all(size):
    def work(group):
        one, other = group.allocate(3, "float64"), group.allocate(3, "float64")
        with pytest.raises(ValueError, match="another array on other ranks"):
            group.all_reduce(one if group.rank else other)
        one[...] = 1
        group.all_reduce(one)
        return one.tolist(), other.tolist()

    assert run(size, work) == [([size] * 3, [0] * 3)] * size


@all_sizes
def test_misuse_is_told(size):
    def work(group):
        array = group.allocate(4, "float32")
        if size > 1:
            with pytest.raises(ValueError, match=r"arrays of allocate\(\), not views"):
                group.all_reduce(array[:2])
        group.send(group.rank, array)
        array[...] = 5
        assert not group.receive(5.0)[1][0].any()  # a copy
        group.close()
        group.close()
        if size > 1:
            for call in (group.barrier, lambda: group.send(0, 1), lambda: group.receive(0)):
                with pytest.raises(RuntimeError, match="the group is closed"):
                    call()

    run(size, work)


@several
def test_a_rank_that_has_left_comes_to_no_barrier(size):
    def work(group):
        if group.rank != 1:
            with pytest.raises(RankLost, match=r"rank \d has left"):  # others leave after rank 1
                group.barrier()

    run(size, work)


def _next_message(group):
    """Return the next message of a rank; others may leave before."""
    while True:
        _, message = group.receive(20.0)
        if message is not None:
            return message


def _descriptors():
    return len(os.listdir("/proc/self/fd"))
