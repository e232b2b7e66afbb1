"""`python -m quantflow`: the command line, where the console script is not installed."""

import sys

from quantflow.stages.cli import main

sys.exit(main())
