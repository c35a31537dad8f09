"""Further names of the host library that this folder uses, as `base.library` has them."""

from synkhronos._host.base.library import title

if title == "Theano":
    from synkhronos._host.theano.dividing.library import *  # noqa: F403
else:
    from synkhronos._host.pytensor.dividing.library import *  # noqa: F403
