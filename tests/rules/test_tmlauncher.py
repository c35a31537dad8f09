"""``tmlauncher``: Theano-MPI's options and files, and the errors that it had, as sentences."""

import json
import shlex

import pytest
from support.launching import allow_root, needs_mpirun
from support.rules import README

from synkhronos.rules import command as rule
from synkhronos.rules import options, tmlauncher
from synkhronos.rules.places import find_places


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Return a function that runs tmlauncher, and returns its request and the line to resume."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "modelfile.py").write_text("class ModelClass: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DEVICES", raising=False)
    found = []

    def start(asked, resume_line, dry_run=False, refused=2):
        found.append((asked, resume_line, dry_run, refused))
        return 77

    monkeypatch.setattr(rule, "start", start)

    def launch(*arguments, cfg=None):
        if cfg is not None:
            (tmp_path / "train.cfg").write_text(cfg)
        assert tmlauncher.main(list(arguments)) == 77
        asked, resume_line, _, refused = found.pop()
        assert refused == 1
        return asked, resume_line

    return launch


def test_the_file_of_their_readme(launched):
    asked, again = launched("-cfg=train.cfg", cfg=README)
    assert (asked.rule, asked.modelfile, asked.modelclass) == (
        "BSP",
        "models.modelfile",
        "ModelClass",
    )
    assert asked.places == find_places("cuda0,cuda1")
    of_launcher = {"log_path": asked.log_path, "bind": False, "grace": asked.grace}
    assert {**asked.options, **of_launcher} == options.check("BSP") and not asked.settings
    assert again == ["tmlauncher", "-cfg=train.cfg", "-resume"]


def test_hosts_and_every_key_of_a_file(launched):
    more = """\
DEVICES=("node0:cuda0" "node1:cuda0,cuda1,cuda2")
BSP_SYNC_TYPE=avg
BSP_EXCH_STRATEGY='ar'
BIND=yes
PRINT_FREQ=10
SNAPSHOT_PATH="a b"
SET=("n_epochs=3" "data.n_batch_train=10")
LOG_PATH=elsewhere
"""
    commands = "-agent=my ssh", "-mpirun_args=--mca a b"
    asked, _ = launched("--config=train.cfg", *commands, cfg=README + more)
    assert [place.host for place in asked.ranks] == ["node0", "node1", "node1", "node1"]
    assert asked.options["sync_type"] == "avg" and asked.options["exch_strategy"] == "ar"
    assert asked.options["print_freq"] == 10 and asked.options["snapshot_path"] == "a b"
    assert asked.bind and asked.log_path == "elsewhere"
    assert asked.settings == {"n_epochs": 3, "data.n_batch_train": 10}
    assert (asked.reach.agent, asked.reach.mpirun_args) == ("my ssh", "--mca a b")


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_nothing_is_bound_by_default(launched, value):
    asked, _ = launched("-cfg=train.cfg", cfg=README + ("" if value is None else f"BIND={value}\n"))
    assert asked.bind is False


def test_options_of_the_command(launched, monkeypatch):
    monkeypatch.setenv("DEVICES", "node0:cpu,cpu")
    asked, again = launched(
        *("-r=EASGD", "-file=models.modelfile", "-class=ModelClass", "-b", "-alpha=0.25"),
        *("-set=n_epochs=3", "--set=name=a b", "--snapshot-freq=1", "-resume"),
    )
    assert asked.rule == "EASGD" and asked.places == find_places("node0:cpu,cpu") and asked.bind
    assert asked.options["alpha"] == 0.25 and asked.options["snapshot_freq"] == 1
    assert asked.options["resume"] is True and asked.settings == {"n_epochs": 3, "name": "a b"}
    assert again.count("-resume") == 1
    asked, _ = launched(
        *("--rule=ASGD", "--modelfile=models.modelfile", "--modelclass=ModelClass"),
        *("-devices=cpu;", "-server=extra", "-bind"),
    )
    assert asked.rule == "ASGD" and [place.device for place in asked.ranks] == ["none", "cpu"]


def test_the_file_comes_before_the_command(launched, capsys):
    asked, _ = launched("-cfg=train.cfg", "-r=GOSGD", "-class=ModelClass", cfg=README)
    assert asked.rule == "BSP"
    note = "tmlauncher: train.cfg, line 2: RULE is taken, and not -r=GOSGD, as a file comes before"
    assert capsys.readouterr().err.startswith(note)


