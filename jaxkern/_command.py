"""Tells in one line that Ctrl-C ended the command line before its first own statement.

The package is imported before ``jaxkern.__main__`` is. In a process that is not the command line
this does nothing.
"""

import sys
from types import TracebackType


def _is_the_command() -> bool:
    program = (getattr(sys, "argv", None) or [""])[0]
    # While python -m jaxkern looks for the module, the program's name is "-m".
    module = ("-m", "jaxkern") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return program.rpartition("/")[2] == "jaxkern" or (program == "-m" and module)


def _tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("jaxkern: stopped (SIGINT)", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, traceback)


if _is_the_command() and sys.excepthook is sys.__excepthook__:
    sys.excepthook = _tell
