"""What a run waits for, and when that is said: to the log, and to the learners that can hear it.

Must not decide who is waited for or how long: that is the layers below. The sentences are those of
`wait_texts`.

A fleet of strangers' machines waits for many reasons, and from outside they all look the same:
nothing happens. So whoever looks must find the reason, whichever end he looks at.

rule 16.1. A run waits for one thing at a time: for what the step that commits next is short of, or
    the phase. A later round may be incomplete as well, but is not what keeps the run. A pace that
    was asked for (rule 4.4) is no wait.
rule 16.2. It is said when it has lasted 5 s, and again twice a minute. A learner whose steps take
    longer than that is not late before two of them are over. Where round after round waits for the
    same learners, the wait goes on: a line for each would drown the others.
rule 16.3. The sentence says for whom or what, until when, and what can be done. Ids, counts and
    settings are in it, nothing that a peer has written, since it goes to other peers.
rule 16.4. Who joins such a wait would else stand there for up to half a minute without knowing.

rule 1.6. With --start-timeout-s the run ends with status 6 if it has not begun in time, with the
    same words.
"""

from syncer.core import actions as act
from syncer.core.deadlines cimport NEVER
from syncer.core.rounds.closing cimport relaunch_needs
from syncer.core.rounds.membership cimport LONG_AGO, Member, slowest_step_time_s
from syncer.core.rounds.policy cimport MILLION
from syncer.core.rounds.round cimport Round, RoundState, Slot
from syncer.core.run import wait_texts as texts
from syncer.core.run.ending cimport Ending
from syncer.core.run.phases cimport Phase
from syncer.exits import Exit
from syncer.protocol import NoticeCode

cdef int NEVER_STARTED = Exit.NEVER_STARTED
cdef long long SAY_NS = 5_000_000_000            # a wait of so long is said,
cdef long long SAY_AGAIN_NS = 30_000_000_000     # and again so long after that
cdef double LATE_STEPS = 2                       # of its own: then an answer is late


