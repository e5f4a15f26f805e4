"""What is to be said of settings that may be used and look odd. Must not refuse any: rules.py does.
"""

from __future__ import annotations

from typing import Any

from syncer.config.options import Option, flag
from syncer.config.presets import PRESETS


class Remarked:
    """The part of `Config` that looks at its own values."""

    preset: str | None
    learners: int
    given: frozenset[str] | None

    @staticmethod
    def rows() -> tuple[Option[Any], ...]:
        """All of them."""
        raise NotImplementedError

    @property
    def from_preset(self) -> dict[str, object]:
        """What the preset has set, of what it could: names and values."""
        if self.preset is None:
            return {}
        return {name: getattr(self, name) for name, part in PRESETS[self.preset].parts.items()
                if name not in (self.given or ())
                and getattr(self, name) == part.of(self.learners)}

    @property
    def without_effect(self) -> tuple[tuple[str, str], ...]:
        """Of every setting that was given and has no effect: its flag, and what it needs."""
        return tuple((flag(option.name), str(need)) for option in self.rows()
                     if (need := option.lacks(self)) is not None and self._was_given(option))

    @property
    def unusual(self) -> tuple[tuple[str, float, float], ...]:
        """Of every setting that looks like a mistake: its flag, its value, the most usual one."""
        return tuple((flag(option.name), value, option.usual) for option in self.rows()
                     if option.usual is not None
                     and (value := getattr(self, option.name)) > option.usual)

    def _was_given(self, option: Option[Any]) -> bool:
        if self.given is not None:
            return option.name in self.given
        return bool(getattr(self, option.name) != option.default)
