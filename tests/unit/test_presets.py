"""Presets: what they set for which M, and who wins over them."""

from __future__ import annotations

import pytest

from syncer.config import Config
from syncer.config.presets import PRESETS, markdown_table
from syncer.config.table import PRESET
from syncer.errors import ConfigError
from syncer.flags import read_config


def run(*argv: str, learners: int = 8, environ: dict[str, str] | None = None) -> Config:
    return read_config(["--learners", str(learners), "--total-steps", "8", *argv], environ or {})


def test_every_name_has_its_settings():
    assert tuple(PRESETS) == PRESET.choices


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("learners", [1, 2, 3, 8, 1000])
def test_a_preset_is_admitted_for_every_fleet(name, learners, tmp_path):
    config = run("--preset", name, "--checkpoint-path", str(tmp_path / "run.ckpt"),
                 learners=learners)
    for setting, part in PRESETS[name].parts.items():
        assert getattr(config, setting) == part.of(learners)
    assert config.from_preset.keys() == PRESETS[name].parts.keys()
    assert config.without_effect == ()


@pytest.mark.parametrize(("name", "quorums"), [
    ("local", [1, 1, 2, 7]), ("regions", [1, 2, 2, 6]), ("spot", [1, 1, 2, 4]),
    ("reproducible", [1, 2, 3, 8])])
def test_the_quorum_follows_from_the_number_of_learners(name, quorums):
    assert [run("--preset", name, learners=m).quorum for m in (1, 2, 3, 8)] == quorums


def test_reproducible_is_a_fixed_roster():
    assert run("--preset", "reproducible").fixed_roster


def test_whatever_is_given_wins(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "regions"\npipeline = 3\n')
    config = run("--config", str(file), "--grace-ms", "1000",
                 environ={"SYNCER_QUORUM": "1", "SYNCER_GRACE_TAU": "2"})
    assert (config.quorum, config.grace_ms, config.grace_tau, config.pipeline) == (1, 1000, 2.0, 3)
    assert config.from_preset == {"sync_interval_steps": 48.0, "checkpoint_every": 8}


def test_a_preset_may_come_from_any_source(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "spot"\n')
    assert run("--preset", "spot") == run(environ={"SYNCER_PRESET": "spot"}) == run(
        "--config", str(file))


def test_without_a_preset_every_default_stays():
    assert run() == Config(learners=8, total_steps=8)


def test_a_preset_is_not_in_the_profile_but_what_comes_of_it_is():
    written = run("--quorum", "4", "--grace-ms", "2000", "--grace-tau", "4", "--checkpoint-every",
                  "4")
    assert run("--preset", "spot").profile_hash == written.profile_hash
    assert run("--preset", "spot").profile_hash != run().profile_hash


def test_checkpoints_are_set_only_where_there_is_a_path(tmp_path):
    assert not run("--preset", "local").background_checkpoint
    path = str(tmp_path / "run.ckpt")
    assert run("--preset", "local", "--checkpoint-path", path).background_checkpoint
    every = run("--preset", "local", "--checkpoint-path", path, "--checkpoint-every", "1")
    assert (every.checkpoint_every, every.background_checkpoint) == (1, False)
    background = run("--preset", "reproducible", "--checkpoint-path", path,
                     "--background-checkpoint")
    assert (background.checkpoint_every, background.background_checkpoint) == (8, True)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="--preset fast cannot be used: give local or regions"):
        run("--preset", "fast")


def test_the_docs_have_a_row_for_each_setting():
    table = markdown_table()
    for preset in PRESETS.values():
        for name in preset.parts:
            assert f"`--{name.replace('_', '-')}`" in table


@pytest.mark.parametrize(("key", "flags"), [
    ("soft-deadline-s = 2", ["--soft-deadline-s", "2"]),
    ("quorum-capacity = 1", ["--quorum-capacity", "1"]),
    ("heloco-kappa = 2", ["--heloco-kappa", "2"])])
def test_a_whole_number_in_a_file_has_the_hash_of_the_command_line(key, flags, tmp_path):
    capacity = [] if "capacity" in key else ["--quorum-capacity", "0.5"]
    file = tmp_path / "run.toml"
    file.write_text(f"{key}\n")
    assert (run("--config", str(file), *capacity).profile_hash
            == run(*flags, *capacity).profile_hash)


def test_a_number_given_in_python_has_the_hash_of_its_text():
    given = Config(learners=8, total_steps=8, quorum_capacity=1, clip_norm=2,
                   learner_capacity=((0, 2),))
    assert given.profile_hash == run("--quorum-capacity", "1", "--clip-norm", "2",
                                     "--learner-capacity", "0=2").profile_hash
