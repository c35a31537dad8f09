"""PyTensor 3 as the host library. Only this folder, and `extensions/pymc`, import PyTensor.

Importing it raises ImportError for a PyTensor that Synkhronos does not know.

What is replaced in PyTensor, because it has no other way in (`tests/host/test_replaced.py`):

by the first block of `parallel`, by `dividing.intercept`: libraries keep `pytensor.function`
    pytensor.compile.maker.function                its code: calls become those of the next name
    pytensor.compile.maker.synkhronos_intercepted  the function that the block was given is called
the class of objects that the script has already: so it sees no other objects than its own
    pytensor.link.basic.Container                  `base.cells`: tells when the value is set or read
    pytensor.compile.executor.Function             `dividing.serial_functions`: tells of its calls
in a rank on a device: plain functions can't read the values of shared variables there
    pytensor.compile.mode.predefined_modes["JAX"]  `jax_functions`: a mode with a linker of its own
"""

from pytensor import __version__

from synkhronos._host.pythons import advice_of_release

if advice_of_release(__version__):
    raise ImportError(f"{advice_of_release(__version__)}.")
