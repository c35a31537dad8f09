"""The only code that starts processes of a run, and watches them to their end.

tools: launch, rule, tmlauncher, nodes, run     options, and what to say at the end
│
├──▶ where      hosts and devices, of options, files, Slurm, PBS
├──▶ children   how on this machine: child processes
├──▶ through    how on several: mpirun, of which `mpirun` has the command line, and a
│               `guard` beside each process
└──▶ watch      streams, log files, signals, deaths and exit statuses, in both
"""

INTERRUPTED = 130  # the exit status of ranks that have agreed to stop
FOLLOWS = 14  # of a rank that ends because another one has; Open MPI's, if a connection is closed


class CannotLaunch(ValueError):
    """A run can't be started; the message is for the user."""
