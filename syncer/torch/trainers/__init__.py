"""Callbacks that make the model of somebody else's trainer an island: one module a library.

Must not import a library before its module is asked for.
"""
