import importlib
import sys

from bench.program import COMMANDS, RUNS


def main(argv: list[str]) -> int:
    """Runs the command that the first argument names, and ``run`` if it names none."""
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("run", argv)
    if name in RUNS:
        return getattr(importlib.import_module("bench.runs"), name)(rest)
    return importlib.import_module(f"bench.{name}").main(rest)


if __name__ == "__main__":  # processes that this one starts import it again
    sys.exit(main(sys.argv[1:]))
