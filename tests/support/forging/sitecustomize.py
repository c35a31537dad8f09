"""Let each process of a job send forged messages before each right one, from its start.

For processes whose PYTHONPATH has this folder. They have what an attacker may know: communicators,
tags, lengths, numbers and earlier messages. A forged pickle writes a file where it is read.
"""

import sys
from importlib.machinery import PathFinder, SourceFileLoader

FORGING = """
class _Evil:
    def __reduce__(self):
        return open, (os.path.join(os.environ["FORGED"], "unpickled"), "w")

_first, _kept, _true_send = {}, [], Sealed.Isend

def _forging_send(self, buffer, dest, tag=0):
    evil, length = pickle.dumps(_Evil()), len(bytes_of(buffer))
    frames = [np.frombuffer(evil, np.uint8), np.zeros(length, np.uint8)]
    for payload in (evil, b"\\1" * length):  # as the right one will be, but for the secret
        guessed = Seal(b"not the key", self.rank, self.size)
        guessed._n_sent = list(self._seal._n_sent)
        frames.append(guessed.close(dest, tag, payload))
    if (dest, tag) in _first:
        frames.append(_first[dest, tag])
    for frame in frames:
        _kept.append((self._comm.Isend([frame, MPI.BYTE], dest, tag), frame))
    right = self._seal.close

    def close(*given):
        frame = right(*given)
        _first.setdefault((dest, tag), frame)
        return frame

    self._seal.close = close
    try:
        return _true_send(self, buffer, dest, tag)
    finally:
        self._seal.close = right

Sealed.Isend = _forging_send
open(os.path.join(os.environ["FORGED"], f"forger-{os.getpid()}-{os.uname().nodename}"), "w").close()
"""


class Loader(SourceFileLoader):
    """Loads the module of checked messages with that at its end."""

    def get_code(self, fullname):
        source = self.get_source(fullname) + FORGING
        return compile(source, self.path, "exec", dont_inherit=True)


class Finder:
    """Finds that module."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname != "synkhronos.comm.mpi.sealed":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        spec.loader = Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
