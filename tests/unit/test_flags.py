"""Command line, environment and file: precedence, one-sentence refusals, help."""

import dataclasses
import os
import threading
from dataclasses import fields
from pathlib import Path

import pytest

from syncer import flags
from syncer.config import OPTIONS, Config
from syncer.config.options import flag
from syncer.errors import ConfigError
from syncer.flags import default_text, markdown_table, parser, read_config
from tests.unit.rows import BY_NAME, OFF, ON, TLS_FILES, another, companions, texts

RUN = ["--learners", "4", "--total-steps", "8"]


def refusal(argv, environ=None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(argv, environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_setting_has_exactly_one_option():
    assert sorted(o.name for o in OPTIONS) == sorted({f.name for f in fields(Config)} - {"given"})


def test_defaults_are_those_of_the_config():
    assert read_config(RUN, {}) == Config(learners=4, total_steps=8)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_flag_reaches_its_field(option):
    text, value = another(option)
    argv = [flag(option.name)] if value is True else [flag(option.name), text]
    given = read_config([*RUN, *texts(companions(option)), *argv], {})
    assert getattr(given, option.name) == value


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_variable_reaches_its_field(option):
    text, value = another(option)
    given = read_config([*RUN, *texts(companions(option))] if not option.required else RUN[2:]
                        if option.name == "learners" else RUN[:2],
                        {f"SYNCER_{option.name.upper()}": text})
    assert getattr(given, option.name) == value


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_key_of_a_file_reaches_its_field(option, tmp_path):
    text, value = another(option)
    written = text if type(value) in (int, float, bool) and option.values.toml != (str,) else (
        f'"{text}"')
    file = tmp_path / "run.toml"
    file.write_text(f"{flag(option.name)[2:]} = {written}\n")
    argv = [*texts(companions(option)), "--config", str(file)]
    for name in ("learners", "total_steps"):
        if name != option.name:
            argv += [flag(name), "4"]
    assert getattr(read_config(argv, {}), option.name) == value


def test_command_line_beats_environment_beats_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('quorum = 2\ngrace-ms = 7\npipeline = 5\nouter-lr = 1\n'
                    'allow-unauthenticated = true\nlog-level = "debug"\n')
    config = read_config([*RUN, "--config", str(file), "--quorum", "4"],
                         {"SYNCER_QUORUM": "3", "SYNCER_GRACE_MS": "8", "SYNCER_PIPELINE": ""})
    assert (config.quorum, config.grace_ms, config.pipeline) == (4, 8, 5)
    assert (config.outer_lr, config.allow_unauthenticated, config.log_level) == (1, True, "debug")


@pytest.mark.parametrize(("argv", "new", "old", "key"), [
    ([], "new", "old", "new"), ([], "", "old", "old"), ([], "", "", None),
    (["--island-hmac-key", "flag"], "new", "old", "flag")])
def test_key_variables_in_order_and_empty_is_unset(argv, new, old, key):
    given = read_config([*RUN, *argv], {"SYNCER_HMAC_KEY": new, "YETO_ISLAND_HMAC_KEY": old})
    assert given.island_hmac_key == key


def test_the_variable_of_the_flag_comes_before_its_older_names():
    environ = {"SYNCER_ISLAND_HMAC_KEY": "mine", "SYNCER_HMAC_KEY": "other"}
    assert read_config(RUN, environ).island_hmac_key == "mine"


@pytest.mark.parametrize(("argv", "environ", "value"), [
    (["--resume"], {}, True), (["--resume", "auto"], {}, "auto"), (["--resume=auto"], {}, "auto"),
    (["--resume", "--pipeline", "1"], {}, True), ([], {"SYNCER_RESUME": "auto"}, "auto"),
    ([], {"SYNCER_RESUME": "1"}, True), (["--resume"], {"SYNCER_RESUME": "auto"}, True),
    ([], {}, False)])
def test_resume_alone_and_with_its_word(argv, environ, value):
    assert read_config([*RUN, *argv], environ).resume == value


def test_resume_auto_counts_as_a_beginning():
    begun = read_config([*RUN, "--checkpoint-path", "c"], {})
    auto, plain = (dataclasses.replace(begun, resume=value) for value in ("auto", True))
    assert auto.profile_hash == begun.profile_hash != plain.profile_hash


@pytest.mark.parametrize(("text", "value"), [("true", True), ('"auto"', "auto"), ("false", False)])
def test_resume_in_a_file(tmp_path, text, value):
    file = tmp_path / "run.toml"
    file.write_text(f"resume = {text}\n")
    assert read_config([*RUN, "--config", str(file)], {}).resume == value


def test_the_backend_that_published_launchers_name_changes_nothing():
    given = read_config([*RUN, "--iso-backend", "scalar"], {})
    assert given.profile_hash == read_config(RUN, {}).profile_hash
    assert given.without_effect == ()


def test_an_older_flag_of_the_open_switch():
    assert read_config([*RUN, "--allow-unauthenticated-islands"], {}).allow_unauthenticated


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False)])
def test_an_older_variable_of_the_open_switch(text, value):
    given = read_config(RUN, {"YETO_SYNCER_ALLOW_UNAUTHENTICATED": text})
    assert given.allow_unauthenticated == value


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
    ([*RUN, "--expected-island-contract", "ab " * 21 + "a"], "64 hexadecimal digits"),
    ([*RUN, "--expected-island-contract", "ab" * 31 + "  "], "64 hexadecimal digits"),
    ([*RUN, "--iso-backend", "gpu"], "--iso-backend gpu cannot be used: give scalar"),
    ([*RUN, "--resume", "maybe"], "--resume 'maybe' cannot be used: give true or false or auto"),
    ([*RUN, "--frobnicate", "x"], "--frobnicate is unknown"),
    ([*RUN, "--config", "nowhere.toml"], "--config nowhere.toml cannot be read"),
])
def test_refusals_name_flag_value_and_remedy(argv, words):
    assert words in refusal(argv)


