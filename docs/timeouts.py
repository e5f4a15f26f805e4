"""Every time-out of server and learner, made from the constants, flags and arguments that set them.

A row says where the number stands and what follows; the number itself is read. A constant with a
unit in its name that is no time-out is named in `OTHER`, with what it is: a test finds those that
are in neither. Must not state a number that the code has.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from pathlib import Path
from typing import NamedTuple

from syncer import tcp
from syncer.config import OPTIONS
from syncer.learner import Learner

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("syncer/server", "syncer/core", "syncer/checkpoint", "syncer/learner", "syncer/reader")
BESIDE = ("syncer/flags.py",)
UNITS = {"_NS": 1e-9, "_MS": 1e-3, "_S": 1.0}
CONSTANT = re.compile(
    r"^(?:cdef [a-z ]+ )?((?:[A-Z][A-Z0-9_]*_(?:NS|MS|S)(?:, )?)+) = ([^#\n]+)", re.MULTILINE)

BOTH, SERVER, LEARNER, READER = "both", "server", "learner", "reader"


class Row(NamedTuple):
    """One time-out. `value`: a constant as "file:NAME", a flag, an argument or a socket option."""

    side: str
    what: str
    value: str
    follows: str


ROWS = (
    Row(BOTH, "an idle connection is probed from", "TCP_KEEPIDLE",
        "every socket; keeps flows in middleboxes that forget after 30 s"),
    Row(BOTH, "and every", "TCP_KEEPINTVL",
        "after TCP_KEEPCNT (3) probes without an answer the kernel ends it: the peer is gone"),
    Row(BOTH, "bytes that the peer does not acknowledge, or has no room for", "TCP_USER_TIMEOUT",
        "the kernel ends the connection (Linux): a peer that is gone, or a process that is stopped "
        "or holds the GIL while its buffers are full"),
    Row(SERVER, "a pipe in the place of the file of `--config`", "syncer/flags.py:CONFIG_S",
        "refused with a sentence, status 2"),
    Row(SERVER, "a first frame, TLS included", "syncer/server/door.py:FIRST_FRAME_NS",
        "the socket is closed"),
    Row(SERVER, "the HELLO of a DATA_HELLO", "syncer/server/door.py:DATA_HELLO_WAIT_NS",
        "`unknown learner`, after which a learner dials again"),
    Row(SERVER, "a data socket that a HELLO declared",
        "syncer/server/promised.py:STREAMS_WAIT_NS", "a WARN; the group goes on without it"),
    Row(SERVER, "a message without a further piece, of a group whose sockets are not all there",
        "syncer/server/promised.py:INCOMPLETE_NS", "an ERROR that names them"),
    Row(SERVER, "the next notice to one connection", "syncer/server/telling.py:NOTICE_PAUSE_NS",
        "it waits so long, and a newer one takes its place"),
    Row(SERVER, "the next report of a learner", "syncer/server/reporting.py:REPORT_PAUSE_NS",
        "an earlier one is dropped"),
    Row(SERVER, "a socket that takes no byte", "--write-timeout-s",
        "its learner is disconnected; the kernel is faster where TCP_USER_TIMEOUT is"),
    Row(SERVER, "a turn to be caught up", "syncer/server/catchups.py:TURN_SAID_NS",
        "its learner is told behind whom it stands (rule 15.7)"),
    Row(SERVER, "and then", "syncer/server/catchups.py:TURN_SAID_AGAIN_NS", "told again"),
    Row(SERVER, "a catch-up of which the peer acknowledges nothing",
        "syncer/server/catchups.py:STALLED_NS",
        "its turn goes to the next (rule 15.3); after `--write-timeout-s` the connection ends"),
    Row(SERVER, "and then", "syncer/server/catchups.py:SILENT_NS",
        "an older connection of its learner that shows life is current again (rule 2.8)"),
    Row(SERVER, "readers that still take the final cut, after everything else",
        "syncer/server/service.py:READERS_END_NS", "the process ends"),
    Row(SERVER, "a broadcast for which there is no memory",
        "syncer/server/outgoing.py:LACKING_NS", "tried again; after `--quorum-timeout-s` the run "
        "ends with its last cut"),
    Row(SERVER, "a merge, or the values of a push, for which there is no memory",
        "syncer/server/shortage.py:FIRST_PAUSE_NS", "tried again, after twice as long each time; "
        "after `--quorum-timeout-s` the run ends with its last cut"),
    Row(SERVER, "and at most", "syncer/server/shortage.py:PAUSE_MAX_NS", "tried again"),
    Row(SERVER, "and for both every", "syncer/server/shortage.py:TELL_AGAIN_NS", "a WARN"),
    Row(SERVER, "the reader of an ERROR or SHUTDOWN", "syncer/server/farewell.pyx:FAREWELL_NS",
        "closed without waiting for its end"),
    Row(SERVER, "accepting, when no descriptor or memory is left",
        "syncer/server/listener.py:NO_DESCRIPTORS_PAUSE_NS", "tried again"),
    Row(SERVER, "nothing came before a connection failed",
        "syncer/server/run_session.py:SILENCE_S", "`a learner has fallen silent`"),
    Row(SERVER, "an older connection of a learner that still speaks beside its newest",
        "syncer/server/run_session.py:TWO_ALIVE_NS", "a WARN: two processes have one id"),
    Row(SERVER, "learners of a start", "--start-timeout-s", "status 6"),
    Row(SERVER, "nobody to launch a round to", "syncer/core/rounds/gathering.pyx:RETRY_NS",
        "looked at again"),
    Row(SERVER, "a quorum", "--quorum-timeout-s",
        "relaunch, or deferral (rules 6.11 to 6.13); twice as long where answers come an attempt "
        "late, at most 16 times (rule 6.15)"),
    Row(SERVER, "an answer on a version that is of no use to the round",
        "syncer/core/rounds/round.pyx:ASK_NS",
        "asked again, after each further one twice as long after it"),
    Row(SERVER, "and at most", "syncer/core/rounds/round.pyx:ASK_MAX_NS", "asked again"),
    Row(SERVER, "a sign of life of an older connection of a learner",
        "syncer/core/rounds/membership.pyx:SILENCE_NS",
        "its slots go to the current one; also how long after the newest has gone an older one is "
        "current, and how long that shows life beside a silent newest one"),
    Row(SERVER, "learners of before that have not dialed a resumed server yet, at its end",
        "syncer/core/run/ending.pyx:RETURN_NS",
        "after that they are not waited for; until then up to `--final-ack-timeout-s`"),
    Row(SERVER, "anything that keeps the run waiting", "syncer/core/run/waits.pyx:SAY_NS",
        "it is said, with whom or what, until when and what can be done (rule 16.2)"),
    Row(SERVER, "and then", "syncer/core/run/waits.pyx:SAY_AGAIN_NS", "said again"),
    Row(SERVER, "too few learners to relaunch to", "syncer/core/rounds/gathering.pyx:DEFER_NS",
        "the deadline moves by this"),
    Row(SERVER, "late pushes after the quorum", "--grace-ms",
        "at most; the round closes (rule 6.8)"),
    Row(SERVER, "q_min pushes of a capacity quorum are enough after", "--soft-deadline-s",
        "the round closes (rule 6.6)"),
    Row(SERVER, "between two launches, at least", "--min-round-interval-ms", "rule 4.4"),
    Row(SERVER, "a learner budget's lease", "--quorum-timeout-s", "status 1 (rule 11.3)"),
    Row(SERVER, "whoever asks for the final cut of a run that was over when it was started again",
        "--linger-s", "status 0 (rule 12.8)"),
    Row(SERVER, "acknowledgements of the final cut", "--final-ack-timeout-s",
        "status 1, naming the missing learners"),
    Row(SERVER, "last frames, log and tape at the end", "syncer/server/service.py:FLUSH_NS",
        "the process ends without them"),
    Row(SERVER, "a log that takes nothing, at the end", "syncer/server/log.py:LOG_STUCK_S",
        "its last lines are lost"),
    Row(SERVER, "a tape that takes nothing, at the end", "syncer/server/tape.py:TAPE_STUCK_S",
        "its last records are lost, and counted"),
    Row(SERVER, "a failed write of a checkpoint",
        "syncer/checkpoint/trouble.py:RETRY_PAUSE_S", "tried again, `--checkpoint-retries` times"),
    Row(SERVER, "no descriptor for a file of a checkpoint",
        "syncer/checkpoint/files.py:SHORT_PAUSE_S", "tried again, 120 times"),
    Row(LEARNER, "the first connection, all tries together", "Learner(connect_timeout_s=)",
        "`ConnectionFailed`; also for initial values of which the server takes nothing"),
    Row(LEARNER, "one of these tries", "syncer/learner/client.py:FIRST_TRY_S", "the next one"),
    Row(LEARNER, "each of their sockets, at least", "syncer/learner/client.py:LAST_TRY_S",
        "the attempt failed"),
    Row(LEARNER, "each address of a name, at least", "syncer/learner/dialing.py:ONE_ADDRESS_MIN_S",
        "the next address; the resolver has the whole time of the try"),
    Row(LEARNER, "between them, on average", "syncer/learner/client.py:FIRST_PAUSE_S",
        "evenly spread from 0 to twice that"),
    Row(LEARNER, "a socket of a later connection", "syncer/learner/client.py:REDIAL_TRY_S",
        "the attempt failed"),
    Row(LEARNER, "a server that has accepted and does not answer the HELLO",
        "syncer/learner/greeting.py:UNANSWERED_S",
        "a line; the attempt goes on for as long as a socket may take"),
    Row(LEARNER, "the same NOTICE again", "syncer/learner/notices.py:NOTICE_AGAIN_S",
        "told again"),
    Row(LEARNER, "between two REPORTs, at least", "syncer/learner/reports.py:FIGURES_S",
        "the newest figures are sent at the next step boundary"),
    Row(LEARNER, "between later attempts, at most", "syncer/learner/dialing.py:BACKOFF_MAX_S",
        "a random part of 3, 6, 12, 24, 30 ... s"),
    Row(LEARNER, "an ERROR on a connection that has ended", "syncer/learner/client.py:DRAIN_S",
        "closed unread"),
    Row(LEARNER, "`close()`", "syncer/learner/client.py:CLOSE_S",
        "a dial that hangs is left behind"),
    Row(LEARNER, "`finish()`", "Learner.finish(timeout_s=)", "follows the run, or `SyncerError`"),
    Row(LEARNER, "`adopt()`", "Learner.adopt(timeout_s=)", "follows the run, or `SyncerError`"),
    Row(LEARNER, "sending the FINAL_ACK", "syncer/learner/learner.py:ACK_TIMEOUT_S",
        "`SyncerError`; the parameters are the final ones; `finish(timeout_s=)` may be shorter"),
    Row(LEARNER, "no merge, at least (and five expected round times)",
        "syncer/learner/news.py:SILENCE_MIN_S", "`no news of ...`"),
    Row(LEARNER, "no merge, while none is known yet", "syncer/learner/news.py:UNKNOWN_S",
        "the same, with what a run needs to begin, and whether the server has said anything"),
    Row(LEARNER, "and then", "syncer/learner/news.py:NEWS_AGAIN_S", "said again"),
    Row(LEARNER, "a standard error that takes nothing, at the end of the process",
        "syncer/learner/lines.py:LINES_STUCK_S", "its last lines are lost"),
    Row(LEARNER, "nothing came before a connection failed", "syncer/learner/client.py:MUTE_S",
        "the line about it says so"),
    Row(LEARNER, "a round that waits for a learner in `finish()`, at least",
        "syncer/learner/early_end.py:WAITED_FOR_MIN_S", "it leaves the rounds"),
    Row(LEARNER, "and comes back after", "syncer/learner/early_end.py:AWAY_MIN_S",
        "twice as long every time"),
    Row(LEARNER, "but at most", "syncer/learner/early_end.py:AWAY_MAX_S", ""),
    Row(READER, "a single try to connect", "syncer/reader/pulling.py:DIAL_S",
        "dialed again"),
    Row(READER, "at most between two tries, of which a random part is waited",
        "syncer/reader/pulling.py:PAUSE_MAX_S", "a line each time"),
    Row(READER, "a byte of a cut, or a connection, where one cut is wanted",
        "syncer/reader/pulling.py:PULL_TIMEOUT_S",
        "status 1, unless `syncer pull --timeout-s` says otherwise; with `--follow` there is no "
        "limit"),
    Row(READER, "a byte, before a line says what is waited for",
        "syncer/reader/pulling.py:QUIET_S", ""),
    Row(READER, "and again", "syncer/reader/pulling.py:SAY_AGAIN_S", ""),
    Row(LEARNER, "between two heartbeats, at least", "syncer/learner/heartbeats.py:HEARTBEAT_S",
        "also repeated in a pause; there is no time-out for them on the server"),
)

OTHER = {
    "syncer/reader/pull_screen.py:EVERY_LINE_S": "between two lines about the bytes of one cut",
    "syncer/checkpoint/lane.py:ASKED_AGAIN_S":
        "how often a write in the background looks whether somebody waits for it",
    "syncer/checkpoint/pace.py:RESTS_S": "the same, of one with a rate",
    "syncer/server/catchups.py:TICK_NS": "how often catch-ups are looked at",
    "syncer/server/catchups.py:IDLE_TICK_NS": "the same, while nothing moves",
    "syncer/server/catchups.py:SHIELD_NS": "of a long time of broadcasts, what is theirs alone",
    "syncer/server/catchups.py:SLICE_NS": "and what catch-ups have of it",
    "syncer/server/catchups.py:PAUSE_NS": "longest pause of catch-ups to measure a broadcast",
    "syncer/server/catchups.py:NEXT_NS": "and for the next one, while the way is not free",
    "syncer/server/secured.py:LOOK_AGAIN_NS": "how often the expiry of certificates is looked at",
    "syncer/server/farewell.pyx:FAREWELL_S": "FAREWELL_NS for Python",
    "syncer/server/restraint.py:REFILL_NS":
        "how soon one more line of a message may be written, and those held back are told",
    "syncer/server/promised.py:LOOK_NS": "how often such messages are looked at",
    "syncer/server/selector.pyx:LONGEST_WAIT_NS": "one sleep of the loop: longer ones are several",
    "syncer/core/rounds/policy.pyx:LONGEST_NS": "bounds arithmetic",
    "syncer/checkpoint/progress.py:SILENT_S": "how soon a progress line shows",
    "syncer/checkpoint/progress.py:EVERY_S": "how often it is drawn",
    "syncer/learner/client.py:FIRST_REPORT_S": "how often a wait is said",
    "syncer/server/notify.py:STATUS_EVERY_NS": "how often a service manager hears of the run",
    "syncer/learner/client.py:LATE_S": "what counts as a thread that could not run",
    "syncer/learner/initial_values.py:REPORT_S": "how often a wait is said",
    "syncer/learner/learner.py:WAIT_REPORT_S": "how often a wait is said",
    "syncer/learner/learner.py:AGAIN_S": "how soon something is looked at again",
    "syncer/learner/pulse.pyx:NEVER_NS": "a time that does not come",
}

OPERATORS = {ast.Mult: operator.mul, ast.Pow: operator.pow, ast.LShift: operator.lshift,
             ast.Div: operator.truediv}


def constants() -> dict[str, float]:
    """Seconds of every constant of the rooms with a unit in its name, by "file:NAME"."""
    found: dict[str, float] = {}
    rooms = [p for room in ROOMS for p in (ROOT / room).rglob("*.py*")]
    for path in sorted([*rooms, *(p for name in BESIDE for p in ROOT.glob(name))]):
        if path.suffix not in (".py", ".pyx"):
            continue
        for names, values in CONSTANT.findall(path.read_text(encoding="utf-8")):
            parts = values.replace("<long long>", "").split(",")
            for name, value in zip(names.split(", "), parts, strict=False):
                unit = next(UNITS[u] for u in UNITS if name.endswith(u))
                file = path.relative_to(ROOT).as_posix()
                found[f"{file}:{name}"] = unit * number(value.strip(), path)
    return found


def number(text: str, path: Path) -> float:
    """A number as source has it; 0 for one that is made of other names."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return 0.0
        raise ValueError(f"{path.name}: {text!r} is no number that this table can read")

    return float(value(ast.parse(text, mode="eval").body))


