"""Where each of the numbered scenarios of the round description is tested.

Those of the round logic are files here, named by their number; the others need sockets or files and
are tests of the server or the store. docs/testing.md shows the table; a test checks both.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent
LAST = 63
ADMISSION, HOSTILE = "e2e/test_server_door.py", "e2e/test_server_hostile.py"
CHECKPOINTS = "e2e/test_checkpoints.py"
ELSEWHERE = {
    9: [f"{HOSTILE}::test_one_crime_ends_one_connection"],
    10: [f"{ADMISSION}::test_ids_and_sessions"],
    11: [f"{ADMISSION}::test_a_huge_first_frame_is_refused_from_its_header",
         f"{HOSTILE}::test_declared_sizes_take_no_memory"],
    26: [f"{CHECKPOINTS}::test_late_joiners_after_a_resume"],
    50: [f"{CHECKPOINTS}::test_a_step_that_cannot_be_written_is_never_seen"],
    52: [f"{CHECKPOINTS}::test_a_slow_background_write_holds_nothing_up_but_the_next_save"],
    53: ["checkpoint/test_formats.py::test_versions_of_two_cuts_are_refused"],
    54: [f"{CHECKPOINTS}::test_a_learner_of_another_session_is_refused_and_nothing_else",
         f"{CHECKPOINTS}::test_in_a_strict_run_such_a_learner_ends_it",
         f"{CHECKPOINTS}::test_what_cannot_be_resumed_ends_with_status_4"],
    59: [f"{ADMISSION}::test_keys"],
    60: [f"{ADMISSION}::test_ids_and_sessions", f"{ADMISSION}::test_profiles",
         f"{ADMISSION}::test_a_pinned_island_contract"],
    61: [f"{HOSTILE}::test_at_most_four_payloads_of_a_connection_are_decoded_at_a_time",
         f"{HOSTILE}::test_one_crime_ends_one_connection",
         f"{HOSTILE}::test_a_bad_init_waits_for_a_new_generation"],
    62: ["e2e/test_server_reconnect.py::test_learner_0_comes_back_in_the_middle_of_its_inits"],
    63: [f"{HOSTILE}::test_a_reader_that_stops_is_cut_off_and_slows_nobody"],
}
"""Number -> tests outside of this directory, relative to tests/."""


def files_of(number: int) -> list[str]:
    """Scenario files of a number, such as 36 -> 36a_… and 36b_…"""
    return sorted(path.name for path in HERE.glob("*.txt")
                  if int(re.match(r"\d+", path.name)[0]) == number)


def places(number: int) -> list[str]:
    """Every place that tests a number, relative to tests/."""
    return [f"scenarios/{name}" for name in files_of(number)] + ELSEWHERE.get(number, [])


def table() -> str:
    """The table of docs/testing.md."""
    rows = [f"| {number} | {'<br>'.join(f'`{place}`' for place in places(number))} |"
            for number in range(1, LAST + 1)]
    return "\n".join(["| scenario | tested by, in `tests/` |", "|---|---|", *rows]) + "\n"
