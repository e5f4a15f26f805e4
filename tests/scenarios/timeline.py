"""Draws a scenario as a timeline for the docs: one lane per learner, one for the server.

Made from the file as it is played, so that a picture in the docs cannot disagree with the
scheduler. Only what an operator can see is drawn: who comes and goes, pulls, pushes, merges.
"""

from __future__ import annotations

import re
from pathlib import Path

LANE = 23
SERVER = 44
EVENTS = {
    "hello": "connects",
    "gone": "disconnects",
    "push": "pushes {step}",
    "caughtup": "is up to date",
    "ack": "acknowledges",
}
ACTIONS = [
    (r"pull (t\d+) p\d+ attempt (\d+) -> (.*)", r"pull \1 attempt \2 -> \3"),
    (r"catch-up (.*)", r"catch-up -> \1"),
    (r"merge (t\d+) p\d+ on (v\d+): .*", r"\1 closes, merges on \2"),
    (r"publish (t\d+) p\d+ = (.*)", r"\1 commits: \2"),
    (r"log WARNING quorum timeout: (.*?),? .*step=(\d+).*", r"t\2 quorum timeout"),
    (r"log WARNING push rejected reason=(\w+) .*", r"refused: \1"),
    (r"log rebound outstanding pull .* step=(\d+).*", r"slot of t\1 rebound"),
    (r"log late joiner pulled into open round .* step=(\d+).*", r"late join of t\1"),
    (r"log late push carried into round .* into=(\d+) discount=(.*)", r"carried into t\1 at \2"),
    (r"final cut (t\d+) -> (.*)", r"final cut \1 -> \2"),
    (r"(exit \d+).*", r"\1"),
]


def timeline(name: str) -> str:
    """The scenario whose file name starts with `name`, as a fenced block."""
    (path,) = Path(__file__).parent.glob(f"{name}_*.txt")
    text = path.read_text(encoding="utf-8")
    learners = int(re.search(r"learners=(\d+)", text)[1])
    rows = [row("ms", [f"learner {i}" for i in range(learners)], "server")]
    for block in re.split(r"^(?=at )", text, flags=re.MULTILINE)[1:]:
        head, *body = block.splitlines()
        _, at_ms, what = head.split(maxsplit=2)
        lanes = [""] * learners
        who = re.match(r"(\w+) (\d+)\.(\d+)(?: (t\d+))?", what)
        if who and who[1] in EVENTS:
            several = f"{who[2]}.2" in text
            lanes[int(who[2])] = (EVENTS[who[1]].format(step=who[4])
                                  + (f" ({who[2]}.{who[3]})" if several else ""))
        said = [drawn for line in body if line.startswith("  ") for drawn in draw(line.strip())]
        for number in range(max(1, len(said)) if any(lanes) or said else 0):
            rows.append(row(at_ms if number == 0 else "", lanes if number == 0 else [""] * learners,
                            said[number] if said else ""))
    return "```\n" + "\n".join(rows) + "\n```\n"


def draw(line: str) -> list[str]:
    for pattern, shown in ACTIONS:
        if re.fullmatch(pattern, line):
            return [re.sub(r"(\d)\.\d+", r"\1", re.sub(pattern, shown, line))
                    if line.startswith(("pull", "catch-up", "final"))
                    else re.sub(pattern, shown, line)]
    return []


def row(at_ms: str, lanes: list[str], server: str) -> str:
    cells = "".join(lane.ljust(LANE) for lane in lanes)
    return f"{at_ms:>7}  {cells}{server[:SERVER]}".rstrip()


def grace() -> str:
    """Scenario 5."""
    return timeline("05")


def relaunch() -> str:
    """Scenario 12."""
    return timeline("12")


def rebind() -> str:
    """Scenario 17."""
    return timeline("17")


def late_join() -> str:
    """Scenario 25."""
    return timeline("25")


def deferred() -> str:
    """Scenario 13."""
    return timeline("13")


def fixed() -> str:
    """Scenario 37."""
    return timeline("37")
