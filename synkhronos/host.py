"""The host library, Theano or PyTensor, under Theano's names.

A script that is to run on both imports it from here::

    from synkhronos.host import T, theano

It is Theano on Python 3.8 to 3.11, and PyTensor on 3.12 to 3.14. A script for one of them keeps its
own imports.

Attributes
----------
theano : module
    ``theano``, or ``pytensor``.
T : module
    Its expressions: ``theano.tensor``, or ``pytensor.tensor``.
"""

from typing import Any

from synkhronos import _host

__all__ = ["T", "theano"]

theano: Any = _host.library
T: Any = _host.tensor
