"""`jaxkern` and `python -m jaxkern`."""

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit code unless a signal ended it.

    After a signal the process ends here: threads that compile cannot be interrupted, and the
    interpreter would wait for them.
    """
    try:
        from jaxkern.lm import cli

        code = cli.main(argv)
    except KeyboardInterrupt:  # before a command has begun
        print("jaxkern: stopped (SIGINT)", file=sys.stderr, flush=True)
        code = 130
    if code > 128:
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
