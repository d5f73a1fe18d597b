"""Four host devices for the tests of meshes, and the transformation matrix at the end of a run."""

import os
from collections import defaultdict
from pathlib import Path

if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    )
if os.environ.get("JAX_PLATFORMS") == "cpu":  # most of the time is LLVM's, for programs run once
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Kernels that a test lowers are kept from one run to the next, apart from the user's.
os.environ.setdefault(
    "JAXKERN_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "jaxkern")
)
# The interpreter's warpgroups wait for each other on threads of XLA's pool, of one per core.
os.environ.setdefault("NPROC", "8")

import jax
import pytest

ON_GPU = jax.default_backend() == "gpu"


def pytest_configure(config):
    config.addinivalue_line("markers", "compiled: asks a GPU what the interpreter cannot tell")


def pytest_collection_modifyitems(items):
    """Tests of compiled behaviour are GPU tests, and cannot run elsewhere."""
    for item in items:
        if item.get_closest_marker("compiled"):
            item.add_marker(pytest.mark.gpu)
            if not ON_GPU:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_terminal_summary(terminalreporter):
    """Prints op × transformation, from the tests that recorded a ``cell``."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    marks = {"passed": "✓", "failed": "✗", "skipped": "–"}
    for outcome, mark in marks.items():
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", []):
                if name == "cell":
                    row, column = value
                    cells[column][row] = mark
    if not cells:
        return
    terminalreporter.write_sep("-", "transformations (✓ passed, ✗ failed, – not here)")
    columns = sorted(cells)
    rows = sorted({row for column in columns for row in cells[column]})
    width = max(len(row) for row in rows)
    terminalreporter.write_line(" " * width + "  " + "  ".join(columns))
    for row in rows:
        line = "  ".join(cells[c].get(row, " ").center(len(c)) for c in columns)
        terminalreporter.write_line(f"{row:{width}}  {line}")
