"""`python -m syncer.server`. Must not hold any logic."""

import sys

from syncer.server.command import main

sys.exit(main())