cdef class Waiting(Ending):
    """The waits of a run, on top of all that it can wait for.

    Large: one method per kind of wait that has more than one sentence.
    """

    def __init__(self, config, resumed=None):
        Ending.__init__(self, config, resumed)
        self.initialized = []
        self.start_deadline_ns = -1
        self.wait = Wait.NO_WAIT
        self.newcomers = []
        self.told_ids = frozenset()
        self.told_ns = LONG_AGO

    # ---- what is waited for --------------------------------------------------------------------

    # rule 16.1
    cdef Wait awaited(self):
        """What the run waits for now."""
        cdef Round round
        if self.lingers:
            return Wait.NO_WAIT
        if self.phase == Phase.RUNNING:
            round = self.rounds.get(self.global_step + 1)
            if round is None:
                return (Wait.LAUNCH if self.members.launchable_count < self.launch_needs()
                        else Wait.NO_WAIT)
            if round.state == RoundState.GATHERING:
                return Wait.ANSWERS
            return Wait.MERGE if round.state == RoundState.COMPUTING else Wait.WRITTEN
        if self.phase == Phase.WAITING:
            if self.saves.outstanding is not None:
                return Wait.WRITTEN
            return (Wait.LEARNERS if self.members.current_count < self.policy.start_learners
                    else Wait.VALUES)
        if self.phase == Phase.FINISHING:
            return Wait.ACKNOWLEDGED
        if self.phase == Phase.CUTOFF and not self.budget.complete():
            return Wait.REPORTED
        return Wait.NO_WAIT if self.phase == Phase.ENDED else Wait.WRITTEN

    cdef long long step_of(self, Wait wait):
        """Which step this wait is about: of another one it is another wait. Before the start there
        is none, but a learner 0 that has just come is not late."""
        if wait == Wait.WRITTEN:
            return self.saves.step
        if wait == Wait.VALUES:
            return self.members.current[0] is not None
        return self.global_step + 1 if self.phase == Phase.RUNNING else 0

    # ---- when it is said -----------------------------------------------------------------------

    # rule 16.2
    cdef int look_wait(self) except -1:
        """After every event: a new wait, one that is to be said, or somebody who joins it."""
        cdef Wait wait = self.awaited()
        cdef long long step = self.step_of(wait)
        cdef Round round
        if wait != self.wait or step != self.wait_step or self.tell_ns == 0:
            self.wait, self.wait_step = wait, step
            self.wait_since_ns = self.now_ns
            if wait == Wait.ANSWERS:
                round = self.rounds[step]
                self.wait_since_ns = round.begun_ns
            self.told = False
            self.tell_ns = NEVER if wait == Wait.NO_WAIT else self.wait_since_ns + SAY_NS
        if self.now_ns >= self.tell_ns:
            if not self.goes_on():
                self.say_wait()
        elif self.told and self.newcomers:
            self.tell_newcomers()
        if self.newcomers:
            self.newcomers = []
        return 0

    cdef bint goes_on(self):
        """Is it too early to say this, since nobody is late, or since it was said of the round
        before? Then it is due later."""
        cdef Round round
        cdef Slot slot
        cdef list missing, members
        cdef long long due
        if self.wait != Wait.ANSWERS:
            return False
        round = self.rounds[self.wait_step]
        missing = round.unanswered()
        members = []
        for learner in missing:
            slot = round.slots[learner]
            members.append(slot.member)
        due = round.begun_ns + <long long>(LATE_STEPS * max(slowest_step_time_s(members), 0) * 1e9)
        if not self.told and self.now_ns < due:
            self.tell_ns = min(due, self.now_ns + SAY_NS)  # it may go, or prove to be faster
            return True
        if self.now_ns < self.told_ns + SAY_AGAIN_NS and self.told_ids.issuperset(missing):
            self.told = True
            self.tell_ns = self.told_ns + SAY_AGAIN_NS
            return True
        self.told_ids = frozenset(missing)
        self.told_ns = self.now_ns
        return False

    # rule 16.3
    cdef int say_wait(self) except -1:
        cdef str text = self.sentence()
        self.told = True
        self.said_count += 1
        self.tell_ns = self.now_ns + SAY_AGAIN_NS
        self.warn("the run waits", {
            "waited_s": (self.now_ns - self.wait_since_ns) // 10**9, "what": text})
        return self.notice(self.members.current_keys(), self.code_of(), text)

    # rule 16.4
    cdef int tell_newcomers(self) except -1:
        return self.notice(tuple(self.newcomers), self.code_of(), self.sentence())

    cpdef object told_wait(self):
        """(code, text) for who comes to a wait that was said and goes on; None: there is none."""
        return (self.code_of(), self.sentence()) if self.told else None

    cdef int notice(self, tuple members, object code, str text) except -1:
        return self.emit(act.Notice(members, code, text)) if members else 0

    # ---- the sentences -------------------------------------------------------------------------

    cdef object code_of(self):
        """What kind of wait it is, for learners."""
        if self.wait == Wait.LEARNERS or self.wait == Wait.LAUNCH:
            return NoticeCode.LEARNERS
        if self.wait == Wait.VALUES:
            return NoticeCode.INITIAL_VALUES
        if self.wait == Wait.ANSWERS:
            return NoticeCode.ANSWERS
        return NoticeCode.FILE if self.wait == Wait.WRITTEN else NoticeCode.OTHER

    cdef str sentence(self):
        """Whom or what the run waits for, until when, and what can be done."""
        if self.wait == Wait.ANSWERS:
            return self.answers_sentence(self.rounds[self.wait_step])
        if self.wait == Wait.LEARNERS:
            return texts.start_waits_for_learners(
                self.start_missing(), self.start_left_ns(),
                self.policy.start_learners == self.policy.learners and not self.policy.fixed_roster)
        if self.wait == Wait.VALUES:
            return texts.start_waits_for_values(self.start_missing(), self.start_left_ns())
        if self.wait == Wait.MERGE:
            return texts.merge(self.wait_step)
        if self.wait == Wait.LAUNCH:
            return texts.launch(self.wait_step,
                                self.whereabouts(range(self.policy.learners))._replace(there=()),
                                self.policy.fixed_roster)
        if self.wait == Wait.WRITTEN:
            return texts.file(str(self.saves.outstanding), self.saves.step, texts.THEN[self.phase])
        if self.wait == Wait.ACKNOWLEDGED:
            return texts.acknowledgements(self.whereabouts(self.final_cut.missing()),
                                          self.final_cut.deadline_ns - self.now_ns)
        return texts.reports(self.whereabouts(sorted(self.budget.leases)),
                             self.budget.deadline_ns() - self.now_ns)

    cdef str answers_sentence(self, Round round):
        return texts.answers(
            f"{round.step} (attempt {round.attempt})", self.whereabouts(round.unanswered()),
            f"{round.answered} of {len(round.slots)}", self.needs_of(round), self.until_of(round))

    cdef str needs_of(self, Round round):
        """Without what the round does not close."""
        if round.quorum_ns != NEVER:
            return "that is quorum"
        if not round.mergeable() and self.policy.least_values > 1:
            return f"--robust needs {self.policy.least_values}"
        if self.policy.exact_fold:
            return "--fold exact needs all"
        if self.policy.quorum_capacity is None:
            return f"--quorum is {self.policy.quorum}"
        return (f"--quorum-capacity is {self.policy.quorum_capacity / MILLION:g}, "
                f"--q-min {self.policy.q_min}")

    cdef str until_of(self, Round round):
        """When time alone goes on with the round."""
        cdef Py_ssize_t needed = relaunch_needs(self.policy)
        cdef str left
        if round.quorum_ns != NEVER:
            return f"it closes in {texts.seconds(round.grace_deadline_ns - self.now_ns)}"
        left = texts.seconds(round.quorum_deadline_ns - self.now_ns)
        if self.policy.fixed_roster:
            return f"they are asked again in {left} (--quorum-timeout-s)"
        if self.members.launchable_count < needed:
            return texts.until_here(needed)
        return f"in {left} (--quorum-timeout-s) those who are here are asked anew"

    cdef object whereabouts(self, learners):
        """Where they are, by what is known here."""
        cdef Member member
        cdef list gone = [], held = [], there = []
        for learner in learners:
            member = self.members.current[learner]
            if member is None:
                (there if learner in self.members.older else gone).append(learner)
            else:
                (held if member.held else there).append(learner)
        return texts.Whereabouts(gone, held, there)

    # ---- the start -----------------------------------------------------------------------------

    cdef list absent(self):
        """Learners that have no current member, ascending."""
        return [i for i, member in enumerate(self.members.current) if member is None]

    cdef str start_missing(self):
        """What keeps the run from beginning."""
        if self.members.current_count < self.policy.start_learners:
            return texts.learners_missing(self.absent(), self.members.current_count,
                                          self.policy.start_learners)
        if self.saves.outstanding is not None:
            return "the initial values are still being written to --checkpoint-path"
        return texts.values_missing(self.fragments, sum(self.initialized),
                                    self.members.current[0] is not None)

    cdef object start_left_ns(self):
        return self.start_deadline_ns - self.now_ns if self.policy.start_timeout_ns else None

    # rule 1.6
    cdef int start_overdue(self) except -1:
        if not self.policy.start_timeout_ns:
            return 0
        if self.start_deadline_ns < 0:
            self.start_deadline_ns = self.now_ns + self.policy.start_timeout_ns
        elif self.now_ns >= self.start_deadline_ns:
            return self.end(NEVER_STARTED, "the run did not begin before --start-timeout-s: "
                            f"{self.start_missing()}")
        return 0
