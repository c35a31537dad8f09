"""A session: what the master keeps of it, and one rank's life.

A rank waits for a command, runs it, and hands its outputs over; the master does the same.
"""