def test_conversions_are_told(launched, capsys):
    """Theirs made avg of cdd with one device, without a word; and counted devices by itself."""
    one = README.replace("cuda0,cuda1", "cpu")
    asked, _ = launched("-cfg=train.cfg", "-size=4", "-exch_strategy=nccl16", cfg=one)
    assert asked.options["sync_type"] == "avg"  # 16 bits are too few for it, but nothing is sent
    shown = capsys.readouterr().err
    assert "with one device there is nothing to exchange: BSP_SYNC_TYPE is avg" in shown
    assert "-size=4 is left out: DEVICES names 1 device." in shown
    hosts = README.replace("cuda0,cuda1", "a:cpu;b:cpu").replace("DEVICES=a:cpu;b:cpu", "")
    asked, _ = launched("-cfg=train.cfg", "-d=a:cpu;b:cpu", "-s=2", cfg=hosts)
    assert asked.options["exch_strategy"] == "nccl32"  # theirs forced ar: the exchange chooses
    assert capsys.readouterr().err == ""
    easgd = README.replace("RULE=BSP", "RULE=EASGD") + "BSP_SYNC_TYPE=avg\n"
    asked, _ = launched("-cfg=train.cfg", cfg=easgd)
    assert "sync_type" not in asked.options
    assert "BSP_SYNC_TYPE is for BSP: EASGD leaves it out" in capsys.readouterr().err


FULL = ("-rule=BSP", "-file=models.modelfile", "-class=ModelClass", "-devices=cpu,cpu")


@pytest.mark.parametrize(
    ("arguments", "cfg", "message"),
    [
        ([], None, "Neither config nor run options provided. Write tmlauncher -cfg=FILE"),
        (["-b"], None, "Neither config nor run options provided"),
        (["-r=BSP"], None, "MODELFILE is empty"),
        (["-file=models.modelfile", "-class=A"], None, "RULE is empty: write RULE=... in the"),
        (["-r=BSP", "-file=models.modelfile"], None, "MODELCLASS is empty"),
        (FULL[:3], None, "DEVICES is empty"),
        (["-cfg=train.cfg"], "RULE=BSP\n", "MODELFILE is empty"),
        (["-cfg=train.cfg"], README + "DEVICES=\n", "DEVICES is empty"),
        (["-cfg=none.cfg"], None, "can't read the config file 'none.cfg': No such file"),
        (["-cfg=train.cfg"], README + "rm -rf x\n", "train.cfg, line 6: 'rm -rf x' is not an assi"),
        (
            ["-cfg=train.cfg"],
            README + "AGENT='touch x'\n",
            "line 6: AGENT is refused in a file, be",
        ),
        (["-cfg=train.cfg"], README + "MPIRUN_ARGS=x\n", "write tmlauncher -mpirun_args=ARGS in"),
        (["-cfg=train.cfg"], README + "ALPHA=1\n", "line 6: ALPHA: BSP has no option 'alpha'"),
        (["-cfg=train.cfg"], README + "SEED=x\n", "line 6: SEED must be a whole number from 0"),
        (["-cfg=train.cfg"], README + "DEVICES=gpu0\n", "'gpu0' is not the name of a device"),
        (["-cfg=train.cfg"], README + "DEVICES=-Fx@y:cpu\n", "'-Fx@y"),
        (["-cfg=train.cfg"], README + "RULE=BSQ\n", "there is no rule 'BSQ'"),
        (["-cgf=train.cfg"], None, "unknown option '-cgf=train.cfg'. Perhaps you meant cfg."),
        (["train.cfg"], None, "unknown option 'train.cfg'"),
        (["-cfg"], None, "'-cfg' needs a value in the same word, such as -cfg=VALUE"),
        ([*FULL, "-alpha=1"], None, "-alpha=1: BSP has no option 'alpha'"),
        ([*FULL, "-seed=x"], None, "-seed=x must be a whole number"),
        ([*FULL, "-set=x"], None, "NAME=VALUE"),
        ([*FULL, "-class=Modle"], None, "has no class 'Modle'"),
        ([*FULL, "-file=models.none"], None, "there is no module 'models.none'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(launched, tmp_path, capsys, arguments, cfg, message):
    if cfg is not None:
        (tmp_path / "train.cfg").write_text(cfg)
    assert tmlauncher.main(list(arguments)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("tmlauncher: ") and message in shown and shown.count("\n") == 1


def test_no_command_of_a_file_runs(launched, tmp_path, capsys):
    """Theirs sourced the file, so that bash ran all that it holds."""
    for attack in ("$(touch ran)", "`touch ran`", "a; touch ran", '"$(touch ran)"'):
        (tmp_path / "train.cfg").write_text(README + f"MODELCLASS={attack}\n")
        assert tmlauncher.main(["-cfg=train.cfg"]) == 1
    assert not (tmp_path / "ran").exists()


@needs_mpirun
def test_a_dry_run_prints_the_line_of_mpirun(tmp_path, monkeypatch, capsys):
    (tmp_path / "model.py").write_text("class Model: pass\n")
    monkeypatch.chdir(tmp_path)
    allow_root(monkeypatch)
    given = ["-r=GOSGD", "-file=model", "-class=Model", "-d=a:cpu,cpu", "-p=0.5", "-dry-run"]
    assert tmlauncher.main(given) == 0
    line = shlex.split(capsys.readouterr().out)
    assert json.loads(json.loads(line[-1])["line"][-1])["options"]["p"] == 0.5


def test_help(capsys):
    assert tmlauncher.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "-bsp_exch_strategy=" in shown and "-KEY=VALUE" in shown
