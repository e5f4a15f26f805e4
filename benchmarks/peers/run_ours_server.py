"""How our server is started beside the others: flags that a fleet of that size would have."""

from __future__ import annotations

PORT = "29640"
DOWN = " both ways"
FORMS = ("f32", "bf16", "q4", "q4" + DOWN)


def command(world: int, form: str) -> list[str]:
    """A round is merged when all who are there have answered: one that is gone holds nobody up."""
    return ["syncer.server", "--learners", str(world), "--start-learners", str(world),
            "--quorum-capacity", "1", "--grace-ms", "0", "--pipeline", "4",
            "--sync-interval-steps", "0", "--total-steps", "1000000000", "--host", "0.0.0.0",
            "--port", PORT, "--allow-unauthenticated", "--delta-correction", "none",
            *(["--downlink", "q4"] if form.endswith(DOWN) else [])]
