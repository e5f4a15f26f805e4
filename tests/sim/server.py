"""One process of the production server in a simulated world: it starts, lives, ends, or is killed.

All of `syncer.server` runs as it is; this drives `Server.life` as `Server.run` does, with the
world's clock in place of a selector, and looks at what is left when it has ended.
"""

from __future__ import annotations

import gc
from datetime import UTC, datetime, timedelta
from typing import Any

from syncer.config import Config
from syncer.merge.optimizers import OPTIMIZERS
from syncer.server.log import Log
from syncer.server.service import Server
from tests.sim.clock import World
from tests.sim.history import Broken, Witness
from tests.sim.lane import Killed, Strand
from tests.sim.system import SimSystem
from tests.sim.turns import LineCheck

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class SimServer:
    """Starts a server at once. Raises what `Server` raises; nothing is left behind then.

    turn_ns: how late it wakes up. `crashed`: it was killed. `over`: it has ended by itself.
    """

    def __init__(self, world: World, config: Config, system: SimSystem, witness: Witness,
                 turn_ns: int):
        self.world, self.config, self.system, self.witness = world, config, system, witness
        self.turn_ns = turn_ns
        self.crashed = False
        self.replaced = False
        """There will be, or is, another process."""
        self.over = False
        self.stirred = False
        self.turning = False
        self.armed_ns: int | None = None
        self.frozen_until_ns = 0
        self.line_check = LineCheck()
        log = Log(config.log_level, config.log_format, system.log_lines(),
                  now=lambda: EPOCH + timedelta(microseconds=world.now_ns // 1000))
        self.server = Server(config, log, system, watch=witness)
        self.first_step = self.scheduler.global_step
        self.loop: Any = system.the_loop
        self.loop.stir = self.stir
        self.life = self.server.life()
        self.strand: Strand | None = None
        """Of a process that runs `Server.run` itself, instead of having its turns made here."""
        if world.chance(0.1):
            self.loop.sleep = self.sleep
            self.strand = Strand(world, self.run, lambda: None)
            self.turn()
        else:
            self.wait_until(self.loop.due_ns(next(self.life)))

    @property
    def scheduler(self) -> Any:
        return self.witness.scheduler

    @property
    def raised(self) -> int:
        """By how much it has raised the steps of its checkpoint."""
        resumption = self.server.persistence.resumption
        return 0 if resumption is None else resumption.raised

    @property
    def ended(self) -> bool:
        """The process is not there any more."""
        return self.over or self.crashed

    # ---- one turn after the other ------------------------------------------------------------

    def stir(self) -> None:
        """A turn has something to do."""
        if not self.stirred:
            self.stirred = True
            late_ns = max(self.turn_ns, self.frozen_until_ns - self.world.now_ns)
            self.world.after(late_ns, self.turn)

    def wait_until(self, due_ns: int | None) -> None:
        if due_ns is None or self.ended:
            return
        if due_ns <= self.world.now_ns:
            self.stir()
        elif due_ns != self.armed_ns:
            self.armed_ns = due_ns
            self.world.after(due_ns - self.world.now_ns, self.due, due_ns)

    def due(self, due_ns: int) -> None:
        if self.armed_ns == due_ns:
            self.armed_ns = None
            self.stir()

    def turn(self) -> None:
        self.stirred = False
        if self.ended or self.turning:            # it waits inside of a turn for its own threads
            return
        self.turning = True
        try:
            if self.strand is None:
                self.wait_until(self.loop.due_ns(self.next_deadline()))
            else:
                self.strand.resume()
        except StopIteration:
            self.over = True
        except Killed:
            if not self.crashed:
                raise
        finally:
            self.turning = False
        if self.over:
            self.check_closed()

    def run(self) -> None:
        """On a strand: `Server.run` itself, which sleeps in `SimLoop.poll`."""
        try:
            self.server.run()
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        self.over = True

    def sleep(self, due_ns: int | None) -> None:
        self.wait_until(due_ns)
        self.strand.park()

    def next_deadline(self) -> int | None:
        loop = self.loop
        loop.woken()
        try:
            loop.turn(loop.ready())
        except Exception as error:
            if not self.explained(error):
                raise
            return self.life.throw(error)
        try:
            self.line_check.look(self.server.session)
        except AssertionError as error:
            raise Broken(*error.args) from error
        return next(self.life)

    def explained(self, error: Exception) -> bool:
        """Whether a defect is one that a worker was told to have."""
        return isinstance(error, MemoryError) and self.system.the_workers.failed > 0

    # ---- what is done to it ------------------------------------------------------------------

    def signal(self) -> None:
        if not self.ended:
            self.server.stop()

    def freeze(self, pause_ns: float) -> None:
        """The machine has no time for it."""
        self.frozen_until_ns = self.world.now_ns + int(pause_ns)

    def kill(self, power: bool = False) -> None:
        """The process dies, or the whole machine: then unsynced bytes go with it, and nobody tells
        the peers."""
        self.crashed = True
        self.system.kill()
        if self.strand is not None:
            self.strand.kill()
        listener = self.system.listener
        for sock in listener.accepted:
            if not sock.closed:
                sock.closed = True
                sock.touched = None
                delay = self.world.between(1, 20_000 if power else 500) * 1_000_000
                sock.wire.reset(client_after_ns=delay)
        listener.close()
        if power:
            self.system.disk.power_fails()

    # ---- what is left ------------------------------------------------------------------------

    @property
    def status(self) -> int | None:
        """That it ended with, or would have; None if there was no reason to end."""
        if self.over:
            return int(self.server.status)
        exit_action = self.witness.exit
        return None if exit_action is None else int(exit_action.status)

    @property
    def exit_text(self) -> str:
        exit_action = self.witness.exit
        return "" if exit_action is None else exit_action.text

    @property
    def complete(self) -> bool:
        """Whether the learners have got what they came for."""
        return self.status == 0 or self.exit_text.startswith("final-state could not be written")

    @property
    def resumed(self) -> bool:
        """Whether it went on from a checkpoint."""
        return self.server.persistence.facts is not None

    @property
    def over_before(self) -> bool:
        """Whether every step was done when this process began, and nobody looked."""
        return self.scheduler.lingers

    def check_closed(self) -> None:
        """Everything was given back: sockets, timers, files, memory."""
        loop, system = self.loop, self.system
        assert loop.closed or not loop.waiting, f"still waits for {list(loop.waiting)}"
        assert system.listener.closed, "still listens"
        still = [sock.number for sock in system.listener.accepted if not sock.closed]
        assert not still, f"sockets {still} are open"
        active = [timer for timer in loop.timers_made if timer.active]
        assert not active, f"{len(active)} timers are armed"
        assert not system.files.descriptors, "files are open"
        assert not system.disk.locks, "the checkpoint is locked"
        assert not system.the_workers.queue.jobs, "jobs are waiting"
        self.check_saved()
        if self.status == 0:
            self.witness.forget()
            self.check_memory()

    def check_saved(self) -> None:
        """A defect loses no committed step (rule 13.8), unless the disk does."""
        scheduler = self.scheduler
        if (self.exit_text.startswith("internal error") and scheduler.saves.on
                and "could not be saved" not in self.exit_text
                and scheduler.global_step > self.first_step):
            assert scheduler.saves.durable_step == scheduler.global_step, "a defect cost a step"
            self.witness.found.add("a defect saved the last cut")

    def check_memory(self) -> None:
        """What payloads, merges and messages took is back to what the state itself needs."""
        session = self.server.session
        if session is None:
            return
        store, fragments = session.merging.store, len(session.hello.layout.fragments)
        # Initial values stay where they were decoded; what the end found on a worker goes with it.
        kept = sum(not store.current(f).version for f in range(fragments))
        kept += 2 * self.system.the_workers.left_over
        if session.pool.live > kept:
            gc.collect()                          # a MemoryError's traceback holds the job it is of
        arrays = fragments * (1 + len(OPTIMIZERS[self.config.outer_optimizer].state))
        if session.pool.live > kept or store.live_buffers > arrays:
            gc.collect()                          # what an exception has held on to is no leak
        assert session.pool.live <= kept, f"{session.pool.live} payloads live, not {kept}"
        assert store.live_buffers <= arrays, f"{store.live_buffers} arrays live"
