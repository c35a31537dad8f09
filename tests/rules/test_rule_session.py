"""``BSP().init(...)`` and ``wait``: what is checked at once, exit statuses, Ctrl-C, ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import stand_in_rank
from support.launching import allow_root
from support.leaks import runs, working_in
from support.waiting import wait_until

from synkhronos import rules
from synkhronos.rules import ASGD, BSP, EASGD, GOSGD, Rule, RuleFailed, options, rule_classes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.py").write_text("raise SystemExit(5)\nclass Model: pass\n")
    monkeypatch.chdir(tmp_path)
    allow_root(monkeypatch)
    own = [sys.executable, stand_in_rank.__file__, "rule"]
    monkeypatch.setattr(rule_classes, "_LAUNCHER", own)
    return tmp_path


def test_options_are_attributes_of_classes():
    """Theirs had two of BSP's, and alpha, tau and p were constants in the source."""
    assert BSP.sync_type == "cdd" and BSP.exch_strategy == "nccl32"
    assert (EASGD.alpha, EASGD.tau, EASGD.snapshot_freq) == (0.5, 10, 2)
    assert GOSGD.p == 0.1 and ASGD.learning_rate_rule == "staleness"
    for rule in (BSP, EASGD, GOSGD, ASGD):
        assert set(options.of_rule(rule.__name__)) <= set(dir(rule))
        assert issubclass(rule, Rule)
    assert not hasattr(BSP, "alpha")
    assert BSP(sync_type="avg").sync_type == "avg" and BSP.sync_type == "cdd"


def test_a_rule_that_was_not_started_has_a_name_and_nothing_to_wait_for():
    assert BSP().rulename == "BSP(cdd,nccl32)" and BSP(sync_type="avg").rulename.startswith(
        "BSP(avg"
    )
    assert [kind().rulename for kind in (EASGD, GOSGD)] == ["EASGD", "GOSGD"]
    assert BSP().wait() is None and BSP().pid is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BSP(alpha=0.5), TypeError, "BSP has no option 'alpha': it is one of EASGD."),
        (lambda: EASGD(alhpa=0.5), TypeError, "Perhaps you meant alpha"),
        (lambda: EASGD(alpha=2), ValueError, "alpha must be a number above 0 and at most 1, got 2"),
        (lambda: GOSGD(bind=1), TypeError, "bind must be True or False, got 1"),
        (Rule, TypeError, f"Rule itself can't train: make one of {', '.join(options.RULES)}, such"),
        (lambda: BSP().wait(timeout="1"), TypeError, "timeout must be a number of seconds or None"),
    ],
)
def test_mistakes_in_options(make, error, message):
    with pytest.raises(error, match=message):
        make()


CPUS = {"devices": ["cpu", "cpu"], "modelfile": "models.small", "modelclass": "Model"}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"devices": ["gpu0"]}, ValueError, "'gpu0' in 'gpu0' is not the name of a device"),
        ({"devices": 2}, TypeError, "devices must be a list of names"),
        ({"modelfile": "models.large"}, FileNotFoundError, "there is no module 'models.large'"),
        ({"modelclass": "Modle"}, ValueError, "Perhaps you meant Model"),
        ({"settings": [3]}, TypeError, r"settings must be a dict of the model's settings, got \[3"),
        ({"settings": {"n": print}}, TypeError, "the setting n must be a number"),
        ({"agent": 3}, TypeError, "agent must be a text, got 3"),
        ({"mpirun_args": None}, TypeError, "mpirun_args must be a text, got None"),
        ({"tau": 3}, TypeError, "BSP has no option 'tau'"),
        ({"print_freq": 0}, ValueError, "print_freq must be a whole number from 1 on, got 0"),
        ({"sync_type": "avg", "exch_strategy": "asa16"}, ValueError, "sends 16 bits, which is too"),
        ({"sync_type": "avg", "exch_strategy": "nccl16"}, ValueError, "Take 'ar' or 'asa32'"),
    ],
)
def test_init_checks_all_before_it_starts_anything(folder, changed, error, message):
    rule = BSP()
    with pytest.raises(error, match=message):
        rule.init(**{**CPUS, **changed})
    assert rule.pid is None and not (folder / "logs").exists()


def test_attributes_are_checked_when_a_run_begins(folder, monkeypatch):
    monkeypatch.setattr(BSP, "sync_type", "cd")
    with pytest.raises(ValueError, match="sync_type must be 'cdd' or 'avg' or 'swap', got 'cd'"):
        BSP().init(**CPUS)


