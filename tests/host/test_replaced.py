"""What the package replaces in the host library is what the docstring of its folder lists."""

import ast
import re

from support import host_library
from support.sources import MODULES

SCRIPT = """
import sys, types
import numpy as np
import synkhronos as synk
from synkhronos.host import T, theano

LIBRARY = theano.__name__
OURS = "/synkhronos/_host/", "/_synkhronos_import_support"

def places():
    for name, module in list(sys.modules.items()):
        if name.startswith(LIBRARY + ".") and hasattr(module, "__file__"):  # else it is added
            for key, value in list(vars(module).items()):
                yield f"{name}.{key}", value
                if isinstance(value, type) and value.__module__ == name:
                    yield from ((f"{name}.{key}.{own}", each) for own, each in vars(value).items())

x, w = T.matrix("x"), theano.shared(np.ones((3, 3)), "w")
counting = theano.function([], w.sum(), updates=[(w, w + 1)])
synk.fork(2)
synk.function([x], (T.dot(x, w).sum(), "sum"))(np.ones((4, 3)))
with synk.parallel():
    theano.function([x], T.dot(x, w).sum())(np.ones((4, 3)))
for place, value in places():
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        if any(each in value.__code__.co_filename for each in OURS):
            has_new_code = value.__globals__["__name__"].startswith(LIBRARY)
            print(f"{value.__module__}.{value.__qualname__}" if has_new_code else place)
for each in (w.container, counting):
    swapped, plain = type(each), next(k for k in type(each).__mro__ if LIBRARY in k.__module__[:8])
    print(f"{plain.__module__}.{plain.__name__}", *[] if swapped is plain else ["is derived"])
synk.close()
"""


def listed(folder):
    """Return the names that the docstring of a host's folder lists, but for those of devices."""
    text = ast.get_docstring(MODULES[f"_host.{folder}"]).partition("\nin a rank on")[0]
    of_objects = text.partition("\nthe class of objects")[2]
    found = dict.fromkeys(re.findall(rf"^    ({folder}\.\S+)", text, re.MULTILINE), "")
    found.update((name, " is derived") for name in found if f" {name} " in of_objects)
    return {name + suffix for name, suffix in found.items()}


def test_all_that_is_replaced_is_listed(script):
    names = listed(host_library.NAME)
    assert {*script(SCRIPT).stdout.splitlines()} == names and len(names) > 3


def test_no_other_module_changes_the_class_of_objects():
    found = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "__class__"
        if isinstance(node.ctx, ast.Store)
    }
    assert found == {"_host.base.cells", "_host.base.dividing.serial_functions"}
