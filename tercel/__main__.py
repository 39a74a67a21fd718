"""`python -m tercel` is the `tercel` command."""

import sys

from tercel.cli import main

sys.exit(main())
