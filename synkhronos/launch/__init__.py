"""The only code that starts processes of a run, and watches them to their end."""

INTERRUPTED = 130  # the exit status of ranks that have agreed to stop
FOLLOWS = 14  # of a rank that ends because another one has; Open MPI's, if a connection is closed
