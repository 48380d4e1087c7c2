"""``python -m stamppruner``."""

import sys

from stamppruner.cli import main

if __name__ == "__main__":
    sys.exit(main())
