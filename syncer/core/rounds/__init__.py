"""The life of a round: who is expected, what is accepted, when it closes.

Pure, like all of core.
"""
