"""Starts the processes of a run, and watches them to their end.

    tools: launch, run    options, and the sentences at the end
      │
      ├──▶ where      hosts and devices, from options, files, Slurm, PBS
      ├──▶ attempts   whether a run starts again after a loss, and on which hosts; `leftovers`
      ├──▶ through    starts a script on several machines by mpirun, with a `guard` on each
      └──▶ watch      streams, signals, deaths and exit statuses

`parameter_server.group` starts the ranks of a group in the same way. The sentences about a run that
fails are made where it is started, for all commands.
"""

INTERRUPTED = 130  # exit status of ranks that have agreed to stop


class CannotLaunch(ValueError):
    """A run can't be started; the message is for the user."""
