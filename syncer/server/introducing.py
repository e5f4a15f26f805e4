"""What the server says of itself to who has introduced himself, and what it takes from a block.

WELCOME (rule 17.1), and the run and the names that a HELLO tells (rule 17.5): a name is as sure as
the fingerprint that it is in. Must not decide what is kept (rule 3.10) or who belongs to the run
(`wire.identity`).

rule 18.5. A process with --downlink q4 sends what no file holds: nothing that it has sent is kept
    by a later one, which gives its versions other numbers. And it keeps only what it has sent
    itself: a learner may have no bytes of anything else that could be changed.
"""

from __future__ import annotations

from syncer import __version__
from syncer.checkpoint.lineage import Lineage
from syncer.config import Config
from syncer.core import actions
from syncer.protocol import DTYPE_Q4, RunState
from syncer.server.group import Group
from syncer.server.persistence import Persistence
from syncer.wire.extended import Welcome, encode_welcome
from syncer.wire.hello import Hello

PROGRAM = f"syncer {__version__}"


# rule 18.5
def versions_held(hello: Hello, lineage: Lineage, sends_changes: bool = False) -> tuple[int, ...]:
    """Of each fragment the version that a learner has as this run has had it, -1 for none: what the
    block says of another run, or of a part that was lost, is nothing to this one; nor, where
    changes are sent, what another process has sent. () of a learner that has said nothing."""
    if hello.extension is None or hello.extension.held is None:
        return ()
    past = lineage._replace(entries=()) if sends_changes else lineage
    return tuple(
        held.version if held is not None and past.kept(*held, held.version) else -1
        for held in hello.extension.held)


# rule 17.1
def welcome(group: Group, action: actions.Admit, config: Config, lineage: Lineage) -> None:
    """Queue the first thing that an admitted group is told; what it keeps is not sent to it."""
    for fragment, version in action.kept:
        group.outbox.keep(fragment, version)
    kept = dict(action.kept)
    extension = group.hello.extension
    assert extension is not None  # it is why it is told anything
    group.outbox.takes_changes = config.downlink != "whole" and DTYPE_Q4 in extension.changes
    group.outbox.frame(greeting(config, lineage, action.step, action.state, tuple(
        fragment in kept for fragment in range(group.outbox.fragments)),
        changes=DTYPE_Q4 if group.outbox.takes_changes else 0))


def greeting(config: Config, lineage: Lineage, step: int, state: RunState,
             kept: tuple[bool, ...] = (), *, changes: int = 0) -> bytes:
    """The frame of a WELCOME; a reader keeps nothing, and gets no changes."""
    return encode_welcome(Welcome(
        lineage.epoch, lineage.instance, step, config.total_steps + lineage.renumbered,
        config.learners, config.quorum if config.quorum_capacity is None else 0,
        config.sync_interval_steps, state, PROGRAM, lineage.run, lineage.renumbered, kept,
        changes))


# rule 17.5
def take_records(hello: Hello, persistence: Persistence) -> str:
    """The name of the run, if it has none yet, and learner 0's names of the parameters; what the
    learner says it is is given back."""
    extension = hello.extension
    assert extension is not None  # it is why it is asked
    if extension.run is not None:
        persistence.take_run(extension.run.name)
    if extension.names is not None:  # no other learner's are read
        persistence.take_names([fragment.tensors for fragment in extension.names])
    return extension.client or ""
