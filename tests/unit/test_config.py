"""Rules of the configuration and its profile hash, against the published golden values.

Every row of the table is walked: both ends of its range, what it needs, its part in the hash.
"""

import dataclasses
import hashlib
import math
import struct

import pytest

from syncer.config import OPTIONS, Config, rules
from syncer.config.options import NO_DEFAULT, flag, is_loopback
from syncer.config.profile import At
from syncer.errors import ConfigError
from tests.unit.rows import TLS_FILES, another, companions, ends

EXACT = dict(fold="exact", learner_weight="equal", delta_correction="none", quorum=2)
FIXED = dict(max_base_lag=0, quorum=2, grace_ms=0)
STRICT = dict(FIXED, delta_correction="none", learner_weight="equal", require_profile_binding=True,
              checkpoint_path="c", checkpoint_every=1, mark_final_checkpoint=True)


def config(**changes) -> Config:
    return Config(**{"learners": 2, "total_steps": 8, **changes})


def refusal(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def published_bytes(run: Config) -> bytes:
    """What is hashed of a run without later features, written apart from the rows."""
    def optional(value):
        return b"\0" if value is None else b"\1" + struct.pack("<Q", value)

    encoded = b"yeto-syncer-semantic-profile-v1\0" + struct.pack(
        "<IIQddIQdBQQQB", run.learners, run.quorum, run.grace_ms, run.grace_gamma, run.grace_tau,
        run.pipeline, run.min_round_interval_ms, run.sync_interval_steps,
        run.delta_correction == "heloco", run.quorum_timeout_s, run.final_ack_timeout_resolved_s,
        run.total_steps, 0)
    encoded += struct.pack(
        "<ffBQBB", run.outer_lr, run.outer_momentum, run.checkpoint_path is not None,
        run.checkpoint_every, run.resume, run.mark_final_checkpoint)
    encoded += optional(run.learner_budget_steps) + optional(run.max_base_lag)
    encoded += struct.pack("<BB", run.learner_weight == "equal", run.require_profile_binding)
    return encoded


# ----------------------------------------------------------------------------------- the hash
def test_profile_hash_of_defaults_is_the_published_one():
    assert config().profile_hash.hex() == (
        "55e86bece77c9d93a4845fd0ccc74e25aa1afe66f4c308bb0faf897e694fe747")


def test_profile_hash_with_every_optional_part_is_the_published_one():
    assert config(**STRICT, resume=True).profile_hash.hex() == (
        "b904a25c417a24deef77b8526c4e982a13a35c65d331a4cafb74e579b584d4b7")


@pytest.mark.parametrize("change", [
    {}, STRICT, dict(STRICT, resume=True), dict(learners=70_000, quorum=69_999),
    dict(grace_ms=2**33, grace_gamma=0.3, grace_tau=1e-9), dict(pipeline=9, total_steps=2**40),
    dict(min_round_interval_ms=2**35, sync_interval_steps=0.1), dict(quorum_timeout_s=7),
    dict(quorum_timeout_s=7, final_ack_timeout_s=9), dict(outer_lr=0.1, outer_momentum=0.3),
    dict(checkpoint_path="c", learner_budget_steps=0xDEADBEEF), dict(max_base_lag=2**40),
    dict(learner_weight="equal"), dict(require_profile_binding=True), dict(merge_threads=3),
])
def test_a_run_without_later_features_has_the_published_hash(change):
    run = config(**change)
    assert run.profile_hash == hashlib.sha256(published_bytes(run)).digest()


def test_the_published_fields_have_one_place_each():
    places = [option.hashed.position for option in OPTIONS if isinstance(option.hashed, At)]
    assert sorted(places) == [n for n in range(1, 24) if n != 13]  # which this server never sets


def test_later_features_add_name_and_value_sorted_by_name():
    run = config(late_carry=True, carry_gamma=0.25, outer_optimizer="sgd", clip_norm=1.5)
    later = (b"carry_gamma\x000.25\0" b"clip_norm\x001.5\0" b"late_carry\0True\0"
             b"outer_optimizer\0sgd\0")
    assert run.profile_hash == hashlib.sha256(published_bytes(run) + later).digest()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_row_changes_the_hash_if_it_says_so(option):
    context = {"learners": 4} | companions(option)
    if option.name in TLS_FILES:
        context[option.name] = "another"
    changed = config(**context | {option.name: another(option)[1]})
    assert (changed.profile_hash != config(**context).profile_hash) == (option.hashed is not None)


def test_a_resumed_run_saves_the_hash_of_a_fresh_one():
    run = config(**STRICT, resume=True)
    fresh = dataclasses.replace(run, resume=False)
    assert fresh.profile_hash != run.profile_hash
    assert fresh.profile_hash == fresh.saved_profile_hash == run.saved_profile_hash


@pytest.mark.parametrize("change", [
    dict(checkpoint_path="d"), dict(background_checkpoint=True), dict(checkpoint_format="yeto-v3"),
    dict(checkpoint_keep=3), dict(checkpoint_retries=3), dict(checkpoint_direct=True),
    dict(background_checkpoint=True, checkpoint_rate=10**6)])
def test_how_a_checkpoint_is_written_leaves_the_hash(change):
    plain = config(checkpoint_path="c")
    assert config(**dict(checkpoint_path="c") | change).profile_hash == plain.profile_hash


@pytest.mark.parametrize("change", [{}, dict(checkpoint_path="c", checkpoint_every=2)])
def test_when_a_checkpoint_is_written_changes_the_hash(change):
    assert config(**change).profile_hash != config(checkpoint_path="c").profile_hash


@pytest.mark.parametrize("change", [
    dict(learners=3), dict(quorum=2), dict(grace_ms=999), dict(grace_gamma=0.7),
    dict(grace_tau=1.0), dict(pipeline=3), dict(min_round_interval_ms=1),
    dict(sync_interval_steps=23.0), dict(quorum_timeout_s=901), dict(final_ack_timeout_s=901),
    dict(total_steps=9), dict(outer_lr=0.6), dict(outer_momentum=0.8), dict(max_base_lag=3),
    dict(learner_weight="equal"), dict(require_profile_binding=True),
    dict(delta_correction="none"), dict(heloco_kappa=2.0), dict(outer_optimizer="sgd"),
    dict(outer_optimizer="delayed-nesterov"),
    dict(outer_optimizer="delayed-nesterov", dn_period=2), dict(fold="streaming"),
    dict(clip_norm=1.0), dict(clip_norm="median"), dict(start_learners=1),
    dict(quorum_capacity=0.5), dict(quorum_capacity=0.5, learner_capacity=((0, 2.0),)),
    dict(late_carry=True), dict(late_carry=True, carry_gamma=0.25),
])
def test_what_changes_the_merge_changes_the_hash(change):
    assert config(**change).profile_hash != config().profile_hash


@pytest.mark.parametrize("change", [
    dict(port=1), dict(host="127.0.0.2"), dict(merge_threads=1), dict(log_level="debug"),
    dict(island_hmac_key="k"), dict(event_tape="t"), dict(final_state="f"), dict(write_timeout_s=1),
    dict(allow_unauthenticated=True), dict(final_ack_timeout_s=900), dict(heloco_kappa=3.0),
    dict(merge_stats=True), dict(start_timeout_s=3),
])
def test_what_does_not_change_the_merge_leaves_the_hash(change):
    assert config(**change).profile_hash == config().profile_hash


@pytest.mark.parametrize(("change", "words"), [
    (dict(learners=0), "--learners 0"),
    (dict(learners=2**32), "--learners 4294967296"),
    (dict(total_steps=0), "--total-steps 0"),
    (dict(quorum=0), "--quorum 0"),
    (dict(quorum=3), "--quorum 3 can never be reached by --learners 2"),
    (dict(port=65536), "--port 65536"),
    (dict(quorum_timeout_s=0), "--quorum-timeout-s 0"),
    (dict(final_ack_timeout_s=0), "--final-ack-timeout-s 0"),
    (dict(write_timeout_s=0), "--write-timeout-s 0"),
    (dict(merge_threads=0), "--merge-threads 0"),
    (dict(merge_threads=33), "--merge-threads 33"),
    (dict(grace_ms=-1), "--grace-ms -1"),
    (dict(grace_ms=True), "--grace-ms True"),
    (dict(grace_gamma=1.1), "--grace-gamma 1.1"),
    (dict(grace_gamma=math.nan), "--grace-gamma nan"),
    (dict(grace_tau=-0.5), "--grace-tau -0.5"),
    (dict(grace_tau=math.inf), "--grace-tau inf"),
    (dict(sync_interval_steps=-1.0), "--sync-interval-steps -1"),
    (dict(outer_lr=-0.1), "--outer-lr -0.1"),
    (dict(outer_lr=1e39), "--outer-lr 1e+39"),
    (dict(outer_momentum=1.0), "--outer-momentum 1.0"),
    (dict(outer_momentum=0.99999999999), "below 1 also as f32"),
    (dict(learner_weight="tokens"), "--learner-weight tokens"),
    (dict(log_level="loud"), "--log-level loud"),
    (dict(outer_optimizer="adam"), "--outer-optimizer adam"),
    (dict(dn_period=0), "--dn-period 0"),
    (dict(outer_optimizer="delayed-nesterov", dn_activation=0.3), "give at most 1/4"),
    (dict(fold="lazy"), "--fold lazy"),
    (dict(clip_norm=0.0), "--clip-norm 0"),
    (dict(clip_norm="mean"), "--clip-norm mean"),
    (dict(robust=0), "--robust 0"),
    (dict(robust="median"), "needs at least 3 pushes in every round, and a round may close with 1"),
    (dict(learners=9, quorum=4, robust=2), "--robust without 2 outliers needs at least 5"),
    (dict(learners=3, quorum=3, robust=1, fold="streaming"), "--robust compares all pushes"),
    (dict(clip_norm="median", fold="streaming"), "--clip-norm median compares all pushes"),
    (dict(EXACT, delta_correction="heloco"), "--fold exact needs --delta-correction none"),
    (dict(EXACT, learner_weight="tokens2-over-steps"), "--fold exact needs --learner-weight equal"),
    (dict(EXACT, quorum=1), "--fold exact needs --quorum 2"),
    (dict(EXACT, late_carry=True), "--fold exact needs no --late-carry"),
    (dict(FIXED, late_carry=True), "--late-carry cannot be used with a fixed roster"),
    (dict(FIXED, quorum_capacity=0.5), "--quorum-capacity cannot be used with a fixed roster"),
    (dict(FIXED, start_learners=1), "--start-learners cannot be used with a fixed roster"),
    (dict(start_learners=3), "--start-learners 3 can never be reached"),
    (dict(quorum_capacity=0.0), "--quorum-capacity 0"),
    (dict(quorum_capacity=0.5, q_min=3), "--q-min 3 can never be reached"),
    (dict(quorum_capacity=0.5, learner_capacity=((2, 1.0),)), "learner 2, which is not in"),
    (dict(quorum_capacity=0.5, learner_capacity=((0, 1.0), (0, 2.0))), "named twice"),
    (dict(quorum_capacity=0.5, learner_capacity=((0, -1.0),)), "--learner-capacity 0=-1.0"),
    (dict(late_carry=True, carry_gamma=1.5), "--carry-gamma 1.5"),
    (dict(heloco_c_ok=-1.5), "--heloco-c-ok -1.5"),
    (dict(heloco_eps=0.0), "--heloco-eps 0"),
    (dict(heloco_kappa=math.inf), "--heloco-kappa inf"),
    (dict(checkpoint_every=0), "--checkpoint-every 0"),
    (dict(checkpoint_format="pickle"), "--checkpoint-format pickle"),
    (dict(checkpoint_path="c", checkpoint_keep=-1), "--checkpoint-keep -1"),
    (dict(checkpoint_path="c", checkpoint_retries=-1), "--checkpoint-retries -1"),
    (dict(mark_final_checkpoint=True), "--mark-final-checkpoint has no effect without --c"),
    (dict(background_checkpoint=True), "--background-checkpoint has no effect without --c"),
    (dict(checkpoint_path="c", checkpoint_every=1, background_checkpoint=True),
     "--checkpoint-every 1"),
    (dict(checkpoint_path="c", checkpoint_format="yeto-v3", outer_optimizer="sgd"),
     "--checkpoint-format yeto-v3"),
    (dict(checkpoint_path="c", checkpoint_format="yeto-v3", downlink="q4"),
     "--downlink q4 needs steps that a resume can raise"),
    (dict(checkpoint_path="c", learner_budget_steps=0), "--learner-budget-steps 0"),
    (dict(learner_budget_steps=9), "--learner-budget-steps has no effect without --c"),
    (dict(checkpoint_path="c", learner_budget_steps=9, resume=True),
     "--learner-budget-steps cannot be used with --resume"),
    (dict(checkpoint_path="c", learner_budget_steps=9, mark_final_checkpoint=True),
     "--learner-budget-steps cannot be used with --mark-final-checkpoint"),
    (dict(expected_island_contract=b"x"), "--expected-island-contract has 1 bytes"),
    (dict(host="0.0.0.0"), "--host 0.0.0.0"),
    (dict(host="example.org"), "--host example.org"),
])
def test_unusable_values_are_refused_by_name(change, words):
    assert words in refusal(**change)


@pytest.mark.parametrize(("change", "address"), [
    ({}, "127.0.0.1"), (dict(island_hmac_key="k"), "0.0.0.0"),
    (dict(allow_unauthenticated=True), "0.0.0.0"),
    (dict(host="0.0.0.0", island_hmac_key="k"), "0.0.0.0"), (dict(host="::1"), "::1")])
def test_who_may_listen_beyond_this_machine(change, address):
    assert config(**change).bind_host == address


@pytest.mark.parametrize(("host", "here"), [
    ("localhost", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False), ("me", False)])
def test_what_is_known_to_stay_on_this_machine(host, here):
    assert is_loopback(host) == here


@pytest.mark.parametrize("change", [FIXED, EXACT | FIXED])
def test_a_fixed_roster_is_all_three_of_it(change):
    assert config(**change).fixed_roster


@pytest.mark.parametrize("change", [dict(max_base_lag=1), dict(quorum=1), dict(grace_ms=1)])
def test_two_of_three_are_no_fixed_roster(change):
    assert not config(**FIXED | change).fixed_roster


def test_the_key_never_shows():
    assert "hunter2" not in repr(config(island_hmac_key="hunter2"))


@pytest.mark.parametrize(("given", "resolved"), [(None, 7), (9, 9)])
def test_final_ack_timeout_follows_the_quorum_timeout(given, resolved):
    run = config(quorum_timeout_s=7, final_ack_timeout_s=given)
    assert run.final_ack_timeout_resolved_s == resolved


# --------------------------------------------------------------------------------- every row
def admitted_ends():
    return [pytest.param(option, value, id=f"{option.name} {value}")
            for option in OPTIONS for value in ends(option.values)[0]]


def refused_ends():
    return [pytest.param(option, value, id=f"{option.name} {value}")
            for option in OPTIONS for value in ends(option.values)[1]]


@pytest.mark.parametrize(("option", "value"), admitted_ends())
def test_a_row_admits_its_ends(option, value):
    option.check(value)


@pytest.mark.parametrize(("option", "value"), refused_ends())
def test_a_row_refuses_what_is_beyond_its_ends(option, value):
    words = refusal(**{option.name: value})
    assert words.startswith(flag(option.name))
    assert ": give " in words


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.default is not None],
                         ids=lambda option: option.name)
