"""The transport of ranks on several machines: shared memory within each, TCP between them.

The *leader* of a machine is its first process, which mpirun has started: the master, or a process
that takes the master's commands. Each leader starts a *carrier*, the only process of its machine
that connects with others; MPI tells them their addresses. Three things cross the network: values
from leader to leader (`GateOfMachines.exchange`), arrays that carriers fetch for their ranks
(`fetches`), and all-reduces (`reductions`).

======================  ==========================================================================
`carrier`               the carrier's loop for a session
`fetches`               its part in fetching arrays from other machines
`reductions`            its part in all-reduces that ranks have begun, of buckets and others
`all_reduce`            the messages of one all-reduce
`mpi_reductions`        or MPI's own, on a network that is trusted
`link`                  a process's connection with the carrier, over a `~synkhronos.comm.channel`
`gate`                  the barriers: `master_gate`, `leader_gate`
`memory`                arrays of commands: the rows that a machine needs are fetched
`variable_collectives`  collectives on shared variables
`arrays`                reductions inside of functions
`outputs`               outputs of functions
======================  ==========================================================================

Carriers of groups have the loop of `base_carrier`, too, and the connections of `mesh`, which are
made by `rendezvous`, with messages that are `sealed` with a `secret`.
"""
