"""One rank's life: wait for a command, run it, hand its outputs over."""
