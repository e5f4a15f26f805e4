"""`build_layout` and its fingerprint against golden layouts; the JSON file; refused input."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.errors import ConfigError
from syncer.layout import AVG, ISO, RDA, FragmentLayout
from syncer.learner.partition import (
    NamedFragment,
    NamedLayout,
    NamedTensor,
    build_layout,
    canonical_name,
    layout_fingerprint,
    load_layout,
    save_layout,
)

EMBED = "model.embed_tokens.weight"
T = {
    EMBED: 1000,
    "model.layers.0.q.weight": 64,
    "model.layers.0.mlp.weight": 256,
    "model.layers.1.q.weight": 64,
    "model.layers.1.mlp.weight": 256,
    "lm_head.weight": 1000,
}
S = {EMBED: 1000, "model.final_norm.weight": 8} | {
    f"model.layers.{layer}.{kind}.weight": numel
    for layer in range(6) for kind, numel in (("q", 64), ("mlp", 256))
}
T_SHAPES = T | {
    EMBED: (100, 10), "lm_head.weight": (100, 10),
    "model.layers.0.q.weight": (8, 8), "model.layers.1.q.weight": (8, 8),
    "model.layers.0.mlp.weight": (16, 16),
}
HEADS = (AVG, "lm_head", "embed_tokens")
GOLDEN = {
    "T3 binpack": (
        T, 3, {}, [HEADS, (RDA, "0.mlp", "0.q"), (RDA, "1.mlp", "1.q")],
        "a2c30e5e41c860ec0c139f6f6f38457f5757b09e1088a6b2cfc49545a7584b18"),
    "T4 binpack": (
        T, 4, {}, [HEADS, (RDA, "0.mlp"), (RDA, "1.mlp"), (RDA, "0.q", "1.q")],
        "9832be659610afdc80ba75875cbd7e925246f26cb04ede2bc2e5329fea52d644"),
    "T6 strided drops empty bins": (
        T, 6, {"pattern": "strided"}, [HEADS, (RDA, "0.mlp", "0.q"), (RDA, "1.mlp", "1.q")],
        "a2c30e5e41c860ec0c139f6f6f38457f5757b09e1088a6b2cfc49545a7584b18"),
    "T1 gives two": (
        T, 1, {}, [HEADS, (RDA, "0.mlp", "1.mlp", "0.q", "1.q")],
        "f44f775beb0e25a6b977c6c65a79b1e86ac6f27a0bd986cdf5f0554fdaa73c4a"),
    "S3 strided": (
        S, 3, {"pattern": "strided"},
        [(AVG, "embed_tokens"),
         (RDA, "0.mlp", "0.q", "2.mlp", "2.q", "4.mlp", "4.q", "final_norm"),
         (RDA, "1.mlp", "1.q", "3.mlp", "3.q", "5.mlp", "5.q")],
        "b8f1e918e6859da311ba52c78c4c575a5987ce58ec75321247691dd9fb393ca0"),
    "S4 strided": (
        S, 4, {"pattern": "strided"},
        [(AVG, "embed_tokens"), (RDA, "0.mlp", "0.q", "3.mlp", "3.q", "final_norm"),
         (RDA, "1.mlp", "1.q", "4.mlp", "4.q"), (RDA, "2.mlp", "2.q", "5.mlp", "5.q")],
        "7d6616ca79d74bd4d54ec3f85e0f35b8077acf51ef1a75b8c4b39fee21811dfe"),
    "T3 iso": (
        T_SHAPES, 3, {"matrix_merge": "iso"},
        [(AVG, "lm_head", "embed_tokens", "1.mlp"), (ISO, "0.mlp"), (ISO, "0.q", "1.q")],
        "546c6dbc77fda648914450cfea0f25fad291f55832279532d4eda48ab087ebdb"),
}


def short(name: str) -> str:
    return name.removeprefix("model.").removeprefix("layers.").removesuffix(".weight")


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_layouts(case):
    tensors, fragments, options, expected, fingerprint = GOLDEN[case]
    layout = build_layout(tensors, fragments, **options)
    found = [(fragment.merge_mode, *(short(t.name) for t in fragment.tensors))
             for fragment in layout.fragments]
    assert found == expected
    assert layout_fingerprint(layout).hex() == fingerprint


def test_golden_fingerprints():
    one = NamedLayout((NamedFragment(RDA, (NamedTensor("w", (4,)),)),))
    assert layout_fingerprint(one).hex() == (
        "3d2c1598d87e386e871e06824ffc0e4effc1c0723722c07bc1969756d0ef1fb2")

    def two(embed_shape, identity):
        return NamedLayout((
            NamedFragment(AVG, (NamedTensor("embed.weight", embed_shape),), identity),
            NamedFragment(ISO, (NamedTensor("layers.0.a", (2, 3)),
                                NamedTensor("layers.0.b", (2, 2)))),
        ))

    plain = "70262f63fc2606ef859df27f553bd52724078440d1bfc305c7d748bb250c8b4b"
    assert layout_fingerprint(two((6,), False)).hex() == plain
    assert layout_fingerprint(two((3, 2), False)).hex() == plain
    assert layout_fingerprint(two((3, 2), True)).hex() == (
        "8ca588d00a1304e431e2dcb1eec8c58f815ab9ca6cfa2fee0532e13a2ebc605f")


def test_wire_layout_carries_iso_shapes_only():
    layout = build_layout(T_SHAPES, 3, matrix_merge="iso").wire
    assert layout.fragments == (
        FragmentLayout(AVG, (1000, 1000, 256)),
        FragmentLayout(ISO, (256,), ((16, 16),)),
        FragmentLayout(ISO, (64, 64), ((8, 8), (8, 8))),
    )


def test_avg_regex_matches_anywhere_and_heads_match_in_any_case():
    layout = build_layout({"a.NORM.x": 3, "b.norm.y": 4, "c": 5, "My_EMBEDDING": 2}, 4,
                          avg_regex=r"norm\.")
    assert [t.name for t in layout.fragments[0].tensors] == ["b.norm.y", "My_EMBEDDING"]
    assert layout.fragments[0].merge_mode == AVG
    assert [[t.name for t in f.tensors] for f in layout.fragments[1:]] == [["c"], ["a.NORM.x"]]


def test_only_averaged_tensors_make_one_fragment():
    layout = build_layout({"embed": 2, "lm_head": 3}, 8)
    assert [f.merge_mode for f in layout.fragments] == [AVG]


def test_strided_uses_the_rank_of_a_layer_not_its_number():
    names = {f"t.h.{layer}.w": 8 for layer in (7, 3, 100)}
    layout = build_layout(names, 2, pattern="strided")
    assert [[t.name for t in f.tensors] for f in layout.fragments] == [
        ["t.h.3.w", "t.h.100.w"], ["t.h.7.w"]]


def test_wrapper_names_are_stripped():
    assert canonical_name("_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.w") == (
        "layers.0.w")


names = st.lists(
    st.text("abhlwte_.01289é", min_size=1, max_size=14)
    | st.builds("m.layers.{}.{}".format, st.integers(0, 12), st.sampled_from("qkvo")),
    min_size=1, max_size=40, unique=True)


@given(names, st.integers(1, 12), st.sampled_from(["binpack", "strided"]), st.randoms())
def test_any_order_gives_the_same_layout(found, fragments, pattern, rng: random.Random):
    tensors = [(name, rng.choice([1, 5, 5, 64, 1000])) for name in found]
    layout = build_layout(tensors, fragments, pattern=pattern)
    rng.shuffle(tensors)
    again = build_layout(dict(tensors), fragments, pattern=pattern)
    assert again == layout
    assert layout_fingerprint(again) == layout_fingerprint(layout)
    flat = [tensor.name for fragment in layout.fragments for tensor in fragment.tensors]
    assert sorted(flat) == sorted(found)
    assert all(fragment.tensors for fragment in layout.fragments)
    assert layout.numel == layout.wire.numel == sum(numel for _, numel in tensors)
    assert len(layout.fragments) <= max(fragments, 2)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=6), st.integers(1, 99), min_size=1),
       st.integers(1, 9))
def test_binpack_equals_the_definition(tensors, fragments):
    """The heap against looking through all bins for every tensor."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name], name))
    bins = [[] for _ in range(min(fragments, len(ordered)))]
    for name in ordered:
        min(bins, key=lambda members: sum(tensors[m] for m in members)).append(name)
    layout = build_layout(tensors, fragments)
    assert [[t.name for t in f.tensors] for f in layout.fragments] == bins


