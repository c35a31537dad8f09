"""The master's side of the workers: the current session, and what the workers have."""
