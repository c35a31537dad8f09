"""The operating system's part: processes, interrupts, shared memory, devices, the log."""
