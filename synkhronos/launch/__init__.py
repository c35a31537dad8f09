"""The only code that starts processes of a run, and watches them to their end.

    tools: launch, nodes, rule, tmlauncher, run     options, and what to say at the end
      │
      ├──▶ where, cores   hosts and devices, of options, files, Slurm, PBS; cores to bind to
      ├──▶ attempts       whether a run starts again after a loss, and on which hosts; `leftovers`
      ├──▶ children       how on this machine: child processes
      ├──▶ through        how on several: mpirun, whose command line is in `mpirun`; it starts a
      │                   `machine` on each, with the ranks there, or scripts with a `guard`
      └──▶ watch          streams, log files, signals, deaths and exit statuses, of both

What a command prints about a run that fails is made here, once for all commands.
"""

INTERRUPTED = 130  # the exit status of ranks that have agreed to stop
FOLLOWS = 14  # of a rank that ends because another one has


class CannotLaunch(ValueError):
    """A run can't be started; the message is for the user."""
