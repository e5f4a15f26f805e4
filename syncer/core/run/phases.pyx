"""The phases of a run, and what each of them does with each event. Must not do any of it.

    WAITING -> RUNNING -> [SAVING ->] FINISHING -> ENDED
               RUNNING -> CUTOFF -> ENDED            a learner budget was spent
               any -> [STOPPING ->] ENDED            a signal or a failure, saving the last cut

rule 1.1. `TABLE` below is the rule: the scheduler looks a cell up for every event and does what its
word says, docs/rules.md shows it, and a test compares every cell with what really happens. Phases
are not ordered: a run that was cut off has not "got further" than one that finishes. So no rule
asks whether a phase is before another one; what must differ by phase is a cell, or names its
phases.

Three words are no handler. `-`: nothing happens, because the event is about something that has
ended meanwhile (a merge of a dropped round) or comes too late to matter. `release`: as `-`, and the
payload goes back. `defect`: nothing in this phase can have caused it, so the driver is wrong about
its own run, and going on could lose a step.
"""

from syncer.core import events
from syncer.errors import InvariantViolation

TABLE = """
              WAITING    RUNNING    SAVING     FINISHING  CUTOFF     STOPPING   ENDED
Tick          time       time       time       time       time       time       -
Hello         hello      hello      hello      hello      hello      -          turn_away
Misfit        misfit     -          -          -          -          -          -
NoRoom        no_room    defect     defect     defect     defect     -          -
Broken        broken     broken     broken     broken     broken     broken     -
Disconnected  gone       gone       gone       gone       gone       gone       -
Init          init       release    release    release    release    release    release
Heartbeat     progress   progress   progress   progress   progress   progress   -
Push          push       push       outlived   outlived   outlived   outlived   release
Folded        defect     folded     -          -          -          -          -
CaughtUp      defect     caught_up  -          -          -          -          -
Stalled       -          stalled    -          -          -          -          -
MergeDone     defect     merged     -          -          -          -          -
Synced        defect     synced     -          -          synced     synced     -
Saved         saved      saved      saved      defect     saved      saved      -
FinalAck      early      early      early      ack        -          -          -
BudgetDone    budget     budget     -          -          budget     -          -
Stop          stop       stop       stop       stop       stop       -          -
"""

MEANING = {
    "time": "the deadlines of the phase are looked at, as after every event (rule 1.7)",
    "hello": "refused as a duplicate (rule 2.2), or admitted (rule 2.1) and given what the phase "
             "has for it: the start (rule 1.5), a catch-up (rule 3.1), the final cut (rule 12.4), "
             "a new lease (rule 11.3)",
    "misfit": "the end of a strict run (rule 14.6); otherwise its connection was refused, no more",
    "no_room": "the run ends before it has begun (rule 13.7)",
    "broken": "the run cannot go on (rule 13.8)",
    "turn_away": "refused if training is complete, else unanswered (rule 13.5)",
    "gone": "forgotten (rule 2.3); while rounds are open, replay or shrink (rule 3.7, rule 6.10)",
    "init": "adopted, or given back (rule 1.3)",
    "progress": "a sample of its step time (rule 2.6) and a sign of life (rule 2.7); in CUTOFF a "
                "new lease (rule 11.3)",
    "push": "admission (rule 5.1), then a sign of life (rule 2.7)",
    "outlived": "given back, then as a heartbeat: no round is open any more",
    "release": "given back; nothing else",
    "folded": "its payload is free (rule 7.3)",
    "caught_up": "the tail of a catch-up (rule 3.3)",
    "stalled": "of its silence (rule 2.8)",
    "merged": "the result waits for its turn (rule 7.4)",
    "synced": "log and tape (rule 9.5)",
    "saved": "what waited for it goes on (rule 10.3, rule 12.7), or the run ends (rule 10.7)",
    "early": "of a cut that the run is not at any more (rule 12.9)",
    "ack": "counted if it is of this cut (rule 12.3)",
    "budget": "the gate (rule 11.1), or a run that cannot be trusted (rule 11.2)",
    "stop": "the first signal (rule 13.1)",
    "defect": "the program ends with a defect: nothing in this phase can cause it",
    "-": "nothing",
}


def phases() -> list[str]:
    """Names of the phases, in the order of the columns."""
    return TABLE.strip().split("\n")[0].split()


def rows() -> dict[str, list[str]]:
    """Event name -> the words of its row."""
    return {name: words for name, *words in map(str.split, TABLE.strip().split("\n")[1:])}


cdef int HANDLERS[7][18]
cdef dict ROW_OF = {}                            # event type -> row


cdef int read_table() except -1:
    for row, (name, words) in enumerate(rows().items()):
        ROW_OF[getattr(events, name)] = row
        for phase, word in enumerate(words):
            HANDLERS[<int>phase][<int>row] = (
                Handler.IGNORE if word == "-" else getattr(Handler, word.upper()))
    return 0


read_table()


# rule 1.1
cdef int handler_of(Phase phase, object event) except -1:
    """What this phase does with an event, a `Handler`."""
    row = ROW_OF.get(type(event))
    if row is None:
        raise InvariantViolation(f"the scheduler was given {event!r}, which is no event")
    return HANDLERS[<int>phase][<int>row]


def handler(phase, event):
    """As `handler_of`, for Python: a member of `Handler`."""
    return Handler(handler_of(phase, event))
