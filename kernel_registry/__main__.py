"""Entry point of ``python -m kernel_registry``."""

import sys

from kernel_registry.cli import main

sys.exit(main())
