"""Fragments of tensors against those of arrays, to the bit; coarse weights lose nothing."""

import pytest

from tests.torch.island import DEVICES, torch  # isort: split

import numpy as np

from syncer.kernels import encode_bf16
from syncer.learner.fragment import Fragment
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, DTYPES, bulk_dtype, tensor_bytes
from syncer.torch.device import Device, device_of
from syncer.torch.device_fragment import DeviceFragment, HostFragment
from syncer.torch.tensor_piece import Piece

SHAPES = [(), (1,), (3, 5), (7, 2, 3), (300, 7), (255,)]
TYPES = [DTYPE_F32, DTYPE_BF16, DTYPE_Q4]


def no_check() -> None:
    """The model is what it was."""


def strided(values):
    """The same values, every second element of larger memory."""
    wide = torch.zeros((*values.shape, 2), dtype=values.dtype, device=values.device)
    wide[..., 0] = values
    return wide[..., 0]


def transposed(values):
    return values.t().contiguous().t() if values.dim() == 2 else strided(values)


def pieces_of(arrays, device="cpu", dtype=torch.float32, *, arrange=lambda values: values,
              master=lambda: None, statistic=False):
    return [Piece(str(i), arrange(torch.tensor(array, device=device).to(dtype)), master=master,
                  statistic=statistic)
            for i, array in enumerate(arrays)]


def made(kind: str, pieces, dtype: int, device: str, on_device: bool):
    if kind == "host":
        return HostFragment(pieces, dtype, no_check)
    there = torch.device(device)
    return DeviceFragment(pieces, dtype, Device(there) if kind == "plain" else device_of(there),
                          keep_on_device=on_device, check=no_check)


def arrays_of(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape), np.float32) for shape in SHAPES]


def flat(pieces) -> np.ndarray:
    return torch.cat([p.tensor.detach().float().reshape(-1).cpu() for p in pieces]).numpy()


def encoded(values: np.ndarray, dtype: int) -> memoryview:
    if bulk_dtype(dtype) == DTYPE_F32:
        return memoryview(values.view(np.uint8))
    out = np.empty(2 * values.size, np.uint8)
    encode_bf16(values, out)
    return memoryview(out)


def delta_of(fragment, dtype: int) -> bytes:
    out = np.empty(tensor_bytes(fragment.numel, dtype), np.uint8)
    underway = fragment.pack_delta(out)
    if underway is not None:
        underway.wait()
    return out.tobytes()


KINDS = [("host", False, lambda values: values), ("device", False, lambda values: values),
         ("device", True, lambda values: values), ("device", False, strided),
         ("device", True, transposed), ("plain", False, strided), ("plain", True, transposed)]


