"""Where the weights are."""

import os

WEIGHTS = os.environ.get("BETA_WEIGHTS", "example/beta")
