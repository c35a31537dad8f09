"""Processes of one machine: they wait for one another, and share memory.

==================  ============================================================================
`gate_memory`       cells of memory that the processes of a session or a group inherit
`meetings`          their waits for one another, in these cells
`spinning`          how long they spin before they sleep
`gate`              the barriers of a session
`memory`            segments for its arrays
`group`             a group of equal ranks
`mail`              its messages; `large_messages`: large arrays in them
==================  ============================================================================
"""
