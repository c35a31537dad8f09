"""No public name, argument, default, option or variable is lost; new ones may come."""

from pathlib import Path

from support.public_names import all_names

RECORDED = Path(__file__).with_name("public_names.txt")


def test_all_public_names_of_before_are_there():
    assert not {*RECORDED.read_text(encoding="utf-8").splitlines()} - {*all_names()}
