"""`python -m elasticgang` is the command line."""

import sys

from elasticgang.launch.cli import main

sys.exit(main())
