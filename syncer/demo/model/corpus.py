"""Text that is on every machine: the source files of Python's own standard library, as bytes.

Reads only; must not touch the network, and must not depend on directory order, locale or time.

The rule, in full:
- every `*.py` file below the standard library directory, symbolic links not followed;
- not below a directory named in `SKIPPED_DIRECTORIES` (other people's packages, test suites, and
  tables that programs wrote), not a `_sysconfigdata*` file (it describes the machine), not empty;
- ordered by the SHA-256 of the path relative to the standard library, written with `/`: fixed for
  every machine, and neighbours in it have nothing to do with each other;
- cut off before the file that would exceed `CORPUS_BYTES_MAX` in total;
- every tenth file (number 9, 19, …) is held out, the others are dealt to the shards in turn.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from syncer.demo.model.byte_model import ByteArray
from syncer.errors import ConfigError

CORPUS_BYTES_MAX = 12 << 20
HELD_OUT_EVERY = 10
SHARD_BYTES_MIN = 4096
"""A shard or held-out part below this is refused: nothing could be learned or measured on it."""
SKIPPED_DIRECTORIES = frozenset({
    "__pycache__", "site-packages", "dist-packages",
    "test", "tests", "idle_test",
    "encodings", "pydoc_data",
})  # fmt: skip
FILE_END = b"\0"
"""Put after every file; a byte that Python source cannot contain."""


class Corpus(NamedTuple):
    """What one learner reads. Both arrays are one-dimensional uint8."""

    shard: ByteArray
    """Training bytes of this learner."""
    held_out: ByteArray
    """Bytes that no learner trains on; the same array for every learner."""
    files: int
    """Files in the whole corpus, held-out ones included."""


def stdlib_directory() -> Path:
    """Where this interpreter keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def corpus_files(root: Path, bytes_max: int = CORPUS_BYTES_MAX) -> list[Path]:
    """The files of the corpus below `root` in their fixed order, `bytes_max` bytes at most."""
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        for name in names:
            path = Path(directory, name)
            wanted = name.endswith(".py") and not name.startswith("_sysconfigdata")
            if wanted and path.is_file() and not path.is_symlink():
                relative = path.relative_to(root).as_posix()
                found.append((hashlib.sha256(os.fsencode(relative)).digest(), path))
    files, total = [], 0
    for _, path in sorted(found):
        size = path.stat().st_size
        if total + size > bytes_max:
            break
        if size:
            total += size
            files.append(path)
    return files


def load(shard: int, shards: int, root: Path | None = None) -> Corpus:
    """The training bytes of shard `shard` of `shards`, and the held-out bytes.

    Raises ConfigError when there is too little text for that, or a file cannot be read.
    """
    if not 0 <= shard < shards:
        raise ConfigError(f"shard {shard} does not exist: the text is cut into {shards} shards")
    root = stdlib_directory() if root is None else root
    files = corpus_files(root)
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [path for number, path in enumerate(files) if (number + 1) % HELD_OUT_EVERY]
    parts = []
    for what, chosen in (("shard", training[shard::shards]), ("held-out part", held_out)):
        try:
            text = b"".join(path.read_bytes() + FILE_END for path in chosen)
        except OSError as error:
            raise ConfigError(f"cannot read the training text: {error}") from error
        if len(text) < SHARD_BYTES_MIN:
            raise ConfigError(
                f"too little training text: the {what} has {len(text)} bytes of Python source from "
                f"{root}, at least {SHARD_BYTES_MIN} are needed; install the full standard library "
                "(for example: apt-get install libpython3-stdlib) or use fewer learners"
            )
        parts.append(np.frombuffer(text, dtype=np.uint8))
    return Corpus(shard=parts[0], held_out=parts[1], files=len(files))
