"""What is known of a run, and how it looks: live, in the closing table, as JSON, as a picture.

Must not start, signal or wait for a process.
"""
