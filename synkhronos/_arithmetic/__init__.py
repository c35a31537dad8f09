"""Pure functions that divide rows among ranks and reduce arrays; no processes, no host library."""