NAMES = ["host", "device", "anchors", "strided", "transposed", "torch alone",
         "torch alone, anchors"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("dtype", [DTYPE_BF16, DTYPE_Q4], ids=lambda dtype: DTYPES[dtype])
def test_errors_are_those_of_arrays(kind, dtype, device):
    name, on_device, arrange = kind
    if name == "host" and device != "cpu":
        pytest.skip("NumPy changes memory of the host")
    twin = Fragment([array.copy() for array in arrays_of(0)], dtype)
    fragment = made(name, pieces_of(arrays_of(0), device, arrange=arrange), dtype, device,
                    on_device)
    again = made(name, pieces_of(arrays_of(0), device, arrange=arrange), dtype, device, on_device)
    sent = encoded(np.concatenate([array.reshape(-1) for array in arrays_of(1)]), dtype)
    for each in (twin, fragment, again):
        each.feed_back()
        each.rebase(sent, 0.5)
    for forgotten in (False, False, True, False):
        if forgotten:
            twin.forget_error()
            fragment.forget_error()
            assert "error" not in fragment.kept()
        assert delta_of(fragment, dtype) == delta_of(twin, dtype)
        kept, expected = fragment.kept(), twin.kept()
        assert kept["error"].tobytes() == expected["error"].tobytes()
        assert np.any(kept["error"])
    again.keep(kept)  # another process goes on from there
    assert delta_of(again, dtype) == delta_of(twin, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: DTYPES[dtype])
def test_the_bits_are_those_of_arrays(kind, dtype, device):
    name, on_device, arrange = kind
    if name == "host" and device != "cpu":
        pytest.skip("NumPy changes memory of the host")
    twin_arrays = [array.copy() for array in arrays_of(0)]
    twin = Fragment(twin_arrays, dtype)
    pieces = pieces_of(arrays_of(0), device, arrange=arrange)
    fragment = made(name, pieces, dtype, device, on_device)
    assert fragment.anchor is None

    def same() -> None:
        expected = np.concatenate([array.reshape(-1) for array in twin_arrays])
        assert flat(pieces).tobytes() == expected.tobytes()

    for seed, alpha in ((1, 0.5), (2, 0.3), (3, 0.0)):
        sent = np.concatenate([array.reshape(-1) for array in arrays_of(seed)])
        for each in (twin, fragment):
            each.rebase(encoded(sent, dtype), alpha)
        same()
        assert fragment.anchor.tobytes() == twin.anchor.tobytes()
        for array, piece in zip(twin_arrays, pieces, strict=True):
            np.multiply(array, np.float32(0.99), out=array)
            piece.tensor.mul_(np.float32(0.99))
        assert delta_of(fragment, dtype) == delta_of(twin, dtype)
    packed = [np.empty(tensor_bytes(twin.numel, bulk_dtype(dtype)), np.uint8) for _ in range(2)]
    twin.pack_values(packed[0])
    fragment.pack_values(packed[1])
    assert packed[0].tobytes() == packed[1].tobytes()
    for each in (twin, fragment):
        each.restore()
    same()
    cut = np.concatenate([array.reshape(-1) for array in arrays_of(4)])
    for each in (twin, fragment):
        each.overwrite(memoryview(cut.view(np.uint8)))
    same()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_blends_of_coarse_weights_add_up(dtype, on_device, device):
    """A hundred blends that each move a weight by less than it can hold."""
    pieces = pieces_of([np.ones(5, np.float32)], device, dtype)
    fragment = made("device", pieces, DTYPE_F32, device, on_device)
    target = encoded(np.full(5, 1.5, np.float32), DTYPE_F32)
    expected = np.float32(1)
    for _ in range(100):
        fragment.rebase(target, 0.9999)
        expected = np.float32(0.9999) * expected + np.float32(1 - 0.9999) * np.float32(1.5)
    assert pieces[0].tensor.tolist() == torch.full((5,), float(expected)).to(dtype).tolist()
    assert pieces[0].tensor[0] != 1
    delta = np.frombuffer(delta_of(fragment, DTYPE_F32), np.float32)
    assert delta.tolist() == [expected - np.float32(1.5)] * 5, "the master, not the coarse weight"


@pytest.mark.parametrize("device", DEVICES)
def test_what_training_has_added_to_coarse_weights_is_in_the_delta(device):
    pieces = pieces_of([np.ones(4, np.float32)], device, torch.bfloat16)
    fragment = made("device", pieces, DTYPE_F32, device, False)
    fine = np.float32(1 + 2**-12)  # between two values of bf16
    fragment.rebase(encoded(np.full(4, fine), DTYPE_F32), 0.0)
    assert pieces[0].tensor.tolist() == [1] * 4
    assert not any(delta_of(fragment, DTYPE_F32)), "nothing was trained"
    pieces[0].tensor.add_(0.25)
    delta = np.frombuffer(delta_of(fragment, DTYPE_F32), np.float32)
    assert delta.tolist() == [0.25] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_the_masters_of_an_optimizer_are_the_weights(device):
    """They are what is merged, and what the next step starts from."""
    masters = torch.full((4,), 1 + 2**-12, device=device)
    pieces = pieces_of([np.ones(4, np.float32)], device, torch.bfloat16, master=lambda: masters)
    fragment = made("device", pieces, DTYPE_F32, device, False)
    fragment.rebase(encoded(np.full(4, 2, np.float32), DTYPE_F32), 0.5)
    blended = np.float32(0.5) * np.float32(1 + 2**-12) + np.float32(1)
    assert masters.tolist() == [blended] * 4
    assert pieces[0].tensor.tolist() == torch.tensor([blended] * 4).bfloat16().tolist()
    delta = np.frombuffer(delta_of(fragment, DTYPE_F32), np.float32)
    assert delta.tolist() == [blended - np.float32(2)] * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_statistic_is_merged_and_not_blended(dtype, device):
    pieces = pieces_of([np.full(3, 8, np.float32)], device, dtype, statistic=True)
    fragment = made("device", pieces, DTYPE_F32, device, False)
    fragment.rebase(encoded(np.full(3, 2 + 2**-12, np.float32), DTYPE_F32), 0.5)
    fragment.rebase(encoded(np.full(3, 2, np.float32), DTYPE_F32), 0.5)
    assert pieces[0].tensor.tolist() == [8] * 3
    assert np.frombuffer(delta_of(fragment, DTYPE_F32), np.float32).tolist() == [6] * 3
    fragment.overwrite(encoded(np.full(3, 4, np.float32), DTYPE_F32))
    assert pieces[0].tensor.tolist() == [4] * 3


class LateUse:
    """A use of host memory that has ended when somebody has waited for it."""

    def __init__(self, waited: list):
        self.waited = waited

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.waited.append(self)


class LateDevice(Device):
    """The host, as a device that is always behind."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.waited: list[LateUse] = []

    def record(self) -> LateUse:
        return LateUse(self.waited)


def test_host_memory_is_written_again_only_when_the_device_has_read_it():
    device = LateDevice()
    pieces = pieces_of([np.zeros(4, np.float32)], arrange=strided)
    fragment = DeviceFragment(pieces, DTYPE_F32, device, keep_on_device=False, check=no_check)
    fragment.rebase(encoded(np.ones(4, np.float32), DTYPE_F32), 0.0)
    assert device.waited == []
    last = fragment.pack_delta(np.empty(16, np.uint8))
    assert device.waited == []
    fragment.rebase(encoded(np.ones(4, np.float32), DTYPE_F32), 0.0)
    assert device.waited == [last]


def test_two_stages_take_turns_and_wait_for_their_last_copy():
    device = LateDevice()
    data = [memoryview(np.full(size, size, np.uint8)) for size in (3, 9, 5, 200)]
    there = [device.upload(each) for each in data[:2]]
    assert device.waited == []
    there += [device.upload(each) for each in data[2:]]
    assert len(device.waited) == 2
    assert [each.tolist() for each in there] == [each.tolist() for each in data]


def test_memory_that_was_replaced_is_found():
    """As `parameter.data = ...` does: NumPy would go on changing the old one."""
    pieces = pieces_of([np.zeros(4, np.float32)])
    fragment = HostFragment(pieces, DTYPE_F32, no_check)
    pieces[0].tensor.data = torch.full((4,), 6.0)
    fragment.rebase(encoded(np.full(4, 2, np.float32), DTYPE_F32), 0.5)
    assert pieces[0].tensor.tolist() == [4] * 4
