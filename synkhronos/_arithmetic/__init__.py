"""Pure arithmetic: which rows, which parts, how they are reduced; no processes, no host library."""
