"""`Diloco` at a scripted server: what counts as a step, what comes into the model, how it ends."""

import pytest

from tests.torch.island import DEVICES, Place, line_model, torch, values  # isort: split

import copy
import threading

import numpy as np

from syncer.errors import LocalProtocolError
from syncer.learner import ConnectionFailed
from syncer.torch import Diloco
from tests.e2e.scripted_server import DEADLINE_S, ScriptedServer
from tests.e2e.test_learner_pause import heard_by_now, hold_the_gil
from tests.e2e.waiting import until


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


def pushed(place: Place, fragment: int = 0, step: int = 1):
    """The answer to a pull, given by a boundary of an ordinary loop."""
    place.peer.pull(fragment, step)
    place.until(lambda: place.island.status.answered)
    return place.peer.receive_push()


# --------------------------------------------------------------------------------------- two lines
@pytest.mark.parametrize("device", DEVICES)
def test_a_loop_blends_answers_and_ends_with_the_final_model(server, device):
    model = line_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    place = Place(server, model, optimizer)
    with place.island as island:
        place.peer = server.accept()
        sent = [np.frombuffer(each, "<f4") for each in place.peer.receive_inits()]
        assert sorted(np.concatenate(sent)) == sorted(np.float32(values(model)))
        place.broadcast(0, fill=1.0)
        push = pushed(place)
        assert push.c_tokens == 7 * push.c_steps
        assert push.delta.nbytes == 4 * place.numels[0]
        place.final(1, fill=3.0)
        place.until(lambda: island.finished)
    assert values(model) == [3.0] * len(values(model))
    assert place.peer.receive_ack().step == 1
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_names_travel_so_that_exports_load_by_name(server):
    with Place(server, torch.compile(line_model(), backend="eager")) as place:
        names = place.peer.hello.extension.names
        found = {name: shape for fragment in names for name, shape in fragment.tensors}
        assert found == {name: tuple(p.shape) for name, p in line_model().named_parameters()}


def test_a_joining_learner_begins_with_the_values_of_the_run(server):
    """Whatever is in its parameters, in every one of them."""
    model = line_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    place = Place(server, model, learner_id=1)
    joining = threading.Thread(target=place.island.__enter__)
    joining.start()
    place.peer = server.accept()
    place.peer.bcast(0, 3, np.full(12, 0.25, "<f4"))
    place.peer.bcast(1, 4, np.full(7, 0.5, "<f4"))
    joining.join(DEADLINE_S)
    try:
        assert place.island.status.versions == (3, 4)
        assert sorted(values(model)) == [0.25] * 12 + [0.5] * 7
    finally:
        place.island.__exit__(AssertionError, None, None)


def test_an_exception_leaves_the_run_and_the_model_as_they_are(server):
    place = Place(server)
    before = []

    def train() -> None:
        with place.island:
            place.peer = server.accept()
            place.peer.receive_inits()
            place.train()
            before[:] = values(place.model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert place.peer.receive() is None, "the connection has ended"
    assert values(place.model) == before
    place.model(torch.ones(1, 4)).sum().backward()
    place.optimizer.step()  # nobody counts it any more
    with pytest.raises(LocalProtocolError, match="was closed"):
        place.island.tokens(1), place.island._boundary()


def test_a_server_that_is_not_there_leaves_nothing_behind():
    model = line_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConnectionFailed), Diloco(
            model, optimizer, "127.0.0.1:1", connect_timeout_s=0.0):
        raise AssertionError("nobody is there")
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


# --------------------------------------------------------------------------------- what is a step
def steps_and_tokens(place: Place) -> tuple[int, int]:
    session = place.island._joined()._session
    return session.steps, session.tokens


def backward(place: Place) -> None:
    place.model(torch.ones(2, 4)).sum().backward()


def test_steps_are_those_of_the_optimizer_whatever_is_accumulated(server):
    with Place(server) as place:
        for batch in range(12):
            backward(place)
            if batch % 4 == 3:
                place.optimizer.step()
                place.optimizer.zero_grad()
            place.island.tokens(5)
        assert steps_and_tokens(place) == (3, 55), "the last part counts for the next step"


