"""The machinery of the experiments: what it trains, what its time costs, and how it counts."""

import json

import numpy as np
import pytest

from experiments import (
    chaos,
    command,
    outer,
    parity,
    plot,
    staleness,
    straggler,
    sweep,
    tables,
    wall_time,
)
from experiments.model import BITS_PER_NAT, SIZES, Batches, Model, Trainer, synchronous
from experiments.world import SCALE, Fleet, Setting

pytestmark = pytest.mark.slow                   # they train
SIZE = SIZES["small"]


def played(seconds=60, **given):
    fleet = Fleet(Setting(SIZE, 1, 4e-3, 2, 1000, **{"h": 8, **given}))
    fleet.play(lambda: fleet.seconds >= seconds)
    return fleet


def test_the_gradient_is_that_of_the_loss():
    model, windows = Model(SIZE, 1), Batches(1).next()
    model.loss_and_gradient(windows)
    gradient, start = model.gradient.copy(), model.flat.copy()
    length = np.linalg.norm(gradient)
    losses = []
    for sign in (1, -1):
        model.flat[:] = start + sign * 3e-2 * gradient / length
        losses.append(model.loss_and_gradient(windows))
    assert (losses[0] - losses[1]) / (2 * 3e-2) == pytest.approx(length * BITS_PER_NAT, rel=0.02)


def test_what_4_bits_lose_is_in_the_next_delta():
    plain, fed_back = played(dtype="q4"), played(dtype="q4", feeds_back=True)
    assert fed_back.loss != plain.loss
    assert any(island.session.fates.merged(0) is not None or island.session.fates.carried(0)
               for island in fed_back.islands)


def test_data_parallel_of_one_is_plain_training_and_of_two_is_another():
    trainer = Trainer(SIZE, 3, 0, 4e-3)
    for _ in range(20):
        trainer.step()
    assert synchronous(SIZE, 3, 1, 4e-3, 20) == trainer.model.bits_per_byte()
    assert synchronous(SIZE, 3, 2, 4e-3, 20) != trainer.model.bits_per_byte()


def test_the_same_seed_is_the_same_run_and_it_learns():
    first, again = played(look_s=20), played(look_s=20)
    assert (first.curve, first.loss) == (again.curve, again.loss)
    assert first.curve[0][1] > first.loss + 0.2
    assert first.ledger.entries() == first.server.scheduler.ledger
    assert 0.5 < first.merged_steps / first.own_steps <= 1


def test_a_run_ends_with_the_servers_values_in_every_learner():
    fleet = Fleet(Setting(SIZE, 1, 4e-3, 2, 24, h=8))
    fleet.play()
    assert all(island.done for island in fleet.islands)
    for island in fleet.islands:
        assert island.trainer.model.flat.tobytes() == fleet.merged.flat.tobytes()


def test_a_link_carries_what_it_can_and_no_more():
    """f32 both ways and H 8: 4 bytes a parameter in 8 s would be 4 Gb/s."""
    free, limited = played(120), played(120, bits_per_s=1e9)
    for passed in limited.bytes_per_parameter:
        assert 0.6 * 120 < passed * SCALE * 8 / 1e9 < 1.01 * 120
    assert len(limited.ledger.merges) < 0.4 * len(free.ledger.merges)


def test_work_of_a_slow_learner_counts_as_what_it_is():
    fleet = played(80, step_s=(1.0, 4.0))
    assert [round(island.steps / 10) for island in fleet.islands] == [8, 2]