@pytest.mark.parametrize("identity", [False, True])
def test_saved_layout_comes_back_equal(tmp_path, identity):
    layout = build_layout(T_SHAPES, 3, matrix_merge="iso", identity_shapes=identity)
    save_layout(tmp_path / "layout.json", layout)
    assert load_layout(tmp_path / "layout.json") == layout
    assert [p.name for p in tmp_path.iterdir()] == ["layout.json"]


def test_altered_or_foreign_layout_files_are_refused(tmp_path):
    path = tmp_path / "layout.json"
    save_layout(path, build_layout(T, 3))
    good = json.loads(path.read_text())
    bad = json.loads(path.read_text())
    bad["fragments"][1]["tensors"][0]["shape"] = [255]
    for document, text in [
        (bad, "was altered"),
        (good | {"format": "other"}, "has format 'other'"),
        ({"format": good["format"]}, "is not of format"),
        (good | {"fragments": [{"merge": "sum"}]}, "is not of format"),
        ([], "is not of format"),
    ]:
        path.write_text(json.dumps(document))
        with pytest.raises(ConfigError, match=text):
            load_layout(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_layout(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_layout(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot write"):
        save_layout(tmp_path / "missing" / "layout.json", build_layout(T, 3))


@pytest.mark.parametrize("options", [{}, {"pattern": "strided"}, {"matrix_merge": "iso"},
                                     {"identity_shapes": True}])
def test_empty_tensors_are_left_out(options):
    full = {"a": (3, 4), "embed": (5, 2), "layers.1.b": (7,)}
    empty = {"a.none": (3, 0), "embed.none": (0,), "layers.0.none": 0}
    assert build_layout(full | empty, 3, **options) == build_layout(full, 3, **options)


@pytest.mark.parametrize(("arguments", "options", "text"), [
    (({}, 1), {}, "at least one parameter"),
    (({"a": 1}, 0), {}, "fragments must be"),
    (({"a": 1}, 1.0), {}, "fragments must be"),
    (({"a": 0}, 1), {}, "only empty ones, for example 'a'"),
    (({"a": (3, 0)}, 1), {}, "only empty ones, for example 'a'"),
    (({"a": (3, -1)}, 1), {}, "'a' has shape"),
    (({"a": (0, -1), "b": 1}, 1), {}, "'a' has shape"),
    (({"a": (2**40, 2**40)}, 1), {}, "'a' has shape"),
    (({"": 1}, 1), {}, "an empty one"),
    (([("a", 1), ("a", 2)], 1), {}, "'a' twice"),
    (({"\ud800": 1}, 1), {}, "UTF-8"),
    (({"a": 1}, 1), {"pattern": "zigzag"}, "zigzag"),
    (({"a": 1}, 1), {"matrix_merge": "avg"}, "matrix_merge"),
    (({"a": 1}, 1), {"avg_regex": "("}, "regular expression"),
])
def test_refused_input_is_named(arguments, options, text):
    with pytest.raises(ConfigError, match=text):
        build_layout(*arguments, **options)
