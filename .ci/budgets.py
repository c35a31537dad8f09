"""Compare the lines of each room with its budget; `make lint` runs it.

Whoever needs more lines changes the number in the same commit, and says why in its message.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A file counts in the room with the longest name that it is in.
CORE = {
    "synkhronos": 4_440,  # modules at the top
    "synkhronos/_arithmetic": 890,
    "synkhronos/_calls": 2_850,
    "synkhronos/_host": 9_950,
    "synkhronos/_machine": 2_840,
    "synkhronos/_session": 2_530,
    "synkhronos/comm": 7_380,
    "synkhronos/launch": 1_760,
    "synkhronos/profiling": 1_945,
    "synkhronos/tools": 2_480,
}
WHOLE_CORE = 37_000
OTHERS = {
    "synkhronos/extensions": 3_200,
    "synkhronos/extensions/keras": 600,
    "synkhronos/extensions/pymc": 5_710,
    "synkhronos/parameter_server": 9_100,
    "synkhronos/rules": 12_115,
    "synkhronos/tools/bench": 3_000,
    "tests": 73_100,
}


def lines_of_rooms():
    """Return the number of lines of each room."""
    found = dict.fromkeys([*CORE, *OTHERS], 0)
    for path in (*ROOT.glob("synkhronos/**/*.py"), *ROOT.glob("tests/**/*.py")):
        parents = (parent.as_posix() for parent in path.relative_to(ROOT).parents)
        room = next(parent for parent in parents if parent in found)
        found[room] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def main():
    found = lines_of_rooms()
    budgets = {**CORE, **OTHERS, "the core": WHOLE_CORE}
    found["the core"] = sum(found[room] for room in CORE)
    over = [room for room in budgets if found[room] > budgets[room]]
    for room in over:
        print(f"{room} has {found[room]:,} lines, over its {budgets[room]:,} in .ci/budgets.py")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
