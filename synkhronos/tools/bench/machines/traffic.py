"""The command that counts the messages of each machine, for ``bench machines --count``."""


class CountTraffic:
    """A command for all ranks."""

    def run(self, worker):
        """Return the number of messages and of their bytes, in the first rank of a machine."""
        return worker.gate.link.count_traffic() if worker.gate.is_leader else None
