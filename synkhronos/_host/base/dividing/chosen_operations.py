"""Further names of the host library that this folder uses, as `base.chosen_library` has them."""

from synkhronos._host.base.chosen_library import title

if title == "Theano":
    from synkhronos._host.theano.dividing.library_operations import *  # noqa: F403
else:
    from synkhronos._host.pytensor.dividing.library_operations import *  # noqa: F403
