"""The flags of a run: a table of rows, the rules between them, and the profile hash.

Where values come from (command line, environment, file) is flags.py. Must not import anything that
loads NumPy or a compiled module: `--help` needs these rows.
"""

from syncer.config.table import OPTIONS, Config, available_cores

__all__ = ["OPTIONS", "Config", "available_cores"]