def test_a_refusal_names_the_environment():
    assert "--quorum is set in the environment" in refusal(RUN, {"SYNCER_QUORUM": "9"})


def test_a_refusal_of_a_text_names_its_variable():
    assert "environment variable SYNCER_QUORUM 'x'" in refusal(RUN, {"SYNCER_QUORUM": "x"})


@pytest.mark.parametrize(("argv", "named"), [([], True), (["--quorum", "8"], False)])
def test_a_refusal_names_the_file_if_the_value_is_from_there(argv, named, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("quorum = 9\n")
    words = refusal([*RUN, "--config", str(file), *argv])
    assert (f"--quorum is set in {file}" in words) == named


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
    (f"outer-lr = {'9' * 400}", "cannot be used: give a finite f32 number"),
    (f"quorum = {'9' * 5000}", "is not a TOML file"),
])
def test_bad_files_are_refused_by_key(tmp_path, text, words):
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert words in refusal([*RUN, "--config", str(file)])


@pytest.mark.parametrize(("text", "words"), [
    ('island-hmac-key = "hunter2\\u0000"', "--island-hmac-key cannot be used: give a text"),
    ("island-hmac-key = ['hunter2']", "'island-hmac-key' in"),
    ('host = "a\\u0000b"', "--host 'a\\x00b' cannot be used"),
    ('host = "a..b"', "--host a..b cannot be used"),
    ('checkpoint-path = "a\\u0000b"', "--checkpoint-path 'a\\x00b' cannot be used"),
    ('final-state = "a\\u0000b"', "--final-state 'a\\x00b' cannot be used"),
    ('log-level = "a\\nb"', "--log-level 'a\\nb' cannot be used"),
])
def test_texts_of_a_file_are_checked_before_they_are_used(tmp_path, text, words):
    file = tmp_path / "run.toml"
    file.write_text(text)
    found = refusal([*RUN, "--config", str(file)])
    assert words in found
    assert "hunter2" not in found


@pytest.mark.parametrize("variable", ["SYNCER_HMAC_KEY", "YETO_ISLAND_HMAC_KEY"])
def test_a_key_that_is_no_utf_8_is_refused_and_not_shown(variable):
    found = refusal(RUN, {variable: os.fsdecode(b"hunter2\xff")})
    assert "--island-hmac-key cannot be used: give a text in UTF-8" in found
    assert "hunter2" not in found


@pytest.mark.parametrize("name", ["--final-state", "--event-tape", "--checkpoint-path"])
@pytest.mark.parametrize(("place", "words"), [("", "is a directory"),
                                              ("no/file", "does not exist")])
