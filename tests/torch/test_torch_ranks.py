"""Islands of several processes in a run: what they end with, and how they end when a rank fails."""

import pytest

from tests.torch.island import torch  # isort: split

import contextlib
import re
import threading
from pathlib import Path

import numpy as np
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from syncer.errors import ConfigError, LocalProtocolError
from syncer.learner import ConnectionFailed
from syncer.protocol import RunState
from syncer.torch import Diloco, IslandBroken
from tests.e2e.scripted import ServerProcess
from tests.e2e.scripted_server import ScriptedServer
from tests.e2e.waiting import until
from tests.torch import ranks


def train(rank: int, address: str, kind: str, dtype: torch.dtype, options: dict):
    """An ordinary loop to the end of the run: the final model, and what was seen on the way."""
    model = ranks.spread(kind, ranks.model_of(options.get("learner_id", 0), dtype))
    for memory in ranks.here(model) if options.get("learner_id") else []:
        memory.fill_(float("nan"))  # whatever is there, it is none of the run's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(100 + rank)
    merged = []
    island = Diloco(model, optimizer, address, **{
        "dtype": "f32", "fragments": 2, "num_streams": 1, "ranks_timeout_s": 60.0} | options)
    island.on_merge(lambda status: merged.extend(status.applied))
    evaluate(model, dtype)
    with island:
        joined = ranks.values_of(model)
        while not island.finished:
            inputs = torch.randn(8, 4, generator=random)
            target = inputs.sum(1, keepdim=True)
            (model(inputs.to(dtype)).float() - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            island.tokens(8)
            island.report(loss=1.0)
            evaluate(model, dtype)
    return {"joined": joined, "final": ranks.values_of(model), "merged": merged,
            "status": island.status}


def evaluate(model, dtype: torch.dtype) -> None:
    """Which leaves the outermost module of FSDP2 gathered."""
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=dtype))


def plain(address: str, found: dict, **options) -> threading.Thread:
    """An island of one process, in this one."""
    def loop() -> None:
        found.update(train(0, address, "plain", torch.float32, options))

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


@pytest.mark.parametrize(("kind", "dtype"), [("ddp", "bf16"), ("fsdp", "q4")])
def test_two_islands_in_one_run_have_one_model_in_all_ranks(tmp_path, kind, dtype):
    """A plain one that brings the values, and one of two ranks that begins with garbage."""
    found: dict = {}
    with ServerProcess(tmp_path, "--sync-interval-steps", "2", "--quorum", "2",
                       learners=2, steps=12) as server:
        address = f"127.0.0.1:{server.port}"
        thread = plain(address, found, learner_id=0, dtype=dtype)
        there = [outcome.value for outcome in ranks.run(
            tmp_path, train, 2, address, kind, torch.float32, {"learner_id": 1, "dtype": dtype})]
        thread.join(ranks.WAIT_S)
        assert server.wait() == 0, server.log.text()
    assert [each["final"] for each in there] == 2 * [found["final"]]
    assert np.isfinite(there[0]["joined"]).all()
    assert there[0]["joined"] == there[1]["joined"]
    assert there[0]["merged"] == there[1]["merged"] != []
    assert there[0]["status"] == there[1]["status"]
    assert there[0]["status"].finished


@pytest.mark.filterwarnings("ignore:.*keeps no f32 master")
@pytest.mark.parametrize(("kind", "options"), [
    ("fsdp", {"anchors": "device"}), ("ignoring", {}), ("ddp", {})])
def test_coarse_weights_of_all_ranks_end_as_those_of_the_server_rounded(tmp_path, kind, options):
    found: dict = {}
    with ServerProcess(tmp_path, "--sync-interval-steps", "2", "--quorum", "2",
                       learners=2, steps=6) as server:
        address = f"127.0.0.1:{server.port}"
        thread = plain(address, found, learner_id=0, dtype="bf16")
        there = [outcome.value for outcome in ranks.run(
            tmp_path, train, 2, address, kind, torch.bfloat16,
            options | {"learner_id": 1, "dtype": "bf16"})]
        thread.join(ranks.WAIT_S)
        assert server.wait() == 0, server.log.text()
    expected = torch.tensor(found["final"]).bfloat16().float().tolist()
    assert [each["final"] for each in there] == 2 * [expected]


