"""Processes of one machine: they wait for one another, and share memory.

==================  ============================================================================
`gate_memory`       cells of memory that the processes of a session or a group inherit
`gate`              their waits for one another, in these cells, and the barriers of a session
`spinning`          how long they spin before they sleep
`memory`            segments for its arrays
==================  ============================================================================
"""
