"""What is read from mpirun: lines with tags, marks of guards, pages of mpirun's own."""

import itertools
import os
from pathlib import Path

from synkhronos.launch import through, watch


class FakeRanks(through.MpirunRanks):
    """Ranks of which the output is given by hand."""

    def __init__(self, folder, **more):
        more.update(names=["cpu", "cuda0"], environment={}, token="61ab", folder=Path(folder))
        super().__init__([], **more)
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
    fake.ranks.append(watch.Rank("cpu"))
    fake._take_mark(2, b"status", "14")  # its word comes first: the one that died is elsewhere
    assert fake.cause == 1
    fake._take_mark(0, b"status", "1")
    assert fake.cause == 0 and fake.name(0) == "rank 0 (the server, cpu)"


class FakeScript(through.Script):
    """A script of which the output is given by hand."""

    def __init__(self):
        super().__init__([], [], None)
        self.written, self.n_asked = {1: b"", 2: b""}, 0

    def _write(self, fd, data):
        self.written[fd] += data

    def _wait_for_stdin(self):
        self.n_asked += 1


def test_marks_of_a_script_are_taken_out_in_pieces_of_any_size():
    for size in (1, 3, 1000):
        fake = FakeScript()
        begin = fake._beginning
        page = b"-" * 74 + b"\nprterun has noticed\n" + b"-" * 74 + b"\n"
        err = b"of mpirun\n" + begin + b"0 start 77 node1\0\na\0b" + begin + b"0 more \0\nc"
        err += begin + b"0 status -9\0\n" + page + begin[:5]
        fake._take(1, b"out")
        assert fake.written == {1: b"", 2: b""} and fake.own_words == "out"
        for at in range(0, len(err), size):
            fake._take(2, err[at : at + size])
        fake._take(2, b"", is_end=True)
        assert fake.written == {1: b"out", 2: b"of mpirun\na\0bc"}
        assert (fake._status(), fake.n_asked) == (137, 2) and fake.failure_summary() == []


def test_a_script_of_which_no_end_was_told():
    fake = FakeScript()
    fake._take_mark(0, b"start", "77 node1")
    assert fake.failure_summary() == ["mpirun has ended before the script."]
    fake._was_asked = True
    fake._end_next = lambda: None
    fake._interrupt(15)
    assert fake._status() == 143 and fake.failure_summary() == []


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


def test_what_was_lost_is_told_of_a_script():
    told = "Machine a is lost: It has not been heard of for 8 s. The session has ended."
    lost = told.partition(". ")[0]
    for tells, status, loss in [
        (True, "1", lost),
        (True, None, lost),
        (True, "0", None),  # it has caught the WorkerDied
        (False, "1", None),
        (False, "-11", "the script on node1 was killed by SIGSEGV (signal 11)"),
        (False, None, "mpirun has ended before the script"),
    ]:
        fake = FakeScript()
        fake._take_mark(0, b"start", "77 node1")
        if tells:
            fake._take_mark(0, b"lost", told)
        if status is not None:
            fake._take_mark(0, b"status", status)
        assert fake.loss == loss
        fake._take_mark(0, b"own", "")
        assert fake.loss is None
        fake._ended_itself, fake._was_asked = False, True
        assert fake.loss is None


def test_a_machine_that_has_lost_the_scripts_ends_it_after_a_while():
    fake = FakeScript()
    fake._take_mark(0, b"start", "77 node1")
    fake._take_mark(0, b"lost", "Machine c is lost: It is silent")
    assert fake._deadline == float("inf")
    fake._take_mark(2, b"lost", "Machine a is lost: It is silent")
    assert fake._deadline < float("inf")
    assert fake.failure_summary() == ["Machine c is lost: It is silent, which has ended the run."]


def test_the_page_about_a_daemon_that_has_gone_is_a_sentence():
    edge = b"-" * 60 + b"\n"
    pages = (
        b"A daemon failed to report\nback to prterun:\n  Local host:    vm\n  Remote host:   b-2\n",
        b"PRTE has lost communication\n\n  HNP daemon   : [prterun-vm-9@0,0] on node vm\n"
        b"  Remote daemon: [prterun-vm-9@0,1] on node b-2\n\nThis is usually due to\n",
    )
    for page, stream, split in itertools.product(pages, (1, 2), (1000, 80, 200)):
        whole, fake = b"out\n" + edge + page + edge, FakeScript()
        fake._take_mark(0, b"start", "77 node1")
        fake._take(stream, whole[:split])
        assert fake.written[stream] == b"out\n"
        fake._take(stream, whole[split:])  # of a second read
        assert fake.written[stream] == b"out\n" and fake.loss == "mpirun has lost b-2"
        fake._take(stream, edge + b"a table of the script\n" + edge)
        fake._take(stream, edge + page)
        assert fake.written[stream] == b"out\n" + edge + b"a table of the script\n" + edge
        fake._take(stream, b"", is_end=True)
        assert fake.written[stream].endswith(edge + page)


def test_a_sigterm_that_comes_twice_at_once_is_one():
    """From Slurm, and from the job script that Slurm sends it to: the second one killed the run."""
    fake, heard, (reader, writer) = FakeScript(), [], os.pipe()
    fake._interrupt = heard.append
    for sent in ([15, 15, 2, 2], [15]):
        os.write(writer, bytes(sent))
        fake._hear(reader)
        fake._terminated_at -= 2
    os.close(reader)
    os.close(writer)
    assert heard == [15, 2, 2, 15]
