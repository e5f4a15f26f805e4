"""One frozen, validated configuration of a run, with its semantic profile hash.

Holds values and their rules only; where values come from (flags, environment, file) is flags.py.
Must not import any room but errors.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import os
import struct
from dataclasses import dataclass, field, fields

from syncer.errors import ConfigError
from syncer.protocol import PROFILE_DOMAIN

LEARNER_WEIGHTS = ("tokens2-over-steps", "equal")
DELTA_CORRECTIONS = ("heloco", "none")
OUTER_OPTIMIZERS = ("nesterov", "delayed-nesterov", "sgd")
CHECKPOINT_FORMATS = ("safetensors", "yeto-v3")
HELOCO_CONSTANTS = {
    "heloco_c_ok": (-1.0, 1.0), "heloco_k_s": (0.0, 1e9), "heloco_k_d": (0.0, 1e9),
    "heloco_beta_max": (0.0, 1.0), "heloco_kappa": (0.0, 1e9), "heloco_eps": (1e-300, 1e9),
}
"""Least and largest value of each constant of the correction (merge.correction)."""
LATER_FEATURES = (
    *HELOCO_CONSTANTS, "outer_optimizer", "dn_period", "dn_activation", "fold", "clip_norm",
    "robust", "start_learners", "quorum_capacity", "q_min", "learner_capacity", "soft_deadline_s",
    "late_carry", "carry_gamma", "max_carry_lag", "carry_answers_round",
)
"""What changes merges or rounds but is no part of the published profile."""
FOLDS = ("batch", "exact", "streaming")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MERGE_THREADS_MAX = 32
U32, I63 = 2**32 - 1, 2**63 - 1
SECONDS_MAX = 10**9
"""Longest accepted wait, 31 years: in nanoseconds it still fits a signed 64-bit clock."""


def available_cores() -> int:
    """Cores this process may run on, at most 32: the default of `merge_threads`."""
    return min(len(os.sched_getaffinity(0)), MERGE_THREADS_MAX)


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine, decided without a name lookup."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides how a run goes. Raises `ConfigError` for a value out of range.

    Field names are the flag names; their meaning and units stand in `syncer.flags.OPTIONS`.
    """

    learners: int
    total_steps: int
    port: int = 29400
    host: str | None = None
    quorum: int = 1
    grace_ms: int = 1000
    grace_gamma: float = 0.8
    grace_tau: float = 2.0
    pipeline: int = 2
    min_round_interval_ms: int = 0
    sync_interval_steps: float = 24.0
    quorum_timeout_s: int = 900
    final_ack_timeout_s: int | None = None
    max_base_lag: int | None = None
    learner_weight: str = "tokens2-over-steps"
    delta_correction: str = "heloco"
    heloco_c_ok: float = 0.2
    heloco_k_s: float = 0.5
    heloco_k_d: float = 1.0
    heloco_beta_max: float = 0.5
    heloco_kappa: float = 3.0
    heloco_eps: float = 1e-8
    outer_optimizer: str = "nesterov"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    dn_period: int = 4
    dn_activation: float = 0.0
    fold: str = "batch"
    clip_norm: float | str | None = None
    robust: int | str | None = None
    start_learners: int | None = None
    start_timeout_s: int | None = None
    quorum_capacity: float | None = None
    q_min: int = 1
    learner_capacity: tuple[tuple[int, float], ...] = ()
    soft_deadline_s: float | None = None
    late_carry: bool = False
    carry_gamma: float = 0.5
    max_carry_lag: int = 2
    carry_answers_round: bool = False
    merge_stats: bool = False
    merge_threads: int = field(default_factory=available_cores)
    checkpoint_path: str | None = None
    checkpoint_every: int = 8
    checkpoint_format: str = "safetensors"
    background_checkpoint: bool = False
    resume: bool = False
    no_verify: bool = False
    mark_final_checkpoint: bool = False
    checkpoint_keep: int = 0
    checkpoint_retries: int = 1
    checkpoint_direct: bool = False
    learner_budget_steps: int | None = None
    final_state: str | None = None
    event_tape: str | None = None
    write_timeout_s: int = 180
    require_profile_binding: bool = False
    island_hmac_key: str | None = field(default=None, repr=False)
    allow_unauthenticated: bool = False
    expected_island_contract: bytes | None = None
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self):
        self._check_whole_numbers()
        self._check_reals()
        self._check_choices()
        self._check_capacities()
        self._check_without_effect()
        self._check_together()
        self._check_folds()
        self._check_checkpoints()

    # ------------------------------------------------------------- what follows from the values
    @property
    def fixed_roster(self) -> bool:
        """All learners in every round, no stale base: partial merges never happen (rounds.md 1)."""
        return self.max_base_lag == 0 and self.quorum == self.learners and self.grace_ms == 0

    @property
    def final_ack_timeout_resolved_s(self) -> int:
        """Seconds to wait for FINAL_ACKs: the quorum timeout unless given."""
        given = self.final_ack_timeout_s
        return self.quorum_timeout_s if given is None else given

    @property
    def bind_host(self) -> str:
        """Address to listen on: every interface only when peers must prove a key, or on request."""
        if self.host is not None:
            return self.host
        return "0.0.0.0" if self.island_hmac_key or self.allow_unauthenticated else "127.0.0.1"

    @property
    def key_bytes(self) -> bytes | None:
        """The island key as HMAC bytes, or None when no key is set."""
        return self.island_hmac_key.encode() if self.island_hmac_key else None

    @property
    def profile_hash(self) -> bytes:
        """The 32 bytes a HELLO may bind to."""
        return self._profile_hash(self.resume)

    @property
    def saved_profile_hash(self) -> bytes:
        """The 32 bytes a checkpoint carries: a resumed run writes the same ones."""
        return self._profile_hash(False)

    def _profile_hash(self, resume: bool) -> bytes:
        return semantic_profile_hash(
            learners=self.learners, quorum=self.quorum, grace_ms=self.grace_ms,
            grace_gamma=self.grace_gamma, grace_tau=self.grace_tau, pipeline=self.pipeline,
            min_round_interval_ms=self.min_round_interval_ms,
            sync_interval_steps=self.sync_interval_steps,
            heloco=self.delta_correction == "heloco", quorum_timeout_s=self.quorum_timeout_s,
            final_ack_timeout_s=self.final_ack_timeout_resolved_s, total_steps=self.total_steps,
            outer_lr=self.outer_lr, outer_momentum=self.outer_momentum,
            max_base_lag=self.max_base_lag, equal_weights=self.learner_weight == "equal",
            require_binding=self.require_profile_binding,
            checkpoint=self.checkpoint_path is not None, checkpoint_every=self.checkpoint_every,
            resume=resume, mark_final=self.mark_final_checkpoint,
            learner_budget_steps=self.learner_budget_steps, later=self._later_features(),
        )

    def _later_features(self) -> dict[str, object]:
        """What is on beyond the published profile; it enters the hash by name and value."""
        return {name: getattr(self, name) for name in LATER_FEATURES
                if getattr(self, name) != _default(name)}

    # ------------------------------------------------------------------------------------ rules
    def _check_whole_numbers(self):
        bounds = {
            "learners": (1, U32), "total_steps": (1, I63), "port": (0, 65535), "quorum": (1, U32),
            "grace_ms": (0, 1000 * SECONDS_MAX), "pipeline": (0, U32),
            "min_round_interval_ms": (0, 1000 * SECONDS_MAX), "quorum_timeout_s": (1, SECONDS_MAX),
            "final_ack_timeout_s": (1, SECONDS_MAX), "max_base_lag": (0, I63),
            "merge_threads": (1, MERGE_THREADS_MAX), "write_timeout_s": (1, SECONDS_MAX),
            "dn_period": (1, U32), "start_learners": (1, U32), "start_timeout_s": (1, SECONDS_MAX),
            "q_min": (1, U32), "max_carry_lag": (0, U32),
            "checkpoint_every": (1, I63), "checkpoint_keep": (0, 10**6),
            "checkpoint_retries": (0, 1000), "learner_budget_steps": (1, U32),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is None and _default(name) is None:
                continue
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{flag(name)} {value} cannot be used: give a whole number "
                                  f"{_range(low, high)}")

    def _check_reals(self):
        bounds = {"grace_gamma": (0.0, 1.0), "grace_tau": (0.0, SECONDS_MAX),
                  "sync_interval_steps": (0.0, SECONDS_MAX), "dn_activation": (0.0, 1.0),
                  "carry_gamma": (0.0, 1.0), "quorum_capacity": (1e-6, 1.0),
                  "soft_deadline_s": (1e-3, SECONDS_MAX), **HELOCO_CONSTANTS}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is None and _default(name) is None:
                continue
            if not _is_real(value) or not low <= value <= high:
                raise ConfigError(f"{flag(name)} {value} cannot be used: give a number between "
                                  f"{low:g} and {high:g}")
        if not _is_real(self.outer_lr) or not 0.0 <= _as_f32(self.outer_lr) < math.inf:
            raise ConfigError(f"--outer-lr {self.outer_lr} cannot be used: give a finite f32 "
                              "number >= 0")
        if not _is_real(self.outer_momentum) or not 0.0 <= _as_f32(self.outer_momentum) < 1.0:
            raise ConfigError(f"--outer-momentum {self.outer_momentum} cannot be used: give a "
                              "number >= 0 that is below 1 also as f32")

    def _check_choices(self):
        choices = {"learner_weight": LEARNER_WEIGHTS, "delta_correction": DELTA_CORRECTIONS,
                   "outer_optimizer": OUTER_OPTIMIZERS, "fold": FOLDS,
                   "checkpoint_format": CHECKPOINT_FORMATS,
                   "log_level": LOG_LEVELS, "log_format": LOG_FORMATS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} cannot be used: give "
                                  f"{' or '.join(allowed)}")
        pinned = self.expected_island_contract
        if pinned is not None and len(pinned) != 32:
            raise ConfigError(f"--expected-island-contract has {len(pinned)} bytes: give 32 bytes "
                              "as 64 hexadecimal digits")

        clip, robust = self.clip_norm, self.robust
        if not (clip is None or clip == "median" or (_is_real(clip) and clip > 0.0)):
            raise ConfigError(f"--clip-norm {clip} cannot be used: give median or a norm above 0")
        if not (robust is None or robust == "median" or (type(robust) is int and robust >= 1)):
            raise ConfigError(f"--robust {robust} cannot be used: give median or trimmed-mean:F "
                              "with F >= 1")

    def _check_capacities(self):
        seen = set()
        for learner, capacity in self.learner_capacity:
            if not 0 <= learner < self.learners or learner in seen:
                raise ConfigError(f"--learner-capacity names learner {learner}, which is "
                                  f"{'named twice' if learner in seen else 'not in this run'}: "
                                  f"give each id from 0 to {self.learners - 1} at most once")
            if not _is_real(capacity) or not 1e-6 <= capacity <= 1e6:
                raise ConfigError(f"--learner-capacity {learner}={capacity} cannot be used: give "
                                  "a number between 1e-06 and 1e+06")
            seen.add(learner)

    def _check_without_effect(self):
        """A setting that another one makes meaningless is refused, not ignored."""
        for needed, holds, names in (
            ("--delta-correction heloco", self.delta_correction == "heloco", HELOCO_CONSTANTS),
            ("--outer-optimizer delayed-nesterov", self.outer_optimizer == "delayed-nesterov",
             ("dn_period", "dn_activation")),
            ("an --outer-optimizer with momentum", self.outer_optimizer != "sgd",
             ("outer_momentum",)),
            ("--late-carry", self.late_carry,
             ("carry_gamma", "max_carry_lag", "carry_answers_round")),
            ("--quorum-capacity", self.quorum_capacity is not None,
             ("q_min", "learner_capacity", "soft_deadline_s")),
            ("--checkpoint-path", self.checkpoint_path is not None,
             ("mark_final_checkpoint", "background_checkpoint", "checkpoint_keep",
              "checkpoint_direct", "checkpoint_format", "checkpoint_retries",
              "learner_budget_steps")),
            ("--resume", self.resume, ("no_verify",)),
        ):
            for name in () if holds else names:
                if getattr(self, name) != _default(name):
                    raise ConfigError(f"{flag(name)} has no effect without {needed}: give both or "
                                      "neither")

    def _check_folds(self):
        """What the ways of gathering pushes allow (rounds.md 14, merge.md)."""
        if self.fold != "batch" and (self.robust is not None or self.clip_norm == "median"):
            name = "--robust" if self.robust is not None else "--clip-norm median"
            raise ConfigError(f"{name} compares all pushes of a round, and --fold {self.fold} "
                              "keeps none of them: use --fold batch")
        if self.fold == "exact":
            for text, refused in (
                ("--learner-weight equal", self.learner_weight != "equal"),
                ("--delta-correction none", self.delta_correction != "none"),
                ("no --late-carry", self.late_carry),
                ("no --quorum-capacity", self.quorum_capacity is not None),
                (f"--quorum {self.learners}", self.quorum != self.learners),
            ):
                if refused:
                    raise ConfigError(f"--fold exact needs {text}: its order and weights are "
                                      "fixed for the whole round")
        if self.robust is not None:
            outliers = 1 if self.robust == "median" else self.robust
            pushes = self.quorum if self.quorum_capacity is None else self.q_min
            if pushes < 2 * outliers + 1:
                raise ConfigError(
                    f"--robust without {outliers} outlier{'s' * (outliers > 1)} needs at least "
                    f"{2 * outliers + 1} pushes in every round, and a round may close with "
                    f"{pushes}: raise {'--quorum' if self.quorum_capacity is None else '--q-min'}")

    def _check_together(self):
        if self.quorum > self.learners:
            raise ConfigError(f"--quorum {self.quorum} can never be reached by --learners "
                              f"{self.learners}: give a quorum between 1 and {self.learners}")
        for name in ("start_learners", "q_min"):
            if (getattr(self, name) or 1) > self.learners:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} can never be reached by "
                                  f"--learners {self.learners}")
        if self.fixed_roster:
            for name, refused in (
                ("--late-carry", self.late_carry),
                ("--quorum-capacity", self.quorum_capacity is not None),
                ("--start-learners", (self.start_learners or self.learners) < self.learners),
            ):
                if refused:
                    raise ConfigError(
                        f"{name} cannot be used with a fixed roster (--max-base-lag 0, --quorum "
                        f"{self.quorum}, --grace-ms 0): every round needs every learner")
        if self.dn_activation * self.dn_period > 1.0:
            raise ConfigError(f"--dn-activation {self.dn_activation} is too large for --dn-period "
                              f"{self.dn_period}: give at most 1/{self.dn_period}")
        open_host = self.host is not None and not is_loopback(self.host)
        if open_host and not self.island_hmac_key and not self.allow_unauthenticated:
            raise ConfigError(
                f"--host {self.host} lets anybody who reaches it join the run: set a key with "
                "SYNCER_HMAC_KEY, or say --allow-unauthenticated, or listen on 127.0.0.1")

    def _check_checkpoints(self):
        if self.background_checkpoint and self.checkpoint_every < 2:
            raise ConfigError(
                "--background-checkpoint cannot be used with --checkpoint-every "
                f"{self.checkpoint_every}: a checkpoint of every step must be durable before the "
                "step is seen; give --checkpoint-every 2 or more")
        for name in ("resume", "mark_final_checkpoint"):
            if self.learner_budget_steps is not None and getattr(self, name):
                raise ConfigError(
                    f"--learner-budget-steps cannot be used with {flag(name)}: the checkpoint of a "
                    "budget run is the beginning of another one, which resumes it without a budget")
        if self.checkpoint_format == "yeto-v3" and self.outer_optimizer != "nesterov":
            raise ConfigError(
                f"--checkpoint-format yeto-v3 cannot hold the state of --outer-optimizer "
                f"{self.outer_optimizer}: use --checkpoint-format safetensors")