def test_unwritable_outputs_are_refused_before_anything_starts(name, place, words, tmp_path):
    assert words in refusal([*RUN, name, str(tmp_path / place)])
    assert not list(tmp_path.iterdir())


def test_help_fits_80_columns_and_shows_every_flag_with_its_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = parser("syncer serve").format_help()
    assert max(map(len, text.splitlines())) <= 80
    squeezed = "".join(text.split())
    for option in OPTIONS:
        assert flag(option.name) in text
        assert f"({''.join(default_text(option).split())})" in squeezed
        assert f"| `{flag(option.name)}" in markdown_table()


def test_a_roster_that_leaves_no_memory_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(flags, "memory_bytes", lambda: 2**30)
    assert read_config(["--learners", str(2**22), "--total-steps", "8"], {}).learners == 2**22
    assert "give at most 4194304 on this machine" in refusal(
        ["--learners", str(2**22 + 1), "--total-steps", "8"])
    assert "--learners 4294967295 would take 64.0 GiB" in refusal(
        ["--learners", str(2**32 - 1), "--total-steps", "8"])


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.usual], ids=lambda option: option.name)
def test_what_is_far_beyond_the_usual_is_named(option):
    most = option.usual
    for value, named in ((most, False), (most + 1, True)):
        given = Config(**{"learners": 4, "total_steps": 8, option.name: value})
        assert given.unusual == (((flag(option.name), value, most),) if named else ())


# ------------------------------------------------------------------------ without effect
PAIRS = [pytest.param(option, need, id=f"{option.name} {need}")
         for option in OPTIONS for need in option.needs]


def without(need) -> list[str]:
    """A command line that has everything but this."""
    if need.below:
        return [flag(need.name), "4"]
    value = ON[need.name] if need.off else OFF.get(need.name)
    more = ["--quorum", "3"] if need.name == "robust" else []
    if need.name == "tls_cert":
        more = [word for name in TLS_FILES[1:] for word in (flag(name), "f")]
    return [] if value is None else [flag(need.name), str(value), *more]


def default_words(option) -> str | None:
    """The default as a text, None for off and unset."""
    unset = any(option.default is off for off in (None, False)) or option.default == ()
    return None if unset else str(option.default)


def words_of(option, text) -> list[str]:
    return [flag(option.name)] if text == "true" else [flag(option.name), text]


@pytest.mark.parametrize(("option", "need"), PAIRS)
@pytest.mark.parametrize("as_default", [False, True])
def test_a_setting_without_effect_is_named_with_what_it_needs(option, need, as_default):
    text = default_words(option) if as_default else (
        str(option.default) if option.idle else another(option)[0])
    if text is None:
        return  # off, or unset: nobody asked for anything
    others = {name: value for name, value in companions(option).items()
              if name != need.name and need.name not in {n.name for n in BY_NAME[name].needs}}
    argv = [*RUN, *texts(others), *without(need), *words_of(option, text)]
    if need.refused:
        assert refusal(argv) == (
            f"{flag(option.name)} has no effect without {need}: give both or neither")
        return
    named = [pair for pair in read_config(argv, {}).without_effect if pair[0] == flag(option.name)]
    assert named == [(flag(option.name), str(need))]
    assert flag(need.name) in str(need)




@pytest.mark.parametrize("option", [o for o in OPTIONS if o.needs], ids=lambda option: option.name)
def test_a_setting_with_what_it_needs_is_not_named(option):
    text = str(option.default) if option.idle else another(option)[0]
    argv = [*RUN, *texts(companions(option)), *words_of(option, text)]
    assert flag(option.name) not in dict(read_config(argv, {}).without_effect)


def test_nothing_is_named_that_nobody_gave():
    off = ["--outer-optimizer", "sgd", "--delta-correction", "none", "--grace-ms", "0"]
    assert read_config(RUN, {}).without_effect == ()
    assert read_config([*RUN, *off], {"SYNCER_MERGE_STATS": "0"}).without_effect == ()


