"""What a seed draws: a configuration, a layout, and how wild the world is. Must not play."""

from __future__ import annotations

import random
from typing import Any

from syncer.config import Config
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from tests.sim.anchors import draw_downlink
from tests.sim.clock import World
from tests.sim.disk import DIRECTORY, PATH
from tests.toy_driver import toy_config

LEARNER_FAULTS = ("drop", "restart", "dial_again", "garbage", "lose_stream", "dribble", "deaf",
                  "vanish", "ghost", "mute")
SERVER_FAULTS = ("kill", "power", "signal", "no_memory", "overflow", "stale", "false_report")
"""After which a process has ended, or may have."""
FAULTS = (*LEARNER_FAULTS, *SERVER_FAULTS, "stall", "leave", "stranger", "no_descriptors", "freeze",
          "full_tape", "unread", "second_server", "second_fleet", "chown", "system_call")
LARGE = Layout((FragmentLayout(AVG, (2_300_000, 20_000, 7)),))
LARGE_SETTINGS = {"step_ms": (500, 1000), "capacity": 64 << 20, "ns_per_byte": 0.01,
                  "chunk_bytes": 4 << 20, "inline_elements": 131_072, "duplicate": 0,
                  "catchup_bytes": 1 << 17}
"""A fleet whose pieces and turns are of real size."""


