"""Settings of every test: property tests depend on neither the clock nor chance.

HYPOTHESIS_PROFILE=explore tries new examples instead, many more of them.
"""

import os

from hypothesis import HealthCheck, settings

# A deadline or a "too slow" check would make a loaded machine fail a correct program.
STEADY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("default", derandomize=True, **STEADY)
settings.register_profile("explore", max_examples=5000, **STEADY)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
