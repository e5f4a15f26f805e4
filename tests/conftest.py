"""Settings of every test: tiers as markers; property tests depend on neither clock nor chance.

A test of tests/NAME/ bears the marker NAME, so `-m unit` or `-m "not e2e"` choose tiers; `slow` is
said by the files that start many processes, fill memory or run a compiler. docs/testing.md tells
what each tier is for. HYPOTHESIS_PROFILE=explore tries new examples, many more of them.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent

# A deadline or a "too slow" check would make a loaded machine fail a correct program.
STEADY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("default", derandomize=True, **STEADY)
settings.register_profile("explore", max_examples=5000, **STEADY)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Every folder of tests is a marker."""
    for folder in sorted(HERE.glob("*/__init__.py")):
        tier = folder.parent.name
        config.addinivalue_line("markers", f"{tier}: the tests of tests/{tier}")
    config.addinivalue_line("markers", "slow: takes seconds: processes, memory or a compiler")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test the marker of its folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(item.path.relative_to(HERE).parts[0])
