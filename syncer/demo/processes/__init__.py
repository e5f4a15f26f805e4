"""Who runs: the children, the one that conducts them, and the training loop of a learner process.

Must stay cheap to import: every child starts through `tether`.
"""
