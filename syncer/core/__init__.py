"""Pure round logic: (state, now, event) -> actions.

Must not touch a socket, clock, thread, file or float array.
"""