# ------------------------------------------------------------------- at a server that says it all
def steps(rank: int, address: str, kind: str, tokens: list, options: dict):
    """Steps that change nothing, until the run is over."""
    model = ranks.spread(kind, ranks.model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Diloco(model, optimizer, address, ranks_timeout_s=60.0, fragments=2, dtype="f32",
                num_streams=0, **options) as island:
        while not island.finished:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            island.tokens(tokens[rank])
    return ranks.values_of(model), island.status


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_tokens_of_all_ranks_are_summed_and_the_final_cut_is_in_all(server, tmp_path, kind):
    started = ranks.start(tmp_path, steps, 2, server.address, kind, [3, 4], {})
    peer = server.accept()
    peer.receive_inits()
    numels = [fragment.numel for fragment in peer.hello.layout.fragments]
    for fragment, numel in enumerate(numels):
        peer.bcast(fragment, 0, np.ones(numel, "<f4"))
    peer.pull(0, 1)
    push = peer.receive_push()
    assert push.c_tokens == 7 * push.c_steps
    cuts = [np.random.default_rng(f).standard_normal(n).astype("<f4")
            for f, n in enumerate(numels)]
    for fragment, cut in enumerate(cuts):
        peer.final(fragment, 1, cut)
    peer.manifest(1, [1] * len(cuts))
    found = [outcome.value for outcome in ranks.outcomes(started)]
    assert found[0] == found[1]
    assert sorted(found[0][0]) == sorted(np.concatenate(cuts).tolist())


def restarted(rank: int, address: str, how: tuple, saved, at: Path):
    """Three steps, or what they have left, and the state behind them; then steps that change
    nothing until a pull is answered, which comes when `at` is there."""
    kind, dtype = how
    model = ranks.spread(kind, ranks.model_of(5, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    island = Diloco(model, optimizer, address, ranks_timeout_s=60.0, fragments=2, dtype="bf16",
                    num_streams=0)
    if saved:
        assert island.load_state_dict(saved[rank]["island"]) == {"at": rank}
        for memory, each in zip(ranks.here(model), saved[rank]["model"], strict=True):
            memory.copy_(each)
    try:
        with island:
            for _ in range(0 if saved else 3):
                model(torch.ones(2, 4, dtype=dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                island.tokens(7)
            state = {"island": island.state_dict(data={"at": rank}),
                     "model": [memory.clone() for memory in ranks.here(model)]}
            seen = island.status.step, island.status.versions, ranks.values_of(model)
            if rank == 0:
                at.touch()
            while not island.status.answered:
                optimizer.step()  # without gradients
                island.tokens(0)
            raise Enough
    except Enough:
        return state, seen


@pytest.mark.filterwarnings("ignore:.*keeps no f32 master")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_island_goes_on_from_the_states_of_its_ranks(server, tmp_path, kind, dtype):
    server.welcome = server.welcome._replace(global_step=2, state=RunState.RUNNING, epoch=2)

    def pushed(saved):
        """Everything in the answer to a pull but the steps that were made waiting for it."""
        at = tmp_path / f"at-{bool(saved)}"
        started = ranks.start(tmp_path, restarted, 2, server.address, (kind, dtype), saved, at)
        peer = server.accept()
        for fragment, part in enumerate(peer.hello.layout.fragments if not saved else []):
            peer.bcast(fragment, 1, np.full(part.numel, 0x3F81, "<u2"))
        until(at.exists, "the state")
        peer.pull(0, 2)
        push = peer.receive_push()
        found = [outcome.value for outcome in ranks.outcomes(started)]
        return found, (push.base, push.c_tokens, bytes(push.delta)), peer

    found, first, _ = pushed(None)
    server.welcome = server.welcome._replace(kept=(True, True))
    again, second, peer = pushed([state for state, _ in found])
    assert second == first
    assert [seen for _, seen in again] == [seen for _, seen in found]
    assert [held.version for held in peer.hello.extension.held] == [1, 1]
    own = [[record["kept"] for record in state["island"]["fragments"]] for state, _ in found]
    assert bool(own[1][0] or own[1][1]) is (kind == "fsdp")


def test_a_state_of_another_rank_or_moment_is_refused(tmp_path):
    def state(rank: int, steps: int) -> dict:
        return {"fingerprint": "", "steps": steps, "rank": rank, "data": None,
                "fragments": [{"version": 1, "kept": {"anchor": torch.ones(1)}}]}

    swapped = [{"island": state(1 - rank, 3), "model": []} for rank in range(2)]
    for outcome in ranks.run(tmp_path, loading, 2, swapped):
        with pytest.raises(ConfigError, match=r"the state is of rank \d of an island, and this is"):
            raise outcome.error
    apart = [{"island": state(rank, 3 + rank), "model": []} for rank in range(2)]
    for outcome in ranks.run(tmp_path, loading, 2, apart):
        with pytest.raises(ConfigError, match="goes on from a state of step 4, and rank 0 from a"):
            raise outcome.error


def loading(rank: int, saved):
    island = Diloco(ranks.spread("fsdp", ranks.model_of()), None, "127.0.0.1:1")
    island.load_state_dict(saved[rank]["island"])
    with island:
        raise AssertionError("it has joined")


# ----------------------------------------------------------------------------------- what fails
class Enough(Exception):
    """A test has seen what it wanted to see."""


def differing(rank: int, address: str, how: str):
    """A second rank that has another model."""
    model = ranks.model_of()
    if rank == 1 and how == "values":
        model[2].bias.data += 1
    if rank == 1 and how == "names":
        model.append(torch.nn.Linear(1, 1))
    if rank == 1 and how == "types":
        model[2].bfloat16()
    if rank == 1 and how == "trained":
        model[0].requires_grad_(False)
    with Diloco(model, None, address, ranks_timeout_s=60.0, connect_timeout_s=0.0):
        raise AssertionError("it has joined")


@pytest.mark.parametrize(("how", "text"), [
    ("values", "'2.bias' has other values at rank 1 of the island than at rank 0"),
    ("names", "rank 1 of the island has parameter '3.weight' where rank 0 has no more"),
    ("types", "'2.weight' is bfloat16 [1, 3] at rank 1 of the island, and float32 [1, 3] at rank"),
    ("trained", "rank 1 of the island has parameter '2.weight' where rank 0 has '0.weight'"),
])
def test_another_model_in_a_rank_is_named_in_all_of_them(tmp_path, how, text):
    for outcome in ranks.run(tmp_path, differing, 2, "127.0.0.1:1", how):
        with pytest.raises(ConfigError, match=re.escape(text)):
            raise outcome.error


def placed(rank: int, how: str):
    """A model whose parts no island can put together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Linear(4, 4, bias=False)
    if how == "tensor parallel":
        model.weight = torch.nn.Parameter(
            distribute_tensor(model.weight.detach(), mesh, [Shard(0), Shard(1)]))
    else:
        model.weight = torch.nn.Parameter(distribute_tensor(
            model.weight.detach(), mesh["tensor"], [Shard(0)]))
        group = torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])
        with Diloco(model, None, "127.0.0.1:1", group=group[rank % 2]):
            raise AssertionError("it has joined")
    Diloco(model, None, "127.0.0.1:1")


@pytest.mark.parametrize(("how", "text"), [
    ("tensor parallel", "'weight' is placed as (Shard(dim=0), Shard(dim=1)) on a mesh of (2, 2), "
                        "as of tensor parallelism"),
    ("two of four", "the parts of 'weight' that the ranks of this island have are not the whole"),
])
def test_parts_that_are_no_whole_are_named(tmp_path, how, text):
    for outcome in ranks.run(tmp_path, placed, 4, how):
        with pytest.raises(ConfigError, match=re.escape(text)):
            raise outcome.error


def refused(rank: int):
    with Diloco(ranks.model_of(), None, "127.0.0.1:1", connect_timeout_s=0.0):
        raise AssertionError("nobody is there")


def test_an_error_of_the_learner_is_raised_in_all_ranks(tmp_path):
    for outcome in ranks.run(tmp_path, refused, 2):
        with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1 was not reachable"):
            raise outcome.error


def failing(rank: int, address: str, who: int, how: str):
    """Without a collective of its own, so that only the island can notice."""
    model = ranks.model_of()
    with Diloco(model, None, address, num_streams=0,
                ranks_timeout_s=2.0 if how == "hangs" else 60.0) as island:
        for step in range(1, 10):
            if rank == who and step == 4:
                if how == "raises":
                    raise ZeroDivisionError("of the data")
                if how == "leaves":
                    break
                if how == "freezes":
                    model[0].bias.requires_grad_(False)
                    return island.state_dict()
                threading.Event().wait(ranks.WAIT_S)
            island.step(1)
    raise AssertionError("the run has no end")


@pytest.mark.parametrize(("who", "how", "text"), [
    (1, "hangs", "rank 1 of the island did not come to step 4 within 2 s, as rank 0 did"),
    (0, "hangs", "rank 0 of the island did not come to step 4 within 4 s, as rank 1 did"),
    (1, "leaves", "rank 1 of the island is through, and rank 0 is at step 4: all ranks must"),
    (1, "raises", "rank 1 has left the island: ZeroDivisionError: of the data"),
    (0, "raises", "rank 0 has left the island: ZeroDivisionError: of the data"),
    (1, "freezes", "rank 1 of the island makes a state_dict, and rank 0 is at step 4"),
])
def test_a_rank_that_does_something_else_ends_the_island_and_is_named(
        server, tmp_path, who, how, text):
    started = ranks.start(tmp_path, failing, 2, server.address, who, how)
    peer = server.accept()
    peer.receive_inits()
    if how == "hangs":
        outcome = started[1 - who].outcome()
        started[who].kill()
        with pytest.raises(IslandBroken, match=re.escape(text)):
            raise outcome.error
        return
    found = ranks.outcomes(started)
    with pytest.raises(IslandBroken, match=re.escape(text)):
        raise found[1 - who].error
    with pytest.raises(ZeroDivisionError if how == "raises" else IslandBroken):
        raise found[who].error
    assert peer.receive() is None, "the connection has ended"


def frozen(rank: int, address: str):
    model = ranks.model_of()
    with Diloco(model, None, address, num_streams=0, ranks_timeout_s=60.0) as island:
        if rank == 1:
            model[0].bias.requires_grad_(False)
        for _ in range(10_000_000):
            island.step(1)


def test_what_goes_wrong_with_the_model_of_one_rank_is_raised_in_all(server, tmp_path):
    started = ranks.start(tmp_path, frozen, 2, server.address)
    peer = server.accept()
    peer.receive_inits()
    peer.bcast(0, 0, np.zeros(peer.hello.layout.fragments[0].numel, np.uint16))
    for outcome in ranks.outcomes(started):
        with pytest.raises(ConfigError, match=re.escape("'0.bias' was trained when the run")):
            raise outcome.error


def test_an_island_whose_rank_0_is_killed_ends_and_the_run_goes_on(tmp_path):
    with ServerProcess(tmp_path, "--quorum", "1", "--grace-ms", "0", learners=2,
                       steps=1_000_000) as server:
        address = f"127.0.0.1:{server.port}"
        started = ranks.start(tmp_path, train, 2, address, "plain", torch.float32,
                              {"learner_id": 1})
        with contextlib.suppress(Enough), Diloco(
                ranks.model_of(), None, address, dtype="f32", fragments=2) as island:

            def merged(version: int) -> bool:
                return min(island.step(1).versions) >= version

            until(lambda: merged(4) and server.log.find("learner connected", learner=1), "merges")
            started[0].kill()
            outcome = started[1].outcome()
            version = min(island.status.versions)
            until(lambda: merged(version + 4), "merges without it")
            raise Enough
    with pytest.raises(IslandBroken, match="rank 0 of the island has gone, and with it"):
        raise outcome.error


def feeding_back(rank: int, address: str, kind: str):
    with Diloco(ranks.spread(kind, ranks.model_of()), None, address, num_streams=0, dtype="q4",
                error_feedback=True):
        raise Enough


def test_error_feedback_needs_whole_fragments(server, tmp_path):
    for outcome in ranks.run(tmp_path, feeding_back, 2, server.address, "fsdp"):
        with pytest.raises(ConfigError, match="error_feedback needs each fragment in one process"):
            raise outcome.error
    started = ranks.start(tmp_path, feeding_back, 2, server.address, "ddp")
    server.accept().receive_inits()
    for outcome in ranks.outcomes(started):
        assert isinstance(outcome.error, Enough)


def absent(rank: int, address: str):
    if rank == 0:
        with Diloco(ranks.model_of(), None, address, ranks_timeout_s=2.0):
            raise AssertionError("it has joined")


def test_a_rank_that_never_joins_is_named(tmp_path):
    outcome = ranks.run(tmp_path, absent, 2, "127.0.0.1:1")[0]
    with pytest.raises(IslandBroken, match="rank 1 has not joined the island within 2 s"):
        raise outcome.error


def arguments(rank: int):
    with pytest.raises(LocalProtocolError, match="has not joined yet"):
        _ = Diloco(ranks.model_of(), None, "127.0.0.1:1").status
    with pytest.raises(ConfigError, match="ranks_timeout_s must be more than 0"):
        Diloco(ranks.model_of(), None, "127.0.0.1:1", ranks_timeout_s=0)


def test_arguments_of_an_island_of_ranks(tmp_path):
    for outcome in ranks.run(tmp_path, arguments, 2):
        assert outcome.value is None
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialized"):
        Diloco(ranks.model_of(), None, "127.0.0.1:1", group=object())
