"""A transport on top of another one: its base does all that it does not do itself."""

from unittest.mock import Mock

import pytest

from synkhronos.comm import Arrays, Outputs, Variables
from synkhronos.comm.composition import ArraysOver, OutputsOver, VariablesOver

PAIRS = [(Variables, VariablesOver), (Outputs, OutputsOver), (Arrays, ArraysOver)]


@pytest.mark.parametrize(("interface", "over"), PAIRS)
def test_every_method_is_done_by_the_base(interface, over):
    base = Mock(spec=interface)
    upper = over(base)
    assert isinstance(upper, interface)
    methods = [name for name in vars(interface) if not name.startswith("_")]
    assert len(methods) > 2
    for name in methods:
        assert getattr(upper, name)(1, 2) is getattr(base, name).return_value
        getattr(base, name).assert_called_once_with(1, 2)
        assert getattr(upper, name).__doc__ == getattr(interface, name).__doc__


def test_what_the_upper_one_does_itself_goes_no_further():
    class Upper(VariablesOver):
        def all_reduce(self, keys, op):
            return super().all_reduce(keys, op) if op == "prod" else "done"

    base = Mock(spec=Variables)
    upper = Upper(base)
    assert upper.all_reduce((1,), "sum") == "done" and not base.all_reduce.called
    assert upper.all_reduce((1,), "prod") is base.all_reduce.return_value
