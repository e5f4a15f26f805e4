"""How a figure is written in 80 columns: bits per byte, bytes, tokens per second.

Must not know what is being shown.
"""

from __future__ import annotations

COLUMNS_MAX = 80


def bits(value: float | None) -> str:
    """Bits per byte, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def rate(tokens_per_s: float | None) -> str:
    """Tokens per second, or a dash."""
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def size(count: float) -> str:
    """Bytes in the unit that leaves at most four digits; powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
