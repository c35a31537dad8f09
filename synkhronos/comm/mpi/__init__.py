"""The transport of ranks on several machines: shared memory within each, MPI between them.

==============  ================================================================================
`carrier`       the process of each machine that speaks MPI, started by its first process
`fetches`       the arrays that ranks fetch from other machines, as it gets and sends them
`transfers`     reductions and copies, as it keeps track of them
`~synkhronos.comm.channel`  messages between that process and the ranks
`link`          a rank's end of it
`all_reduce`    the all-reduce between machines
`gate`          the barriers
`memory`        arrays of commands: the rows that a machine needs are fetched
`variables`     collectives on shared variables
`arrays`        reductions inside of functions
`outputs`       outputs of functions
`communicator`  one rank's end of all this
==============  ================================================================================
"""
