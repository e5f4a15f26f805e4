"""`python -m syncer`: the same as the `syncer` command."""

import sys

from syncer.cli import main

sys.exit(main())