def test_tokens_may_be_said_before_the_step(server):
    with Place(server) as place:
        for _ in range(3):
            backward(place)
            place.island.tokens(5)
            place.optimizer.step()
        assert steps_and_tokens(place) == (3, 15)


def test_tokens_of_each_step_may_be_said_once(server):
    with Place(server, tokens_per_step=11) as place:
        for _ in range(3):
            backward(place)
            place.optimizer.step()
        assert steps_and_tokens(place) == (3, 33)
        with pytest.raises(LocalProtocolError, match="tokens_per_step=11 says it already"):
            place.island.tokens(1)


def test_steps_without_tokens_are_an_error(server):
    with Place(server) as place:
        backward(place)
        place.optimizer.step()
        with pytest.raises(LocalProtocolError, match="how many tokens the first one used"):
            place.optimizer.step()


class FusedLike(torch.optim.Optimizer):
    """As a fused optimizer: a GradScaler calls it always, and it skips by itself."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters, lr: float):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if not bool(self.found_inf):
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad / self.grad_scale)


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedLike])
def test_a_step_that_a_grad_scaler_skips_is_none(server, kind):
    model = line_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Place(server, model, kind(model.parameters(), lr=0.1), tokens_per_step=10) as place:
        for overflow in (False, True, False, True):
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            if overflow:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(place.optimizer)
            scaler.update()
            place.optimizer.zero_grad()
        assert steps_and_tokens(place) == (2, 20)


def test_of_several_optimizers_the_last_one_makes_the_step(server):
    model = line_model()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    with Place(server, model, optimizers, tokens_per_step=10) as place:
        backward(place)
        optimizers[0].step()
        assert steps_and_tokens(place) == (0, 0)
        optimizers[1].step()
        assert steps_and_tokens(place) == (1, 10)


def test_a_loop_without_hooks_says_its_steps(server):
    with Place(server, optimizer=()) as place:
        assert place.island.step(5).step == 1
        assert place.island.step(6).step == 2
        assert steps_and_tokens(place) == (2, 11)
    with Place(server) as place, pytest.raises(LocalProtocolError, match="counted already"):
        place.island.step(5)


# --------------------------------------------------------------------------- what is blended where
def test_the_state_of_an_optimizer_is_never_touched(server):
    model = line_model()
    with Place(server, model, torch.optim.AdamW(model.parameters(), lr=0.0)) as place:
        place.train()
        before = copy.deepcopy(place.optimizer.state_dict())
        place.peer.bcast(0, 0, np.ones(place.numels[0], "<f4"))
        until(lambda: place.island._joined()._session.broadcasts, "the broadcast")
        place.island._boundary()
        assert place.island.status.applied == ((0, 0),)
        after = place.optimizer.state_dict()
        for number, state in before["state"].items():
            for key, value in state.items():
                assert torch.equal(after["state"][number][key], value)


def test_tied_parameters_are_tied_after_a_blend(server):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with Place(server, model) as place:
        assert sum(place.numels) == 16 + 4 + 4
        place.broadcast(0, fill=2.0)
        assert model[1].weight is model[0].weight
        assert model[1].weight.data_ptr() == model[0].weight.data_ptr()


def test_coarse_weights_are_trained_with_a_master_and_told_of_once(server):
    model = line_model().bfloat16()
    with Place(server, model) as place:
        place.train = lambda: (model(torch.ones(2, 4).bfloat16()).sum().backward(),
                               place.optimizer.step(), place.island.tokens(1))
        place.broadcast(0, fill=1.0)
        with pytest.warns(UserWarning, match="keeps no f32 master"):
            pushed(place)
        pushed(place, step=2)


class MasterSGD(torch.optim.SGD):
    """Keeps f32 values of its coarse parameters, as optimizers for mixed precision do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.state[parameter].setdefault("master_param", parameter.float())
                master.sub_(group["lr"] * parameter.grad.float())
                parameter.copy_(master)


