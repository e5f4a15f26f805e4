"""Where a learner stands, in words for whoever watches it. Must not change a session."""

from __future__ import annotations

from syncer.learner.session import Phase, Session


def standing(session: Session) -> str | None:
    """Where the run and this learner are, as soon as this connection has told of it."""
    connection = session.connection
    if connection is None or session.phase is not Phase.TRAINING:
        return None
    run = "the run"
    if (welcome := connection.welcome) is not None:
        run += f" {welcome.run}" * bool(welcome.run)
        step = f"{welcome.global_step} of {welcome.total_steps}"
    elif session.unheard:
        return None
    else:
        step = str(max(seen[0] for seen in session.accepted if seen is not None))
    own = f"{session.steps} steps and {session.tokens} tokens" if session.steps else "no step yet"
    return (f"{run} is at step {step}; learner {session.learner} has made {own} in this process"
            + "; broadcasts come as 4-bit changes" * connection.takes_changes)


def awaited(session: Session) -> str:
    """What has to happen before there is news for this learner, as far as it can know."""
    if session.phase is not Phase.TRAINING:
        return ("the rest of the final cut" if session.final.missing() else
                "its acknowledgement of the final cut to be taken")
    if not any(session.accepted):
        return ("the run to begin, for which its server may need other learners, or the "
                "initial values of learner 0")
    if session.pulls:
        step = session.pulls[0].step
        return f"this learner, which has not answered the pull of step {step} yet"
    pull = session.answered
    if pull is None:
        return "a pull"
    seen = session.accepted[pull.fragment]
    if seen is None or seen[0] < pull.step:
        return f"the merge of step {pull.step}, for which it has sent its delta"
    return f"a pull, or a merge after step {pull.step}"
