"""A session: its state on the master, and the life of one rank, which runs its commands."""
