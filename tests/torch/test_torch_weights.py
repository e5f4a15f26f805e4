"""What of a model is in a run, under which names; and what cannot be, or must not change."""

import pytest

from tests.torch.island import line_model, torch  # isort: split

import re
import warnings

from torch.utils.checkpoint import checkpoint

from syncer.errors import ConfigError
from syncer.protocol import DTYPE_F32
from syncer.torch import Diloco
from syncer.torch.device_fragment import DeviceFragment, HostFragment
from syncer.torch.weights import Weights


def weights(model, **options) -> Weights:
    return Weights(model, (), **options)


def single_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous",
                                         rank=0, world_size=1)


def test_parameters_that_need_a_gradient_are_in_the_run():
    """As with LoRA: the base model is frozen, what is beside it is trained."""
    model = line_model()
    model[0].requires_grad_(False)
    assert weights(model).shapes == {"1.weight": (1, 3), "1.bias": (1,)}


def test_names_are_those_of_the_bare_model(tmp_path):
    def compiled(model):
        return torch.compile(model, backend="eager")

    bare = weights(line_model()).shapes
    assert weights(compiled(line_model())).shapes == bare
    assert weights(torch.nn.DataParallel(line_model())).shapes == bare
    partly = line_model()
    partly[0] = compiled(partly[0])
    assert weights(partly).shapes == bare
    single_process_group(tmp_path)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel
        assert weights(parallel(line_model())).shapes == bare
        assert weights(compiled(parallel(compiled(line_model())))).shapes == bare
    finally:
        torch.distributed.destroy_process_group()


def test_names_are_those_without_activation_checkpoints():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: PLC0415
            checkpoint_wrapper,
        )
    model = line_model()
    model[0] = checkpoint_wrapper(model[0])
    assert weights(model).shapes == weights(line_model()).shapes


def test_a_submodule_that_is_called_module_keeps_its_name():
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 1, bias=False)})
    assert weights(model).shapes == {"module.weight": (1, 2)}
    assert weights(torch.nn.DataParallel(model)).shapes == {"module.weight": (1, 2)}


def test_tied_parameters_count_once():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert list(weights(model).shapes) == ["0.weight", "0.bias", "1.bias"]
    shared = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    shared[1].weight.data = shared[0].weight.data  # two parameters, one memory
    assert list(weights(shared).shapes) == ["0.weight", "0.bias", "1.bias"]


def test_parts_of_one_memory_are_parameters_like_others():
    whole = torch.arange(6, dtype=torch.float32)
    model = torch.nn.ParameterList([torch.nn.Parameter(whole[:2]), torch.nn.Parameter(whole[2:])])
    assert weights(model).shapes == {"0": (2,), "1": (4,)}


def test_scalars_and_empty_tensors():
    model = torch.nn.ParameterDict({"scalar": torch.nn.Parameter(torch.tensor(3.0)),
                                    "empty": torch.nn.Parameter(torch.zeros(0, 4)),
                                    "none": torch.nn.Parameter(torch.zeros(2, 0))})
    assert weights(model).shapes == {"scalar": (), "empty": (0, 4), "none": (2, 0)}


def test_numpy_changes_what_it_can_and_torch_the_rest():
    model = torch.nn.ParameterDict({
        "plain": torch.nn.Parameter(torch.zeros(4)),
        "coarse": torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
        "turned": torch.nn.Parameter(torch.zeros(3, 4).t())})
    found = {name: type(weights(model).fragment([name], DTYPE_F32)) for name in model}
    assert found == {"plain": HostFragment, "coarse": DeviceFragment, "turned": DeviceFragment}


class Lazy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.parameter.UninitializedParameter()


def parameter(tensor) -> torch.nn.ParameterList:
    return torch.nn.ParameterList([torch.nn.Parameter(tensor)])


@pytest.mark.parametrize(("model", "text"), [
    (lambda: line_model().requires_grad_(False), "no parameter with requires_grad"),
    (lambda: line_model().double(), "'0.weight' is torch.float64"),
    (lambda: line_model().to("meta"), "'0.weight' has no values yet"),
    (Lazy, "'weight' has no shape yet"),
    (lambda: parameter(torch.zeros(1).expand(3)), "'0' is expanded"),
    (lambda: parameter(torch.zeros(3, dtype=torch.complex64)), "'0' is torch.complex64"),
    (lambda: torch.nn.ParameterList([*parameter(whole := torch.zeros(6)), *parameter(whole[2:4])]),
     "'0' and '1' share memory"),
    (lambda: torch.nn.ModuleList([parameter(torch.zeros(1)), parameter(
        torch.zeros(1)).to("meta")]), "'1.0' has no values yet"),
])
def test_what_cannot_be_in_a_run_is_named(model, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        weights(model())


@pytest.mark.parametrize(("options", "text"), [
    ({"buffers": "mine"}, "buffers must be one of local, average, found 'mine'"),
    ({"anchors": "disk"}, "anchors must be one of host, device, found 'disk'"),
    ({"tokens_per_step": 0}, "tokens_per_step must be a whole number of at least 1"),
    ({"tokens_per_step": 1.5}, "tokens_per_step must be a whole number of at least 1"),
    ({"optimizer": 3}, "the optimizer must be a torch.optim.Optimizer"),
    ({"model": 3}, "the model must be a torch.nn.Module, found int"),
])
def test_arguments_that_cannot_be_used(options, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        Diloco(**{"model": line_model(), "optimizer": None, "address": "127.0.0.1:1"} | options)


def freeze(model) -> None:
    model[1].bias.requires_grad_(False)


def unfreeze(model) -> None:
    model[0].bias.requires_grad_(True)


def replace(model) -> None:
    model[1].weight = torch.nn.Parameter(torch.zeros(1, 3))


def convert(model) -> None:
    model[1].weight.data = model[1].weight.data.double()


@pytest.mark.parametrize(("change", "text"), [
    (freeze, "'1.bias' was trained when the run was joined, and is frozen now"),
    (unfreeze, "'0.bias' was frozen when the run was joined, and is trained now"),
    (replace, "'1.weight' has come into the model after the run was joined"),
    (convert, "'1.weight' is float64 [1, 3] on cpu, and was float32 [1, 3] on cpu"),
])
def test_a_model_that_has_become_another_one_is_named(change, text):
    model = line_model()
    model[0].bias.requires_grad_(False)
    here = weights(model)
    fragment = here.fragment(["1.bias"], DTYPE_F32)
    fragment.rebase(memoryview(torch.ones(1).numpy().view("u1")), 0.0)
    change(model)
    with pytest.raises(ConfigError, match=re.escape(text)):
        fragment.rebase(memoryview(torch.ones(1).numpy().view("u1")), 0.0)


def batch_norm() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.full((2,), float("-inf")), persistent=False)
    return model


def test_buffers_are_local_or_averaged():
    local = weights(batch_norm())
    assert local.statistics == ()
    assert list(local.shapes) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    average = weights(batch_norm(), buffers="average")
    assert average.statistics == ("1.running_mean", "1.running_var")
    assert list(average.shapes) == [*local.shapes, *average.statistics]


def test_a_buffer_that_is_not_finite_is_named():
    model = batch_norm()
    model[1].running_var[1] = float("inf")
    with pytest.raises(ConfigError, match=re.escape("'1.running_var' is not finite")):
        weights(model, buffers="average")


class Recomputed(torch.nn.Module):
    """Its inner part is computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointing_by_function_has_no_prefix():
    assert list(weights(Recomputed()).shapes) == ["inner.weight", "inner.bias"]
