"""``python -m benchmarks.litgpt``: one run of the benchmark."""

import sys

from benchmarks.litgpt.command import main

sys.exit(main())
