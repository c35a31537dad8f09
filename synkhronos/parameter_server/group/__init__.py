"""Groups: processes that work together, all with the same methods, without a master.

Ranks of `rules`, and servers and workers of a parameter server, are groups.

    launching   starts the ranks: `children` of this process, or by mpirun a `machine` on each host,
      │         with the ranks there as its children; `watched` shows what they print
      ▼
    membership  a rank joins its group
      │
      ├──▶ interface         Group, and SingleGroup, of one process
      ├──▶ one_machine       SharedGroup: shared memory, and a socket for each pair; no MPI, no port
      └──▶ several_machines  MachinesGroup: a SharedGroup on each, and a `carrier` between them
"""
