"""What a run says of its memory before it takes any: the parts, and the formula made of them."""

from __future__ import annotations

import pytest

from syncer.config import Config
from syncer.layout import ISO, RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4
from syncer.server import memory

LAYOUT = Layout(tuple(FragmentLayout(RDA, (n,)) for n in (4 << 20, 4 << 20, 2 << 20)))


def parts_of(layout=LAYOUT, dtype=DTYPE_F32, **settings) -> tuple[dict[str, int], str]:
    config = Config(**({"learners": 2, "quorum": 2, "grace_ms": 0, "pipeline": 1,
                        "total_steps": 9} | settings))
    parts = memory.memory_parts(config, layout, dtype)
    return parts, memory.formula_of(config, layout, parts).text


def test_two_bf16_learners_take_three_fragments_of_a_round_and_its_wire():
    """8 bytes for each parameter of the model, and of each round in flight three fragments of f32,
    the bytes of two pushes, and those of the broadcast."""
    parts, formula = parts_of(dtype=DTYPE_BF16)
    assert formula == "8 P + 18 G"
    wire = 2 * 2 + 2
    most = (3 * 4 + wire) * (4 << 20) + 6 * memory.BLOCK
    assert parts["rounds"] + parts["broadcasts"] + parts["late"] <= most


@pytest.mark.parametrize(("per_model", "per_round", "dtype", "settings"), [
    (8, 16, DTYPE_F32, {}),
    (8, 16, DTYPE_F32, {"pipeline": 2}),
    (8, 20, DTYPE_F32, {"learners": 3, "quorum": 3}),
    (8, 22, DTYPE_BF16, {"learners": 3, "quorum": 3}),
    (8, 18, DTYPE_Q4, {}),
    (4, 12, DTYPE_F32, {"outer_optimizer": "sgd"}),
    (12, 20, DTYPE_F32, {"outer_optimizer": "delayed-nesterov"}),
    (8, 20, DTYPE_F32, {"quorum": 1}),
    (8, 24, DTYPE_BF16, {"quorum": 1}),
    (8, 16, DTYPE_F32, {"fold": "streaming"}),
    (8, 22, DTYPE_BF16, {"fold": "streaming"}),
    (8, 22, DTYPE_BF16, {"numa": "local"}),
    (18, 16, DTYPE_F32, {"background_checkpoint": True, "checkpoint_path": "c"}),
])
def test_the_formula_follows_what_runs(per_model, per_round, dtype, settings):
    """f32 pushes are what was received; quorum 1: a late push; a fold: sums;
    local: messages leave their memory to no result."""
    model, _, rounds = parts_of(dtype=dtype, **settings)[1].partition(" P + ")
    assert round(float(model)) == per_model
    assert round(float(rounds.removesuffix(" G"))) == per_round


def test_iso_matrices_have_working_memory_in_f64():
    shapes = ((1000, 1000), (500, 100))
    iso = Layout((FragmentLayout(ISO, tuple(r * c for r, c in shapes), shapes=shapes),))
    plain = Layout((FragmentLayout(RDA, tuple(r * c for r, c in shapes)),))
    more = parts_of(iso)[0]["rounds"] - parts_of(plain)[0]["rounds"]
    assert more == 40 * 1_000_000


def test_parts_are_told_in_whole_mib_and_add_up():
    told = memory.in_mib({"parameters": 3 * memory.MIB + 1, "rounds": memory.MIB}, 1, 2)
    assert told == {"mib": 5, "parameters": 4, "rounds": 1, "with_slow_learners": 6,
                    "with_readers": 7}
