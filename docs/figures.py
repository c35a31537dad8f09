"""The measured figures of these pages and of README.md, from figures.json: `make figures`.

:figure:`call.call_us` is a number of a run, `.. printed:: call` what its command printed, and
`.. runs::` a table of all runs. README.md has such text between comments.
"""

import json
import re
from pathlib import Path

FILE = Path(__file__).with_name("figures.json")
_IN_README = re.compile(
    r"(<!-- (figure|printed) ([\w.]+)(?: from (.*?))? -->)(.*?)(<!-- end -->)", re.DOTALL
)


def read():
    """Return the runs by their names."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def number(runs, name):
    """Return a number, such as that of ``call.call_us``, as pages show it."""
    run, _, key = name.partition(".")
    return f"{runs[run]['numbers'][key]:,}"


def printed(runs, name, start=None):
    """Return what a command printed, from the line on that begins with a text."""
    lines = runs[name]["output"]
    if start:
        first = next(n for n, line in enumerate(lines) if line.startswith(start))
        lines = lines[first:]
    return "\n".join(lines)


def in_readme(text, runs):
    """Return the text of README.md with the figures of the file."""

    def renewed(found):
        begin, kind, name, start, _, end = found.groups()
        if kind == "figure":
            return f"{begin}{number(runs, name)}{end}"
        return f"{begin}\n```text\n{printed(runs, name, start)}\n```\n{end}"

    return _IN_README.sub(renewed, text)


def table(runs):
    """Return the runs as rows: what was run, when, and where.

    Numbers of machines stand for their descriptions, which are the second list.
    """
    machines = list(dict.fromkeys(run["machine"] for run in runs.values()))
    rows = [
        (name, f"``{run['command']}``", run["date"] + ", busy" * ("busy" in run),
         run.get("commit", "by hand"), str(1 + machines.index(run["machine"])))
        for name, run in runs.items()
    ]  # fmt: skip
    return rows, machines


def setup(app):
    """Register the role and the directives with Sphinx."""
    from docutils import nodes
    from docutils.parsers.rst import Directive
    from docutils.statemachine import StringList

    runs = read()

    def figure(role, raw, text, line, inliner, *_):
        try:
            return [nodes.Text(number(runs, text))], []
        except KeyError:
            error = inliner.reporter.error(f"figures.json has no number {text!r}", line=line)
            return [inliner.problematic(raw, raw, error)], [error]

    class Printed(Directive):
        """Shows a command and what it printed."""

        required_arguments = 1

        def run(self):
            [name] = self.arguments
            self.state.document.settings.env.note_dependency(str(FILE))
            if name not in runs:
                raise self.error(f"figures.json has no run {name!r}")
            shown = f"$ {runs[name]['command']}\n{printed(runs, name)}"
            return [nodes.literal_block(shown, shown, language="text")]

    class Runs(Directive):
        """Lists all runs."""

        def run(self):
            self.state.document.settings.env.note_dependency(str(FILE))
            rows, machines = table(runs)
            text = [".. list-table::", "   :header-rows: 1", "   :widths: 16 48 16 10 10", ""]
            for first, *others in [("run", "command", "date", "commit", "machine"), *rows]:
                text += [f"   * - {first}", *(f"     - {each}" for each in others)]
            for n, machine in enumerate(machines, 1):
                text += ["", f"Machine {n}: {machine}."]
            found = nodes.Element()
            self.state.nested_parse(StringList(text, str(FILE)), 0, found)
            return found.children

    app.add_role("figure", figure)
    app.add_directive("printed", Printed)
    app.add_directive("runs", Runs)
    return {"parallel_read_safe": True}
