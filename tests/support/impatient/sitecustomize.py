"""Make the limits after which a silent or stopped process is lost shorter, in each Python at start.

For processes whose PYTHONPATH has this folder: see ``impatient`` in tests/support/hosts.py.
"""

import sys
from importlib.machinery import PathFinder, SourceFileLoader

SECONDS = 4
LIMITS = {
    "synkhronos.comm.mpi.carrier": "LOST_SECONDS = 8.0",
    "synkhronos.comm.mpi.link": "_STOPPED_SECONDS = 8.0",
    "synkhronos.parameter_server.remote.heartbeats": "LOST_SECONDS = 8.0",
}


class ShortLimit(SourceFileLoader):
    """Loads a module with a shorter limit; messages have the seconds, too."""

    def get_code(self, fullname):
        source, limit = self.get_source(fullname), LIMITS[fullname]
        assert f"\n{limit}" in source, f"{fullname} has another limit"
        changed = source.replace(limit, limit.replace("8", str(SECONDS)))
        return compile(changed, self.path, "exec", dont_inherit=True)


class Finder:
    """Finds the modules that have a limit."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname not in LIMITS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        spec.loader = ShortLimit(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
