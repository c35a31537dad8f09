"""Choose the ranks, or this process alone, for the next evaluations of a likelihood.

    ranks ── a round takes longer than this process alone needs ──▶ alone
    alone ── now and then a few rounds; these take less time ─────▶ ranks

In each evaluation ranks wait for one another. Where other programs or other chains keep the cores
busy, a rank that is woken waits for a core, and a round takes many times as long as the work. This
process then computes the parts of all ranks itself, and adds them up in the same order, so that the
bits of the result are the same.

Rounds that are tried in vain take a fiftieth of the time, at most.
"""

from __future__ import annotations

from synkhronos._machine.log import log

_WEIGHT = 8  # evaluations of a trial, and at least those that a mean is of
_HORIZON = 0.01  # seconds of evaluations that a mean is of: one late round tells nothing
_FEWEST = 4  # evaluations before a way is judged
_AT_FIRST = 16  # the first of these wake the workers
_WORSE = 1.25  # times the time alone, for rounds to be given up
_HOPELESS = 16  # times the time of the other way, after which one evaluation is enough
_BETTER = 0.9  # of the time alone, for rounds to be taken up again
_SHARE = 50  # times as long as a trial has cost, until the next one
_FIRST, _LONGEST = 16, 1.0  # evaluations, and seconds, until the next trial
_CLEARLY = 2  # times as slow are rounds that the log speaks of
_TOLD_FROM = 1e-4  # seconds of an evaluation from which on the log says that this process is alone
_told: list[bool] = []  # whether the log has said that a process computes alone


class Pace:
    """Measures both ways for evaluations of one kind, and chooses that of the next one.

    `alone` are the seconds of processor time that this process needs for the parts of all ranks.

    Attributes
    ----------
    is_alone : bool
        Whether this process alone computes the next evaluation.
    """

    def __init__(self, alone: float):
        self.is_alone = False
        self._alone, self._round = alone, 0.0  # means of the last evaluations of each way
        self._n_of_mean = max(_WEIGHT, int(_HORIZON / max(alone, 1e-6)))
        self._n = 0  # evaluations since the way has changed
        self._is_trial, self._n_failed = False, 0  # trials, one after another
        self._until_trial = 0.0  # seconds

    def note(self, seconds: float) -> None:
        """Take the time of an evaluation."""
        self._n += 1
        if self.is_alone:
            self._alone += (seconds - self._alone) / min(self._n, self._n_of_mean)
            self._until_trial -= seconds
            if self._n >= _FEWEST and self._alone > self._round:
                self._n_failed = 0
                self._change(is_alone=False)
            elif self._until_trial < 0:
                self._change(is_alone=False)
                self._is_trial = True
            return
        self._round += (seconds - self._round) / min(self._n, self._n_of_mean)
        if self._is_trial:
            self._note_in_trial(seconds)
        elif self._round > _WORSE * self._alone and self._can_judge(seconds, _AT_FIRST):
            self._until_trial = _FIRST * self._alone
            self._change(is_alone=True)

    def _note_in_trial(self, seconds):
        if not self._can_judge(seconds, _WEIGHT):
            return
        self._is_trial = False
        if self._round < _BETTER * self._alone:
            self._n_failed = 0
            return
        self._tell()
        cost = self._n * max(0.0, self._round - self._alone)
        self._n_failed += 1
        later = min(_FIRST * self._alone * 2**self._n_failed, _LONGEST)
        self._until_trial = max(later, _SHARE * cost)
        self._change(is_alone=True)

    def _can_judge(self, seconds, fewest):
        """Return whether rounds can be judged, the last of which has taken `seconds`."""
        return self._n >= fewest or seconds > _HOPELESS * self._alone

    def _change(self, is_alone):
        self.is_alone, self._n = is_alone, 0

    def _tell(self):
        if _told or self._alone < _TOLD_FROM or self._round < _CLEARLY * self._alone:
            return
        _told.append(True)
        log.warning(
            "a round of the ranks takes %.3g milliseconds, and this process alone %.3g: other "
            "programs, or other chains, keep the cores busy. While that is so, this process "
            "computes the likelihood alone, with the same numbers",
            1e3 * self._round,
            1e3 * self._alone,
        )
