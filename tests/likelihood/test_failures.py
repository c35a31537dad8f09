"""Workers that die, errors on ranks, and Ctrl-C."""

import _thread
import contextlib
import functools
import os
import signal
import threading

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")

from support import pymc_models as models  # noqa: E402
from support.waiting import wait_until  # noqa: E402

from synkhronos import SessionError, WorkerDied, WorkerError  # noqa: E402
from synkhronos.extensions import pymc as parallel  # noqa: E402
from synkhronos.extensions.pymc import pace  # noqa: E402

pytestmark = models.MARKS


@pytest.fixture(autouse=True)
def ranks_compute(monkeypatch):
    """Let ranks compute also where other programs keep the cores busy."""
    monkeypatch.setattr(pace.Pace, "note", lambda self, seconds: None)


def test_a_worker_that_dies():
    model, point = models.logistic_at_a_point()
    expected = model.compile_logp()(point)
    with parallel.likelihood(model, ranks=3) as ours:
        function = model.compile_logp()
        function(point)
        os.kill(ours.worker_pids[1], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(WorkerDied, match=r"rank 2 .* was killed.* Leave the likelihood"):
                while True:
                    function(point)
    with parallel.likelihood(model, ranks=3):
        np.testing.assert_allclose(model.compile_logp()(point), expected, rtol=1e-12)


def test_a_worker_that_dies_ends_the_sampling():
    model = models.make(models.logistic)
    with parallel.likelihood(model, ranks=2) as ours:

        def kill(trace, draw):
            if draw.draw_idx == 5:
                os.kill(ours.worker_pids[0], signal.SIGKILL)

        options = {"chains": 1, "cores": 1, "progressbar": False, "nuts_sampler": "pymc"}
        with pytest.raises(WorkerDied, match="rank 1"):
            pm.sample(draws=20, tune=20, callback=kill, **options)


@contextlib.contextmanager
def in_thread_of_others(function):
    """Call a function in a thread that Python did not start, which stays as long as the block."""
    done, end, ended, results = (threading.Semaphore(0), threading.Event(), threading.Event(), [])

    def call():
        try:
            results.append(function())
        except (WorkerDied, WorkerError) as error:
            results.append(error)
        done.release()
        end.wait()
        ended.set()

    _thread.start_new_thread(call, ())
    done.acquire()
    try:
        yield results[0]
    finally:
        end.set()
        ended.wait()


def test_blocks_in_threads_that_python_did_not_start():
    """As in nutpie's; threadpoolctl raised RuntimeError in workers of the second one."""
    model, point = models.logistic_at_a_point()
    expected = model.compile_logp()(point)
    with contextlib.ExitStack() as threads:
        for _ in range(3):
            with parallel.likelihood(model, ranks=2):
                function = functools.partial(model.compile_logp(), point)
                found = threads.enter_context(in_thread_of_others(function))
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_death_that_a_sampler_takes_no_notice_of_ends_the_block():
    model, point = models.logistic_at_a_point()
    killed = pytest.raises(WorkerDied, match="rank 1")
    with killed, parallel.likelihood(model, ranks=2) as ours:
        function = model.compile_logp()
        function(point)
        os.kill(ours.worker_pids[0], signal.SIGKILL)
        found = None
        while not isinstance(found, WorkerDied):
            with in_thread_of_others(functools.partial(function, point)) as found:
                pass


def test_interrupted():
    model, point = models.logistic_at_a_point()
    with parallel.likelihood(model, ranks=2) as ours:
        function = model.compile_logp()
        expected, pids = function(point), ours.worker_pids
        for seconds in (0.2, 0.21, 0.23):
            timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    function(point)
            timer.join()
            np.testing.assert_allclose(function(point), expected, rtol=1e-14)
        assert ours.worker_pids == pids


def test_an_error_on_a_rank(monkeypatch):
    model, point = models.logistic_at_a_point()
    with parallel.likelihood(model, ranks=2) as ours:
        evaluator, original = ours._evaluator, type(ours._evaluator).compute

        def compute(self, rank, gradients):
            if rank == 1:
                raise ArithmeticError("of rank 1")
            original(self, rank, gradients)

        monkeypatch.setattr(type(evaluator), "compute", compute)
        function = model.compile_logp()
        with pytest.raises(WorkerError, match=r"Rank 1 of 2 .*raised ArithmeticError: of rank 1"):
            function(point)


def test_an_evaluation_in_the_middle_of_another_is_refused(monkeypatch):
    """As from a signal handler, which the thread runs in the middle of an evaluation."""
    model = models.make(models.logistic)
    points = models.points(model, 2)
    refused = []
    with parallel.likelihood(model, ranks=2) as ours:
        function = model.compile_logp()
        expected = [function(point) for point in points]
        original = type(ours._evaluator).compute

        def compute(self, rank, gradients):
            with pytest.raises(SessionError, match="in the middle of another evaluation"):
                self.evaluate(gradients, self.values + 1)
            refused.append(rank)
            original(self, rank, gradients)

        monkeypatch.setattr(type(ours._evaluator), "compute", compute)
        assert [function(point) for point in points] == expected
        assert refused == [0, 0]


def test_closed_in_the_middle_of_an_evaluation(monkeypatch):
    """As by a finalizer of the block's context."""
    model, point = models.logistic_at_a_point()
    with parallel.likelihood(model, ranks=2) as ours:
        function = model.compile_logp()
        expected, original = function(point), type(ours._evaluator).compute

        def compute(self, rank, gradients):
            if rank == 0:
                self.close()
            original(self, rank, gradients)

        monkeypatch.setattr(type(ours._evaluator), "compute", compute)
        assert function(point) == expected and ours.worker_pids == []
        with pytest.raises(SessionError, match="after the end of the block"):
            function(point)


def test_workers_end_with_a_killed_master(script):
    text = """
        import os, signal, sys
        from support import pymc_models as models
        from synkhronos.extensions import pymc as parallel
        model = models.make(models.logistic)
        with parallel.likelihood(model, ranks=3) as ours:
            model.compile_logp()(models.points(model, 1)[0])
            print(*ours.worker_pids, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = script("\n".join(line[8:] for line in text.splitlines()), check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
