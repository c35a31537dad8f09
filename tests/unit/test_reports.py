"""Which error a call with several of them is told by."""

from synkhronos.comm import reports


def test_an_error_that_follows_from_another_ranks_is_not_the_one_that_is_told():
    cause = reports.report_on(RuntimeError("on purpose"))
    follows = reports.report_on(reports.left_early(2, waiting=0))
    for found, rank in (({0: follows, 2: cause}, 2), ({0: follows}, 0), ({1: cause, 2: cause}, 1)):
        error = reports.worker_error(found, 3)
        assert (error.rank, reports.first(found)) == (rank, rank)
        assert f"Rank {rank} of 3" in str(error)
    assert "on purpose (and rank 0 SessionError)" in str(
        reports.worker_error({0: follows, 2: cause}, 3)
    )