@pytest.mark.slow("starts several processes")
def test_a_run(folder, capfd, monkeypatch):
    monkeypatch.setattr(BSP, "exch_strategy", "ar")
    rule = BSP(sync_type="avg")
    assert rule.init(**CPUS, settings={"does": "shows"}) is None
    assert runs(rule.pid)
    with pytest.raises(RuntimeError, match=r"has a run that has not ended .* wait\(\) for it"):
        rule.init(**CPUS)
    with pytest.raises(TimeoutError, match=r"has not ended within 0.01 s; it goes on"):
        rule.wait(timeout=0.01)
    assert rule.wait() == 0 and rule.wait(check=True) == 0
    out, _ = capfd.readouterr()
    assert out.startswith("BSP(avg, ar): 2 workers on cpu, cpu; logs in logs/")
    assert out.endswith(f"Rule session {rule.pid} terminated with return code: 0.\n")
    assert sorted(path.name for path in folder.glob("logs/*/*")) == ["rank_0.log", "rank_1.log"]


def test_a_run_that_fails(folder, capfd):
    """Theirs printed the code of a failure, and could not raise."""
    rule = BSP(log_path="elsewhere")
    rule.init(**CPUS, settings={"does": "raises"})
    with pytest.raises(RuleFailed) as caught:
        rule.wait(check=True)
    assert caught.value.code == 1
    assert caught.value.last_lines[-1] == "ValueError: a reason"
    message = str(caught.value)
    assert message.startswith("BSP has ended with return code 1. rank 1 (cpu on ")
    assert "ValueError: a reason" in message and "elsewhere/" in message
    assert rule.wait() == 1
    assert "terminated with return code: 1." in capfd.readouterr().out


@pytest.mark.slow("starts several processes")
def test_a_launcher_that_is_killed(folder):
    rule = GOSGD()
    rule.init(**CPUS, settings={"does": "waits"})
    wait_until(lambda: list(folder.glob("logs/*/rank_1.log")))
    os.kill(rule.pid, signal.SIGKILL)
    with pytest.raises(RuleFailed, match="return code 137"):
        rule.wait(check=True)
    wait_until(lambda: not working_in(folder))


SCRIPT = """
import sys
from synkhronos.rules import BSP, rule_classes
rule_classes._LAUNCHER = [sys.executable, sys.argv[1], "rule"]
rule = BSP()
rule.init(["cpu", "cpu"], "models.small", "Model", settings={"does": "waits", "saves": True})
print("initialized", flush=True)
if sys.argv[2] == "wait":
    rule.wait()
else:
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "how",
    ["wait", "end", "kill"],
)
@pytest.mark.slow("starts several processes")
def test_a_run_ends_with_its_script(folder, how):
    """A Ctrl-C in wait(), and the end of a script by itself or by SIGKILL, end all ranks."""
    (folder / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py", stand_in_rank.__file__, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    begun = 0
    while begun < 2:
        line = process.stdout.readline()
        assert line, process.communicate()
        begun += line == "begun\n"
    if how == "wait":
        process.send_signal(signal.SIGINT)
    elif how == "kill":
        process.kill()
    out, err = process.communicate(timeout=300)
    wait_until(lambda: not working_in(folder))
    assert [each for r in range(2) if f"rank {r} was asked 1 times" in out for each in [r]] == [
        0,
        1,
    ]
    assert "snapshot_0003.npz; this goes on from it: synkhronos rule BSP" in err
    if how == "wait":
        assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in err
        assert "Killing worker processes" in out
        assert "terminated with return code: 130." in out


def test_a_module_beside_the_script_is_not_one_of_the_ranks(folder, monkeypatch):
    """Ranks look in the working folder, and not in that of the script."""
    (folder / "there").mkdir()
    (folder / "there" / "beside.py").write_text("class Model: pass\n")
    script = str(folder / "there" / "script.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    monkeypatch.syspath_prepend(str(folder / "there"))
    with pytest.raises(FileNotFoundError, match="no module 'beside'"):
        BSP().init(["cpu"], "beside", "Model")


def test_the_request_is_the_command_that_the_launcher_reads(folder):
    from synkhronos.__main__ import _parser
    from synkhronos.rules.request import Request

    given = {"tau": 3, "resume": True, "snapshot_path": "a b", "bind": True, "log_path": "l"}
    given["grace"] = 5.0
    settings = {"name": "x y", "lr_step": [1, 2], "data.n": 0.5, "on": None}
    more = {"agent": "my ssh", "mpirun_args": "--mca a b", "lost_after": "60"}
    devices = ["me@a:cpu,cpu", "b:opencl0:0"]
    asked = Request.of("ASGD", devices, "models.small", "Model", settings, given, **more)
    parsed = _parser().parse_args(["rule", *asked.arguments()])
    known = options.of_rule("ASGD")
    again = Request.of(
        parsed.rule,
        parsed.devices,
        parsed.modelfile,
        parsed.modelclass,
        dict(parsed.set),
        {name: value for name, value in vars(parsed).items() if name in known},
        agent=parsed.agent,
        mpirun_args=parsed.mpirun_args,
        lost_after=parsed.lost_after,
    )
    assert again == asked


def test_theanompi_is_here_under_its_name():
    package = rules.theanompi()
    assert package is sys.modules["theanompi"] and package.BSP is BSP
    assert Path(package.__file__).parent.name == "compatible"
