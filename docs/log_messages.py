"""The tables of log messages: level, text and fields come from the source, meanings from here.

A message is found where it is written: `log.info("text", name=...)`, `log("INFO", "text", {...})`,
`warn("text", {...})`, and the sentences that end a run, `end(STATUS, "text")`. Its text must be a
literal, so that whoever reads a log finds the line of code with grep. Must not import a room.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from syncer.exits import Exit

PACKAGE = Path(__file__).resolve().parent.parent / "syncer"
ROOMS = ("core", "server", "checkpoint")
"""Who writes to a server's log."""

MEANINGS = {
    "syncer listening":
        "learners can connect, to any of `addresses`; the whole set-up in one line",
    "a library changed how floats are computed; this is undone":
        "`thread` flushed subnormal numbers or rounded in another way, as some libraries ask for; "
        "results are the same as without",
    "room for learners": "so many of `sockets_each` sockets fit in the limit of descriptors",
    "not every learner fits in the limit of descriptors":
        "raise it (`ulimit -n`): who is too much is told to try again later",
    "a preset sets what was not given":
        "the settings that follow from `--preset` and M; whatever was given has won",
    "a setting has no effect":
        "`setting` was given, and does nothing without what it `needs`; see flags.md",
    "a setting is far beyond what is usual":
        "it is used as given, and looks like a mistake: `usual` is the most that makes sense",
    "only this machine can connect: no key is set (SYNCER_HMAC_KEY)":
        "without a key the server listens on the loopback interface",
    "resumed from checkpoint": "the run goes on from this step of the file; `run`, `epoch`: who it "
        "is and the how-many-th process serves it",
    "the file may be behind what was broadcast: steps were raised":
        "the server before did not end in order, and saved not every step: learners may have seen "
        "later ones. So `by` was added to the step, which makes it `step`, and the run ends at "
        "`last_step`; with yeto-v3 that is `short` merges too early, unless --total-steps is "
        "raised (rule 1.8)",
    "learners of before may stand still: the format has no place for the steps that would be added":
        "yeto-v3 and a run of fewer than `steps` further steps: `added` are enough if at most one "
        "save has failed; otherwise raise --total-steps by them, or start learners anew whose "
        "pushes are refused as `FutureBase`",
    "the end in order could not be noted: a resumed run will count on from a larger step":
        "the `.epoch` file could not be written; see rule 1.11",
    "a call for the checkpoint was tried again":
        "an error that may pass by, at the start; see `--checkpoint-retries`",
    "what an earlier server left could not be put in order":
        "partial files beside the checkpoint, or earlier checkpoints of another history",
    "earlier checkpoints that are no past of this run were set aside":
        "their future was given up, by going back or by beginning anew; they are neither counted "
        "nor removed from now on, and `path` is the first of their new names",
    "a certificate expires soon":
        "in `days` days, from 30 on: at the start, at SIGHUP, once a day, and when a learner comes",
    "the certificates were read again": "SIGHUP came; connections that are there go on as they are",
    "the certificates could not be read again: the old ones stay": "SIGHUP came; `error` says why",
    "TLS failed with who has connected": "`reason` says what is not accepted of which side",
    "the way to a learner":
        "at the end of a connection: `local` is this end of it, `mb_per_s` what its sockets "
        "together carried when the kernel measured last (0 on a Unix socket)",
    "final state write tried again": "an error of the disk that may pass by",
    "other names of parameters are not used":
        "learner 0 calls the parameters otherwise than the run does: the first names stay",
    "the checkpoint that is there will be replaced":
        "`--overwrite` was given, or the file holds no step yet",
    "there is no checkpoint yet: the run begins":
        "the first start with `--resume auto`",
    "training is complete: whoever asks is given the final parameters":
        "`--resume auto` found a finished run: it ends with status 0, after `seconds` at the "
        "latest if nobody asks",
    "reader connected":
        "somebody is sent cuts of the run and gives nothing to it; `readers` are there now",
    "reader has a cut": "the parameters after this step are with its kernel",
    "reader waits for its turn":
        "learners, and readers that were there before, are sent theirs first",
    "reader left": "its connection has ended, after so many `cuts`",
    "connection refused": "a socket was turned away, and told why",
    "learner has introduced itself":
        "`client` is what it says it is; `kept` fragments of it are current and not sent again",
    "a data socket comes from another address than its learner":
        "somebody else may have read a generation in a log: set a key (SYNCER_HMAC_KEY)",
    "connection without a complete first frame is closed":
        "a port scanner, or a learner behind a broken network",
    "too many learners wait for an answer: who comes now is closed":
        "they have said HELLO, and a run that ends does not answer it (rule 13.5); as many wait as "
        "there are descriptors, and whoever is closed dials again",
    "too many connections without a HELLO: the oldest is closed":
        "somebody opens sockets and says nothing",
    "cannot accept connections for a moment":
        "out of descriptors or memory; those who are in go on",
    "the system failed a connection":
        "a system call for it was refused, `error` says why; it ends and nobody else",
    "memory of this run at most":
        "in MiB, the sum and its parts, beside the process; `formula` with the parameters of the "
        "model (`P`) and of the fragments in flight (`G`); `with_slow_learners`, `with_readers`: "
        "with all of them, and with --max-readers, slower than the rounds (server.md)",
    "learner connected":
        "a HELLO was accepted; the run's step, and what was merged of this learner before",
    "data sockets that a HELLO declared have not come":
        "`streams` of them, after 10 s; it goes on over the others, but what its learner sends "
        "over these is lost: look for what blocks some connections and not others",
    "learner connected again while its older connection is alive":
        "two processes with one learner id, unless it has moved: only the newest takes part",
    "learner disconnected": "its connection is gone; its slots wait, and may be rebound",
    "a learner has fallen silent: its connection is given up":
        "nothing came from it for `silent_s` seconds, and what was sent is not acknowledged: its "
        "host is gone, or the way to it; it is expected to dial again",
    "connection ended": "why: the sockets of one learner are closed",
    "older connection is current again":
        "the newer one has gone or is silent, and its learner has not dialed again",
    "fragment initialized": "learner 0 gave the first values of a fragment",
    "global parameters initialized": "every fragment has its first values",
    "outer step": "a round was merged and committed",
    "push rejected": "a delta was not merged; `reason` says why",
    "stale base-relative delta admitted": "merged as it is, although its base is older",
    "late push waits for the next round": "with `--late-carry`: kept, not merged yet",
    "late push carried into round": "and now it takes part, at a discount",
    "rebound outstanding pull": "a new connection takes the place of the one that died",
    "late joiner pulled into open round": "a learner that came in the middle takes part at once",
    "asked again after a refused push":
        "the pull again, since its round waits for this learner; seen often: its data sockets are "
        "slow, or it holds versions of another history and has to be started anew",
    "recovery replay": "the catch-up of a learner again, because its older connection died late",
    "contribution left out: the merge would not be finite":
        "a learner's training has blown up; the others are merged without it, see merge.md",
    "weight capped: it is far above those of the other learners":
        "tokens and steps of its push say that it is worth more than 1,000 of the others",
    "no push has a weight: merges change nothing":
        "tokens or steps of every push are 0: learners that do not count; said again only after a "
        "round with a weight",
    "too few pushes for --robust: the round waits for more learners":
        "everybody who is there has answered; with so few an outlier could not be told",
    "nothing finite is left to merge: new attempt":
        "the round is gathered again; `--nonfinite-limit` of them in a row end the run",
    "momentum begins anew: it alone is more than finite":
        "values as large as this come from a learner that has blown up; see merge.md",
    "quorum timeout: new frozen-membership attempt":
        "too few answered in time: the round begins again with those who are there",
    "the run waits":
        "for so many seconds, `what` says for whom or what, until when, and what can be done; said "
        "from 5 seconds on, and again every 30",
    "answers came too late: this attempt has more time":
        "the uplink of a learner is too slow for `--quorum-timeout-s`: raise it",
    "quorum timeout: relaunch deferred, too few learners":
        "and there are too few of those: looked at again every second, said once in an attempt",
    "a round cannot close without a learner that has gone":
        "it waits until the quorum timeout, and on while fewer than quorum learners are there",
    "quorum timeout: missing learners of the fixed roster pulled again":
        "a fixed roster waits for everybody: only the missing are asked",
    "{what} to a closed connection": "the learner left before this could be sent",
    "no memory: what needs it waits, and the run with it":
        "the system has refused memory for `what`: a computation is a merge or the values of a "
        "push. It is tried again for `--quorum-timeout-s`, and nobody loses a connection for it; "
        "see \"memory of this run at most\"",
    "memory is there again": "the run goes on, after so long",
    "catch-up waits for its turn":
        "a learner has joined; those in front, `behind` whom it waits, are sent the model first",
    "catch-up begins after its wait": "now it is sent the model",
    "catch-up makes no progress: its turn goes to the next":
        "its link carries nothing at the moment; it goes on when the others are through",
    "checkpoint written": "a cut is on the disk",
    "a checkpoint in the background gives way no longer, as another waits":
        "it was not done when the next one was due, or the run ends: until it is, nothing is "
        "committed, and `--checkpoint-rate` does not count",
    "checkpoint committed": "the cut of this step is on the disk, so the step may be seen",
    "checkpoint not written": "it is not; what follows depends on its kind",
    "checkpoint write tried again": "a sync of the disk failed once",
    "an earlier checkpoint could not be kept or dropped":
        "of `--checkpoint-keep`; the newest one is safe",
    "an attribute of the replaced file could not be kept":
        "an access list or another extended attribute; said once for all files",
    "the file system cannot make a new name durable":
        "it has no fsync for directories (SMB, some in user space); said once, a power failure may "
        "bring the file before back",
    "the run goes on without a checkpoint":
        "it could not be written, for the reason in the line before; `on_disk` is the step that a "
        "crash would go back to, and the next checkpoint is tried when it is due "
        "(`--on-checkpoint-error`)",
    "background checkpoint failed": "the last good one stays; the next is tried as ever",
    "report of a spent budget refused":
        "a learner says that it has made `steps` steps, and that is not what the run expects: its "
        "connection ends; see how it is started",
    "learner-budget cutoff checkpoint written": "every learner has spent its budget",
    "final state written": "the file of `--final-state` is complete",
    "final state not written":
        "learners get the final cut all the same; then the run ends with status 1",
    "final acknowledgement ignored: too early": "a learner said it had what was never sent",
    "a learner has a final cut that this run is not at: it is to be started again":
        "somebody went back to an earlier checkpoint, or asked for more steps (rule 12.9)",
    "final acknowledgement ignored: not of this final cut": "of another step or connection",
    "the final cut waits for learners that contributed before":
        "the run was resumed after its last step, or shortly before; they may be about to dial",
    "the run ends without learners that did not come back":
        "they were waited for as long as `--final-ack-timeout-s` says; the run is complete",
    "learner finalized": "this learner has the final parameters",
    "all learners acknowledged final cut": "everybody who was awaited has them",
    "event tape record lost": "the disk refused it; the run goes on",
    "event tape takes nothing: records are lost until it does":
        "it does not take what was told, so many bytes wait; the run goes on",
    "event tape records lost":
        "so many records are not on the tape: it took nothing at the time, or at the end",
    "log lines lost": "so many lines are missing here: nobody read the log, or its disk was full",
    "server totals": "the last line of every run",
}
"""What each text says to whoever runs the server; in the order of a run."""

