"""Commands that tests run, without input and with an end."""

import os
import subprocess
import sys
import textwrap

# For scripts that need no C code: before it compiles any, a process reads the keys of all modules
# in Theano's cache, for seconds. The warning is Theano's, that there is no compiler.
IN_PYTHON = {
    "THEANO_FLAGS": "mode=FAST_COMPILE,cxx=",
    "PYTHONWARNINGS": "ignore:DeprecationWarning",
}


def python_path(*folders):
    """Return a PYTHONPATH that has some folders before those of this process's own."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def run(*command, **kwargs):
    """Run a command for at most 300 s; return its exit status, and its output as text."""
    given = {"capture_output": True, "text": True, "timeout": 300}
    if "input" not in kwargs:
        given["stdin"] = subprocess.DEVNULL
    return subprocess.run([*map(str, command)], **{**given, **kwargs})


def python(*arguments, cwd=None, **variables):
    """Run this Python with some more variables in its environment."""
    return run(sys.executable, *arguments, cwd=cwd, env={**os.environ, **variables})


def code(text, **kwargs):
    """Run Python code; see `python`."""
    return python("-c", textwrap.dedent(text), **kwargs)
