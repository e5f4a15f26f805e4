"""An island that goes on from its own checkpoint, beside model and optimizer."""

import pytest

from tests.torch.island import Place, line_model, torch, values  # isort: split

import io
import threading

import numpy as np

from syncer.errors import LocalProtocolError
from syncer.protocol import RunState
from tests.e2e.scripted_server import ScriptedServer


@pytest.fixture
def server():
    with ScriptedServer() as each:
        each.welcome = each.welcome._replace(global_step=2, state=RunState.RUNNING, epoch=2)
        yield each


def through_a_file(state: dict) -> dict:
    """As `torch.load` reads it by default: without code in it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.filterwarnings("ignore:.*keeps no f32 master")
@pytest.mark.parametrize("anchors", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_island_is_restarted_from_its_own_checkpoint(server, dtype, anchors):
    def place(model) -> Place:
        made = Place(server, model, torch.optim.SGD(model.parameters(), lr=0.125),
                     anchors=anchors)

        def train() -> None:
            model(torch.ones(2, 4, dtype=dtype)).sum().backward()
            made.optimizer.step()
            made.optimizer.zero_grad()
            made.island.tokens(7)

        made.train = train
        return made

    def joined(made: Place) -> Place:
        """With a first broadcast for who waits for one."""
        entering = threading.Thread(target=made.island.__enter__)
        entering.start()
        made.peer = server.accept()
        for fragment, numel in enumerate([12, 7]):
            made.peer.bcast(fragment, 1, np.full(numel, 1 + 2**-12, "<f4"))
        entering.join()
        return made

    first = joined(place(line_model().to(dtype)))
    for _ in range(3):
        first.train()
    saved = through_a_file({
        "model": first.model.state_dict(), "island": first.island.state_dict(data={"epoch": 5})})
    expected = pushed_at_once(first)
    first.island.__exit__(AssertionError, None, None)

    second = place(line_model(1).to(dtype))
    second.model.load_state_dict(saved["model"])
    server.welcome = server.welcome._replace(kept=(True, True))
    assert second.island.load_state_dict(saved["island"]) == {"epoch": 5}
    with second:
        assert second.island.status.versions == (1, 1)
        assert second.island.status.step == 3
        assert values(second.model) == torch.cat(
            [each.float().reshape(-1) for each in saved["model"].values()]).tolist()
        assert pushed_at_once(second) == expected
        with pytest.raises(LocalProtocolError, match="joined already"):
            second.island.load_state_dict(saved["island"])


def pushed_at_once(place: Place) -> tuple:
    """The answers to pulls of both fragments, by the boundary of one more step without a change."""
    found = []
    for fragment in range(2):
        place.peer.pull(fragment, 2)
    session = place.island._joined()._session
    place.island._joined()._client.wait_for(lambda: len(session.pulls) == 2)
    for group in place.optimizer.param_groups:
        group["lr"] = 0.0
    place.train()
    for _ in range(2):
        push = place.peer.receive_push()
        found.append((push.fragment, push.base, push.local_step, push.c_steps, push.c_tokens,
                      bytes(push.delta)))
    return tuple(found)
