"""The rule book as data: its numbers, and where each rule has its home and is tested.

Reads docs/rules.md, the code, the scenario files and the mutations; must not know what a rule says.

    number       `**3.5** …` in docs/rules.md
    home         the function under a line `# rule 3.5` in the code; one for each rule
    scenarios    files with 3.5 in their `rules:` line
    mutations    those of the catalogue that name 3.5

What only sockets, files or a counter of 64 bits can show has a test in `ELSEWHERE` as well.
"""

from __future__ import annotations

import re
from pathlib import Path

from syncer.core.run import phases
from tests.mutation.catalogue import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "docs" / "rules.md"
NUMBER = re.compile(r"^\*\*(\d+\.\d+)\*\* ", re.MULTILINE)
CITED = re.compile(r"\brule (\d+\.\d+)")
HOME = re.compile(r"^ *# (rule \d+\.\d+(?:, rule \d+\.\d+)*)\n"
                  r" *(?:cdef|cpdef|def)\b[^\n(]*?(\w+)\(", re.MULTILINE)
DOOR, CONNECTIONS = "e2e/test_server_door.py", "e2e/test_server_connections.py"
HELLO, OUTBOX = "unit/test_wire_hello.py", "unit/test_server_outbox.py"
TURNS, READERS = "sim/test_catchups.py", "e2e/test_server_readers.py"
SHORTAGE = "e2e/test_server_shortage.py"
INTRODUCTIONS = "e2e/test_server_introductions.py"
FATES = "unit/test_learner_fates.py"
DOWNLINK, ANCHORS = "e2e/test_downlink.py", "unit/test_server_downlink.py"
RENUMBERING = "checkpoint/test_renumbering.py"
PROMISED = "unit/test_server_promised.py"
CHECKPOINTS, RESUME = "e2e/test_checkpoints.py", "e2e/test_resume.py"
ELSEWHERE = {
    "1.2": ["checkpoint/test_formats.py::test_versions_of_two_cuts_are_refused"],
    "1.3": ["e2e/test_server_reconnect.py::test_learner_0_comes_back_in_the_middle_of_its_inits",
            "e2e/test_server_hostile.py::test_a_bad_init_waits_for_a_new_generation"],
    "1.7": ["unit/test_core_formulas.py::test_time_that_runs_back_is_no_time_passed"],
    "1.8": [f"{RENUMBERING}::test_when_a_file_may_be_behind", f"{RENUMBERING}::test_what_is_added",
            f"{RENUMBERING}::test_no_number_is_ever_given_twice"],
    "1.9": [f"{RENUMBERING}::test_what_was_never_merged_has_a_number_of_the_new_cut"],
    "1.10": [f"{RENUMBERING}::test_no_number_is_ever_given_twice",
             f"{RENUMBERING}::test_a_process_is_known_before_it_answers",
             f"{RENUMBERING}::test_a_start_that_comes_no_further_adds_no_steps",
             f"{RENUMBERING}::"
             "test_where_the_usual_sum_has_no_room_one_for_a_save_that_failed_has"],
    "1.11": [f"{RENUMBERING}::test_an_end_in_order_is_noted_and_no_other_one"],
    "2.2": ["unit/test_core_formulas.py::test_generations_are_remembered_within_a_bound"],
    "2.6": ["unit/test_core_formulas.py::test_step_time_clock_restarts_without_progress"],
    "2.8": ["sim/test_catchups.py::test_a_newest_connection_that_takes_nothing_gives_way"],
    "3.5": [f"{RESUME}::test_late_joiners_after_a_resume"],
    "3.3": [f"{OUTBOX}::test_a_catch_up_ends_also_when_the_queue_never_does",
            f"{OUTBOX}::test_a_fragment_that_was_under_way_before_a_second_catch_up_goes_out_again"],
    "3.10": ["unit/test_server_introductions.py"
             "::test_what_a_learner_holds_counts_by_the_process_that_sent_it",
             f"{INTRODUCTIONS}::test_who_comes_back_is_sent_only_what_has_changed",
             f"{INTRODUCTIONS}::test_a_restarted_server_sends_nothing_that_was_saved"],
    "15.1": [f"{TURNS}::test_a_limit_is_a_limit_and_whoever_waits_is_told_behind_whom",
             f"{TURNS}::test_a_waiting_member_is_sent_nothing_and_then_the_versions_of_that_moment",
             f"{TURNS}::test_the_end_of_the_run_waits_for_no_turn"],
    "15.2": [f"{TURNS}::test_32_joiners_do_not_choke_those_who_train",
             f"{TURNS}::test_many_slow_links_are_served_side_by_side",
             "unit/test_server_group.py::test_what_may_go_is_shared_out_before_any_of_it_goes",
             "unit/test_server_catchups.py"
             "::test_it_halves_while_broadcasts_are_slower_and_never_ends"],
    "15.3": [f"{TURNS}::test_a_dead_link_in_front_gives_its_turn_away"],
    "15.7": [f"{TURNS}::test_who_waits_long_for_a_turn_is_told_again",
             f"{READERS}::test_a_reader_hears_that_it_waits_for_its_turn_and_behind_whom"],
    "16.5": [f"{READERS}::test_a_reader_hears_what_the_run_waits_for_and_who_comes_later_at_once"],
    "15.4": [f"{TURNS}::test_readers_wait_for_whoever_joins"],
    "15.5": [f"{READERS}::test_a_slow_reader_skips_cuts_and_each_is_whole",
             f"{READERS}::test_who_follows_gets_every_cut_and_the_final_one",
             f"{TURNS}::test_who_has_a_cut_when_the_run_ends_is_begun_no_other"],
    "15.6": [f"{READERS}::test_the_final_cut_of_a_large_run_is_waited_for_as_long_as_it_is_taken"],
    "4.4": ["unit/test_core_formulas.py::test_launch_interval"],
    "6.8": ["unit/test_core_formulas.py::test_grace_examples"],
    "7.9": [f"{SHORTAGE}::test_a_merge_without_memory_is_computed_again",
            f"{SHORTAGE}::test_memory_that_never_comes_ends_the_run_with_its_last_cut",
            "sim/test_memory.py::test_memory_that_is_lacking_for_a_broadcast_is_waited_for",
            "sim/test_memory.py::test_memory_for_a_broadcast_is_not_waited_for_without_end",
            "sim/test_memory.py::test_memory_that_is_lacking_for_merges_is_waited_for"],
    "9.6": ["unit/test_core_record.py::test_what_a_merge_left_out_has_no_share_in_the_ledger"],
    "9.4": ["unit/test_core_record.py::test_counters_at_the_end_of_their_range"],
    "10.1": [f"{CHECKPOINTS}::test_a_step_that_cannot_be_written_is_never_seen"],
    "10.3": [f"{CHECKPOINTS}"
             "::test_a_slow_background_write_holds_nothing_up_but_the_next_save"],
    "14.1": [f"{HELLO}::test_authentication_comes_before_everything", f"{DOOR}::test_keys"],
    "14.2": [f"{HELLO}::test_refusal", f"{DOOR}::test_ids_and_sessions"],
    "14.3": [f"{HELLO}::test_profile", f"{DOOR}::test_profiles"],
    "14.4": [f"{HELLO}::test_pinned_contract", f"{HELLO}::test_who_belongs_to_a_run",
             f"{HELLO}::test_who_does_not",
             f"{HELLO}::test_who_says_no_name_means_the_one_that_the_run_has_by_itself",
             f"{DOOR}::test_a_pinned_island_contract"],
    "14.5": [f"{HELLO}::test_every_other_difference_names_both_sides",
             f"{RESUME}::test_a_learner_of_another_session_is_refused_and_nothing_else"],
    "14.6": [f"{RESUME}::test_in_a_strict_run_such_a_learner_ends_it"],
    "14.7": [f"{DOOR}::test_rounds_go_on_while_a_large_hello_is_read",
             f"{DOOR}::test_a_large_hello_makes_a_session_and_equal_ones_share_its_layout"],
    "14.12": [f"{READERS}::test_a_reader_needs_the_key_and_a_recorded_hello_is_none",
              f"{READERS}::test_readers_have_their_number_of_places",
              f"{READERS}::test_a_reader_of_another_run_is_told_both_names"],
    "14.11": [f"{PROMISED}::test_those_that_are_missing_are_named_once",
              f"{PROMISED}::test_nobody_looks_when_all_are_there",
              f"{PROMISED}"
              "::test_a_message_that_grows_is_waited_for_and_one_that_stands_still_is_not",
              f"{CONNECTIONS}::test_a_message_that_waits_for_a_socket_which_never_comes"],
    "14.10": [f"{CONNECTIONS}::test_a_learner_has_at_most_four_connections",
              f"{CONNECTIONS}::test_a_learner_that_comes_from_elsewhere_is_told_of_at_once"],
    "14.9": [f"{DOOR}::test_learners_that_do_not_fit_are_told_to_try_again_later",
             f"{DOOR}::test_a_checkpoint_is_possible_whoever_dials",
             f"{READERS}::test_a_reader_gets_no_socket_that_a_learner_was_promised"],
    "17.1": [f"{INTRODUCTIONS}::test_welcome_is_the_first_thing_that_an_introduced_learner_hears",
             f"{INTRODUCTIONS}::test_a_refused_one_gets_its_error_alone"],
    "17.2": [f"{INTRODUCTIONS}::test_two_addresses_of_one_id_are_named_to_both",
             "unit/test_server_introductions.py::test_a_newer_notice_takes_the_place_of_one_that_waits",
             "unit/test_server_introductions.py::test_who_has_gone_or_cannot_hear_is_told_nothing"],
    "17.3": [f"{INTRODUCTIONS}::test_with_a_key_data_sockets_are_proved",
             f"{INTRODUCTIONS}::test_a_data_socket_from_elsewhere_is_told_of"],
    "17.4": [f"{INTRODUCTIONS}::test_reports_end_the_record_of_the_next_merge",
             "unit/test_server_introductions.py::test_one_report_a_second_is_kept",
             "unit/test_server_introductions.py::test_a_report_goes_with_the_connection_that_made_it"],
    "17.5": [f"{INTRODUCTIONS}::test_names_of_learner_0_go_into_the_checkpoint"],
    "17.6": [f"{INTRODUCTIONS}::test_in_a_strict_run_nothing_overtakes_a_broadcast"],
    "17.7": [f"{HELLO}::test_a_refusal_names_both_runs_as_far_as_they_are_known",
             f"{HELLO}::test_a_hello_of_another_run",
             "e2e/test_server_runs.py::test_two_fleets_with_the_same_ids_on_one_port"],
    "17.8": ["e2e/test_tls.py::test_an_id_comes_with_its_certificate",
             "e2e/test_tls.py::test_data_sockets_come_with_the_certificate_of_their_learner"],
    "18.1": [f"{ANCHORS}::"
             "test_an_anchor_is_the_one_before_and_a_change_towards_the_parameters"],
    "18.2": [f"{DOWNLINK}::test_all_learners_hold_one_anchor_however_it_came"],
    "18.3": [f"{ANCHORS}::test_what_a_change_would_make_infinite_is_whole",
             f"{ANCHORS}::test_without_memory_a_version_is_whole"],
    "18.4": [f"{OUTBOX}::test_a_change_goes_to_who_has_what_it_changes",
             f"{OUTBOX}::test_what_a_peer_keeps_is_changed",
             f"{OUTBOX}::test_who_takes_no_changes_gets_the_same_values_whole",
             f"{DOWNLINK}::test_who_comes_back_goes_on_from_what_is_kept"],
    "18.5": [f"{DOWNLINK}::test_nothing_is_kept_of_another_process",
             f"{DOWNLINK}::test_a_file_says_that_its_versions_are_not_what_was_sent",
             "unit/test_server_introductions.py"
             "::test_what_a_learner_holds_counts_by_the_process_that_sent_it"],
    "14.8": [f"{RESUME}::test_what_no_run_would_take_does_not_end_a_strict_one"],
    "19.1": [f"{FATES}::test_of_two_answers_to_one_pull_nobody_can_tell_the_fates_apart",
             f"{FATES}::test_a_fate_is_of_the_last_answer_alone"],
    "19.2": [f"{FATES}::test_only_a_merge_is_carried_on",
             f"{FATES}::test_a_merge_outlives_its_connection_where_the_next_server_has_it"],
}
"""Rule -> tests that are no scenarios, relative to tests/."""