def test_only_a_setting_that_may_be_unset_is_none(option):
    assert refusal(**{option.name: None}).startswith(f"{flag(option.name)} None cannot be used")


def test_of_a_config_made_in_python_what_differs_from_its_default_was_given():
    assert config(outer_optimizer="sgd", outer_momentum=0.9).without_effect == ()
    assert config(outer_optimizer="sgd", outer_momentum=0.5).without_effect == (
        ("--outer-momentum", "an --outer-optimizer with momentum"),)


def test_the_first_mistake_of_the_table_is_named():
    assert refusal(pipeline=-1, quorum=0).startswith("--quorum 0 ")


BROKEN = {
    rules.capacities_are_of_learners: dict(quorum_capacity=0.5, learner_capacity=((2, 1.0),)),
    rules.a_file_has_a_place: dict(learner_budget_steps=9),
    rules.the_quorum_can_be_reached: dict(quorum=3),
    rules.counts_can_be_reached: dict(start_learners=3),
    rules.a_fixed_roster_waits_for_everybody: dict(FIXED, late_carry=True),
    rules.the_activation_fits_the_period: dict(outer_optimizer="delayed-nesterov",
                                               dn_activation=0.3),
    rules.an_open_host_needs_a_key: dict(host="0.0.0.0"),
    rules.tls_takes_three_files: dict(tls_cert="c", tls_key="k"),
    rules.comparing_pushes_needs_a_batch: dict(fold="streaming", clip_norm="median"),
    rules.an_exact_fold_is_fixed_for_the_round: dict(EXACT, quorum=1),
    rules.outliers_leave_a_value: dict(robust=1),
    rules.every_step_is_saved_in_the_foreground: dict(
        checkpoint_path="c", checkpoint_every=1, background_checkpoint=True),
    rules.a_budget_run_is_a_beginning: dict(
        checkpoint_path="c", learner_budget_steps=9, resume=True),
    rules.a_checkpoint_goes_on_or_is_replaced: dict(
        checkpoint_path="c", overwrite=True, resume="auto"),
    rules.yeto_holds_nesterov_only: dict(
        checkpoint_path="c", checkpoint_format="yeto-v3", outer_optimizer="sgd"),
    rules.changes_need_new_numbers: dict(
        downlink="q4", checkpoint_path="c", resume=True, renumber=0),
}
"""A configuration that breaks this rule, and no other one."""


def unchecked(**changes) -> Config:
    """A configuration that nobody has looked at."""
    run = object.__new__(Config)
    vars(run).update({"learners": 2, "total_steps": 8, "given": None} | {
        option.name: option.default for option in OPTIONS if option.default is not NO_DEFAULT})
    vars(run).update(changes)
    return run


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_is_what_refuses_a_run_that_breaks_it(rule):
    changes = BROKEN[rule]
    words = refusal(**changes)
    assert {found.__name__: found(unchecked(**changes)) for found in rules.RULES
            if found(unchecked(**changes))} == {rule.__name__: words}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_says_nothing_of_a_run_that_keeps_it(rule):
    for run in (config(), config(**STRICT), config(**EXACT), config(**EXACT | FIXED)):
        assert rule(run) is None
