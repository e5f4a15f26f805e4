"""Mistakes about what a merge takes: weights, enough learners, and what is left out of it."""

from __future__ import annotations

from tests.mutation.mistake import broken

EXCLUDING = broken(
    "core/rounds/excluding.pyx",
    ("7.4", "a merge's payloads are kept",
     "self.fruitless.pop(fragment, None)\n            return self.release_all(round.free_all())",
     "return 0"),
    ("7.5", "a fold that was not finite is folded again", "round.folds = False", "pass"),
    ("7.5", "the next round of its fragment is folded whatever was left out",
     "self.unfolded.add(round.fragment)", "pass"),
    ("7.5", "pushes are kept apart for good", "self.unfolded.discard(round.fragment)", "pass"),
    ("7.5 9.7", "a fold that was not finite counts as an attempt that left nothing",
     "if not round.folds:  ", "if True:  "),
    ("9.6", "what was left out is in the ledger",
     "if i not in left])", "if True])"),
    ("9.6", "what was left out is not told on the tape",
     "round.excluded.append((contribution, round.attempt, dropped.element))", "pass"),
    ("9.7", "an attempt that left nothing ends the run at once",
     "if self.fruitless.get(fragment, 0) >= self.policy.nonfinite_limit:", "if True:"),
    ("9.7", "the run never ends", "if self.fruitless.get(fragment, 0) >= "
     "self.policy.nonfinite_limit:", "if False:"),
    ("9.7", "a result does not begin the count anew",
     "self.fruitless.pop(fragment, None)", "pass"),
    ("9.7", "the one that was left out is asked again beside others",
     "elif len([member for member in there if member.learner not in out]) >= (\n"
     "                self.policy.least_values):", "elif False:"),
    ("9.7", "nobody is asked when all were left out",
     "elif len([member for member in there if member.learner not in out]) >= (\n"
     "                self.policy.least_values):", "else:"),
    ("9.7", "a fixed roster shrinks to those who are there",
     "expected = round.expected_members()", "pass"),
    ("9.7", "a carried delta that was left out comes again",
     "if contribution.carried and attempt == round.attempt:", "if False:"),
)
WEIGHTS = broken(
    "core/rounds/contributions.pyx",
    ("7.6", "the upper median of the others", "others[(len(others) - 1) // 2]",
     "others[len(others) // 2]"),
    ("7.6", "a learner is compared with itself", "for w, who in weighed if who != learner]",
     "for w, who in weighed]"),
    ("7.6", "weights of 0 count among the others",
     "return sorted([entry for entry in found if entry[0] > 0])", "return sorted(found)"),
    ("7.6", "a weight of 100 times the others is too much", "RATIO = 1000.0", "RATIO = 100.0"),
) + broken(
    "core/rounds/gathering.pyx",
    ("7.6", "weights are told and not capped",
     "return contribution._replace(weight=most * contribution.discount)", "return contribution"),
    ("7.7", "a fold knows nothing of the round before it", "self.weighed or sorted([", "sorted(["),
    ("7.7", "a fold caps no weight before the first merge",
     "round.weights[push.learner, late is not None] = contribution.weight",
     "round.weights[push.learner, late is not None] = contribution.weight if self.weighed else 0"),
    ("7.8", "nobody hears that nothing has a weight", "if self.weightless and not before:",
     "if False:"),
    ("7.8", "it is said of every round", "if self.weightless and not before:",
     "if self.weightless:"),
    ("6.14", "nobody hears what a robust round waits for",
     "        round.told_too_few = True\n        return self.warn(",
     "        return 0\n        return self.warn("),
    ("6.14", "it is said at every event", "        round.told_too_few = True\n", ""),
) + broken(
    "core/rounds/closing.pyx",
    ("6.14", "everybody's answers close a robust round, however few",
     "len(round.slots), round.mergeable(),", "len(round.slots), round.contributed(),"),
) + broken(
    "core/rounds/round.pyx",
    ("6.14", "a learner counts twice, by its carried delta",
     "found += slot is None or slot.push is None", "found += 1"),
)
