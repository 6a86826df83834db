"""``python -m tests.fuzzing``: random programs against eager."""

import sys

from tests.fuzzing.command import main

sys.exit(main())
