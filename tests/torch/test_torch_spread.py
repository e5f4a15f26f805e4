"""Fragments over several ranks against those of one process, to the bit."""

import pytest

from tests.torch.island import torch  # isort: split

import numpy as np

from syncer.kernels import encode_bf16
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, bulk_dtype, tensor_bytes
from syncer.torch.ranks import Ranks, Word
from syncer.torch.shares import Seat, compared, introduction
from syncer.torch.spread import RankParts, SpreadWeights
from syncer.torch.weights import Weights
from tests.torch import ranks as worlds

DTYPES = [DTYPE_F32, DTYPE_BF16, DTYPE_Q4]


def world(rank: int, kind: str, dtype: torch.dtype, code: int):
    """What is to be seen of one fragment, the whole model, in this rank."""
    ranks = Ranks(None, 60.0)
    model = worlds.spread(kind, worlds.model_of(0, dtype))
    weights = Weights(model, (), seat=Seat(rank, len(ranks.others) + 1))
    names = list(weights.shapes)
    if rank == 0:
        rows = [introduction(weights.pieces, weights.shares)] + [
            ranks.read_json(other, ranks.hear(other, Word.INTRODUCE, at="the start"))
            for other in ranks.others]
        holding = SpreadWeights(weights, ranks, compared(rows, weights.shares))
        fragment = holding.fragment(names, code)
        seen = seen_of(fragment, code, lambda: tell(ranks, Word.GO_ON), model)
        tell(ranks, Word.FINISH)
        return seen
    from syncer.torch.ranks import as_json  # noqa: PLC0415
    ranks.tell(0, Word.INTRODUCE, payload=as_json(introduction(weights.pieces, weights.shares)))
    parts, seen = RankParts(weights, ranks, []), []
    while (message := ranks.hear(0, at="an order")).word is not Word.FINISH:
        if message.word is not Word.GO_ON:
            parts.obey(message)
        else:
            seen.append(worlds.values_of(model))
            train(model)
    return seen


def tell(ranks: Ranks, word: Word) -> None:
    for other in ranks.others:
        ranks.tell(other, word)
    ranks.settle()


def train(model) -> None:
    """What one process would do to the same values."""
    for local in worlds.here(model):
        local.mul_(0.75)


def alone(dtype: torch.dtype, code: int):
    model = worlds.model_of(0, dtype)
    weights = Weights(model, ())
    return seen_of(weights.fragment(list(weights.shapes), code), code, lambda: None, model)


def sent(code: int, seed: int, numel: int) -> memoryview:
    values = np.random.default_rng(seed).standard_normal(numel).astype(np.float32)
    if bulk_dtype(code) == DTYPE_F32:
        return memoryview(values.view(np.uint8))
    out = np.empty(2 * numel, np.uint8)
    encode_bf16(values, out)
    return memoryview(out)


def seen_of(fragment, code: int, let_others_look, model) -> list:
    """Everything that a fragment does, and the model behind each step."""
    numel, seen = 19, []

    def look() -> None:
        let_others_look()
        seen.append(worlds.values_of(model))
        train(model)

    def packed(dtype: int, pack) -> list[int]:
        out = np.empty(tensor_bytes(numel, dtype), np.uint8)
        underway = pack(out)
        if underway is not None:
            underway.wait()
        return out.tolist()

    packings = [packed(bulk_dtype(code), fragment.pack_values)]
    for seed, alpha in ((1, 0.5), (2, 0.3), (3, 0.0)):
        fragment.rebase(sent(code, seed, numel), alpha)
        look()
        packings.append(packed(code, fragment.pack_delta))
    packings.append(packed(bulk_dtype(code), fragment.pack_values))
    fragment.restore()
    look()
    fragment.overwrite(sent(DTYPE_F32, 4, numel))
    look()
    return [*seen, packings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("kind", "count"), [
    ("ddp", 2), ("fsdp", 2), ("ignoring", 2), ("fsdp", 3), ("hybrid", 4)])
def test_the_bits_are_those_of_one_process(tmp_path, kind, count, dtype):
    for code in DTYPES:
        expected = alone(dtype, code)
        leader, *others = worlds.run(tmp_path, world, count, kind, dtype, code)
        assert leader.value == expected
        for other in others:
            assert other.value == expected[:-1]
