"""What is read from mpirun about a script: marks of its guard, pages of mpirun's own."""

import itertools
import os

from synkhronos.launch import mpirun, through


class FakeScript(through.Script):
    """A script of which the output is given by hand."""

    def __init__(self):
        super().__init__([], [], mpirun.Options())
        self.written, self.n_asked = {1: b"", 2: b""}, 0

    def _write(self, fd, data):
        self.written[fd] += data

    def _wait_for_stdin(self):
        self.n_asked += 1


def test_marks_of_a_script_are_taken_out_in_pieces_of_any_size():
    for size in (1, 3, 1000):
        fake = FakeScript()
        begin = fake._marks._beginning
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


def test_the_page_about_a_daemon_or_a_guard_that_has_gone_is_a_sentence():
    edge, lost = b"-" * 60 + b"\n", "mpirun has lost b-2"
    pages = {
        b"A daemon failed to report\nback to prterun:\n  Local host:    vm\n"
        b"  Remote host:   b-2\n": lost,
        b"PRTE has lost communication\n\n  HNP daemon   : [prterun-vm-9@0,0] on node vm\n"
        b"  Remote daemon: [prterun-vm-9@0,1] on node b-2\n\nThis is usually due to\n": lost,
        b"prterun noticed that process rank 1 with PID 24 on node b-2 exited on\n"
        b"signal 9 (Killed).\n": "The guard on b-2 was killed by SIGKILL (signal 9)",
    }
    for (page, what), stream, split in itertools.product(pages.items(), (1, 2), (1000, 80, 200)):
        whole, fake = b"out\n" + edge + page + edge, FakeScript()
        fake._take_mark(0, b"start", "77 node1")
        fake._take(stream, whole[:split])
        assert fake.written[stream] == b"out\n"
        fake._take(stream, whole[split:])  # of a second read
        assert fake.written[stream] == b"out\n" and fake.loss == what
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
