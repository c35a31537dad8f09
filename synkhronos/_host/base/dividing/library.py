"""What this folder uses of the host library, beyond `base.library`: under the same names, too."""

from synkhronos._host.base.library import title

if title == "Theano":
    from synkhronos._host.theano.dividing.library import *  # noqa: F403
else:
    from synkhronos._host.pytensor.dividing.library import *  # noqa: F403
