"""The classes and functions of the host library that this folder uses, under the same names.

As ``os.path`` is ``posixpath`` or ``ntpath``, this module is ``_host/theano/library.py`` or
``_host/pytensor/library.py``. A further host library needs a module with the same names. Here it is
imported as `host`.
"""

from synkhronos._host.choice import choose

if choose() == "theano":
    from synkhronos._host.theano.library import *  # noqa: F403
else:
    from synkhronos._host.pytensor.library import *  # noqa: F403
