"""A session: its state on the master, and the life of one rank.

A rank waits for a command, runs it, and hands its outputs over; the master does the same.
"""
