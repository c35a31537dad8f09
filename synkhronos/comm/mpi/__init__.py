"""The transport of ranks on several machines: shared memory within each, MPI between them.

The process of a machine that mpirun has started is its leader: the master, or one that takes the
master's commands. It speaks for its machine in three ways: values to all other leaders
(`GateOfMachines.exchange`), arrays that its carrier gets from others (`fetches`), and all-reduces
over the machines (`reductions`).

======================  ==========================================================================
`carrier`               the process of each machine that speaks MPI, started by its leader
`fetches`               arrays that ranks get from other machines, as the carriers get and send them
`reductions`            all-reduces that ranks have begun, of `buckets` and others
`all_reduce`            the messages of one of these
`link`                  a process's connection with the carrier, over a `~synkhronos.comm.channel`
`gate`                  the barriers: `master_gate`, `leader_gate`
`memory`                arrays of commands: the rows that a machine needs are fetched
`variable_collectives`  collectives on shared variables
`arrays`                reductions inside of functions
`outputs`               outputs of functions
======================  ==========================================================================

A group over several machines is `machines_group`, with a `group_carrier` on each. Both kinds of
carriers have the loop of `base_carrier`, its `waiting`, and messages that are `sealed` with a
`secret`.
"""