@pytest.mark.parametrize(("argv", "environ", "named"), [
    (["--outer-optimizer", "sgd", "--outer-momentum", "0.9"], {}, "--outer-momentum"),
    (["--checkpoint-format", "yeto-v3", "--outer-optimizer", "sgd"], {}, "--checkpoint-format"),
    (["--checkpoint-format", "safetensors"], {}, "--checkpoint-format"),
    (["--dn-activation", "0.9"], {}, "--dn-activation"),
    (["--q-min", "9"], {}, "--q-min"),
    (["--quorum", "4", "--grace-ms", "300"], {}, "--grace-ms"),
    (["--quorum", "3", "--robust", "median", "--learner-weight", "equal"], {}, "--learner-weight"),
    (["--learner-capacity", "9=1"], {}, "--learner-capacity"),
    (["--quorum-capacity", "0.5", "--quorum", "9"], {}, "--quorum"),
    ([], {"SYNCER_CHECKPOINT_EVERY": "3"}, "--checkpoint-every"),
    (["--allow-unauthenticated", "--host", "127.0.0.1"], {}, "--allow-unauthenticated"),
    (["--allow-unauthenticated", "--host", "::1"], {}, "--allow-unauthenticated"),
    (["--allow-unauthenticated"], {"SYNCER_HMAC_KEY": "k"}, "--allow-unauthenticated"),
])
def test_a_launcher_may_pass_the_same_flags_to_every_run(argv, environ, named):
    assert [pair[0] for pair in read_config([*RUN, *argv], environ).without_effect] == [named]


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "settings"
    os.mkfifo(path)
    return path


def test_settings_may_come_from_a_pipe_in_parts(pipe):
    """As of a shell's <(...)."""
    def write():
        with open(pipe, "wb", buffering=0) as file:
            for part in (b"learners", b" = 3\ntotal-", b"steps = 7\n"):
                file.write(part)

    writer = threading.Thread(target=write)
    writer.start()
    config = read_config(["--config", str(pipe)], {})
    writer.join()
    assert (config.learners, config.total_steps) == (3, 7)


@pytest.mark.parametrize(("begun", "what"), [(b"", "nothing"), (b"learners = 3", "its end")])
def test_settings_that_do_not_come_are_not_waited_for_without_end(pipe, monkeypatch, begun, what):
    assert flags.CONFIG_S == 10
    monkeypatch.setattr(flags, "CONFIG_S", 0.2)
    held = os.open(pipe, os.O_RDWR)
    try:
        os.write(held, begun)
        assert refusal(["--config", str(pipe)]) == (
            f"--config {pipe} is no regular file, and {what} came from it within 0.2 s: name a "
            "file")
    finally:
        os.close(held)


def test_a_file_without_end_is_no_file_of_settings():
    assert "is larger than 1048576 bytes" in refusal(["--config", "/dev/zero"])
    assert "--config / cannot be read: Is a directory" in refusal(["--config", "/"])


@pytest.mark.parametrize("name", TLS_FILES)
def test_a_file_that_is_read_need_not_be_writable_and_is_not_written(tmp_path, pipe, name):
    given = {other: str(tmp_path / other) for other in TLS_FILES}
    for path in given.values():
        Path(path).write_text("x")
    argv = [*RUN, *texts(given)]
    read_config(argv, {})
    for option in ("--event-tape", "--final-state", "--checkpoint-path"):
        assert refusal([*argv, option, given[name]]).endswith(
            f"the file of {flag(name)} {given[name]}: name another file")
    assert "is a FIFO: name a regular file" in refusal([*RUN, *texts(given | {name: str(pipe)})])
    missing = given | {name: str(tmp_path / "no" / "where")}
    assert getattr(read_config([*RUN, *texts(missing)], {}), name) == missing[name], "says TLS"


def test_a_value_of_any_length_is_refused_in_a_sentence():
    many = "1" + "0" * 400
    for argv in (["--learner-weight", many], ["--quorum", many], ["--outer-lr", many + "x"]):
        text = refusal([*RUN, *argv])
        assert "characters)" in text
        assert len(text) < 400


def test_a_file_that_the_run_writes_is_not_its_configuration(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("quorum = 1\n", encoding="utf-8")
    (tmp_path / "alias").symlink_to(path)
    for name in ("--event-tape", "--final-state", "--checkpoint-path"):
        for written in ("run.toml", "alias"):
            text = refusal([*RUN, "--config", str(path), name, str(tmp_path / written)])
            assert f"the file of --config {path}" in text
    path.rename(tmp_path / "c.tmp")
    assert "c.tmp, the file of --config" in refusal(
        [*RUN, "--config", str(tmp_path / "c.tmp"), "--checkpoint-path", str(tmp_path / "c")])