def flags() -> dict[str, str]:
    """The default of every flag that is a time, by its name."""
    found = {}
    for option in OPTIONS:
        if option.metavar in ("S", "MS"):
            unit = 1.0 if option.metavar == "S" else 1e-3
            found["--" + option.name.replace("_", "-")] = (
                duration(option.default * unit) if isinstance(option.default, int | float)
                else f"`{option.unset}`" if option.unset.startswith("--") else option.unset)
    return found


def duration(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def value_of(row: Row) -> str:
    """The number of a row, from where it stands."""
    if row.value.startswith("TCP_"):
        given = dict(tcp.KEEPALIVE)[row.value]
        return duration(given / 1000 if row.value == "TCP_USER_TIMEOUT" else given)
    if row.value.startswith("--"):
        return flags()[row.value]
    if row.value.startswith("Learner"):
        method, argument = re.fullmatch(r"Learner(?:\.(\w+))?\((\w+)=\)", row.value).groups()
        default = inspect.signature(
            getattr(Learner, method or "__init__")).parameters[argument].default
        return "none" if default is None else duration(default)
    return duration(constants()[row.value])


def table() -> str:
    """The table of docs/caveats.md."""
    lines = ["| side | what is waited for | time | set by | then |", "|---|---|---|---|---|"]
    for row in ROWS:
        where = row.value.replace("syncer/", "")
        lines.append(f"| {row.side} | {row.what} | {value_of(row)} | `{where}` | {row.follows} |")
    return "\n".join(lines) + "\n"