FORWARDED = {"text", "line", "ending.text", "action.text"}
"""Arguments that bring a text from elsewhere; `line` is a line of a traceback, at debug level."""

LEVEL_FIRST = {"log", "Log", "write"}
ENDS = {"end", "fail", "fail_with", "Exit", "RunEnd"}
CALL = re.compile(r"(?<![\w\"'`.])(?:(?:\w+\.)*(?:log\.(?:debug|info|warning|error|write)|log|warn"
                  r"|remark|end|fail|Exit|RunEnd)|act(?:ions)?\.Log)(?=\()")
DEF = re.compile(r"^ *(?:async )?(?:def|cdef|cpdef) [^\n]*\(", re.MULTILINE)


class Message(NamedTuple):
    """One place that writes a log line. `level` is "" for a sentence that ends the run."""

    level: str
    text: str
    fields: tuple[str, ...]
    place: str
    status: str = ""


def balanced(text: str, start: int) -> str:
    """From the bracket at `start` to the one that closes it; brackets in strings do not count."""
    depth, at, quote = 0, start, ""
    while True:
        letter = text[at]
        if quote:
            if letter == "\\":
                at += 1
            elif letter == quote:
                quote = ""
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth == 0:
                return text[start:at + 1]
        at += 1


def hole(node: ast.expr) -> str:
    """The name of a value inside a text: of a variable, an attribute or a call."""
    if isinstance(node, ast.Attribute) and node.attr.startswith("__"):
        node = node.value
    if isinstance(node, ast.Call):
        node = node.func
    name: str = re.findall(r"\w+", ast.unparse(node))[-1]
    return "{" + name + "}"