def semantic_profile_hash(
    *, learners, quorum, grace_ms, grace_gamma, grace_tau, pipeline, min_round_interval_ms,
    sync_interval_steps, heloco, quorum_timeout_s, final_ack_timeout_s, total_steps, outer_lr,
    outer_momentum, max_base_lag, equal_weights, require_binding, checkpoint=False,
    checkpoint_every=8, resume=False, mark_final=False, learner_budget_steps=None, later=None,
) -> bytes:
    """SHA-256 of everything that changes what is merged or when (rounds.md 14, protocol.md 6).

    Units as in the flags; `max_base_lag` and `learner_budget_steps` are optional (None). later:
    features that the published profile does not know, by name; sorted, each adds name, NUL, value
    as Python writes it, NUL. Without any, the hash is the published one. Returns 32 bytes.
    """
    def optional(value):
        return b"\0" if value is None else b"\1" + struct.pack("<Q", value)

    encoded = PROFILE_DOMAIN + struct.pack(
        "<IIQddIQdBQQQ", learners, quorum, grace_ms, grace_gamma, grace_tau, pipeline,
        min_round_interval_ms, sync_interval_steps, heloco, quorum_timeout_s, final_ack_timeout_s,
        total_steps)
    encoded += b"\0"  # policy_sweep_fragments: never set by this server
    encoded += struct.pack("<ffBQBB", outer_lr, outer_momentum, checkpoint, checkpoint_every,
                           resume, mark_final)
    encoded += optional(learner_budget_steps) + optional(max_base_lag)
    encoded += struct.pack("<BB", equal_weights, require_binding)
    for name, value in sorted((later or {}).items()):
        encoded += f"{name}\0{value}\0".encode()
    return hashlib.sha256(encoded).digest()


def flag(name: str) -> str:
    """The flag of a field: `grace_ms` -> `--grace-ms`."""
    return "--" + name.replace("_", "-")


def _default(name: str):
    return next(f.default for f in fields(Config) if f.name == name)


def _range(low: int, high: int) -> str:
    return f">= {low}" if high == I63 else f"between {low} and {high}"


def _is_real(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_f32(value: float) -> float:
    """The value as merges will use it: rounded to f32, infinite when it does not fit."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.inf
