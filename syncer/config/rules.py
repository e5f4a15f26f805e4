"""What values may not be together: each function is one rule, and says how it is broken, or None.

A setting without effect breaks none of them. Must not look at one value alone: what a flag may be
stands in its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from syncer.config.options import flag, is_loopback
from syncer.ranges import activation_fits

if TYPE_CHECKING:
    from syncer.config.table import Config

Rule = Callable[["Config"], str | None]


def capacities_are_of_learners(config: Config) -> str | None:
    if config.quorum_capacity is None:
        return None
    seen = set()
    for learner, _ in config.learner_capacity:
        if not 0 <= learner < config.learners or learner in seen:
            return (f"--learner-capacity names learner {learner}, which is "
                    f"{'named twice' if learner in seen else 'not in this run'}: give each id from "
                    f"0 to {config.learners - 1} at most once")
        seen.add(learner)
    return None


def a_file_has_a_place(config: Config) -> str | None:
    """Whoever asks for a file means to have it; any other setting without effect is only said."""
    for option in config.rows():
        need = option.lacks(config)
        if need is not None and need.refused:
            return f"{flag(option.name)} has no effect without {need}: give both or neither"
    return None


def the_quorum_can_be_reached(config: Config) -> str | None:
    if config.quorum_capacity is None and config.quorum > config.learners:
        return (f"--quorum {config.quorum} can never be reached by --learners {config.learners}: "
                f"give a quorum between 1 and {config.learners}")
    return None


def counts_can_be_reached(config: Config) -> str | None:
    by_capacity = config.quorum_capacity is not None
    for name, count in (("start_learners", config.start_learners),
                        ("q_min", config.q_min if by_capacity else None)):
        if count is not None and count > config.learners:
            return f"{flag(name)} {count} can never be reached by --learners {config.learners}"
    return None


def a_fixed_roster_waits_for_everybody(config: Config) -> str | None:
    if config.fixed_roster:
        for name, partial in (
            ("--late-carry", config.late_carry),
            ("--quorum-capacity", config.quorum_capacity is not None),
            ("--start-learners", (config.start_learners or config.learners) < config.learners),
        ):
            if partial:
                return (f"{name} cannot be used with a fixed roster (--max-base-lag 0, --quorum "
                        f"{config.quorum}, --grace-ms 0): every round needs every learner")
    return None


def the_activation_fits_the_period(config: Config) -> str | None:
    if (config.outer_optimizer == "delayed-nesterov"
            and not activation_fits(config.dn_activation, config.dn_period)):
        return (f"--dn-activation {config.dn_activation} is too large for --dn-period "
                f"{config.dn_period}: give at most 1/{config.dn_period}")
    return None


def an_open_host_needs_a_key(config: Config) -> str | None:
    if (config.host is not None and not is_loopback(config.host)
            and not config.is_guarded and not config.allow_unauthenticated):
        return (f"--host {config.host} lets anybody who reaches it join the run: set a key with "
                "SYNCER_HMAC_KEY, give a certificate with --tls-cert, say --allow-unauthenticated, "
                "or listen on 127.0.0.1")
    return None


def tls_takes_three_files(config: Config) -> str | None:
    files = {"--tls-cert": config.tls_cert, "--tls-key": config.tls_key,
             "--tls-client-ca": config.tls_client_ca}
    missing = [name for name, file in files.items() if not file]
    given = [name for name, file in files.items() if file]
    if config.tls_learner_names:
        given.append("--tls-learner-names")
    if given and missing:
        return (f"{given[0]} needs {' and '.join(missing)} as well: both sides of TLS show a "
                "certificate here")
    return None


def comparing_pushes_needs_a_batch(config: Config) -> str | None:
    if config.fold != "batch" and (config.robust is not None or config.clip_norm == "median"):
        name = "--robust" if config.robust is not None else "--clip-norm median"
        return (f"{name} compares all pushes of a round, and --fold {config.fold} keeps none of "
                "them: use --fold batch")
    return None


def an_exact_fold_is_fixed_for_the_round(config: Config) -> str | None:
    if config.fold == "exact":
        for text, refused in (
            ("--learner-weight equal", config.learner_weight != "equal"),
            ("--delta-correction none", config.delta_correction != "none"),
            ("no --late-carry", config.late_carry),
            ("no --quorum-capacity", config.quorum_capacity is not None),
            (f"--quorum {config.learners}", config.quorum != config.learners),
        ):
            if refused:
                return (f"--fold exact needs {text}: its order and weights are fixed for the whole "
                        "round")
    return None


def outliers_leave_a_value(config: Config) -> str | None:
    if config.robust is None:
        return None
    outliers = 1 if config.robust == "median" else config.robust
    if config.least_pushes < config.least_values:
        return (f"--robust without {outliers} outlier{'s' * (outliers > 1)} needs at least "
                f"{config.least_values} pushes in every round, and a round may close with "
                f"{config.least_pushes}: raise "
                f"{'--quorum' if config.quorum_capacity is None else '--q-min'}")
    return None


def every_step_is_saved_in_the_foreground(config: Config) -> str | None:
    if config.background_checkpoint and config.checkpoint_every < 2:
        return ("--background-checkpoint cannot be used with --checkpoint-every "
                f"{config.checkpoint_every}: a checkpoint of every step must be durable before the "
                "step is seen; give --checkpoint-every 2 or more")
    return None


def a_budget_run_is_a_beginning(config: Config) -> str | None:
    if config.learner_budget_steps is not None:
        for name, refused in (("--resume", config.resume),
                              ("--mark-final-checkpoint", config.mark_final_checkpoint)):
            if refused:
                return (f"--learner-budget-steps cannot be used with {name}: the checkpoint of a "
                        "budget run is the beginning of another one, which resumes it without a "
                        "budget")
    return None


def a_checkpoint_goes_on_or_is_replaced(config: Config) -> str | None:
    if config.overwrite and config.resume:
        return ("--overwrite cannot be used with --resume: one begins anew in the place of the "
                "checkpoint, the other goes on from it")
    return None


def yeto_holds_nesterov_only(config: Config) -> str | None:
    if (config.checkpoint_path is not None and config.checkpoint_format == "yeto-v3"
            and config.outer_optimizer != "nesterov"):
        return ("--checkpoint-format yeto-v3 cannot hold the state of --outer-optimizer "
                f"{config.outer_optimizer}: use --checkpoint-format safetensors")
    return None


def changes_need_new_numbers(config: Config) -> str | None:
    """A learner that has such a version would find other bytes under its number after a resume."""
    if config.downlink == "whole" or config.checkpoint_path is None:
        return None
    if config.checkpoint_format == "yeto-v3":
        return ("--downlink q4 needs steps that a resume can raise, which --checkpoint-format "
                "yeto-v3 has no place for: use --checkpoint-format safetensors")
    if config.renumber == 0:
        return ("--downlink q4 needs steps that a resume can raise: leave --renumber 0 out, or go "
                "on with --downlink whole")
    return None


RULES: tuple[Rule, ...] = (
    capacities_are_of_learners, a_file_has_a_place, the_quorum_can_be_reached,
    counts_can_be_reached, a_fixed_roster_waits_for_everybody, the_activation_fits_the_period,
    an_open_host_needs_a_key, tls_takes_three_files, comparing_pushes_needs_a_batch,
    an_exact_fold_is_fixed_for_the_round, outliers_leave_a_value,
    every_step_is_saved_in_the_foreground, a_budget_run_is_a_beginning,
    a_checkpoint_goes_on_or_is_replaced, yeto_holds_nesterov_only,
    changes_need_new_numbers,
)
"""In the order they are looked at: the first that is broken is what a refusal says."""
