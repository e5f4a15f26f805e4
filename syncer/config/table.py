"""All flags of a run, one row each, as one frozen and validated value with its profile hash.

A row is a field of `Config`. `--help`, the keys of a file, the names in the environment,
docs/flags.md and the profile hash are made from it: to add a flag is to add a row, and what it must
not be together with is a rule of rules.py. Must not know where values come from.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, get_args

from syncer.config.options import Need, Option, rows_of, setting, settings
from syncer.config.profile import (
    At,
    equals,
    f32,
    f64,
    given,
    on,
    optional_u64,
    profile_hash,
    u32,
    u64,
)
from syncer.config.remarks import Remarked
from syncer.config.rules import RULES
from syncer.errors import ConfigError
from syncer.machine import cores
from syncer.protocol import KEY_VARIABLES
from syncer.ranges import (
    CHECKPOINT_FORMAT,
    CLIP_NORM,
    DELTA_CORRECTION,
    DN_ACTIVATION,
    DN_PERIOD,
    FOLD,
    HELOCO,
    OUTER_OPTIMIZER,
    ROBUST,
    RUN,
    STEP_LR,
    STEP_MOMENTUM,
    CheckpointFormat,
    DeltaCorrection,
    FoldKind,
    HelocoConstants,
    OuterConstants,
    OuterOptimizer,
)
from syncer.values import (
    U32,
    Choice,
    Digest,
    HostName,
    InputFile,
    LearnerNames,
    Median,
    OutputFile,
    PerLearner,
    Real,
    Secret,
    Switch,
    SwitchOr,
    UnixPath,
    Whole,
)

LearnerWeight = Literal["tokens2-over-steps", "equal"]
PresetName = Literal["local", "regions", "spot", "reproducible"]
Auto = Literal["auto"]
OnError = Literal["stop", "continue"]
IsoBackend = Literal["scalar"]
Numa = Literal["spread", "local", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
LEARNER_WEIGHT: Choice[LearnerWeight] = Choice(get_args(LearnerWeight))
PRESET: Choice[PresetName] = Choice(get_args(PresetName))
ON_ERROR: Choice[OnError] = Choice(get_args(OnError))
ISO_BACKEND: Choice[IsoBackend] = Choice(get_args(IsoBackend))
NUMA: Choice[Numa] = Choice(get_args(Numa))
LOG_LEVEL: Choice[LogLevel] = Choice(get_args(LogLevel))
LOG_FORMAT: Choice[LogFormat] = Choice(get_args(LogFormat))
SWITCH = Switch()

MERGE_THREADS_MAX = 32
SECONDS_MAX = 10**9
"""Longest accepted wait, 31 years: in nanoseconds it still fits a signed 64-bit clock."""
MILLISECONDS_MAX = 1000 * SECONDS_MAX
A_DAY_MS = 86_400_000
PUBLISHED, OUTER = HelocoConstants(), OuterConstants()

CORRECTION = Need("delta_correction", ("heloco",))
MOMENTUM = Need("outer_optimizer", ("nesterov", "delayed-nesterov"),
                words="an --outer-optimizer with momentum")
DELAYED = Need("outer_optimizer", ("delayed-nesterov",))
CARRY = Need("late_carry")
CAPACITY, COUNT = Need("quorum_capacity"), Need("quorum_capacity", off=True)
GRACE = Need("grace_ms", words="--grace-ms above 0")
EARLY = Need("quorum", below="learners", also="quorum_capacity")
WEIGHTS = Need("robust", off=True)
BACKGROUND = Need("background_checkpoint")
A_FILE = Need("checkpoint_path", words="--checkpoint-path or --final-state", also="final_state")
CHECKPOINT, PLACE = Need("checkpoint_path"), Need("checkpoint_path", refused=True)
RESUME, TAPE, NO_KEY = Need("resume"), Need("event_tape"), Need("island_hmac_key", off=True)
NO_TLS, ABROAD = Need("tls_cert", off=True), Need("host", beyond=True)
SUPERVISED = Need("resume", ("auto",))


def available_cores() -> int:
    """Cores this process may keep busy, at most 32: the default of `merge_threads`."""
    return min(cores(), MERGE_THREADS_MAX)


@settings
class Config(Remarked):
    """Everything that decides how a run goes; field names are the flag names.

    Raises `ConfigError`, in one sentence, for the first row (in this order) whose value is not
    admitted, then for the first rule of `RULES` that the values break together.

    Large: what a run makes of several values together is said once, here.
    """

    # ------------------------------------------------------------------------------ run, checkpoint
    learners: int = setting(row=Option(
        "run", Whole(1, U32), "learners in the run; their ids are 0 to M-1", metavar="M",
        usual=10**6, hashed=At(1, u32)))
    total_steps: int = setting(row=Option(
        "run", Whole(1), "outer steps to train; each merges one fragment", metavar="T",
        hashed=At(12, u64)))
    run: str | None = setting(default=None, row=Option(
        "run", RUN, "name of the run: learners of another one are refused", metavar="NAME",
        unset="that of the checkpoint, or of the first learner that names one"))
    preset: PresetName | None = setting(default=None, row=Option(
        "run", PRESET, "quorum, grace, pace and checkpoints for a kind of fleet, from M; any flag "
        "that is given wins", unset="none, the defaults of the flags"))
    final_state: str | None = setting(default=None, row=Option(
        "run", OutputFile(),
        "write the final parameters here: u32 fragments, then per fragment u64 elements and f32 "
        "values, little-endian; a FILE.safetensors that loads by name, if learner 0 has told the "
        "names", metavar="FILE", unset="not written"))
    checkpoint_path: str | None = setting(default=None, row=Option(
        "checkpoint", OutputFile(), "save the whole state here, to resume from", metavar="FILE",
        unset="no checkpoints", hashed=At(16, given)))
    checkpoint_every: int = setting(default=8, row=Option(
        "checkpoint", Whole(1),
        "save every N steps; 1: every step is durable before a learner sees it", metavar="N",
        needs=(CHECKPOINT,), hashed=At(17, u64)))
    checkpoint_format: CheckpointFormat = setting(default="safetensors", row=Option(
        "checkpoint", CHECKPOINT_FORMAT,
        "format of the file; yeto-v3 has no digests and holds nesterov only",
        needs=(CHECKPOINT,)))
    background_checkpoint: bool = setting(default=False, row=Option(
        "checkpoint", SWITCH, "write periodic checkpoints while rounds go on; needs N of 2 or more",
        needs=(PLACE,)))
    resume: bool | Auto = setting(default=False, row=Option(
        "checkpoint", SwitchOr[Auto]("auto"),
        "continue from the file of --checkpoint-path, of either format; auto: begin if there is "
        "none, so that one command line starts a run and starts it again",
        metavar="[auto]", hashed=At(18, on)))
    overwrite: bool = setting(default=False, row=Option(
        "checkpoint", SWITCH, "begin anew where the file of --checkpoint-path has steps; without "
        "it and --resume that is refused", needs=(CHECKPOINT,)))
    linger_s: int | None = setting(default=None, row=Option(
        "checkpoint", Whole(0, SECONDS_MAX), "--resume auto of a finished run: seconds in which "
        "the final parameters are served to whoever asks, before status 0", metavar="S",
        unset="until all that contributed have them, at most --final-ack-timeout-s",
        needs=(SUPERVISED,)))
    renumber: int | None = setting(default=None, row=Option(
        "checkpoint", Whole(0, 10**15),
        "raise the steps of a resumed run by J, so that learners which have seen later ones follow "
        "it back; 0: never", metavar="J",
        unset="1,000 N, and only if the file may be behind what was broadcast", needs=(RESUME,)))
    no_verify: bool = setting(default=False, row=Option(
        "checkpoint", SWITCH, "resume without comparing the digests of the tensors",
        needs=(RESUME,)))
    mark_final_checkpoint: bool = setting(default=False, row=Option(
        "checkpoint", SWITCH, "write FILE.final beside the checkpoint of a finished run",
        needs=(PLACE,), hashed=At(19, on)))
    checkpoint_keep: int = setting(default=0, row=Option(
        "checkpoint", Whole(0, 10**6),
        "keep the N checkpoints before the newest one, as FILE.step-<t>", metavar="N",
        needs=(CHECKPOINT,)))
    checkpoint_retries: int = setting(default=1, row=Option(
        "checkpoint", Whole(0, 1000), "errors of one save that may pass by and are tried again",
        metavar="N", needs=(A_FILE,)))
    on_checkpoint_error: OnError | None = setting(default=None, row=Option(
        "checkpoint", ON_ERROR, "what a checkpoint that cannot be written does, unless it is the "
        "last one: end the run with status 5, or nothing until the next one",
        unset="stop with --checkpoint-every 1, else continue", needs=(CHECKPOINT,)))
    checkpoint_direct: bool = setting(default=False, row=Option(
        "checkpoint", SWITCH, "write past the page cache, where the file system can",
        needs=(CHECKPOINT,)))
    checkpoint_rate: int | None = setting(default=None, row=Option(
        "checkpoint", Whole(1, 10**15), "bytes that --background-checkpoint writes in a second, "
        "until the next checkpoint is due or the run ends", metavar="BYTES",
        unset="what rounds and disk leave", needs=(CHECKPOINT, BACKGROUND)))
    learner_budget_steps: int | None = setting(default=None, row=Option(
        "checkpoint", Whole(1, U32),
        "for benchmarks: when every learner has taken B steps, write an unmarked checkpoint and "
        "end", metavar="B", unset="off", needs=(PLACE,), hashed=At(20, optional_u64)))
    event_tape: str | None = setting(default=None, row=Option(
        "run", OutputFile(), "append one JSON line per merge and event to this file",
        metavar="FILE", unset="not written"))

    # ------------------------------------------------------------------------------------- network
    port: int = setting(default=29400, row=Option(
        "network", Whole(0, 65535), "TCP port; 0 lets the system choose (the log says which)",
        metavar="PORT"))
    host: str | None = setting(default=None, row=Option(
        "network", HostName(), "address to listen on", metavar="ADDRESS",
        unset="0.0.0.0 with a key, TLS or --allow-unauthenticated, else 127.0.0.1"))
    listen: str | None = setting(default=None, row=Option(
        "network", UnixPath(), "listen here as well, for learners on this machine; only processes "
        "of this user can connect", metavar="unix:/PATH", unset="on TCP alone"))
    island_hmac_key: str | None = setting(default=None, row=Option(
        "network", Secret(),
        "key that every HELLO must prove; better given as SYNCER_HMAC_KEY, which other users of "
        "the machine cannot read", metavar="KEY", unset="no authentication",
        variables=KEY_VARIABLES, secret=True))
    tls_cert: str | None = setting(default=None, row=Option(
        "network", InputFile(), "speak TLS 1.3 alone on TCP, with this certificate (PEM), and "
        "learners and readers must show one; SIGHUP reads the files again", metavar="FILE",
        unset="no TLS"))
    tls_key: str | None = setting(default=None, row=Option(
        "network", InputFile(), "its private key (PEM)", metavar="FILE", unset="no TLS"))
    tls_client_ca: str | None = setting(default=None, row=Option(
        "network", InputFile(), "who signs the certificates of learners and readers (PEM)",
        metavar="FILE", unset="no TLS"))
    tls_learner_names: str | None = setting(default=None, row=Option(
        "network", LearnerNames(), "what the certificate of each learner is called: learner-{id} "
        "stands for learner-0, learner-1, ...; an id comes with its name alone",
        metavar="NAMES", unset="any certificate, any id"))
    allow_unauthenticated: bool = setting(default=False, row=Option(
        "network", SWITCH, "listen beyond this machine without a key",
        needs=(NO_KEY, NO_TLS, ABROAD), spellings=("--allow-unauthenticated-islands",),
        variables=("YETO_SYNCER_ALLOW_UNAUTHENTICATED",)))
    expected_island_contract: bytes | None = setting(default=None, row=Option(
        "network", Digest(), "accept only learners bound to this 32-byte backend identity",
        metavar="HEX", unset="any"))
    require_profile_binding: bool = setting(default=False, row=Option(
        "network", SWITCH, "refuse a HELLO that does not carry this server's profile hash",
        hashed=At(23, on)))
    write_timeout_s: int = setting(default=180, row=Option(
        "network", Whole(1, SECONDS_MAX),
        "end a connection whose queued data makes no progress for so many seconds; Linux does it "
        "after 60 (TCP_USER_TIMEOUT) if that is less", metavar="S"))
    max_concurrent_catchups: int | None = setting(default=None, row=Option(
        "network", Whole(1, U32), "learners that are sent the model at once after they have "
        "joined a run under way; others wait for their turn", metavar="N",
        unset="as many as slow no broadcast of a round down to more than 1.5 times"))
    downlink: Literal["whole", "q4"] = setting(default="whole", row=Option(
        "network", Choice(("whole", "q4")),
        "broadcasts go down whole, or as 4-bit changes (q4) to learners that can take them"))
    max_readers: int = setting(default=8, row=Option(
        "network", Whole(0, 4096), "readers (syncer pull) at a time, 0: none; one on a slow link "
        "may hold 4 bytes per parameter", metavar="N"))

    # -------------------------------------------------------------------------------------- rounds
    quorum: int = setting(default=1, row=Option(
        "rounds", Whole(1, U32), "pushes that make a round mergeable", metavar="K",
        needs=(COUNT,), hashed=At(2, u32)))
    grace_ms: int = setting(default=1000, row=Option(
        "rounds", Whole(0, MILLISECONDS_MAX),
        "longest wait for late pushes after the quorum, milliseconds", metavar="MS",
        needs=(EARLY,), idle=0, usual=A_DAY_MS, hashed=At(3, u64)))
    grace_gamma: float = setting(default=0.8, row=Option(
        "rounds", Real(0.0, 1.0), "share of the estimated spare time used as grace, 0 to 1",
        metavar="G", needs=(GRACE, EARLY), hashed=At(4, f64)))
    grace_tau: float = setting(default=2.0, row=Option(
        "rounds", Real(0.0, SECONDS_MAX),
        "local steps of the slowest learner that a round may take before grace ends", metavar="X",
        needs=(GRACE, EARLY), hashed=At(5, f64)))
    pipeline: int = setting(default=2, row=Option(
        "rounds", Whole(0, U32), "rounds in flight at once, each of another fragment", metavar="N",
        hashed=At(6, u32)))
    min_round_interval_ms: int = setting(default=0, row=Option(
        "rounds", Whole(0, MILLISECONDS_MAX), "shortest time between two launches, milliseconds",
        metavar="MS", usual=A_DAY_MS, hashed=At(7, u64)))
    sync_interval_steps: float = setting(default=24.0, row=Option(
        "rounds", Real(0.0, SECONDS_MAX),
        "local steps between two merges of one fragment; paces launches by the slowest learner's "
        "step time; 0 turns pacing off", metavar="H", hashed=At(8, f64)))
    quorum_timeout_s: int = setting(default=900, row=Option(
        "rounds", Whole(1, SECONDS_MAX),
        "seconds without a quorum after which a round is started anew", metavar="S",
        hashed=At(10, u64)))
    quorum_capacity: float | None = setting(default=None, row=Option(
        "rounds", Real(1e-6, 1.0),
        "replaces the count quorum: share of the expected learners' capacity, above 0 to 1",
        metavar="THETA", unset="count quorum", hashed="by name"))
    q_min: int = setting(default=1, row=Option(
        "rounds", Whole(1, U32), "capacity quorum: least number of pushes", metavar="N",
        needs=(CAPACITY,), hashed="by name"))
    learner_capacity: tuple[tuple[int, float], ...] = setting(default=(), row=Option(
        "rounds", PerLearner(Real(1e-6, 1e6)), "capacity quorum: capacities of learners",
        metavar="ID=X,...", unset="1 each", needs=(CAPACITY,), hashed="by name"))
    soft_deadline_s: float | None = setting(default=None, row=Option(
        "rounds", Real(1e-3, SECONDS_MAX),
        "capacity quorum: seconds after launch when a round closes with --q-min pushes",
        metavar="S", unset="never", needs=(CAPACITY,), hashed="by name"))
    late_carry: bool = setting(default=False, row=Option(
        "rounds", SWITCH,
        "a push that came too late joins its fragment's next round, at a discount",
        hashed="by name"))
    carry_gamma: float = setting(default=0.5, row=Option(
        "rounds", Real(0.0, 1.0),
        "late carry: weight factor per version the push is behind, 0 to 1", metavar="G",
        needs=(CARRY, WEIGHTS), hashed="by name"))
    max_carry_lag: int = setting(default=2, row=Option(
        "rounds", Whole(0, U32), "late carry: versions a push may be behind", metavar="V",
        needs=(CARRY,), hashed="by name"))
    carry_answers_round: bool = setting(default=False, row=Option(
        "rounds", SWITCH, "late carry: it counts as the learner's answer for quorum",
        needs=(CARRY,), hashed="by name"))
    start_learners: int | None = setting(default=None, row=Option(
        "rounds", Whole(1, U32), "learners that must be there before training starts", metavar="N",
        unset="all", hashed="by name"))
    start_timeout_s: int | None = setting(default=None, row=Option(
        "rounds", Whole(1, SECONDS_MAX),
        "give up with status 6 when they are not there after so many seconds", metavar="S",
        unset="wait for ever"))
    final_ack_timeout_s: int | None = setting(default=None, row=Option(
        "rounds", Whole(1, SECONDS_MAX),
        "seconds to wait for every learner to confirm the final parameters", metavar="S",
        unset="--quorum-timeout-s", hashed=At(11, u64)))
    max_base_lag: int | None = setting(default=None, row=Option(
        "rounds", Whole(0),
        "oldest anchor accepted, in steps behind the round's base; 0 with K = M and no grace is a "
        "fixed roster", metavar="V", unset="unbounded", hashed=At(21, optional_u64)))

    # ------------------------------------------------------------------------------- merge and log
    learner_weight: LearnerWeight = setting(default="tokens2-over-steps", row=Option(
        "merge", LEARNER_WEIGHT, "weight of a push: tokens squared over steps, or equal",
        needs=(WEIGHTS,), hashed=At(22, equals("equal"))))
    delta_correction: DeltaCorrection = setting(default="heloco", row=Option(
        "merge", DELTA_CORRECTION,
        "correction of pushes against the momentum before the merge; without effect with sgd, "
        "which keeps no momentum", needs=(MOMENTUM,), idle="none", hashed=At(9, equals("heloco"))))
    heloco_c_ok: float = setting(default=PUBLISHED.c_ok, row=Option(
        "merge", HELOCO["c_ok"],
        "HeLoCo: cosine with the momentum from which a delta is left alone, -1 to 1", metavar="C",
        needs=(CORRECTION, MOMENTUM), hashed="by name"))
    heloco_k_s: float = setting(default=PUBLISHED.k_s, row=Option(
        "merge", HELOCO["k_s"], "HeLoCo: strength of shrinking an opposing delta", metavar="K",
        needs=(CORRECTION, MOMENTUM), hashed="by name"))
    heloco_k_d: float = setting(default=PUBLISHED.k_d, row=Option(
        "merge", HELOCO["k_d"], "HeLoCo: strength of rotating towards the momentum", metavar="K",
        needs=(CORRECTION, MOMENTUM), hashed="by name"))
    heloco_beta_max: float = setting(default=PUBLISHED.beta_max, row=Option(
        "merge", HELOCO["beta_max"], "HeLoCo: most of the opposing part that is taken away, 0 to 1",
        metavar="B", needs=(CORRECTION, MOMENTUM), hashed="by name"))
    heloco_kappa: float = setting(default=PUBLISHED.kappa, row=Option(
        "merge", HELOCO["kappa"], "HeLoCo: how much a long momentum weakens the correction",
        metavar="K", needs=(CORRECTION, MOMENTUM), hashed="by name"))
    heloco_eps: float = setting(default=PUBLISHED.eps, row=Option(
        "merge", HELOCO["eps"], "HeLoCo: norm below which a vector has no direction", metavar="E",
        needs=(CORRECTION, MOMENTUM), hashed="by name"))
    outer_optimizer: OuterOptimizer = setting(default="nesterov", row=Option(
        "merge", OUTER_OPTIMIZER, "outer optimizer", hashed="by name"))
    outer_lr: float = setting(default=OUTER.lr, row=Option(
        "merge", STEP_LR, "learning rate of the outer step", metavar="LR", usual=10.0,
        hashed=At(14, f32)))
    outer_momentum: float = setting(default=OUTER.momentum, row=Option(
        "merge", STEP_MOMENTUM, "momentum of the outer step, 0 <= MU < 1; sgd has none",
        metavar="MU", needs=(MOMENTUM,), hashed=At(15, f32)))
    dn_period: int = setting(default=OUTER.dn_period, row=Option(
        "merge", DN_PERIOD, "delayed-nesterov: merges of a fragment between two momentum updates",
        metavar="N", needs=(DELAYED,), hashed="by name"))
    dn_activation: float = setting(default=OUTER.dn_activation, row=Option(
        "merge", DN_ACTIVATION,
        "delayed-nesterov: share of the momentum applied at every merge, 0 to 1/N", metavar="C",
        needs=(DELAYED,), hashed="by name"))
    fold: FoldKind = setting(default="batch", row=Option(
        "merge", FOLD,
        "batch keeps pushes until the round closes; exact (same bits, every learner) and "
        "streaming (bits depend on arrival) add them up and keep none", hashed="by name"))
    clip_norm: float | Median | None = setting(default=None, row=Option(
        "merge", CLIP_NORM, "scale longer deltas down to the round's median norm, or to this norm",
        metavar="median|NORM", unset="deltas of any length", hashed="by name"))
    robust: int | Median | None = setting(default=None, row=Option(
        "merge", ROBUST,
        "element-wise median, or mean without the F lowest and highest; of directions and "
        "of lengths on rda and iso fragments",
        metavar="median|trimmed-mean:F", unset="weighted mean", hashed="by name"))
    nonfinite_limit: int = setting(default=10, row=Option(
        "merge", Whole(1, U32),
        "attempts of a fragment in a row that leave nothing finite to merge, after which the run "
        "ends", metavar="N"))
    merge_stats: bool = setting(default=False, row=Option(
        "merge", SWITCH, "add numbers that explain each merge to its record on the event tape",
        needs=(TAPE,)))
    iso_backend: IsoBackend = setting(default="scalar", row=Option(
        "merge", ISO_BACKEND, "of published launchers, which give it: iso fragments have one way "
        "of being merged here, and no other is accepted"))
    merge_threads: int = setting(default_factory=available_cores, row=Option(
        "merge", Whole(1, MERGE_THREADS_MAX),
        "threads of one merge, 1 to 32; the bits are the same for every N", metavar="N",
        unset="one per core, or as many as a CPU quota of the cgroup admits"))
    numa: Numa = setting(default="off", row=Option(
        "merge", NUMA, "on several memory nodes: deal pages out to all, or keep threads and what "
        "they write on one each; the bits are the same"))
    log_level: LogLevel = setting(default="info", row=Option(
        "log", LOG_LEVEL, "least severe level that is logged"))
    log_format: LogFormat = setting(default="text", row=Option(
        "log", LOG_FORMAT, "lines for people or JSON objects"))

    given: frozenset[str] | None = field(default=None, compare=False, repr=False)
    """Names of the settings that somebody gave, also with their default; None: those that have
    another value."""

    def __post_init__(self) -> None:
        for option in OPTIONS:
            option.check(getattr(self, option.name))
        for rule in RULES:
            broken = rule(self)
            if broken is not None:
                raise ConfigError(broken)

    @staticmethod
    def rows() -> tuple[Option[Any], ...]:
        """`OPTIONS`, for the rules, which cannot import them."""
        return OPTIONS

    # ------------------------------------------------------------- what follows from the values
    @property
    def fixed_roster(self) -> bool:
        """All learners in every round, no stale base: partial merges never happen."""
        return self.max_base_lag == 0 and self.quorum == self.learners and self.grace_ms == 0

    @property
    def final_ack_timeout_resolved_s(self) -> int:
        """Seconds to wait for FINAL_ACKs: the quorum timeout unless given."""
        given = self.final_ack_timeout_s
        return self.quorum_timeout_s if given is None else given

    @property
    def goes_on_unsaved(self) -> bool:
        """Whether a checkpoint that cannot be written, but for the last one, ends nothing."""
        if self.on_checkpoint_error is None:
            return self.checkpoint_every > 1
        return self.on_checkpoint_error == "continue"

    @property
    def linger_resolved_s(self) -> int:
        """Seconds that the final parameters of a finished run are served at most."""
        return self.final_ack_timeout_resolved_s if self.linger_s is None else self.linger_s

    @property
    def least_values(self) -> int:
        """Learners without whom a merge has nothing to compare: 2F + 1 with `--robust`, else 1."""
        if self.robust is None:
            return 1
        return 3 if self.robust == "median" else 2 * self.robust + 1

    @property
    def least_pushes(self) -> int:
        """Fewest pushes with which a round may close."""
        return self.quorum if self.quorum_capacity is None else self.q_min

    @property
    def bind_host(self) -> str:
        """Address to listen on: every interface only when peers must prove a key, or on request."""
        if self.host is not None:
            return self.host
        return "0.0.0.0" if self.is_guarded or self.allow_unauthenticated else "127.0.0.1"

    @property
    def is_guarded(self) -> bool:
        """Whether nobody joins without a key or a certificate."""
        return bool(self.island_hmac_key or self.tls_cert)

    @property
    def key_bytes(self) -> bytes | None:
        """The island key as HMAC bytes, or None when no key is set."""
        return self.island_hmac_key.encode() if self.island_hmac_key else None

    @property
    def profile_hash(self) -> bytes:
        """The 32 bytes a HELLO may bind to."""
        return self._profile_hash(self.resume is True)

    @property
    def saved_profile_hash(self) -> bytes:
        """The 32 bytes a checkpoint carries: a resumed run writes the same ones."""
        return self._profile_hash(False)

    def _profile_hash(self, resume: bool) -> bytes:
        values = vars(self) | {"resume": resume,
                               "final_ack_timeout_s": self.final_ack_timeout_resolved_s}
        published = [(option.hashed, values[option.name]) for option in OPTIONS
                     if isinstance(option.hashed, At)]
        later = {option.name: option.values.hashed(values[option.name]) for option in OPTIONS
                 if option.hashed == "by name" and values[option.name] != option.default}
        return profile_hash(published, later)


OPTIONS = rows_of(Config)
