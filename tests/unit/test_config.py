"""Rules of the configuration and its profile hash, against the published golden values."""

import dataclasses
import math

import pytest

from syncer.config import Config, is_loopback, semantic_profile_hash
from syncer.errors import ConfigError

PROFILE = dict(
    learners=2, quorum=1, grace_ms=1000, grace_gamma=0.8, grace_tau=2.0, pipeline=2,
    min_round_interval_ms=0, sync_interval_steps=24.0, heloco=True, quorum_timeout_s=900,
    final_ack_timeout_s=900, total_steps=8, outer_lr=0.7, outer_momentum=0.9, max_base_lag=None,
    equal_weights=False, require_binding=False)

EXACT = dict(fold="exact", learner_weight="equal", delta_correction="none", quorum=2)
FIXED = dict(max_base_lag=0, quorum=2, grace_ms=0)


def config(**changes) -> Config:
    return Config(**{"learners": 2, "total_steps": 8, **changes})


def test_profile_hash_of_defaults_is_the_published_one():
    digest = semantic_profile_hash(**PROFILE)
    assert digest.hex() == "55e86bece77c9d93a4845fd0ccc74e25aa1afe66f4c308bb0faf897e694fe747"


def test_profile_hash_with_every_optional_part_is_the_published_one():
    digest = semantic_profile_hash(**PROFILE | dict(
        quorum=2, grace_ms=0, heloco=False, max_base_lag=0, equal_weights=True,
        require_binding=True, checkpoint=True, checkpoint_every=1, resume=True, mark_final=True))
    assert digest.hex() == "b904a25c417a24deef77b8526c4e982a13a35c65d331a4cafb74e579b584d4b7"


def test_the_published_hash_from_a_configuration():
    run = config(quorum=2, grace_ms=0, delta_correction="none", max_base_lag=0,
                 learner_weight="equal", require_profile_binding=True, checkpoint_path="c",
                 checkpoint_every=1, resume=True, mark_final_checkpoint=True)
    assert run.profile_hash.hex() == (
        "b904a25c417a24deef77b8526c4e982a13a35c65d331a4cafb74e579b584d4b7")
    fresh = dataclasses.replace(run, resume=False)
    assert fresh.profile_hash != run.profile_hash
    assert fresh.profile_hash == fresh.saved_profile_hash == run.saved_profile_hash


def test_how_a_checkpoint_is_written_leaves_the_hash():
    plain = config(checkpoint_path="c")
    for change in (dict(checkpoint_path="d"), dict(background_checkpoint=True),
                   dict(checkpoint_format="yeto-v3"), dict(checkpoint_keep=3),
                   dict(checkpoint_retries=3), dict(checkpoint_direct=True)):
        assert config(**dict(checkpoint_path="c") | change).profile_hash == plain.profile_hash
    assert plain.profile_hash != config().profile_hash
    assert plain.profile_hash != config(checkpoint_path="c", checkpoint_every=2).profile_hash


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
    (dict(dn_period=2), "--dn-period has no effect without --outer-optimizer delayed-nesterov"),
    (dict(delta_correction="none", heloco_kappa=1.0), "--heloco-kappa has no effect without"),
    (dict(outer_optimizer="sgd", outer_momentum=0.5), "--outer-momentum has no effect without"),
    (dict(carry_answers_round=True), "--carry-answers-round has no effect without --late-carry"),
    (dict(soft_deadline_s=1.0), "--soft-deadline-s has no effect without --quorum-capacity"),
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
    (dict(checkpoint_keep=1), "--checkpoint-keep has no effect without --c"),
    (dict(checkpoint_format="yeto-v3"), "--checkpoint-format has no effect without --c"),
    (dict(checkpoint_path="c", checkpoint_every=1, background_checkpoint=True),
     "--checkpoint-every 1"),
    (dict(checkpoint_path="c", checkpoint_format="yeto-v3", outer_optimizer="sgd"),
     "--checkpoint-format yeto-v3"),
    (dict(checkpoint_path="c", learner_budget_steps=0), "--learner-budget-steps 0"),
    (dict(learner_budget_steps=9), "--learner-budget-steps has no effect without --c"),
    (dict(checkpoint_path="c", learner_budget_steps=9, resume=True),
     "--learner-budget-steps cannot be used with --resume"),
    (dict(checkpoint_path="c", learner_budget_steps=9, mark_final_checkpoint=True),
     "--learner-budget-steps cannot be used with --mark-final-checkpoint"),
    (dict(no_verify=True), "--no-verify has no effect without --resume"),
    (dict(expected_island_contract=b"x"), "--expected-island-contract has 1 bytes"),
    (dict(host="0.0.0.0"), "--host 0.0.0.0"),
    (dict(host="example.org"), "--host example.org"),
])
def test_unusable_values_are_refused_by_name(change, words):
    with pytest.raises(ConfigError) as refusal:
        config(**change)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_default_config_has_the_published_hash():
    assert config().profile_hash == semantic_profile_hash(**PROFILE)


def test_who_may_listen_beyond_this_machine():
    assert config().bind_host == "127.0.0.1"
    assert config(island_hmac_key="k").bind_host == "0.0.0.0"
    assert config(allow_unauthenticated=True).bind_host == "0.0.0.0"
    assert config(host="0.0.0.0", island_hmac_key="k").bind_host == "0.0.0.0"
    assert config(host="::1").bind_host == "::1"
    assert [is_loopback(h) for h in ("localhost", "127.9.9.9", "::1", "10.0.0.1", "me")] == [
        True, True, True, False, False]


def test_fixed_roster_needs_all_three():
    assert config(**FIXED).fixed_roster
    assert config(**EXACT).fold == "exact"
    for change in (dict(max_base_lag=1), dict(quorum=1), dict(grace_ms=1)):
        assert not config(**FIXED | change).fixed_roster


def test_the_key_never_shows():
    assert "hunter2" not in repr(config(island_hmac_key="hunter2"))


def test_final_ack_timeout_follows_the_quorum_timeout():
    assert config(quorum_timeout_s=7).final_ack_timeout_resolved_s == 7
    assert config(quorum_timeout_s=7, final_ack_timeout_s=9).final_ack_timeout_resolved_s == 9
