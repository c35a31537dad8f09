"""The file of the memory that Open MPI shares between the processes of a machine."""

import contextlib
import os


def unlink_segment() -> None:
    """Remove the name of this process's segment, which all that need it have mapped.

    To be called after MPI's start, which ends with a barrier. If processes are killed, Open MPI
    leaves the file behind.
    """
    number = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "")
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "/sm_segment." in line}
        for path in mapped:
            if path.endswith(f".{number}"):
                os.unlink(path)
