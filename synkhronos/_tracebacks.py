"""Show an uncaught error in a few lines: the script's lines, and what went wrong.

Frames of libraries are left out, except the line that calls this package, and what the host says of
a node of the graph is cut to its name, the shapes of its inputs, and the script's line that made
it. What is cut goes into a file. The exception stays as it is: programs, debuggers and other hooks
get all of it.
"""

import functools
import os
import re
import sys
import traceback

from synkhronos._escapes import printable

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = (_PACKAGE, os.path.dirname(os.__file__) + os.sep, "<frozen ", "<__array_function__ ")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MOST_FRAMES, _MOST_LINES, _MOST_LETTERS = 4, 12, 1000
# What the host says of a node beside its name and its inputs' shapes.
_LEFT_OUT = re.compile(
    r"^(Toposort index|Inputs types|Inputs strides|Inputs values|Outputs clients|HINT): .*\n?"
    r"(?:  .*\n)*",
    re.MULTILINE,
)
_MADE_AT = re.compile(
    r"Backtrace when (?:the node|that variable) is created.*\n+((?:  File .*\n(?:    .*\n)*)+)"
)
_HOOKS = "theano.", "pytensor.", "apport_python_hook"  # that stand in for Python's: hosts, Ubuntu


def show_short() -> None:
    """Show uncaught errors of this package in a few lines, unless the script has its own hook."""
    hook = sys.excepthook
    if (getattr(hook, "__module__", None) or "").startswith(_HOOKS):
        hook = getattr(hook, "__globals__", {}).get("__excepthook", sys.__excepthook__)
    if not _shows_whole() and hook is sys.__excepthook__:
        sys.excepthook = functools.partial(_show, sys.excepthook)


def _show(instead_of, kind, error, trace):
    try:
        lines = short_lines(error, trace)
        sys.stderr.write("".join(f"{line}\n" for line in lines))
    except Exception:  # an error of the display must not hide the script's
        lines = ()
    if not lines:
        instead_of(kind, error, trace)


def rendered(error):
    """Return the lines that IPython shows for an exception."""
    whole = traceback.format_exception(type(error), error, error.__traceback__)
    return (() if _shows_whole() else short_lines(error)) or "".join(whole).splitlines()


def _shows_whole():
    return os.environ.get("SYNKHRONOS_TRACEBACK", "0") not in ("", "0")


def short_lines(error, trace=None):
    """Return the lines to show for an exception.

    There are none if the script raised it, not this package, or if what they leave out can't be
    kept in a file.
    """
    trace = trace or error.__traceback__
    frames = traceback.extract_tb(trace)
    own = [at for at, frame in enumerate(frames) if not is_of_library(frame.filename)]
    after = range(own[-1] + 1 if own else len(frames), len(frames))
    entry = next((at for at in after if frames[at].filename.startswith(_PACKAGE)), None)
    if entry is None:
        return ()
    if any(folder in frames[entry - 1].filename for folder in _INSTALLED):
        own.append(entry - 1)  # a script may be a few lines, and all else an installed package
    shown = "".join(traceback.format_list([frames[at] for at in own[-_MOST_FRAMES:]]))
    message = "".join(traceback.format_exception_only(type(error), error))
    lines, more = _cut(message), "SYNKHRONOS_TRACEBACK=1 prints the whole traceback."
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None or lines != message.splitlines():
        try:
            kept = _kept(error, trace)
        except OSError:
            return ()
        more = f"The whole traceback is in {kept}; SYNKHRONOS_TRACEBACK=1 prints it."
    head = "Traceback of the script (most recent call last):"
    return [head, *shown.splitlines(), *lines, more]


def is_of_library(file):
    """Return whether a file of a frame is not the script's: of Python, this or another package."""
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)


def _cut(message):
    """Return the lines of a message without what helps few, at most `_MOST_LINES`."""
    text = _LEFT_OUT.sub("", _MADE_AT.sub(_made_at, message))
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"[... {len(lines) - _MOST_LINES} lines more]"]
    return [printable(line[:_MOST_LETTERS]) + "..." * (len(line) > _MOST_LETTERS) for line in lines]


def _made_at(match):
    """Return the script's line that made a node, from the frames of the host's message."""
    frames = re.findall(r'(  File "(.*?)".*\n(?:    .*\n)*)', match[1])
    own = [text for text, file in frames if not is_of_library(file)]
    return "It was made here:\n" + (own or [match[1]])[-1]


def _kept(error, trace):
    """Write the whole traceback of an exception into a file, and return its path."""
    import tempfile  # not above: launchers do without

    whole = "".join(traceback.format_exception(type(error), error, trace))
    prefix = "synkhronos-traceback-"
    with tempfile.NamedTemporaryFile(prefix=prefix, suffix=".txt", delete=False) as file:
        file.write(whole.encode(errors="backslashreplace"))
    return file.name
