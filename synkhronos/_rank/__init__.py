"""One rank's life: wait for a command, run it, hand over the outputs."""
