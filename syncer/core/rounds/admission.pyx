"""What becomes of a push: accepted, refused, or carried into a later round.

Must not close a round or end the run: `gathering` looks at the rounds after every event, and a push
that ends a strict run is returned as the sentence with which it ends.

What a push says is checked twice. Whether it can be read at all (its length, its learner, that its
values are finite) is checked at the connection, and a violation ends that connection. Here is asked
whether it belongs: nothing a learner does in good faith ends its connection, because it may be
late, or answer an attempt that was given up, through no fault of its own.

rule 5.1 to rule 5.5. The reasons are tested in this order, and the first one that holds is told:

    OutOfRound         no round of this step, fragment and attempt gathers: dropped or carried (8.1)
    UnexpectedMember   its member is not in E; in a fixed roster any generation of the id is
    FutureBase         its base is newer than the round's: the server went back, the learner did not
    StaleBase          its base is more than --max-base-lag steps older than the round's
    Duplicate          the slot has its push: the first one stays, whatever comes after it

rule 5.6. A refused push costs its sender nothing but this push: the connection stays, the payload
    goes back, the log says why. A stale one also gives its slot up, since that learner cannot
    answer this pull with that anchor, and the others need not wait for it. Not if it has answered
    before, not under an exact fold, which is for the full roster or fails, and not if there are no
    others: a round that nobody can answer stands still until its quorum deadline.
rule 5.10. Whoever keeps its slot after a stale push, or one of the future, is asked again
    (`joining`).
rule 6.15. An answer to an attempt that was given up, of one that the round still waits for, says
    that the next attempt must be longer.
rule 5.7. An accepted push is kept whatever becomes of its sender. Against an older base within the
    limit it is merged as it is: a delta is a change, and stays one.

rule 8.1. A push is late if its round, or the attempt it answers, is over. It is of use if its
    sender lives, its base is no newer than the fragment, and no push of that learner was merged in
    that step: then it says something that no merge has heard. It joins the fragment's gathering
    round if that holds nothing of this learner, else it waits (rule 8.2). Its step has to be one of
    this process: of an older one nobody knows any more whether it was merged.

rule 7.3. A folded push is in the sum, and its payload free. A carried one is kept until the round
    is merged, since a relaunch folds it again.

rule 19.2. A push that is refused or carried is told as that to whoever asked, when it comes.
"""

from syncer.core import actions as act
from syncer.core.deadlines cimport NEVER
from syncer.core.rounds.joining cimport Joining
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.round cimport Round, RoundState, Slot
from syncer.protocol import PushFate
from syncer.steps cimport fragment_of

cdef object OUT_OF_ROUND = act.PushRefusal.OUT_OF_ROUND
cdef object UNEXPECTED_MEMBER = act.PushRefusal.UNEXPECTED_MEMBER
cdef object FUTURE_BASE = act.PushRefusal.FUTURE_BASE
cdef object STALE_BASE = act.PushRefusal.STALE_BASE
cdef object DUPLICATE = act.PushRefusal.DUPLICATE
cdef object CARRY_SUPERSEDED = act.PushRefusal.CARRY_SUPERSEDED
cdef object CARRIED = PushFate.CARRIED
cdef dict FATES = {
    OUT_OF_ROUND: PushFate.OUT_OF_ROUND, UNEXPECTED_MEMBER: PushFate.UNEXPECTED_MEMBER,
    FUTURE_BASE: PushFate.FUTURE_BASE, STALE_BASE: PushFate.STALE_BASE,
    DUPLICATE: PushFate.DUPLICATE,
}