def texts(node: ast.expr) -> list[str] | None:
    """The literal texts an argument may be, holes as `{name}`; None for one that is not literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(hole(part.value) if isinstance(part, ast.FormattedValue) else
                        str(ast.literal_eval(part)) for part in node.values)]
    if isinstance(node, ast.IfExp):
        both = [texts(node.body), texts(node.orelse)]
        return None if None in both else [text for one in both for text in one or ()]
    return None


def fields_of(call: ast.Call, source: str, offset: int) -> tuple[str, ...]:
    """Names of the fields of a line, in order: keywords, keys of a dictionary that stands there,
    or of the last one of that name, with the keys that the function adds."""
    names: list[str] = []

    def add(node: ast.expr) -> None:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    add(value)
                else:
                    names.append(ast.literal_eval(key))
        elif isinstance(node, ast.Name):
            made = list(re.finditer(rf"\b{node.id} = (?=\{{)", source[:offset]))
            if made:
                add(ast.parse(balanced(source, made[-1].end()), mode="eval").body)
                function = [match.start() for match in DEF.finditer(source, 0, offset)][-1]
                here = source[max(function, made[-1].end()):offset]
                names.extend(re.findall(rf"\b{node.id}\[\"(\w+)\"\] =", here))

    for argument in call.args[1:]:
        add(argument)
    for keyword in call.keywords:
        if keyword.arg is None:
            add(keyword.value)
        else:
            names.append(keyword.arg)
    return tuple(dict.fromkeys(names))


def messages_in(source: str, place: str) -> Iterator[Message]:
    """Every message a module writes. Raises ValueError for a log text that is not a literal."""
    for match in CALL.finditer(source):
        line = source[source.rfind("\n", 0, match.start()) + 1:match.start()]
        if re.search(r"\b(def|class|cdef|cpdef|import)\b|#", line):
            continue
        name = match[0].rpartition(".")[2]
        call = ast.parse("f" + balanced(source, match.end()), mode="eval").body
        assert isinstance(call, ast.Call)
        at = 1 if name in LEVEL_FIRST or (name in ENDS and name != "fail") else 0
        if len(call.args) <= at:
            continue
        found = texts(call.args[at])
        if name in ENDS:
            status = "FAILED" if at == 0 else status_of(ast.unparse(call.args[0]))
            for each in filter(None, found or () if status else ()):
                yield Message("", each, (), place, status)
        elif found is not None:
            levels = texts(call.args[0]) if name in LEVEL_FIRST else [
                "WARNING" if name in ("warn", "remark") else name.upper()]
            fields = fields_of(call, source, match.start())
            for each in found:
                yield Message(" or ".join(levels or ()), each, fields, place)
        elif ast.unparse(call.args[at]) not in FORWARDED:
            number = source.count("\n", 0, match.start()) + 1
            raise ValueError(f"syncer/{place}:{number}: the text of a log line must stand where it "
                             f"is written, not {ast.unparse(call.args[at])!r}")


def status_of(expression: str) -> str:
    """The name of an exit status in an expression, "" if it names none."""
    words = re.findall(r"\w+", expression)
    return next((word for word in words if word in Exit.__members__ or word == "after_signal"), "")


def collected() -> list[Message]:
    """Every message of the rooms that write to a server's log."""
    found: list[Message] = []
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py*")):
            if path.suffix in (".py", ".pyx"):
                found += messages_in(path.read_text(encoding="utf-8"),
                                     path.relative_to(PACKAGE).as_posix())
    return found


def table() -> str:
    """The messages in the order of `MEANINGS`; places that write the same one are one row."""
    rows = ["| message | level | fields | what it says |", "|---|---|---|---|"]
    found = [message for message in collected() if message.level]
    for text, meaning in MEANINGS.items():
        same = [message for message in found if message.text == text]
        levels = ", ".join(dict.fromkeys(message.level for message in same))
        fields = " ".join(dict.fromkeys(name for message in same for name in message.fields))
        rows.append(f"| `{text}` | {levels} | {f'`{fields}`' if fields else ''} | {meaning} |")
    return "\n".join(rows) + "\n"


def endings() -> str:
    """The sentences that end a run, by exit status."""
    rows = ["| status | sentence |", "|---|---|"]
    found = {(message.status, message.text) for message in collected() if not message.level}
    order = [*Exit.__members__, "after_signal"]
    for status, text in sorted(found, key=lambda pair: (order.index(pair[0]), pair[1])):
        number = f"{Exit[status]:d}" if status in Exit.__members__ else "128 + signal"
        rows.append(f"| {number} | `{text}` |")
    return "\n".join(rows) + "\n"
