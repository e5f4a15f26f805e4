"""The life of a run, from waiting to exit: starting, committing, saving, finishing.

Pure, like all of core.
"""
