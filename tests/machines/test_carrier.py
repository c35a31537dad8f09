"""What a carrier keeps of calls and sessions that end early: in a process of its own, for MPI."""

import socket

import pytest
from support import hosts

from synkhronos.comm.channel import Channel
from synkhronos.comm.mpi.link import CarrierLink, JobEnded

pytestmark = pytest.mark.skipif(not hosts.mpirun().exists(), reason="needs Open MPI")

BEGIN = """
import os
import socket
from types import SimpleNamespace
import numpy as np
from synkhronos._machine.shared_memory import Segments
from synkhronos.comm.mpi.mesh import Mesh
from synkhronos.comm.mpi.carrier import _LEADER as leader, Carrier
from synkhronos.comm.mpi.transfers import PART
from synkhronos.comm.channel import Channel

ours, theirs = socket.socketpair()
rank = Channel(ours)
mesh = Mesh(SimpleNamespace(rank=0, size=1), None)
mesh.end = lambda machine, why: None
carrier = Carrier(mesh, theirs, socket.socket(socket.AF_UNIX))
reductions, fetches = carrier._reductions, carrier._fetches
carrier.n_machines, carrier.others = 2, [1]  # the other one is this script
told, under_way = [], []
carrier._tell = lambda machines, message: told.extend((each, *message) for each in machines)

class Request:
    is_done = False

    def __init__(self, *_):
        under_way.append(self)

def come():
    while any(not request.is_done for request in under_way):
        for request in under_way:
            request.is_done = True
        while carrier.move():
            pass
    carrier.move()

carrier.send = carrier.receive = Request
own = Segments()
segment = own.create(1 << 21)
place = segment.ref, "<f8", (200_000,), 0  # in two parts
large = ("<f8", 200_000)

def reduce(*id):
    reductions.from_rank_reduce(leader, id, [place], ["sum"], 1, large, False)

def copy(number, call):
    fetches.from_rank_copy(leader, number, call, 1, [place], [place])

def heard():
    return rank.receive()
"""


def run(script, text):
    return script(BEGIN + text).stdout.splitlines()


def test_an_aborted_call_leaves_nothing(script):
    lines = run(
        script,
        """
reduce(1, 1, 1)
copy(1, (1, 1))
copy(2, (1, 1))
reductions.from_machine_over(1, 1, 1, 0)
carrier.from_rank_settle(leader, "settled", 1, 1)
carrier.move()
print(heard())
# What the other machine sent before it heard of that:
reductions.from_machine_ready(1, (1, 1, 1), large, None)
fetches.from_machines["failed"](1, 1, "no room")
fetches.from_machine_coming(1, 2, [large], None, PART)
come()
print(reductions._rounds, reductions._ready)
print(fetches._under_way, carrier._moving, carrier._settling)
print(heard())
""",
    )
    assert lines[0] == "[('done', (1, 1, 1), 'given up')]"
    assert lines[1:3] == ["{} {}", "{} [] None"]
    assert lines[3] == "[('failed', 1, 'no room'), ('done', 2, None), ('done', 'settled', None)]"


def test_what_all_have_begun_ends_and_all_else_is_given_up(script):
    lines = run(
        script,
        """
reduce(1, 1, 1)
reduce(1, 1, 2)
reductions.from_machine_ready(1, (1, 1, 1), large, None)  # under way before the abort
carrier.move()
carrier.move()
reductions.from_rank_give_up(leader, 1, 1)
print(told[-1], heard())
reductions.from_machine_over(1, 1, 1, 1)  # the other machine has begun the first alone
print(heard())
reduce(1, 1, 3)
print(heard())
come()
print(heard())
reduce(1, 2, 1)  # the next call
print(heard(), list(reductions._rounds))
""",
    )
    assert lines == [
        "(1, 'over', 1, 1, 2) []",
        "[('done', (1, 1, 2), 'given up')]",
        "[('done', (1, 1, 3), 'given up')]",
        "[('done', (1, 1, 1), None)]",
        "[] [(1, 2, 1)]",
    ]


