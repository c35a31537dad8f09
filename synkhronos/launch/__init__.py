"""Starts the processes of a run, and watches them to their end. No other code starts any.

    tools: launch, nodes, rule, tmlauncher, run     options, and the sentences at the end
      │
      ├──▶ where, cores   hosts and devices, from options, files, Slurm, PBS; cores to bind to
      ├──▶ attempts       whether a run starts again after a loss, and on which hosts; `leftovers`
      ├──▶ children       starts ranks on this machine: child processes
      ├──▶ through        starts processes on several: mpirun, whose command line is in `mpirun`,
      │                   starts a `machine` with the ranks on each, or scripts with a `guard`
      └──▶ watch          streams, log files, signals, deaths and exit statuses, of both

The sentences about a run that fails are made here, for all commands.
"""

INTERRUPTED = 130  # exit status of ranks that have agreed to stop
FOLLOWS = 14  # exit status of a rank that ends because another one has ended


class CannotLaunch(ValueError):
    """A run can't be started; the message is for the user."""
