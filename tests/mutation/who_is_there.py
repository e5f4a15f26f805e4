"""Mistakes at the door: who is let in, and what is believed of how he introduces himself."""

from __future__ import annotations

from tests.mutation.mistake import broken

DOOR = broken(
    "wire/hello.py",
    ("14.1", "any MAC is good", "if not hmac.compare_digest(hello_mac(key, body), mac):",
     "if False:"),
    ("14.2", "a learner beyond the roster is let in", "if learner >= learners:",
     "if learner > learners:"),
) + broken(
    "wire/identity.py",
    ("14.3", "another profile is as good", "if hello.profile_hash == pins.profile_hash:",
     "if True:"),
    ("14.4", "an island may be any island", "if hello.contract == expected:", "if True:"),
    ("14.4", "an island pins the contract of no run",
     "expected = base if name is None else run_contract(base, name)", "expected = base"),
    ("14.4", "a name that a run has by itself counts for nobody who says none",
     "(pins.known_run or None if claim is None", "(None if claim is None"),
    ("17.7", "whoever comes to the wrong run may end it",
     "return bool(identity.run or found) and identity.run != found", "return False"),
    ("14.5", "the layout is not compared",
     "    if identity._replace(run=None) == found._replace(run=None):\n",
     "    if identity._replace(shape=(), run=None) == found._replace(shape=(), run=None):\n"),
) + broken(
    "server/door.py",
    ("14.7", "a long HELLO stops everybody", "if len(payload) <= HELLO_INLINE_MAX:", "if True:"),
) + broken(
    "server/capacity.py",
    ("14.9", "learners are let in whose sockets do not fit",
     "return self.rest - sockets >= STRANGERS_MIN", "return True"),
) + broken(
    "server/promised.py",
    ("14.11", "nobody looks at what stands still",
     "            if now_ns - self.stood[message][1] >= INCOMPLETE_NS:", "            if False:"),
) + broken(
    "server/run_session.py",
    ("14.10", "the newest connection of a learner that has too many is ended",
     "older.pop(0).end(", "group.end("),
    ("14.10", "a learner has as many connections as it likes",
     "if len(older) >= CONNECTIONS_MAX:", "if False:"),
) + broken(
    "server/service.py",
    ("14.8", "a strict run ends by whom no run would take",
     "resumed is not None and pins_refusal(claim, pins) is None:", "resumed is not None:"),
)
INTRODUCTIONS = broken(
    "server/introducing.py",
    ("3.10", "what another process has sent counts as this one's",
     "held is not None and past.kept(*held, held.version)", "held is not None"),
    ("18.5", "who sends changes keeps what another process has sent",
     "lineage._replace(entries=()) if sends_changes else lineage", "lineage"),
    ("17.1", "who is waited for is told that the run is under way",
     "action.step, action.state, tuple(", "action.step, RunState.RUNNING, tuple("),
    ("17.5", "names of the parameters are not kept",
     "if extension.names is not None:", "if False:"),
) + broken(
    "server/telling.py",
    ("17.2", "a notice waits for nothing", "        elif now_ns < due_ns:", "        elif False:"),
) + broken(
    "server/reporting.py",
    ("17.4", "every report is taken", "now_ns - last.at_ns >= REPORT_PAUSE_NS:", "True:"),
) + broken(
    "server/door.py",
    ("17.3", "who knows a generation has its parameters",
     "if not is_proved(data_hello, key):", "if False:"),
    ("17.8", "a data socket needs no certificate of its learner",
     "not same_certificate(stranger.channel, group.control)", "False"),
) + broken(
    "server/secured.py",
    ("17.8", "any certificate does for any id",
     "if not self.name_pattern or (name := self.name_of(learner)) in shown.names:", "if True:"),
) + broken(
    "server/run_session.py",
    ("17.6", "pulls overtake broadcasts in a strict run",
     "return self.parts.config.fixed_roster and hello.extension is None", "return False"),
)
FATES = broken(
    "core/rounds/gathering.pyx",
    ("19.1", "an answer that has not come is not told",
     "            if round.fragment in member.owed:\n", "            if False:\n"),
    ("19.1", "nobody is owed a fate", "if self.members.told_count:\n            self.owe",
     "if False:\n            self.owe"),
    ("19.1", "a fate is told twice", "        del member.owed[fragment]\n", ""),
    ("19.2", "a fate is told of a pull that it is not about",
     "member.owed.get(fragment) != (step, attempt)):", "fragment not in member.owed):"),
    ("19.2", "what an attempt took with it is merged",
     "self.tell_fate(slot.push, round.fragment, round.step, round.attempt, GIVEN_UP)", "pass"),
) + broken(
    "core/rounds/admission.pyx",
    ("19.2", "why a push was refused is not told",
     "self.tell_fate(event, event.fragment, event.step, event.attempt, FATES[reason])", "pass"),
    ("19.2", "a late push is told of when its round is merged",
     "self.tell_fate(event, event.fragment, event.step, event.attempt, CARRIED)", "pass"),
) + broken(
    "core/rounds/excluding.pyx",
    ("19.2", "what was left out is merged",
     "self.tell_fate(contribution, round.fragment, round.step, round.attempt, LEFT_OUT)", "pass"),
) + broken(
    "core/run/committing.pyx",
    ("19.2", "nobody is told of a merge",
     "self.tell_fate(contribution, round.fragment, round.step, round.attempt, MERGED)", "pass"),
    ("19.2", "a carried push is told as merged",
     "            if not contribution.carried:\n                self.tell", "            if True:\n"
     "                self.tell"),
) + broken(
    "learner/fates.py",
    ("19.2", "an answer that nobody has spoken of is merged",
     "self._merged[fragment] is not None\n", "True\n"),
    ("19.2", "what was not merged is carried on", "if fate.fate == PushFate.MERGED:", "if True:"),
    ("19.1", "a fate is of an answer that was not given", "if self._waiting[fragment] != key:",
     "if False:"),
    ("19.1", "a fate is of either of two answers", "if key in (before, self._unseen[fragment]):",
     "if False:"),
    ("19.2", "a merge counts for a server that may not know it",
     "if step is not None and not (kept[fragment] and versions[fragment] >= step):", "if False:"),
)
CHANGES = broken(
    "server/downlink.py",
    ("18.1", "a change is from the parameters before, and what it leaves out is lost",
     "anchor = self.anchors.get(before.fragment)", "anchor = None"),
    ("18.3", "what learners hold may be infinite", "if bad >= 0:", "if False:"),
    ("18.3", "a merge without memory for its anchor is lost", "except MemoryError:",
     "except ZeroDivisionError:"),
) + broken(
    "server/outgoing.py",
    ("18.2", "who gets a version whole gets the parameters",
     "if self.downlink is not None and kind == Msg.BCAST_FRAGMENT:", "if False:"),
) + broken(
    "server/outbox.pyx",
    ("18.4", "a change goes to who has not got what it changes",
     "if change is not None and self.sent.get(image.fragment, -1) == change.base:",
     "if change is not None:"),
    ("18.4", "who takes no changes gets them",
     "        if self.takes_changes:\n            change = image.change\n",
     "        if True:\n            change = image.change\n"),
) + broken(
    "server/resuming.py",
    ("18.5", "a resumed run gives the numbers again that had other bits",
     'if config.goes_on_unsaved or config.downlink != "whole":', "if config.goes_on_unsaved:"),
) + broken(
    "server/persistence.py",
    ("18.5", "after an end in order they are given again",
     'if self.config.downlink != "whole":', "if False:"),
) + broken(
    "checkpoint/lineage.py",
    ("18.5", "a process without changes keeps what one with them has sent",
     "None if self.sends_changes else step", "step"),
)
