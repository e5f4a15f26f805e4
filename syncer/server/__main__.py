"""`python -m syncer.server`. Must not hold any logic."""

import sys

from .command import main

sys.exit(main())