def test_a_call_is_settled_when_nothing_is_under_way_in_memory_of_ranks(script):
    lines = run(
        script,
        """
reduce(1, 1, 1)
reductions.from_machine_ready(1, (1, 1, 1), large, None)
carrier.move()
copy(7, (1, 1))
fetches.from_machine_coming(1, 1, [large], None, PART)
reductions.from_machine_over(1, 1, 1, 2)
carrier.from_rank_settle(leader, "settled", 1, 1)
carrier.move()
print(heard(), len(reductions._rounds), len(fetches._under_way))
come()
print(heard())
""",
    )
    assert lines[0] == "[] 1 1"
    assert "('done', 'settled', None)" in lines[1]
    assert "('done', 7, None)" in lines[1] and "(1, 1, 1)" in lines[1]


def test_what_a_session_leaves_goes_on_in_memory_that_goes_with_it(script):
    lines = run(
        script,
        """
reduce(1, 1, 1)
reductions.from_machine_ready(1, (1, 1, 1), large, None)
carrier.move()
reduce(1, 1, 2)
copy(1, (1, 1))
fetches.from_machine_coming(1, 1, [large], None, PART)
carrier.from_rank_settle(leader, "settled", 1, 1)
carrier.from_rank_leave(leader, 1)
own.leave()
del segment
print(list(reductions._rounds), list(fetches._under_way))
reductions.from_machine_over(1, 1, 1, 1)  # the other machine has not begun the second
print(list(reductions._rounds))
print(list(reductions._ready), carrier._settling)
print(len(carrier.segments._attached), carrier.has_left(1), carrier.has_left(2))
come()  # reads and writes the memory
print(list(reductions._rounds), list(fetches._under_way), carrier._moving)
""",
    )
    assert lines[:2] == ["[(1, 1, 1), (1, 1, 2)] [1]", "[(1, 1, 1)]"]
    assert lines[2:] == ["[(1, 1, 1)] None", "0 True False", "[] [] []"]


def test_maps_of_freed_segments_are_dropped(script):
    lines = run(
        script,
        """
others = own.create(100)
kept = carrier.open((others.ref, "u1", (100,), 0))
carrier.open(place)
del segment
carrier.segments.forget_freed()
print(len(carrier.segments._attached))
""",
    )
    assert lines == ["1"]


def test_a_request_that_fails_here_is_answered_and_nothing_begins(script):
    lines = run(
        script,
        """
def no_room(place):
    raise MemoryError("no room")

carrier.open = no_room
rank.post(("reduce", (1, 1, 1), [place], ["sum"], 1, large, False))
rank.post(("copy", 5, (1, 1), 1, [place], [place]))
for descriptor in carrier._wait():
    carrier.read(descriptor)
[(name, id, problem), (_, other, _)] = heard()
said = f"{socket.gethostname()} could not do its part, MemoryError: no room"
print(name, id, other, problem == said)
print(told, reductions._rounds, fetches._under_way, reductions._begun)
carrier.fail("It is over")
print(told, heard())
""",
    )
    assert lines[:2] == ["failed (1, 1, 1) 5 True", "[] {} {} (0, 0, 0)"]
    assert lines[2] == "[(1, 'end', 'It is over')] [('end', 'It is over', 0)]"


def test_a_rank_for_which_there_is_no_descriptor_is_refused_and_taken_when_there_is_one(script):
    lines = run(
        script,
        """
import resource
carrier._listener.bind("")
carrier._listener.listen()

def connected():
    line = socket.socket(socket.AF_UNIX)
    line.connect(carrier._listener.getsockname())
    return line

first, second = connected(), connected()
free = os.dup(0)
os.close(free)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for limit in (free, soft):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    carrier.read(carrier._listener.fileno())
[(name, id, problem)] = Channel(first).receive()
said = f"{socket.gethostname()} could not do its part"
print(name, id, said in problem, len(carrier._mail.peers))
""",
    )
    assert lines == ["failed None True 2"]