def numbers() -> list[str]:
    """Every rule, in the order of the book."""
    return NUMBER.findall(BOOK.read_text(encoding="utf-8"))


def homes() -> dict[str, list[str]]:
    """Rule -> the functions that are marked as its home, as `file::function`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "syncer").rglob("*.py*")):
        if path.suffix in (".py", ".pyx"):
            text = path.read_text(encoding="utf-8")
            for marks, function in HOME.findall(text):
                for number in CITED.findall(marks):
                    place = f"{path.relative_to(ROOT / 'syncer')}::{function}"
                    found.setdefault(number, []).append(place)
    return found


def scenarios() -> dict[str, list[str]]:
    """Rule -> the scenario files that are about it."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests" / "scenarios").glob("*.txt")):
        for number in rules_of(path):
            found.setdefault(number, []).append(path.stem)
    return found


def rules_of(path: Path) -> list[str]:
    """What a scenario's `rules:` line names; nothing if it has none."""
    line = re.search(r"^rules: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return line[1].split() if line else []


def mutations() -> dict[str, list[int]]:
    """Rule -> numbers of the mutations that break it, from 1."""
    found: dict[str, list[int]] = {}
    for number, mutation in enumerate(MUTATIONS, 1):
        for rule in mutation.rules.split():
            found.setdefault(rule, []).append(number)
    return found


def table() -> str:
    """Every rule, its home, its tests and its mutations, as Markdown."""
    lines = ["| rule | home, in `syncer/` | scenarios and tests, in `tests/` | mutations |",
             "|---|---|---|---|"]
    home, played, broken = homes(), scenarios(), mutations()
    for number in numbers():
        tests = [f"`{name}`" for name in played.get(number, []) + ELSEWHERE.get(number, [])]
        lines.append(f"| {number} | `{home[number][0]}` | {'<br>'.join(tests)} | "
                     f"{', '.join(map(str, broken[number]))} |")
    return "\n".join(lines) + "\n"


def mutation_table() -> str:
    """The catalogue of mistakes by number, as Markdown."""
    lines = ["| | rules | file | mistake |", "|---:|---|---|---|"]
    lines += [f"| {number} | {m.rules} | `{m.file}` | {m.mistake} |"
              for number, m in enumerate(MUTATIONS, 1)]
    return "\n".join(lines) + "\n"


def phase_table() -> str:
    """The phases of a run and what each does with each event, with a legend."""
    names = phases.phases()
    lines = ["| event | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {event} | " + " | ".join(words) + " |" for event, words in phases.rows().items()]
    lines += ["", "| word | what happens |", "|---|---|"]
    lines += [f"| {word} | {meaning} |" for word, meaning in phases.MEANING.items()]
    return "\n".join(lines) + "\n"
