"""How a member gets into the rounds that are open, and what its going leaves behind.

Must not decide who is current (`membership`) or launch (`gathering`).

A learner may connect, vanish and return at any time, and none of that may cost the others a merge.
A member that comes while the run is under way passes three stations:

    catch-up   every fragment at its current version is sent; commits are followed
    tail       each fragment is with the kernel: it is held no more, and enters what is open
    launch     from the next one on it is expected like everybody

rule 3.1. From its HELLO to its tail a member is held. A pull must be preceded, in order, by the
    version that its round is about; before the catch-up is through nobody could say which that is.
rule 3.3. A catch-up ends when each fragment went out once, as new as it was at the HELLO. What was
    committed since follows as to everybody, and a pull waits for it: a link slower than the
    broadcasts always has something under way, and would never be let in. The tail is played only
    for a member that is still there, still current and still held. A newer HELLO has cancelled it:
    the newer member has a tail of its own.
rule 3.4. Rebind. A slot of a dead generation of this learner, without a push, becomes this
    member's, with the pull. A slot whose member is still connected is left alone: its answer may be
    under way. A slot that has its push needs nobody.
rule 3.9. But not for as long as TCP takes to find out that a peer has vanished: a learner whose
    machine is back at once would sit beside its own slot for a minute or more. An older connection
    that has been silent for 5 s gives its slots to the current one, once that is up to date.
rule 3.5. Late join. A round that was launched without this learner takes it in, if the version it
    was sent is the round's base: its answer is then as good as any. Otherwise a run resumed with
    one learner would keep all the others out until that one answers, or for a whole quorum timeout.
    Not a capacity round, whose threshold assumes that E only shrinks; not an exact fold that has
    begun, whose order and weights are those of its roster (an empty one is opened anew).
rule 3.7. Recovery replay. A generation may die after a newer one was already up to date; the newer
    one's tail found the slot alive. It gets another catch-up, and its tail rebinds.
rule 3.8. In a fixed roster E never changes, and any generation of an expected id may answer. A
    member that returns gets the pulls of the open rounds that its learner has not answered.

rule 5.10. A pull and the broadcast it is about may overtake each other on their way to the learner,
    which then answers with the anchor it has. Such an answer uses the pull up. Where the round
    waits for that learner all the same, it is asked again, each time after a longer pause: its
    broadcast may be on its way, and a learner that holds a version of another history, and keeps
    it, must not be asked in a loop.

rule 6.10. Under a capacity quorum a member that goes unanswered takes its capacity out of the
total.
"""

from syncer.core import actions as act
from syncer.core.deadlines cimport NEVER
from syncer.core.rounds.gathering cimport Gathering
from syncer.core.rounds.membership cimport SILENCE_NS, Member
from syncer.core.rounds.round cimport Round, Slot
from syncer.errors import InvariantViolation