cdef class Admission(Joining):
    """The rules of admission on top of the rounds and their members."""

    cdef str admit_push(self, object event):
        """Decide about a push. Returns None, or why a strict run cannot go on."""
        cdef Round round = self.rounds.get(event.step)
        cdef Slot slot = None if round is None else round.slots.get(event.learner)
        reason = self.refusal(round, slot, event)
        if reason is None:
            self.accept(round, slot, event)
            return None
        if reason is OUT_OF_ROUND and round is not None and round.fragment == event.fragment:
            round.heard_late(slot, event)
        if reason is OUT_OF_ROUND and self.policy.late_carry and self.carriable(round, event):
            self.carry(event)
            return None
        return self.refuse(round, slot, event, reason)

    # rule 5.1, rule 5.2, rule 5.3, rule 5.4, rule 5.5
    cdef object refusal(self, Round round, Slot slot, object event):
        """Why a push cannot join its round, or None."""
        if (round is None or round.state != RoundState.GATHERING
                or round.fragment != event.fragment or round.attempt != event.attempt):
            return OUT_OF_ROUND
        if slot is None:
            return UNEXPECTED_MEMBER
        if not self.policy.fixed_roster and slot.member.generation != event.generation:
            return UNEXPECTED_MEMBER
        if event.base > round.base:
            return FUTURE_BASE
        if self.policy.max_base_lag >= 0 and round.base - event.base > self.policy.max_base_lag:
            return STALE_BASE
        if slot.push is not None:
            return DUPLICATE
        return None

    # rule 5.7
    cdef int accept(self, Round round, Slot slot, object event) except -1:
        cdef Member member = self.members.find(event.learner, event.generation)
        if event.base < round.base:
            self.warn("stale base-relative delta admitted", {
                "learner": event.learner, "generation": event.generation, "step": event.step,
                "base": event.base, "staleness": round.base - event.base})
        round.accept(slot, event)
        if member is not None:
            self.members.observe(member, self.now_ns, event.local_step)
        return self.fold(round, event)

    # rule 5.6
    cdef str refuse(self, Round round, Slot slot, object event, object reason):
        """Give the payload back and say why; a stale push also gives its slot up."""
        self.emit(act.Release(event.payload))
        self.tell_fate(event, event.fragment, event.step, event.attempt, FATES[reason])
        self.warn("push rejected", {
            "reason": reason, "learner": event.learner, "generation": event.generation,
            "fragment": event.fragment, "step": event.step, "attempt": event.attempt,
            "base": event.base})
        if reason is not STALE_BASE and reason is not FUTURE_BASE:
            return None
        round.stale_refused += reason is STALE_BASE
        if reason is STALE_BASE and self.policy.max_base_lag == 0:
            return (f"learner {event.learner} pushed step {event.step} against version "
                    f"{event.base} of fragment {event.fragment}, expected {round.base}: with "
                    "--max-base-lag 0 every delta must be relative to the current version")
        if round.answers(slot):
            return None
        if (reason is STALE_BASE and not self.policy.exact_fold
                and self.waits_for_others(round, slot)):
            round.drop_slot(event.learner)
        else:
            round.ask_later(slot, self.now_ns)
        return None

    cdef bint waits_for_others(self, Round round, Slot slot):
        """Would this round come to its end without this unanswered slot?"""
        cdef Slot other
        if round.quorum_ns != NEVER or (
                round.contributed() and round.answered >= len(round.slots) - 1):
            return True
        for other in round.slots.values():
            if other is not slot and other.member.connected and not round.answers(other):
                return True
        return False

    # ---- late carry ----------------------------------------------------------------------------

    # rule 8.1
    cdef bint carriable(self, Round round, object event):
        """Has the round of this push closed without it, and could it still be of use?"""
        if not self.first_step <= event.step < self.next_step:
            return False
        if self.late.was_taken(event):
            return False
        if event.fragment != fragment_of(event.step, self.fragments):
            return False
        if event.base > self.versions[event.fragment]:
            return False
        if self.members.find(event.learner, event.generation) is None:
            return False
        if round is None:
            return not self.late.was_merged(event.step, event.learner)
        if round.state == RoundState.GATHERING:
            return event.attempt < round.attempt
        return event.learner not in round.heard()

    cdef int carry(self, object event) except -1:
        """Join the fragment's gathering round if it holds nothing of this learner, else wait."""
        cdef Round round
        self.tell_fate(event, event.fragment, event.step, event.attempt, CARRIED)
        for round in self.gathering:
            if round.fragment == event.fragment:
                slot = round.slots.get(event.learner)
                if event.learner not in round.carried and (
                        slot is None or (<Slot>slot).push is None):
                    self.late.note_taken(event)
                    return self.attach(round, event, False)
        dropped = self.late.put(event)
        if dropped is not event:
            self.late.note_taken(event)
            self.emit(act.Park(event.payload))
            self.log("INFO", "late push waits for the next round", {
                "learner": event.learner, "generation": event.generation,
                "fragment": event.fragment, "step": event.step, "base": event.base})
        if dropped is not None:
            self.emit(act.Release(dropped.payload))
            self.warn("push rejected", {
                "reason": CARRY_SUPERSEDED, "learner": dropped.learner,
                "generation": dropped.generation, "fragment": dropped.fragment,
                "step": dropped.step, "attempt": dropped.attempt, "base": dropped.base})
        return 0

    # ---- folds ---------------------------------------------------------------------------------

    # rule 7.3
    cdef int folded(self, object event) except -1:
        """An own push is in its fold and its payload free; a carried one is kept for a relaunch."""
        cdef Round round = self.rounds.get(event.step)
        cdef Slot slot
        if round is None or round.attempt != event.attempt or event.carried:
            return 0
        slot = round.slots.get(event.learner)
        if slot is not None and slot.holds:
            slot.holds = False
            self.emit(act.Release(slot.push.payload))
        return 0
