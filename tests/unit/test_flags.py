"""Command line, environment and file: precedence, one-sentence refusals, help."""

from dataclasses import fields

import pytest

from syncer.config import Config
from syncer.errors import ConfigError
from syncer.flags import OPTIONS, default_text, flag, markdown_table, parser, read_config

RUN = ["--learners", "4", "--total-steps", "8"]

CAPACITY = ["--quorum-capacity", "0.5"]
COMPANIONS = {
    "dn_period": ["--outer-optimizer", "delayed-nesterov"],
    "dn_activation": ["--outer-optimizer", "delayed-nesterov"],
    "carry_gamma": ["--late-carry"], "max_carry_lag": ["--late-carry"],
    "carry_answers_round": ["--late-carry"], "q_min": CAPACITY, "learner_capacity": CAPACITY,
    **{name: ["--checkpoint-path", "c"] for name in (
        "background_checkpoint", "mark_final_checkpoint", "checkpoint_keep", "checkpoint_direct",
        "checkpoint_format", "checkpoint_retries", "learner_budget_steps")},
    "no_verify": ["--resume"],
    "soft_deadline_s": CAPACITY, "robust": ["--quorum", "3"],
}
"""Flags without which one has no effect."""


def refusal(argv, environ=None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(argv, environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_setting_has_exactly_one_option():
    assert sorted(o.name for o in OPTIONS) == sorted(f.name for f in fields(Config))


def test_defaults_are_those_of_the_config():
    assert read_config(RUN, {}) == Config(learners=4, total_steps=8)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_flag_reaches_its_field(option):
    text, value = {"int": ("3", 3), "float": ("0.25", 0.25), "switch": (None, True),
                   "digest": ("ab" * 32, b"\xab" * 32), "text": ("127.0.0.2", "127.0.0.2"),
                   "path": ("f", "f"), "clip": ("2.5", 2.5), "robust": ("trimmed-mean:1", 1),
                   "capacities": ("0=2,3=0.5", ((0, 2.0), (3, 0.5)))}[option.kind]
    if option.choices:
        text = value = option.choices[-1]
    argv = [flag(option.name)] if text is None else [flag(option.name), text]
    argv += COMPANIONS.get(option.name, [])
    assert getattr(read_config([*RUN, *argv], {}), option.name) == value


def test_command_line_beats_environment_beats_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('quorum = 2\ngrace-ms = 7\npipeline = 5\nouter-lr = 1\n'
                    'allow-unauthenticated = true\nlog-level = "debug"\n')
    config = read_config([*RUN, "--config", str(file), "--quorum", "4"],
                         {"SYNCER_QUORUM": "3", "SYNCER_GRACE_MS": "8", "SYNCER_PIPELINE": ""})
    assert (config.quorum, config.grace_ms, config.pipeline) == (4, 8, 5)
    assert (config.outer_lr, config.allow_unauthenticated, config.log_level) == (1, True, "debug")


def test_key_variables_in_order_and_empty_is_unset():
    both = {"SYNCER_HMAC_KEY": "new", "YETO_ISLAND_HMAC_KEY": "old"}
    assert read_config(RUN, both).island_hmac_key == "new"
    assert read_config(RUN, both | {"SYNCER_HMAC_KEY": ""}).island_hmac_key == "old"
    assert read_config([*RUN, "--island-hmac-key", "flag"], both).island_hmac_key == "flag"
    assert read_config(RUN, {"SYNCER_HMAC_KEY": ""}).island_hmac_key is None


def test_older_names_of_the_open_switch():
    assert read_config(RUN, {"YETO_SYNCER_ALLOW_UNAUTHENTICATED": "1"}).allow_unauthenticated
    assert read_config([*RUN, "--allow-unauthenticated-islands"], {}).allow_unauthenticated


@pytest.mark.parametrize(("argv", "words"), [
    ([], "--learners and --total-steps are missing"),
    (RUN[:2], "--total-steps is missing"),
    ([*RUN, "--learnres", "3"], "did you mean --learners?"),
    ([*RUN, "--quor=3"], "--quor is unknown"),
    ([*RUN, "stray"], "stray is unknown"),
    ([*RUN, "--grace-ms", "soon"], "--grace-ms 'soon' cannot be used: give a whole number"),
    ([*RUN, "--grace-ms"], "--grace-ms"),
    ([*RUN, "--outer-lr", "fast"], "give a number"),
    ([*RUN, *["--learner-capacity", "0:2"]], "give pairs like 0=2,1=0.5"),
    ([*RUN, "--clip-norm", "mean"], "give median or a norm above 0"),
    ([*RUN, "--robust", "mean"], "give median or trimmed-mean:F"),
    ([*RUN, "--event-tape", ""], "--event-tape is empty"),
    ([*RUN, "--expected-island-contract", "zz" * 32], "64 hexadecimal digits"),
    ([*RUN, "--expected-island-contract", "ab" * 31], "64 hexadecimal digits"),
    ([*RUN, "--frobnicate", "x"], "--frobnicate is unknown"),
    ([*RUN, "--config", "nowhere.toml"], "--config nowhere.toml cannot be read"),
])
def test_refusals_name_flag_value_and_remedy(argv, words):
    assert words in refusal(argv)


def test_refusals_say_where_a_value_came_from(tmp_path):
    assert "--quorum is set in the environment" in refusal(RUN, {"SYNCER_QUORUM": "9"})
    assert "environment variable SYNCER_QUORUM 'x'" in refusal(RUN, {"SYNCER_QUORUM": "x"})
    file = tmp_path / "run.toml"
    file.write_text("quorum = 9\n")
    assert f"--quorum is set in {file}" in refusal([*RUN, "--config", str(file)])
    assert "set in" not in refusal([*RUN, "--config", str(file), "--quorum", "8"])


@pytest.mark.parametrize(("text", "words"), [
    ("qourum = 2", "did you mean quorum?"),
    ("grace_ms = 2", "did you mean grace-ms?"),
    ("quorum = 2.5", "expected a whole number"),
    ("quorum = true", "expected a whole number"),
    ("outer-lr = 'x'", "expected a number"),
    ("allow-unauthenticated = 1", "expected true or false"),
    ("log-level = 3", "expected a string"),
    ("[table]\nx = 1", "key 'table'"),
    ("quorum = ", "is not a TOML file"),
    ("\x00", "is not a TOML file"),
])
def test_bad_files_are_refused_by_key(tmp_path, text, words):
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert words in refusal([*RUN, "--config", str(file)])


def test_unwritable_outputs_are_refused_before_anything_starts(tmp_path):
    assert "is a directory" in refusal([*RUN, "--final-state", str(tmp_path)])
    lost = tmp_path / "no" / "tape.jsonl"
    assert "does not exist" in refusal([*RUN, "--event-tape", str(lost)])
    assert not lost.parent.exists()


def test_help_fits_80_columns_and_shows_every_flag_with_its_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = parser("syncer serve").format_help()
    assert max(map(len, text.splitlines())) <= 80
    squeezed = "".join(text.split())
    for option in OPTIONS:
        assert flag(option.name) in text
        assert f"({''.join(default_text(option).split())})" in squeezed
        assert f"| `{flag(option.name)}" in markdown_table()
