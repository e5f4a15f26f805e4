"""When a round closes, in the words of its description: slow, and without the scheduler's sums.

The twin that tests compare the compiled rules with. Reads a round's slots and the configuration;
every sum is made anew from them.
"""

from __future__ import annotations

from fractions import Fraction


def answered_slots(round, config) -> list[int]:
    """Ids of the expected set that count as responders."""
    by_carry = config.carry_answers_round
    return [learner for learner, slot in round.slots.items()
            if slot.push is not None or (by_carry and learner in round.carried)]


def enough(round, config) -> bool:
    """Has the merge as many learners as it needs: one, or 2F + 1 to do without F?"""
    learners = set(round.carried) | {i for i, slot in round.slots.items() if slot.push is not None}
    needed = {None: 1, "median": 3}.get(config.robust) or 2 * config.robust + 1
    return len(learners) >= needed


def quorum_reached(round, config) -> bool:
    answered = answered_slots(round, config)
    if config.fold == "exact" or not enough(round, config):
        return False
    theta = config.quorum_capacity
    if theta is None:
        return len(answered) >= config.quorum
    given = dict(config.learner_capacity)
    capacity = {learner: Fraction(str(given.get(learner, 1))) for learner in round.slots}
    return (len(answered) >= config.q_min and
            sum(capacity[i] for i in answered) >= Fraction(str(theta)) * sum(capacity.values()))


def launch_gap_ns(scheduler) -> int:
    """How far apart launches are, by the learners that could be launched to now (rule 4.4)."""
    config = scheduler.config
    floor = round(config.min_round_interval_ms * 1e6)
    times = [member.step_time_s for member in scheduler.members.current
             if member is not None and not member.held and member.step_time_s >= 0]
    if not config.sync_interval_steps or not times:
        return floor
    pace = config.sync_interval_steps * max(times) / scheduler.fragments * 1e9
    return max(floor, int(min(pace, config.quorum_timeout_s * 1e9) + 0.5))


def decide(round, config, now_ns: int) -> str:
    """CLOSE, RELAUNCH or WAIT for a gathering round whose grace has been armed when it was due."""
    answered = answered_slots(round, config)
    something = enough(round, config)
    if len(answered) >= len(round.slots) and something:
        return "CLOSE"
    soft_s = config.soft_deadline_s
    if soft_s and config.quorum_capacity is not None:
        over = now_ns >= round.launch_ns + soft_s * 10**9
        if over and len(answered) >= config.q_min and something:
            return "CLOSE"
    if quorum_reached(round, config):
        return "CLOSE" if now_ns >= round.grace_deadline_ns else "WAIT"
    return "RELAUNCH" if now_ns >= round.quorum_deadline_ns else "WAIT"
