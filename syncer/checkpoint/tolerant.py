"""Files on whatever file system: what it lacks and a run can do without is said once.

Must not forgive an error that the next call may not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncer.checkpoint.files import Behind, Files
from syncer.checkpoint.trouble import LACKING


class Tolerant(Behind):
    """Another `Files`; `warn(text, fields)` hears of each kind of trouble once."""

    def __init__(self, files: Files, warn: Callable[[str, dict[str, Any]], None]):
        super().__init__(files)
        self.warn = warn
        self.said: set[str] = set()

    def remark(self, text: str, fields: dict[str, Any]) -> None:
        if text not in self.said:
            self.said.add(text)
            self.warn(text, fields)

    def sync_directory(self, path: str) -> None:
        """SMB and some file systems in user space have no such call; a name is durable there when
        the server says so, and nothing can be done about it here."""
        try:
            self.files.sync_directory(path)
        except OSError as error:
            if error.errno not in LACKING:
                raise
            self.remark("the file system cannot make a new name durable",
                        {"path": path, "call": "fsync of a directory", "error": error.strerror})