cdef class Joining(Gathering):
    """The rules of catch-up, rebind, late join and replay, on top of the gathering rounds."""

    # rule 3.1
    cdef int catch_up(self, Member member) except -1:
        self.members.hold(member)
        return self.emit(act.CatchUp(member.learner, member.generation))

    # rule 3.3
    cdef int caught_up(self, object event) except -1:
        """The end of a catch-up. Still current? Then it is held no more and gets its tail."""
        cdef Member member = self.members.find(event.learner, event.generation)
        if member is None or not member.held or not self.members.is_current(member):
            return 0
        if len(event.delivered) != self.fragments:
            raise InvariantViolation(f"{event} names {len(event.delivered)} versions, the session "
                                     f"has {self.fragments} fragments")
        self.members.unhold(member, tuple(event.delivered), self.now_ns)
        return self.tail(member)

    cdef int tail(self, Member member) except -1:
        """What an up-to-date member gets into; rebind first, so that it joins nothing twice."""
        if self.policy.fixed_roster:
            return self.replay_open_pulls(member)
        self.rebind(member)
        return self.late_join(member)

    # rule 3.8
    cdef int replay_open_pulls(self, Member member) except -1:
        """Fixed roster: the pulls of the open rounds that this id has not answered."""
        cdef Round round
        cdef Slot slot
        for round in self.gathering:
            slot = round.slots[member.learner]
            if slot.push is None:
                self.pull(round, (member.key,))
        return 0

    # rule 3.4
    cdef int rebind(self, Member member) except -1:
        """Slots of a dead generation of this learner without a push become this member's."""
        cdef Round round
        cdef Slot slot
        for round in self.gathering:
            slot = round.slots.get(member.learner)
            if slot is None or slot.push is not None or slot.member.connected:
                continue
            self.pass_on(round, slot, member)
        return 0

    cdef int pass_on(self, Round round, Slot slot, Member member) except -1:
        """The slot of an older generation is this member's, and it is pulled for it."""
        self.log("INFO", "rebound outstanding pull", {
            "learner": member.learner, "step": round.step, "attempt": round.attempt,
            "generation": member.generation, "died": slot.member.generation})
        round.pass_on(slot, member)
        return self.pull(round, (member.key,))

    # rule 3.9
    cdef int take_slots(self) except -1:
        """Slots of older connections that have been silent for long become the current ones'."""
        cdef Round round
        cdef Slot slot
        cdef list learners
        if not self.members.older:
            return 0
        learners = sorted(self.members.older)
        for round in self.gathering:
            for learner in learners:
                slot = self.silent_slot(round, learner)
                if slot is not None and self.now_ns >= slot.member.quiet_since_ns() + SILENCE_NS:
                    self.pass_on(round, slot, self.members.current[learner])
        return 0

    cdef Slot silent_slot(self, Round round, object learner):
        """The slot that a current member would take from an older one of its learner, or None."""
        cdef Member member = self.members.current[learner]
        cdef Slot slot = round.slots.get(learner)
        if (member is None or member.held or slot is None or slot.push is not None
                or slot.member is member or self.policy.fixed_roster):
            return None
        return slot

    # rule 3.5
    cdef int late_join(self, Member member) except -1:
        """Enter the rounds still gathering that were launched without this learner, ascending."""
        cdef Round round
        if self.policy.quorum_capacity is not None:
            return 0
        for round in self.gathering:
            if member.learner in round.slots or member.learner in round.carried:
                continue
            if member.delivered[round.fragment] != round.base:
                continue
            if self.policy.exact_fold and round.pushed:
                continue
            round.join(member)
            if self.policy.exact_fold:
                self.open_fold(round)
            self.log("INFO", "late joiner pulled into open round", {
                "learner": member.learner, "generation": member.generation, "step": round.step,
                "attempt": round.attempt})
            self.pull(round, (member.key,))
        return 0

    # rule 5.10
    cdef int ask_again(self) except -1:
        """Pull those again whose answer was refused for its anchor, when their time has come."""
        cdef Round round
        cdef Slot slot
        cdef Member member
        for round in self.gathering:
            if not round.asking:
                continue
            for learner in sorted(round.asking):
                slot = round.asking[learner]
                member = self.answerer(slot)
                if member is not None and self.now_ns >= slot.again_ns:
                    self.log("INFO", "asked again after a refused push", {
                        "learner": member.learner, "generation": member.generation,
                        "step": round.step, "attempt": round.attempt})
                    self.pull(round, (member.key,))
        return 0

    cdef Member answerer(self, Slot slot):
        """The member that may be pulled for this slot now, or None."""
        cdef Member member = self.members.current[slot.member.learner]
        if member is None or member.held:
            return None
        return member if self.policy.fixed_roster or member is slot.member else None

    cdef long long joining_deadline_ns(self):
        """When somebody has to be asked again, or has been silent for too long."""
        cdef long long due = NEVER
        cdef Round round
        cdef Slot slot
        for round in self.gathering:
            if round.asking:
                for slot in round.asking.values():
                    if self.answerer(slot) is not None:
                        due = min(due, slot.again_ns)
            if self.members.older:
                for learner in self.members.older:
                    slot = self.silent_slot(round, learner)
                    if slot is not None:
                        due = min(due, slot.member.quiet_since_ns() + SILENCE_NS)
        return due

    # ---- who has gone --------------------------------------------------------------------------

    # rule 3.7
    cdef int left(self, Member dead) except -1:
        """A member has gone while rounds are open."""
        cdef Member newer = self.members.current[dead.learner]
        if self.policy.quorum_capacity is not None:
            return self.shrink(dead)
        if newer is None:
            self.tell_of(dead)
        if self.policy.fixed_roster:
            return 0
        if newer is not None and not newer.held and self.recovers(dead):
            # A held newer member needs nothing here: its own tail is still to come and will find
            # the slot dead.
            self.log("INFO", "recovery replay", {
                "learner": newer.learner, "generation": newer.generation,
                "died": dead.generation})
            self.catch_up(newer)
        return 0

    cdef bint recovers(self, Member dead):
        """Does a gathering round wait for this member, which has just gone?"""
        cdef Round round
        cdef Slot slot
        for round in self.gathering:
            slot = round.slots.get(dead.learner)
            if slot is not None and slot.member is dead and slot.push is None:
                return True
        return False

    cdef int tell_of(self, Member dead) except -1:
        """Say at once which rounds now wait for one that has gone: the quorum timeout is long."""
        cdef Round round
        for round in self.gathering:
            if dead.learner in round.unanswered() and not self.can_close(round):
                self.warn("a round cannot close without a learner that has gone", {
                    "step": round.step, "attempt": round.attempt, "learner": dead.learner,
                    "answered": round.answered, "expected": len(round.slots),
                    "quorum": self.policy.quorum})
        return 0

    cdef bint can_close(self, Round round):
        """Is quorum within reach of those who are there?"""
        cdef Py_ssize_t there = round.answered
        for learner in round.unanswered():
            there += self.members.current[learner] is not None or learner in self.members.older
        return there >= (len(round.slots) if self.policy.exact_fold else self.policy.quorum)

    # rule 6.10
    cdef int shrink(self, Member dead) except -1:
        """Capacity rounds: who has gone unanswered takes its capacity out of the total."""
        cdef Round round
        cdef Slot slot
        for round in self.gathering:
            slot = round.slots.get(dead.learner)
            if slot is not None and slot.member is dead and not round.answers(slot):
                round.drop_slot(dead.learner)
        return 0
