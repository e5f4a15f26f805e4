"""What runs behind what on a GPU, shown with streams that only write down what they are told."""

import pytest

from tests.torch.island import torch  # isort: split

import contextlib
from types import SimpleNamespace

import numpy as np

from syncer.protocol import DTYPE_BF16, DTYPE_F32, tensor_bytes
from syncer.torch import device as device_module
from syncer.torch.device import CudaDevice
from syncer.torch.device_fragment import DeviceFragment
from syncer.torch.tensor_piece import Piece


class Recorder:
    """The streams and events of a GPU whose memory is the host's."""

    def __init__(self):
        self.said: list[tuple] = []
        self.current = self.stream("training")
        self.done = True

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.said.append((name, "behind", other.name)),
            wait_event=lambda event: self.said.append((name, "behind", event.number)))

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace(number=None, query=lambda: self.done)

        def record(stream) -> None:
            event.number = sum(what == "event" for _, what, _ in self.said)
            self.said.append((stream.name, "event", event.number))

        event.record = record
        event.synchronize = lambda: self.said.append(("host", "waits", event.number))
        return event

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def gpu(monkeypatch):
    recorder = Recorder()
    cuda = SimpleNamespace(
        Stream=lambda device: recorder.stream("side"), Event=recorder.event,
        current_stream=lambda device: recorder.current, stream=recorder.on)
    real = device_module.torch
    monkeypatch.setattr(device_module, "torch", SimpleNamespace(
        cuda=cuda, no_grad=real.no_grad, empty=real.empty, uint8=real.uint8,
        float32=real.float32, from_numpy=real.from_numpy))
    monkeypatch.setattr(CudaDevice, "host",
                        lambda self, size: real.empty(size, dtype=real.uint8))
    return recorder


def fragment_on(keep_on_device: bool) -> DeviceFragment:
    piece = Piece("w", torch.zeros(300), statistic=False, master=lambda: None)
    return DeviceFragment([piece], DTYPE_BF16, CudaDevice(torch.device("cpu")),
                          keep_on_device=keep_on_device, check=lambda: None)


def ones(dtype: int) -> memoryview:
    values = torch.ones(300) if dtype == DTYPE_F32 else torch.ones(300, dtype=torch.bfloat16)
    return values.view(torch.uint8).numpy().data


def test_training_waits_for_a_blend_and_the_host_for_nothing(gpu):
    fragment_on(False).rebase(ones(DTYPE_BF16), 0.5)
    assert gpu.said == [("side", "behind", "training"), ("side", "event", 0),
                        ("training", "behind", 0)]


def test_training_waits_for_the_copy_of_the_values_and_not_for_the_packing(gpu):
    fragment = fragment_on(False)
    fragment.rebase(ones(DTYPE_BF16), 0.0)
    gpu.said.clear()
    gpu.done = False
    out = np.empty(tensor_bytes(300, DTYPE_BF16), np.uint8)
    underway = fragment.pack_delta(out)
    assert gpu.said == [("side", "behind", "training"), ("side", "event", 0),
                        ("training", "behind", 0), ("side", "event", 1)]
    assert not underway.done()
    underway.wait()
    assert gpu.said[-1] == ("host", "waits", 1)


def test_the_host_waits_before_it_writes_an_anchor_that_is_being_read(gpu):
    fragment = fragment_on(False)
    fragment.rebase(ones(DTYPE_BF16), 0.0)
    fragment.pack_delta(np.empty(tensor_bytes(300, DTYPE_BF16), np.uint8))
    gpu.said.clear()
    fragment.rebase(ones(DTYPE_BF16), 0.0)
    assert [said[:2] for said in gpu.said[:2]] == [("side", "behind"), ("host", "waits")]


def test_an_anchor_on_the_device_is_never_waited_for(gpu):
    fragment = fragment_on(True)
    for _ in range(2):  # as many as there are buffers to send it there from
        fragment.rebase(ones(DTYPE_BF16), 0.0)
        fragment.pack_delta(np.empty(tensor_bytes(300, DTYPE_BF16), np.uint8))
    assert not [said for said in gpu.said if said[0] == "host"]
    fragment.rebase(ones(DTYPE_BF16), 0.0)
    assert [said[1] for said in gpu.said if said[0] == "host"] == ["waits"]
