"""The rules as a script starts them: ``BSP().init(...)`` starts a run, ``wait`` waits for its end.

A run is a process of ``synkhronos rule``, which starts mpirun. It ends with the script: its
standard input is a pipe from the script, which closes however the script ends.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Mapping, Sequence

from synkhronos import _wording
from synkhronos._machine.devices import module_command
from synkhronos._machine.processes import shell_status
from synkhronos.rules import options as _options
from synkhronos.rules.request import Request, devices_in_place

_LAUNCHER = module_command("synkhronos", "rule")


class RuleFailed(RuntimeError):
    """A run has not ended well: raised by ``Rule.wait(check=True)``.

    Attributes
    ----------
    code : int
        The exit status of the rank that failed first; 128 plus the signal's number if a rank was
        killed, 130 after a Ctrl-C.
    last_lines : list of str
        The last lines of output of that rank.
    """

    def __init__(self, message: str, code: int, last_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.last_lines = list(last_lines)


class Rule:
    """A way to train one model on several devices; the base of all rules.

    Each option of the rule is an attribute of its class, with the default as value.

    Parameters
    ----------
    **options
        Other values of options.

    Raises
    ------
    TypeError, ValueError
        For an option that the rule does not have, or a value that is refused.
    """

    _rule = ""
    pid: int | None = None  # of the launcher, after `init`

    @property
    def rulename(self) -> str:
        """The rule, and what its ranks exchange: ``"BSP(cdd,nccl32)"``."""
        names = ("sync_type", "exch_strategy") if self._rule in _options.TOGETHER else ()
        kinds = [getattr(self, name) for name in names if hasattr(self, name)]
        return self._rule + (f"({','.join(kinds)})" if kinds else "")

    def __init_subclass__(cls, **more: Any) -> None:
        """Make each option an attribute of the class."""
        super().__init_subclass__(**more)
        for name, option in _options.of_rule(cls._rule).items():
            if not hasattr(cls, name):
                setattr(cls, name, option.default)

    def __init__(self, **options: Any) -> None:
        if not self._rule:
            raise TypeError(
                f"Rule itself can't train: make one of {', '.join(_options.RULES)}, such as BSP()."
            )
        _options.check(self._rule, **options)
        for name, value in options.items():
            setattr(self, name, value)
        self._process: subprocess.Popen[bytes] | None = None

    def init(
        self,
        devices: Sequence[str] | str,
        modelfile: str,
        modelclass: str,
        settings: Mapping[str, Any] | None = None,
        agent: str | None = None,
        mpirun_args: str = "",
        **options: Any,
    ) -> None:
        """Start a run, and return at once.

        All arguments are checked before anything is started. The model file is looked for, and is
        imported by the ranks only.

        Parameters
        ----------
        devices : list of str
            The device of each rank, ``["cpu", "cpu"]``, on this host or on each one of a Slurm or
            PBS allocation; with hosts a text for each of them, ``["node0:cuda0,cuda1",
            "node1:cuda0"]``.
        modelfile : str
            A dotted name, found on ``PYTHONPATH`` or in the working folder, or the path of a file.
        modelclass : str
            The name of the class in it.
        settings : dict, optional
            Attributes of the model to set, ``{"n_epochs": 3, "data.n_batch_train": 10}``.
        agent : str, optional
            The command that stands in for ssh.
        mpirun_args : str, optional
            More arguments of mpirun.
        **options
            Other values of options.

        Raises
        ------
        TypeError, ValueError
            For arguments that are refused.
        FileNotFoundError, ImportError
            If there is no such model file, or no package that it imports.
        RuntimeError
            If a run of this object has not ended.
        """
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError(
                f"this {self._rule} has a run that has not ended (process {self.pid}): wait() for "
                "it, or make another object."
            )
        names = _options.of_rule(self._rule)
        values = {**{name: getattr(self, name) for name in names}, **options}
        asked = Request.of(
            self._rule,
            devices_in_place(devices),
            modelfile,
            modelclass,
            settings,
            values,
            agent=agent,
            mpirun_args=mpirun_args,
        )
        self._kept = tempfile.TemporaryDirectory(prefix="synkhronos-rule-")
        self._report = Path(self._kept.name, "report.json")
        command = [*_LAUNCHER, *asked.arguments()]
        command += ["--report", str(self._report), "--until-stdin-ends"]
        sys.stdout.flush()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is for `wait`, which passes it on
        )
        self.pid = self._process.pid

    def wait(self, check: bool = False, timeout: float | None = None) -> int | None:
        """Wait until the run has ended; return its exit status. Return None before :meth:`init`.

        A Ctrl-C asks all ranks to write a snapshot and end, a second one ends them at once.
        KeyboardInterrupt is raised when they have ended.

        Parameters
        ----------
        check : bool, optional
            Raise if the exit status is not 0.
        timeout : float, optional
            Seconds after which to give up; the run goes on.

        Raises
        ------
        RuleFailed
            If the exit status is not 0, with `check`.
        TimeoutError
            After `timeout`.
        """
        check = _wording.truth("check", check)
        timeout, process = _wording.seconds("timeout", timeout), self._process
        if process is None:
            return None
        interrupt = None
        while True:
            try:
                code = process.wait(timeout)
                break
            except KeyboardInterrupt as error:
                interrupt = error
                _write(f"Killing worker processes of rule session {self.pid}...")
                process.send_signal(signal.SIGINT)
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"rule session {self.pid} has not ended within {timeout:g} s; it goes on."
                ) from None
        return self._ended(process, code, check, interrupt)

    def _ended(self, process, code, check, interrupt):
        assert process.stdin is not None
        process.stdin.close()
        problem, lines = "", []
        with contextlib.suppress(OSError, ValueError):  # of a launcher that was killed
            report = json.loads(self._report.read_text())
            problem, lines = report["problem"], report["last_lines"]
        self._kept.cleanup()
        code = shell_status(code)
        _write(f"Rule session {self.pid} terminated with return code: {code}.")
        if interrupt is not None:
            raise interrupt
        if check and code:
            shown = "".join(f"\n    {line}" for line in lines)
            raise RuleFailed(
                f"{self._rule} has ended with return code {code}. {problem}{shown}", code, lines
            )
        return code


def _write(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class BSP(Rule):
    r"""Bulk synchronous parallel: all ranks step together, on parts of each minibatch.

    With the velocity :math:`v` that ranks exchange (``sync_type="cdd"``), and
    :math:`g_i` the mean gradient of the :math:`n_i` rows of rank :math:`i` of k,

    .. math:: v \leftarrow \mu v + \sum_i n_i g_i / \sum_i n_i, \quad p \leftarrow p - \eta v,

    which is the step of one process on all rows. With ``"avg"`` each rank steps by itself and the
    parameters are averaged, :math:`p \leftarrow \sum_i n_i p_i / \sum_i n_i`. With ``"swap"`` pairs
    of ranks, drawn anew each time, swap all parameters (generative adversarial parallelization).

    Parameters
    ----------
    **options
        ``sync_type``, ``exch_strategy``, ``exchange_freq``, ``warm_up_epochs``, ``scale_lr`` and
        those of all rules: the page of the API lists them.

    References
    ----------
    L. G. Valiant (1990), A bridging model for parallel computation, CACM 33(8).
    H. Ma, F. Mao and G. W. Taylor (2016), Theano-MPI: a Theano-based distributed training
    framework, https://arxiv.org/abs/1605.08325

    Examples
    --------
    >>> rule = BSP(sync_type="avg")
    >>> rule.sync_type, BSP.sync_type
    ('avg', 'cdd')
    >>> rule.init(["cpu", "cpu"], "models.none", "Model")
    Traceback (most recent call last):
    FileNotFoundError: there is no module 'models.none': ...
    """

    _rule = "BSP"


class EASGD(Rule):
    r"""Elastic averaging SGD: workers step by themselves, and a center and they attract each other.

    After each `tau` minibatches a worker and the server's center meet, both from their old values:

    .. math:: c' = c + \alpha (w - c), \quad w' = w - \alpha (w - c).

    The first device is the server's, unless ``server="extra"``.

    Parameters
    ----------
    **options
        ``alpha``, ``tau``, ``server`` and those of all rules.

    References
    ----------
    S. Zhang, A. Choromanska and Y. LeCun (2015), Deep learning with elastic averaging SGD,
    https://arxiv.org/abs/1412.6651

    Examples
    --------
    >>> EASGD(alpha=0.25).tau
    10
    >>> EASGD().init(["cpu"], "models.cifar10", "Cifar10_model")
    Traceback (most recent call last):
    ValueError: EASGD with one device: the first is the server's, ...
    """

    _rule = "EASGD"


class GOSGD(Rule):
    r"""Gossip SGD: workers step by themselves, and now and then send their parameters to another.

    After each minibatch worker s sends, with probability `p`, its parameters and half of its weight
    :math:`a_s` to a random other worker r, which merges them:

    .. math:: x_r \leftarrow \frac{a_r x_r + a_s x_s}{a_r + a_s}, \quad a_r \leftarrow a_r + a_s.

    The weights begin as 1 / k, and their sum stays 1.

    Parameters
    ----------
    **options
        ``p`` and those of all rules.

    References
    ----------
    M. Blot, D. Picard, M. Cord and N. Thome (2016), Gossip training for deep learning,
    https://arxiv.org/abs/1611.09726

    Examples
    --------
    >>> GOSGD(p=2)
    Traceback (most recent call last):
    ValueError: p must be a number from 0 to 1, got 2.
    """

    _rule = "GOSGD"


class ASGD(Rule):
    r"""Asynchronous SGD with a server of parameters, to which workers send their updates.

    A worker sends the sum :math:`d` of its updates of the last `tau` minibatches, and takes the
    parameters that the server has then. With :math:`n` updates of others between that and the
    taking of the parameters from which :math:`d` was computed, its staleness, the server computes

    .. math:: p \leftarrow p + d / (1 + n),

    with ``learning_rate_rule="adagrad"``

    .. math:: s \leftarrow s + d^2, \quad p \leftarrow p + \gamma d / \sqrt{s},

    and with ``"constant"`` :math:`p \leftarrow p + d`, which with many workers diverges easily.

    Parameters
    ----------
    **options
        ``tau``, ``learning_rate_rule``, ``gamma``, ``server`` and those of all rules.

    References
    ----------
    J. Dean et al. (2012), Large scale distributed deep networks (Downpour SGD, adagrad), NIPS.
    W. Zhang, S. Gupta, X. Lian and J. Liu (2016), Staleness-aware async-SGD for distributed deep
    learning, https://arxiv.org/abs/1511.05950

    Examples
    --------
    >>> ASGD(tau=5).learning_rate_rule
    'staleness'
    """

    _rule = "ASGD"
