"""Checkpoints on disk: formats, atomic files, the saver thread, resume.

Must not know rounds or sockets.
"""
