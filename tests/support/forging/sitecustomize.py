"""Let each process of a job attack the others at its start, and forge MPI's messages.

For processes whose PYTHONPATH has this folder. They have what an attacker may know: addresses,
ports, ranks and lengths, but no key. A forged pickle writes a file where it is read.
"""

import sys
from importlib.machinery import PathFinder, SourceFileLoader

FORGING = """
class _Evil:
    def __reduce__(self):
        return open, (os.path.join(os.environ["FORGED"], "unpickled"), "w")

_held, _true_agree, _true_connect = [], agree, Start.connect

def agree(comm, secret, facts):
    import pickle

    from synkhronos.comm.mpi.mpi_library import MPI

    found = _true_agree(comm, secret, facts)
    frame = np.frombuffer(pickle.dumps(_Evil()), np.uint8)
    for rank in range(comm.size):
        for tag in (0, 1, 21_000):
            if rank != comm.rank:
                _held.append((comm.Isend([frame, MPI.BYTE], rank, tag), frame))
    return found

def _connect_after_attacks(self, key, facts, with_leaders):
    import pickle

    evil = pickle.dumps(_Evil())
    head = struct.pack("=2Q", 1, len(evil))
    n_taken = 0
    for rank, each in enumerate(facts):
        for address in each["addresses"]:
            if rank == self._rank or address.startswith("127."):
                continue
            claims = [_NUMBER.pack(other) for other in (*range(2 * len(facts)), 2**64 - 1)]
            claims = [claim + bytes(32) + head + evil for claim in claims]
            for said in (b"", b"OP", head + evil, *claims):
                with contextlib.suppress(OSError):
                    stranger = socket.create_connection((address, each["port"]), 1)
                    stranger.sendall(said)
                    _held.append(stranger)
                    n_taken += 1
    name = f"forger-{os.getpid()}-{os.uname().nodename}"
    with open(os.path.join(os.environ["FORGED"], name), "w") as file:
        file.write(str(n_taken))
    return _true_connect(self, key, facts, with_leaders)

Start.connect = _connect_after_attacks
"""


class Loader(SourceFileLoader):
    """Loads the module that connects processes with that at its end."""

    def get_code(self, fullname):
        source = self.get_source(fullname) + FORGING
        return compile(source, self.path, "exec", dont_inherit=True)


class Finder:
    """Finds that module."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname != "synkhronos.comm.mpi.rendezvous":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        spec.loader = Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