def test_a_bucket_that_fails_ends_the_call_on_all_machines(script):
    lines = run(
        script,
        """
opened = carrier.open

def no_room(place):
    raise MemoryError("no room")

carrier.open = no_room
bucket = [place], (large,), [0], ["sum"], 1, False
reductions.from_rank_bucket(leader, (1, 1, 1), 0, 1, *bucket)
carrier.open = opened
reductions.from_rank_bucket(leader, (1, 1, 2), 0, 1, *bucket)
print([(name, id[2]) for name, id, _ in heard()], told)
reductions.from_rank_bucket(leader, (1, 2, 1), 0, 1, *bucket)
print(list(reductions._rounds))
""",
    )
    # The other machine learns that none was begun here, so that it does not wait for the first.
    assert lines[0] == "[('failed', 1), ('done', 2)] [(1, 'over', 1, 1, 0)]"
    assert lines[1] == "[(1, 2, 1)]"


@pytest.mark.parametrize(
    ("machine", "what", "runs", "tells"),
    [
        (1, "from_rank_end(leader, None)", [False], "[(1, 'end', None)]"),
        (1, "from_machine_end(1, None)", [False], "[]"),
        # After a loss until the script has ended, or its machine is silent.
        (1, "from_rank_end(leader, 'why')", [True, True], "[(1, 'end', 'why')]"),
        (1, "from_machine_end(1, 'why')", [True, True], "[]"),
        (1, "from_machine_end(1, 'why') or carrier.from_machine_gone(1)", [True, True], "[]"),
        (1, "from_machine_end(1, 'why') or carrier.from_machine_gone(0)", [False, False], "[]"),
        (1, "_lose(0, 'is silent')", [False, False], "[]"),
        (1, "hear_sigterm(15, None)", [True, False], "[]"),
        (1, "from_machine_end(1, 'why') or carrier.hear_sigterm(15, None)", [False, False], "[]"),
        (0, "from_machine_end(1, 'why')", [True, False], "[(1, 'gone')]"),
        (
            0,
            "lose(1, 'is silent') or carrier.from_rank_end(leader, None)",
            [False],
            "[(1, 'end', None), (1, 'gone')]",
        ),
        (0, "from_rank_end(leader, 'why')", [False], "[(1, 'end', 'why'), (1, 'gone')]"),
    ],
)
def test_a_carrier_goes_on_after_a_loss_while_the_script_does(script, machine, what, runs, tells):
    lines = run(
        script,
        f"""
carrier.machine, carrier.hosts = {machine}, ["a", "b"]
carrier.{what}
print(carrier.is_running)
if {len(runs)} > 1:
    carrier.on_end(leader)
    print(carrier.is_running)
print([message for message in told if message[:2] != (1, "end") or message[2] in ("why", None)])
""",
    )
    assert lines == [*map(str, runs), tells]


@pytest.mark.parametrize("machine, lost, is_told", [(0, 1, True), (1, 0, True), (1, 2, False)])
def test_the_launcher_hears_of_a_lost_machine_from_the_first_or_from_those_that_miss_it(
    script, machine, lost, is_told
):
    """Of another one it hears from the first alone: the script may still save something."""
    lines = run(
        script,
        f"""
carrier.machine, carrier.hosts = {machine}, ["a", "b", "c"]
carrier._lose({lost}, "is silent")
print([message[1:] for message in heard() if message[0] == "lost"])
""",
    )
    assert lines == [str([(lost, "abc"[lost], "It is silent")] if is_told else [])]


def test_the_reason_that_a_carrier_told_before_its_end_is_found_by_whoever_misses_it():
    link = CarrierLink("")  # without a carrier
    ours, theirs = socket.socketpair()
    link.channel, link.machine = Channel(ours), 1
    with theirs:
        Channel(theirs).send(("end", "The first machine is lost", 0))
    with pytest.raises(JobEnded, match=r"^The first machine is lost$"):
        for _ in range(2):  # the first may find room still
            link.tell(0, "a message")
    ours.close()
