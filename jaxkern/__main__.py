"""`jaxkern` and `python -m jaxkern`."""

import sys

from jaxkern.lm.cli import main

if __name__ == "__main__":
    sys.exit(main())
