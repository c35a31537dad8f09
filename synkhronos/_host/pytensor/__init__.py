"""PyTensor 3 as the host library. Only this folder, and `extensions/pymc`, import PyTensor.

Importing it raises ImportError for a PyTensor that Synkhronos does not know.
"""

from pytensor import __version__

from synkhronos._host.pythons import advice_of_release

if advice_of_release(__version__):
    raise ImportError(f"{advice_of_release(__version__)}.")