def test_who_is_killed_comes_back_and_nothing_merged_is_lost():
    fleet = Fleet(Setting(SIZE, 1, 4e-3, 2, 1000, h=4, saves=True,
                          rounds={"quorum": 1, "grace_ms": 500}))
    fleet.play(lambda: fleet.seconds >= 20)
    fleet.islands[1].kill(5.0)
    fleet.play(lambda: fleet.seconds >= 40)
    before = fleet.ledger.entries()[1]
    fleet.kill_server(5.0)
    fleet.play(lambda: fleet.seconds >= 80)
    assert fleet.killed == 1
    assert fleet.islands[1].process == 3, "one process, its end, and the next one"
    assert fleet.ledger.entries() == fleet.server.scheduler.ledger
    assert fleet.ledger.entries()[1][0] > before[0]
    assert max(fleet.gaps_s()) > 5 > max(fleet.gaps_s([40.0]))


@pytest.mark.parametrize("experiment", [
    parity, sweep, straggler, chaos, staleness, outer, wall_time])
def test_an_experiment_is_one_command(experiment, tmp_path, capsys):
    files = [tmp_path / "found.json", tmp_path / "picture.png"]
    given = ["--quick", "--json", str(files[0]), "--png", str(files[1])]
    assert command.main(experiment, given) == 0
    found = json.loads(files[0].read_text())
    assert experiment.table(found) in capsys.readouterr().out
    assert files[1].stat().st_size > 10_000
    assert "--quick" in found["command"]


def test_every_experiment_of_the_docs_has_a_table_and_a_picture():
    names = {path.stem for path in tables.DOCS.glob("*.json")}
    assert "parity" in names
    for name in names:
        found = tables.read(name)
        assert found["command"] == f"python -m experiments.{name}"
        assert getattr(tables, name)(found)
        assert getattr(plot, name)
        assert (tables.DOCS / f"{name}.png").exists()


def test_the_gates_of_parity_hold_in_what_was_measured():
    """At toy size: four learners within 10 % of DP of four, and below DP of two + 1 %."""
    groups = tables.group(tables.read("parity")["cells"], "size", "learners")
    for size in SIZES:
        loss = tables.mean(groups[size, 4], "loss")
        assert loss < 1.10 * tables.mean(groups[size, 4], "bound")
        assert loss < 1.01 * tables.mean(groups[size, 2], "bound")


def test_four_bits_both_ways_are_within_a_percent_of_bf16_and_the_fastest_on_slow_links():
    cells = tables.read("sweep")["cells"]
    of = tables.group(cells, "h", "link", "up", "down")
    for h in (2, 8, 24, 96):
        q4, bf16 = (tables.mean(of[h, "no limit", form, form], "loss") for form in ("q4", "bf16"))
        assert abs(q4 / bf16 - 1) < 0.01
    times = {key[2:]: same[0]["to_target_s"] or 1e9
             for key, same in of.items() if key[:2] == (24, "100 Mb/s")}
    fed_back = ("q4" + sweep.FED_BACK, "q4")
    assert min(times, key=times.get) in (("q4", "q4"), fed_back)
    del times[fed_back]
    assert min(times, key=times.get) == ("q4", "q4")
    assert times["q4", "q4"] < 0.6 * times["bf16", "bf16"]


def test_a_rate_by_merge_that_is_constant_is_the_flag():
    losses = []
    for rounds, rate in (({"outer_lr": 0.4}, None), ({}, lambda fragment, merges: 0.4), ({}, None)):
        fleet = Fleet(Setting(SIZE, 1, 4e-3, 2, 24, h=8, rounds=rounds))
        fleet.play(lambda fleet=fleet: fleet.began_ns is not None)
        if rate is not None:
            outer.follow(fleet.server.server.session.merging.store, rate)
        fleet.play()
        losses.append(fleet.loss)
    assert losses[0] == losses[1] != losses[2]


def test_data_parallel_on_a_link_takes_what_its_all_reduce_takes():
    """1.5 times 2 GB a step: 24 s at 1 Gb/s."""
    assert [wall_time.step_s(bits) for bits in (0.0, 1e9, 1e8, 1e12)] == [1.0, 24.0, 240.0, 1.0]
    quick = wall_time.steps_to_target(1, 16)
    assert quick is None
    assert 200 < wall_time.steps_to_target(1, 900) < 900