def draw_config(rng: random.Random, steps: int | None) -> Config:
    """Any configuration that can finish with the learners it names."""
    learners = rng.randint(1, 5)
    fixed = rng.random() < 0.2
    options: dict[str, Any] = {
        "learners": learners,
        "total_steps": steps or rng.randint(3, 25),
        "quorum": learners if fixed else rng.randint(1, learners),
        "grace_ms": 0 if fixed else rng.choice([0, 20, 1000]),
        "pipeline": rng.randint(1, 4),
        "max_base_lag": 0 if fixed else rng.choice([None, None, 2, 8]),
        "quorum_timeout_s": rng.choice([2, 10, 10, 60]),
        "final_ack_timeout_s": rng.choice([90, 1_000_000, 1_000_000]),
        "start_timeout_s": rng.choice([None, None, None, 40]),
        "sync_interval_steps": rng.choice([0.0, 0.0, 4.0]),
        "min_round_interval_ms": rng.choice([0, 0, 0, 50]),
        "outer_lr": 0.5,
        "merge_threads": rng.choice([1, 1, 2]),
        "final_state": rng.choice([None, f"{DIRECTORY}/final"]),
        "event_tape": rng.choice([None, "tape", "tape", "tape", "tape"]),
        "nonfinite_limit": rng.choice([1, 3, 10, 10]),
        "write_timeout_s": rng.choice([1, 5, 180]),
        "log_level": rng.choice(["info", "info", "debug"]),
        "log_format": rng.choice(["text", "json"]),
    }
    options |= draw_checkpoints(rng) | draw_door(rng)
    if not fixed:
        options |= draw_gathering(rng, learners, options)
    options |= draw_merges(rng, options)
    if "checkpoint_path" in options:
        unset = None if options["final_ack_timeout_s"] == 90 else 30
        options["on_checkpoint_error"] = [None, None, "stop", "continue"][
            options["total_steps"] // 3 % 4]
        options["linger_s"] = [unset, 0, unset, 200][options["total_steps"] // 2 % 4]
    options["max_concurrent_catchups"] = [None, None, 1, 2][options["total_steps"] % 4]
    return toy_config(**options, **draw_downlink(options))


def draw_gathering(rng: random.Random, learners: int, drawn: dict[str, Any]) -> dict[str, Any]:
    """How a dynamic roster gathers pushes."""
    options: dict[str, Any] = {"start_learners": rng.randint(1, learners)}
    if "checkpoint_path" in drawn and not drawn["mark_final_checkpoint"] and rng.random() < 0.3:
        options["learner_budget_steps"] = rng.randint(10, 60)
    kind = rng.choice(["", "", "carry", "capacity", "exact", "streaming"])
    if kind == "carry":
        options |= {"late_carry": True, "carry_answers_round": rng.random() < 0.5,
                    "quorum_timeout_s": 1, "quorum": rng.choice([1, learners])}
    elif kind == "capacity":
        options |= {"quorum_capacity": rng.choice([0.3, 0.6, 1.0]),
                    "q_min": rng.randint(1, learners), "learner_capacity": ((0, 2.5),),
                    "soft_deadline_s": rng.choice([None, 1])}
    elif kind == "exact":
        options |= {"fold": "exact", "quorum": learners, "learner_weight": "equal",
                    "max_base_lag": rng.choice([None, 1, 1])}
    elif kind == "streaming":
        options |= {"fold": "streaming"}
    return options


def draw_checkpoints(rng: random.Random) -> dict[str, Any]:
    """None, every step, now and then, or now and then in the background."""
    kind = rng.choice(["none", "none", "round", "periodic", "background"])
    if kind == "none":
        return {}
    return {"checkpoint_path": PATH, "checkpoint_every": 1 if kind == "round" else
            rng.randint(2, 6), "background_checkpoint": kind == "background",
            "mark_final_checkpoint": rng.random() < 0.5,
            "checkpoint_format": rng.choice(["safetensors", "yeto-v3"]),
            "checkpoint_keep": rng.choice([0, 0, 2]),
            "checkpoint_retries": rng.choice([0, 1, 3]),
            "checkpoint_direct": rng.random() < 0.1,
            "checkpoint_rate": rng.choice([None, 1000, 100_000]) if kind == "background" else None}


def draw_door(rng: random.Random) -> dict[str, Any]:
    """Who may come in."""
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["island_hmac_key"] = "the island's key"
    elif rng.random() < 0.3:
        options["allow_unauthenticated"] = True
    if rng.random() < 0.1:
        options["expected_island_contract"] = bytes(rng.randrange(256) for _ in range(32))
    return options


def draw_merges(rng: random.Random, drawn: dict[str, Any]) -> dict[str, Any]:
    """How a round's pushes become a step."""
    options: dict[str, Any] = {}
    if drawn.get("checkpoint_format") != "yeto-v3" and rng.random() < 0.3:
        options["outer_optimizer"] = rng.choice(["sgd", "delayed-nesterov"])
        if options["outer_optimizer"] == "delayed-nesterov":
            options |= {"dn_period": 3, "dn_activation": 0.25}
    if drawn.get("fold") != "exact" and rng.random() < 0.4:
        options["delta_correction"] = "heloco"
    options["merge_stats"] = rng.random() < 0.3
    robust_pushes = drawn.get("q_min", drawn["quorum"])
    if rng.random() < 0.2:
        options["clip_norm"] = rng.choice([0.5, "median" if "fold" not in drawn else 2.0])
    elif "fold" not in drawn and robust_pushes >= 3 and rng.random() < 0.3:
        options["robust"] = rng.choice([1, "median"])
    return options


def draw_layout(rng: random.Random, config: Config) -> Layout:
    """One to four fragments of a few values each."""
    fragments = []
    for _ in range(rng.randint(1, 4)):
        mode = rng.choice([AVG, RDA] if config.fold == "exact" else [AVG, RDA, AVG, RDA, ISO])
        if mode == ISO:
            shapes = ((rng.randint(1, 4), rng.randint(1, 4)), (2, 1))
            fragments.append(FragmentLayout(mode, tuple(r * c for r, c in shapes), shapes))
        else:
            fragments.append(FragmentLayout(mode, (rng.randint(1, 6), rng.randint(1, 4))))
    return Layout(tuple(fragments))


def draw_settings(world: World, config: Config) -> dict[str, Any]:
    """Speeds and habits of learners, network and workers."""
    rng = world.rng
    return {
        "step_ms": (10, 400), "work_ms": world.between(0.1, 300), "gates": [1, 1, 1, 3],
        "streams": [0, 1, 3][config.total_steps % 3] if config.fixed_roster else (
            rng.choice([0, 1, 3])),
        # Data sockets may be slower than the control socket, but not so slow that no answer comes
        # within the quorum timeout; "eager" learners do not wait for what is still on them.
        "slow_data_ms": rng.choice([0, 0, 40]) * (
            min(config.quorum_timeout_s, 10) if config.quorum_timeout_s <= 60 else 0),
        "eager": rng.choice([0, 0, 0.5]),
        # Who introduces himself: nobody, every other one, all.
        "introduced": config.total_steps // 2 % 3,
        "ns_per_byte": world.between(1, 1e5), "half_open_ms": world.between(10, 20_000),
        "capacity": int(world.between(60, rng.choice([400, 100_000]))),
        "spurious": rng.random() < 0.3, "misconfigured": rng.choice([0, 0, 0.2]),
        "duplicate": rng.choice([0, 0, 0.3]), "resend": rng.choice([0, 0.5, 1]),
        "impatience": rng.choice([0, 0, 0, 0.3]),
        "turn_ns": int(world.between(0.001, 5) * 1_000_000),
        # As if tensors were large: bytes of one piece, elements decoded on the spot.
        "chunk_bytes": rng.choice([17, 64, 4 << 20]),
        "inline_elements": rng.choice([0, 4, 131_072, 131_072]),
        # Until the faults stop: how many sockets, goodbyes and bytes nobody may have.
        "strangers": rng.choice([2, 8, 1024, 1024]), "farewells": rng.choice([1, 1024, 1024]),
        "stranger_bytes": rng.choice([100, 1 << 28, 1 << 28, 1 << 28]),
        # From how many bytes on a HELLO is read on the workers.
        "hello_inline": rng.choice([0, 65_536, 65_536]),
        # Descriptors for every learner once, and no more.
        "tight": rng.random() < 0.2,
        # At a time of one learner.
        "connections": rng.choice([2, 4]),
        # Bytes of catch-ups on their way: of one that is alone, and room for another one.
        "catchup_bytes": [20, 100, 1 << 17, 1 << 17][config.total_steps // 4 % 4],
    }
