"""The master's side of a session: its state, and the objects that the workers have."""