def test_the_masters_of_an_optimizer_are_blended_and_trained_on(server):
    """Without the warning: the run keeps none of its own."""
    model = line_model().bfloat16()
    optimizer = MasterSGD(model.parameters(), lr=0.0)
    with Place(server, model, optimizer, alpha=0.0) as place:
        place.train = lambda: (model(torch.ones(2, 4).bfloat16()).sum().backward(),
                               optimizer.step(), place.island.tokens(1))
        place.train()
        fine = 1 + 2**-12
        place.broadcast(0, fill=fine)
        assert all(state["master_param"].unique().tolist() == [fine]
                   for state in optimizer.state.values())
        assert set(values(model)) == {1.0}
        assert not any(pushed(place).delta), "what training starts from is the anchor"


def test_callbacks_hear_of_merges(server):
    heard = []
    with Place(server) as place:
        place.island.on_merge(heard.append)
        place.train()
        assert heard == []
        place.broadcast(0)
        assert [pair for status in heard for pair in status.applied] == [(0, 0), (1, 0)]


def test_figures_reach_the_server(server):
    with Place(server) as place:
        place.island.report(loss=torch.tensor(2.5, requires_grad=True), lr=0.5)
        report = place.peer.receive_report()
        assert (report.loss, report.lr) == (2.5, 0.5)


def test_averaged_buffers_are_merged_and_keep_their_own_values_meanwhile(server):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    place = Place(server, model, buffers="average")
    with place.island as island:
        place.peer = server.accept()
        names = [t.name for f in island._joined().layout.fragments for t in f.tensors]
        assert {"1.running_mean", "1.running_var"} <= set(names)
        place.broadcast(0, fill=9.0)
        assert model[1].running_mean.max() < 9, "its own"
        place.final(1, fill=3.0)
        place.until(lambda: island.finished)
    assert model[1].running_var.tolist() == [3.0] * 3
    assert model[1].num_batches_tracked > 0


# ------------------------------------------------------------------------- beside everything else
def test_a_state_that_is_read_between_forward_and_backward_is_right(server):
    with Place(server) as place:
        place.broadcast(0, fill=1.0)
        loss = place.model(torch.ones(2, 4)).sum()
        read = place.model.state_dict()
        loss.backward()
        assert torch.cat([each.reshape(-1) for each in read.values()]).tolist() == values(
            place.model)
        assert place.model[0].weight.grad is not None


def test_a_blend_between_forward_and_backward_is_an_error(server):
    """A loop that says its tokens too late: the gradients would be of other weights."""
    with Place(server) as place:
        backward(place)
        place.optimizer.step()
        loss = place.model(torch.ones(2, 4)).sum()
        for fragment, numel in enumerate(place.numels):
            place.peer.bcast(fragment, 0, np.zeros(numel, "<f4"))
        until(lambda: len(place.island._joined()._session.broadcasts) == 2, "the broadcasts")
        place.island.tokens(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        return torch.full((4,), float(index))


def test_data_loaders_that_fork_are_harmless(server):
    with Place(server) as place:
        place.peer.receive_inits()
        seen = []
        for _ in range(2):
            for rows in torch.utils.data.DataLoader(
                    Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
                seen += rows[:, 0].tolist()
                place.train()
        assert sorted(seen) == sorted(2 * list(map(float, range(8))))
        place.broadcast(0, fill=1.0)
        assert pushed(place).step == 1


@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.slow)])
def test_heartbeats_go_on_while_the_main_thread_is_in_c(server, seconds):
    with Place(server) as place:
        place.peer.receive_inits()
        for _ in range(3):
            place.train()
        heard_by_now(place.peer)
        place.peer.waiting.clear()
        hold_the_gil(seconds)
        heard = heard_by_now(place.peer)
        assert len(heard) >= seconds / 2 - 1, "about one a second"
        assert len({beat.local_step for beat in heard}) == 1
        place.train()
        assert place.island.status.step == 4
