"""A shell completes the command ``synkhronos``, as the extra ``completion`` sets it up."""

import os
import sys

import pytest
from support import running

argcomplete = pytest.importorskip("argcomplete")
# At a Tab readline calls the function that `complete` names, with the line so far.
SCRIPT = """
eval "$CODE"
read -ra words <<< "$(complete -p synkhronos)"
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMPREPLY=()
    read -ra COMP_WORDS <<< "$COMP_LINE"
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    ${words[-2]} synkhronos "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
    echo "${COMPREPLY[*]}"
done
"""
FOUND = {
    "synkhronos la": "launch",
    "synkhronos launch --wor": "--workers",  # of a system
    "synkhronos rule BSP --sy": "--sync-type",
    "synkhronos bench sca": "scaling",
    "synkhronos run -n 2 tr": "train.py",
    "synkhronos run --nothing": "",
}


def test_bash_completes_commands_options_files_and_benchmarks(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "synkhronos").write_text(f'#!/bin/sh\nexec {sys.executable} -m synkhronos "$@"\n')
    (tmp_path / "synkhronos").chmod(0o755)
    env = {**os.environ, "CODE": argcomplete.shellcode(["synkhronos"])}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    lines = "".join(f"{line}\n" for line in FOUND)
    done = running.run("bash", "--norc", "-c", SCRIPT, cwd=tmp_path, env=env, input=lines)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.strip() for line in done.stdout.splitlines()] == [*FOUND.values()]
