"""Syncs over links of known rate, in the lab of `benchmarks.lab`. Must not make a network."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lab import scenes
from benchmarks.lab.network import NotPermitted, apart
from benchmarks.limits.figure import Figure, NotHere


def found_apart(find: Callable[[], Any]) -> Any:
    """What `find` returns, as JSON carries it, run where the lab is (`network.apart`). Raises
    NotHere where none can be, RuntimeError when it fails: it has said why."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found"

        def body() -> int:
            file.write_text(json.dumps(find()), encoding="utf-8")
            return 0

        try:
            status = apart(body)
        except NotPermitted as error:
            raise NotHere(str(error)) from None
        if status:
            raise RuntimeError("the lab has failed")
        return json.loads(file.read_text(encoding="utf-8"))


def in_lab(scene: Callable[[], scenes.Row]) -> Figure:
    """What a scene of the lab has found, in seconds."""
    row = found_apart(lambda: scene()._asdict())
    return Figure(row["ratio"], row["seconds"], row["bound_s"], "s")


def sync(link: scenes.Link, dtype: str, mib: int, short: bool, downlink: str = "whole") -> Figure:
    """Two learners, the whole model once, against the bytes of the busier direction by the rate."""
    return in_lab(partial(scenes.sync, link, dtype, mib // 8 if short else mib,
                          3 if short else 8, downlink))
