import importlib
import sys

from bench.program import COMMANDS, RUNS


def main(argv: list[str]) -> int:
    """Runs the command that the first argument names, and ``run`` if it names none."""
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("run", argv)
    module, function = ("runs", name) if name in RUNS else (name, "main")
    return getattr(importlib.import_module(f"bench.{module}"), function)(rest)


if __name__ == "__main__":  # processes that this one starts import it again
    sys.exit(main(sys.argv[1:]))
