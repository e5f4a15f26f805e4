"""What becomes of a push: accepted, refused, or carried into a later round. rounds.md 4, 8, 9.

The reasons are tested in the order of the rules. A push is refused quietly: its connection stays
and its payload goes back. Only a stale push under --max-base-lag 0 ends the run.
"""

from syncer.core import actions as act
from syncer.core.rounds.carry cimport Carried
from syncer.core.rounds.gathering cimport Gathering, contribution_of
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.round cimport Round, RoundState, Slot


cdef class Admission(Gathering):
    """The rules of admission on top of the gathering rounds."""

    cdef int on_push(self, object event) except -1:
        cdef Round round = self.rounds.get(event.step)
        cdef Slot slot = None if round is None else round.slots.get(event.learner)
        cdef str reason = self.refusal(round, slot, event)
        if reason is None:
            return self.accept(round, slot, event)
        if reason == "OutOfRound" and self.policy.late_carry and self.carriable(round, event):
            return self.carry(event)
        return self.refuse(round, slot, event, reason)

    cdef str refusal(self, Round round, Slot slot, object event):
        """Why a push cannot join its round, or None."""
        if (round is None or round.state != RoundState.GATHERING
                or round.fragment != event.fragment or round.attempt != event.attempt):
            return "OutOfRound"
        if slot is None:
            return "UnexpectedMember"
        if not self.policy.fixed_roster and slot.member.generation != event.generation:
            return "UnexpectedMember"
        if event.base > round.base:
            return "FutureBase"
        if self.policy.max_base_lag >= 0 and round.base - event.base > self.policy.max_base_lag:
            return "StaleBase"
        if slot.push is not None:
            return "Duplicate"
        return None

    cdef int accept(self, Round round, Slot slot, object event) except -1:
        cdef Member member = self.members.find(event.learner, event.generation)
        if event.base < round.base:
            self.warn("stale base-relative delta admitted", {
                "learner": event.learner, "generation": event.generation, "step": event.step,
                "base": event.base, "staleness": round.base - event.base})
        round.accept(slot, event)
        if member is not None:
            member.observe(self.now_ns, event.local_step)
        return self.fold(round, event)

    cdef int refuse(self, Round round, Slot slot, object event, str reason) except -1:
        """Give the payload back and say why; a stale push also gives its slot up.

        Not the slot of a learner that has answered: its first push stays. Not under an exact fold
        either, which is for the full roster or fails.
        """
        self.emit(act.Release(event.payload))
        self.warn("push rejected", {
            "reason": reason, "learner": event.learner, "generation": event.generation,
            "fragment": event.fragment, "step": event.step, "attempt": event.attempt,
            "base": event.base})
        if reason != "StaleBase":
            return 0
        round.stale_refused += 1
        if self.policy.max_base_lag == 0:
            return self.strict_failure("rejected_stale_updates", (
                f"learner {event.learner} pushed step {event.step} against version {event.base} of "
                f"fragment {event.fragment}, expected {round.base}: with --max-base-lag 0 every "
                "delta must be relative to the current version"))
        if not round.answers(slot) and not self.policy.exact_fold:
            round.drop_slot(event.learner)
        return 0

    cdef int strict_failure(self, str metric, str text) except -1:
        """End the run for a rule that allows no exception; the scheduler says how."""
        raise NotImplementedError

    # ---- late carry ----------------------------------------------------------------------------

    cdef bint carriable(self, Round round, object event):
        """Has the round of this push closed without it, and could it still be of use?"""
        if not 1 <= event.step < self.next_step:
            return False
        if event.fragment != (event.step - 1) % self.fragments:
            return False
        if event.base > self.versions[event.fragment]:
            return False
        if self.members.find(event.learner, event.generation) is None:
            return False
        if round is None:
            return not self.late.was_merged(event.step, event.learner)
        if round.state == RoundState.GATHERING:
            return event.attempt < round.attempt
        return event.learner not in {c.learner for c in round.contributions if not c.carried}

    cdef int carry(self, object event) except -1:
        """Join the fragment's gathering round if it holds nothing of this learner, else wait."""
        cdef Round round
        for round in self.gathering:
            if round.fragment == event.fragment:
                slot = round.slots.get(event.learner)
                if event.learner not in round.carried and (
                        slot is None or (<Slot>slot).push is None):
                    return self.attach(round, event, False)
        dropped = self.late.put(event)
        if dropped is not event:
            self.emit(act.Park(event.payload))
            self.log("INFO", "late push waits for the next round", {
                "learner": event.learner, "generation": event.generation,
                "fragment": event.fragment, "step": event.step, "base": event.base})
        if dropped is not None:
            self.emit(act.Release(dropped.payload))
            self.warn("push rejected", {
                "reason": "carry_superseded", "learner": dropped.learner,
                "generation": dropped.generation, "fragment": dropped.fragment,
                "step": dropped.step, "attempt": dropped.attempt, "base": dropped.base})
        return 0

    # ---- folds ---------------------------------------------------------------------------------

    cdef int on_folded(self, object event) except -1:
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
