"""`python -m temper_lab`, which is how torchrun starts the `temper` command."""

import sys

from temper_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
