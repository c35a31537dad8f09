"""What is read from mpirun about ranks: lines with tags, marks, pages of mpirun's own."""

from pathlib import Path

from synkhronos.launch.mpirun import Options
from synkhronos.parameter_server.group import launching, watched


class FakeRanks(launching.MpirunRanks):
    """Ranks of which the output is given by hand."""

    def __init__(self, folder, **more):
        more.update(names=["cpu", "cuda0"], environment={}, token="61ab", folder=Path(folder))
        super().__init__([], [], Options(), **more)
        self.written = {1: b"", 2: b""}

    def _write(self, fd, data):
        self.written[fd] += data


def test_output_is_taken_apart_in_pieces_of_any_size(tmp_path):
    a, b, c, d = (b"\x0061ab %d line \0" % rank for rank in (0, 1, 1, 0))
    out = b"[1,5]<stdout>: %sa\n[1,5]<stdout>: %s\xff b\nof mpirun\n" % (a, b)
    out += b"[1,5]<stdout>: %sc[1,6]<stdout>: %sd" % (c, d)
    for size in (1, 3, 1000):
        fake = FakeRanks(tmp_path / str(size))
        for at in range(0, len(out), size):
            fake._take(1, out[at : at + size])
        fake._take(1, b"", is_end=True)
        assert fake.written[1] == b"a\n\xff b\nc\nd\n"
        assert fake.own_words == "of mpirun\n"
        assert (tmp_path / str(size) / "rank_1.log").read_bytes() == b"\xff b\nc\n"
        assert fake.ranks[0].last_lines == ["a", "d"]


def test_marks_are_taken_out_of_errors(tmp_path):
    """A token that begins with a digit would be read as an octal escape of a pattern."""
    fake = FakeRanks(tmp_path)
    fake._take(
        2, b"[1,1]<stderr>: \x0061ab 1 start 77 node1\0\n[1,1]<stderr>: half\x0061ab 1 status"
    )
    fake._take(2, b" -9\0\n[1,0]<stderr>: \x0061ab 0 line \0\x0000 1 status 3\0\n")
    assert (fake.ranks[1].pid, fake.ranks[1].host, fake.ranks[1].status) == (77, "node1", -9)
    assert fake.written[2] == b"half\n\x0000 1 status 3\0\n"
    assert fake.failed == [1] and fake.cause == 1
    assert fake.failure_summary()[0] == (
        "rank 1 (cuda0 on node1) was killed by SIGKILL (signal 9), which has ended the run."
    )


def test_the_page_about_machines_that_have_said_why_they_end_is_left_out(tmp_path):
    fake = FakeRanks(tmp_path)
    edge = b"-" * 74 + b"\n"
    fake._take(2, edge + b"prterun detected that a process exited with non-zero status\n" + edge)
    assert "prterun detected" in fake.own_words
    fake._take(2, b"[1,0]<stderr>: node1: no secret\n")
    assert fake.own_words == "node1: no secret\n"
    fake._take(2, edge + b"prterun was unable to start a daemon\n" + edge)
    assert "unable to start a daemon" in fake.own_words


def test_the_cause_is_not_a_rank_that_mpirun_has_ended(tmp_path):
    fake = FakeRanks(tmp_path, is_served=True)
    fake._take_mark(1, b"status", "-15")
    assert fake.cause == 1
    fake.ranks.append(watched.Rank(device="cpu"))
    fake._take_mark(2, b"status", "14")  # its word comes first: the one that died is elsewhere
    assert fake.cause == 1
    fake._take_mark(0, b"status", "1")
    assert fake.cause == 0 and fake.name(0) == "rank 0 (the server, cpu)"


def test_what_was_lost_is_told_of_ranks(tmp_path):
    ends = {
        ("-9", "14"): "rank 0 (cpu on node) was killed by SIGKILL (signal 9)",
        ("14", None): "rank 1 (cuda0 on node) is lost: its end was not reported",
        (None, None): "rank 0 (cpu on node) is lost: its end was not reported",
        ("1", None): None,  # it has failed by itself
        ("1", "14"): None,
        ("-9", "0"): "rank 0 (cpu on node) was killed by SIGKILL (signal 9)",
    }
    for statuses, loss in ends.items():
        for outlives in (False, True):
            fake = FakeRanks(tmp_path, outlives=outlives)
            for rank, status in enumerate(statuses):
                fake._take_mark(rank, b"start", "77 node")
                if status is not None:
                    fake._take_mark(rank, b"status", status)
            # The others may go on without it, to the end.
            assert fake.loss == (None if outlives and "0" in statuses else loss), statuses
    fake._take_mark(1, b"start", "77 node")
    fake.ranks[1].status = None
    fake._take_mark(1, b"lost", "has not been heard of for 8 s")
    fake._outlives, fake.ranks[0].status = False, 14
    assert fake.loss == "rank 1 (cuda0 on node) can't be reached any more"
    fake.ranks[0].status = 1
    assert fake.loss is None
    fake.ranks[0].status, fake.interrupted_by = 14, 2
    assert fake.loss is None
