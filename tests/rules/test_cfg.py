"""Theano-MPI's configuration files: what bash would assign, and what is refused, with its line."""

import shutil
import subprocess

import pytest
from support.rules import README

from synkhronos.rules import cfg


def values(text):
    return {key: entry.value for key, entry in cfg.parse(text).items()}


def test_the_file_of_their_readme():
    assert values(README) == {
        "RULE": "BSP",
        "MODELFILE": "models.modelfile",
        "MODELCLASS": "ModelClass",
        "DEVICES": "cuda0,cuda1",
    }
    assert cfg.parse(README)["DEVICES"].line == 5


ASSIGNED = [
    ("RULE=BSP", "BSP"),
    ("  RULE=BSP ; MODELCLASS=A", "BSP"),
    ("RULE='B S'\"P 'x'\"\\ y", "B SP 'x' y"),
    ("RULE=", ""),
    ("RULE=''", ""),
    ("RULE=BSP # a comment = with $(words)", "BSP"),
    ("RULE=BSP#none", "BSP#none"),
    ("RULE='$HOME `ls`'", "$HOME `ls`"),
    ('RULE="a\\"b\\\\c\\$d\\e"', 'a"b\\c$d\\e'),
    ("RULE=a\\\nb", "ab"),
    ('RULE="a\nb"', "a\nb"),
    ("RULE=a=b", "a=b"),
    ("RULE=BSP\r\nMODELCLASS=A\r\n", "BSP"),
    ("RULE=first\nRULE=last", "last"),
    ("DEVICES=(node0:cuda0 'node1:cuda0,cuda1')", ["node0:cuda0", "node1:cuda0,cuda1"]),
    ('DEVICES=("a:cpu"  # the first\n\n  "b:cpu" # the second\n)', ["a:cpu", "b:cpu"]),
    ("DEVICES=( )", []),
    ('SET=("n_epochs=3" "data.n_batch_train=10")', ["n_epochs=3", "data.n_batch_train=10"]),
    ("ALPHA=0.25", "0.25"),
]


@pytest.mark.parametrize(("text", "expected"), ASSIGNED)
def test_values(text, expected):
    [first, *_] = values(text).values()
    assert first == expected


@pytest.mark.parametrize(("text", "expected"), [each for each in ASSIGNED if "\r" not in each[0]])
def test_bash_assigns_the_same(text, expected, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    name = next(iter(values(text)))
    (tmp_path / "file.cfg").write_text(text)
    shown = f'. ./file.cfg; printf "%s\\0" "${{{name}[@]}}"'
    done = subprocess.run(["bash", "-c", shown], cwd=tmp_path, capture_output=True, text=True)
    found = done.stdout.split("\0")[:-1]
    if isinstance(expected, list):
        assert [each for each in found if each] == expected
    else:
        assert found == [expected]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("RULE=BSP\nrm -rf /", 2, "'rm -rf /' is not an assignment"),
        ("RULE=BSP\n\nexport MODELCLASS=A", 3, "is not an assignment"),
        ("RULE=$(whoami)", 1, "begins a command"),
        ("#\nRULE=`whoami`", 2, "begins a command"),
        ("RULE=$HOME", 1, "begins an expansion"),
        ('RULE="${HOME}"', 1, "begins an expansion"),
        ('DEVICES=("a:cpu"\n $(hosts))', 2, "begins a command"),
        ("RULE=BSP && touch x", 1, "is not an assignment"),
        ("RULE=a|b", 1, "begins a command"),
        ("RULE=a>b", 1, "begins a redirection"),
        ("RULE=BSP touch x", 1, "'touch x' is not an assignment"),
        ("RULE = BSP", 1, "has a space before =; write RULE=VALUE without spaces"),
        ("RULE= BSP", 1, "has a space after ="),
        ("RULE+=BSP", 1, "adds to a value"),
        ("RULE='BSP\nMODELCLASS=A", 1, "has no end"),
        ("\nDEVICES=(a\nb", 2, "has no closing parenthesis"),
        ("DEVICES=(a)b", 1, "'b' after the value of DEVICES"),
        ("DEVICES=((a))", 1, "begins a command"),
        ("DEVICES=(a\nb;c)", 2, "begins a command"),  # it was read for ever
        ("RULE=BSP)", 1, "')' after the value of RULE"),
        ("if true; then\nRULE=BSP\nfi", 1, "is not an assignment"),
        ("RUEL=BSP", 1, "there is no key RUEL. Perhaps you meant RULE."),
        ("PATH=/tmp", 1, "there is no key PATH"),
        ("RULE=(BSP)", 1, "RULE takes one value, not a list"),
    ],
)
def test_what_is_refused_with_its_line(text, line, message):
    """Theirs ran the file as bash, so that any command in it was executed."""
    with pytest.raises(ValueError) as caught:
        cfg.parse(text, "train.cfg")
    assert str(caught.value).startswith(f"train.cfg, line {line}: ")
    assert message in str(caught.value)


def test_files(tmp_path):
    (tmp_path / "train.cfg").write_text(README)
    assert cfg.read(str(tmp_path / "train.cfg")) == cfg.parse(README)
    (tmp_path / "train.cfg").write_bytes(b"RULE=\xff")
    with pytest.raises(ValueError, match="not a text in UTF-8"):
        cfg.read(str(tmp_path / "train.cfg"))
    with pytest.raises(FileNotFoundError):
        cfg.read(str(tmp_path / "none.cfg"))
    with pytest.raises(TypeError, match="must be a path, got 3"):
        cfg.read(3)
