"""The closing table of a run: plain text, at most 80 columns, nothing but figures and sentences.

Must not compute figures: it shows a `RunOutcome`.
"""

from __future__ import annotations

import textwrap

from syncer.demo.show.outcome import Baseline, LearnerRow, LossOutcome, RunOutcome, ServerTotals
from syncer.demo.show.text import COLUMNS_MAX, bits, rate, size

COLUMNS = (("", 13), ("before", 8), ("own", 8), ("merged", 8), ("own steps", 11),
           ("tokens/s", 10), ("sent", 10), ("received", 10))
"""Headings and widths; the first column is flush left, the others flush right."""


def render(outcome: RunOutcome) -> str:
    """The whole closing text."""
    lines = [f"{'':13}{'held-out bits per byte':>24}{'':>11}{'':>10}{'on the wire':>20}".rstrip(),
             row(*(title for title, _ in COLUMNS))]
    lines += [learner_line(each) for each in outcome.learners]
    lines.append(row("merged model", bits(outcome.before), "", bits(outcome.merged)))
    if outcome.baseline is not None:
        lines.append(row("one alone", bits(outcome.baseline["before"]),
                         bits(outcome.baseline["held_out"]), "",
                         f"{outcome.baseline['steps']:,}"))
    lines.append("")
    for sentence in sentences(outcome):
        lines += textwrap.wrap(sentence, COLUMNS_MAX)
    return "\n".join(lines)


def learner_line(each: LearnerRow) -> str:
    """One learner; "-" where it did not live to tell."""
    return row(f"learner {each.learner}", bits(each.before), bits(each.own), bits(each.merged),
               f"{each.steps:,}", rate(each.tokens_per_s), size(each.bytes_sent),
               size(each.bytes_received))


def row(*cells: str) -> str:
    """Cells under `COLUMNS`, without trailing blanks."""
    widths = [width for _, width in COLUMNS]
    first, *others = zip(cells, widths, strict=False)
    text = f"{first[0]:<{first[1]}}" + "".join(f"{cell:>{width}}" for cell, width in others)
    return text.rstrip()


def sentences(outcome: RunOutcome) -> list[str]:
    """What the figures mean, one sentence or two for each thing there is to say."""
    said = [ending(outcome)]
    if outcome.server is not None:
        said.append(server_line(outcome.server, outcome.training_s))
    peaks = [each.peak_rss_bytes for each in outcome.learners if each.peak_rss_bytes]
    if peaks:
        said.append(f"Learners: peak memory {size(max(peaks))}.")
    if outcome.loss is not None:
        said.append(loss_line(outcome.loss))
    if outcome.baseline is not None and outcome.merged is not None:
        said.append(baseline_line(outcome.baseline, outcome.merged))
    said += [f"Problem: {problem}." for problem in outcome.problems]
    return said


def ending(outcome: RunOutcome) -> str:
    """How the run ended and whose parameters were measured."""
    total = outcome.plan["total_steps"]
    ran = f"{outcome.outer_steps} of {total} outer steps in {outcome.training_s:.1f} s"
    if outcome.merged_from is None:
        return f"Stopped ({outcome.ended}) after {ran}: nothing was merged yet."
    if outcome.merged_from == "final state" and outcome.merged_sha256 is not None:
        same = sum(each.holds_final_cut for each in outcome.learners)
        return (f"{ran}. {same} of {len(outcome.learners)} learners ended with exactly the "
                f"server's parameters (sha256 {outcome.merged_sha256[:12]}).")
    return (f"Stopped ({outcome.ended}) after {ran}; the merged model is the newest one that "
            f"{outcome.merged_from} had received.")


def server_line(server: ServerTotals, training_s: float) -> str:
    """What the server needed."""
    share = 100 * server["cpu_seconds"] / max(training_s, 1e-9)
    return (f"Server: CPU time {server['cpu_seconds']:.1f} s ({share:.0f} % of one core), peak "
            f"memory {size(server['peak_rss_bytes'])}, received {size(server['bytes_received'])}, "
            f"sent {size(server['bytes_sent'])}.")


def loss_line(loss: LossOutcome) -> str:
    """What --kill-one did and what became of it."""
    text = (f"Learner {loss['learner']} was killed at {loss['t_s']:.1f} s after outer step "
            f"{loss['step']}. {loss['merges_without_it']} merges went on without it.")
    if loss["return_step"] is None:
        return text + " The run ended before it was started again."
    text += f" It was started again at {loss['return_s']:.1f} s"
    if loss["took_part_again_in"] is None:
        return text + ", too late to take part in another merge."
    return text + f" and took part again from outer step {loss['took_part_again_in']}."


def baseline_line(baseline: Baseline, merged: float) -> str:
    """The comparison that --baseline asks for."""
    alone = baseline["held_out"]
    verdict = "below" if merged < alone else "NOT below"
    return (f"With {baseline['steps']:,} own steps one learner alone reaches "
            f"{alone:.3f} bits per byte; the merged model reaches {merged:.3f}, "
            f"{abs(alone - merged):.3f} {verdict if merged < alone else verdict + ' it'}.")
