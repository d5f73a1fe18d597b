import importlib
import sys

from bench.program import COMMANDS, ELSEWHERE


def main(argv: list[str]) -> int:
    """Runs the command that the first argument names, and ``run`` if it names none."""
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("run", argv)
    module = importlib.import_module(f"bench.{ELSEWHERE.get(name, name)}")
    return getattr(module, name if name in ELSEWHERE else "main")(rest)


if __name__ == "__main__":  # processes that this one starts import it again
    sys.exit(main(sys.argv[1:]))
