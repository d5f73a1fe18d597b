"""Four host devices for the tests of meshes, which tests run here, and what they may take."""

import dataclasses
import fcntl
import functools
import gc
import importlib.util
import inspect
import json
import os
import signal
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    )
if os.environ.get("JAX_PLATFORMS") == "cpu":  # most of the time is LLVM's, for programs run once
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
else:
    # On a GPU: what is not timed need not be tuned, and memory is for whichever process needs it.
    os.environ["XLA_FLAGS"] += (
        " --xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1"
    )
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Kernels and programs are kept from one run to the next, apart from the user's.
os.environ.setdefault(
    "JAXKERN_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "jaxkern")
)
# The interpreter's warpgroups wait for each other on threads of XLA's pool, of one per core.
os.environ.setdefault("NPROC", "8")

import jax
import numpy as np
import pytest
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory

from jaxkern.core import cache, target

ON_GPU = jax.default_backend() == "gpu"
if (programs := cache.programs()) is not None:
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if ON_GPU else 0.1)


def take_numpy_arrays():
    """Lets Pallas's interpreter of GPU kernels call Python with NumPy arrays in this process.

    Each access of an interpreted kernel to memory is a call from the CPU's program into Python,
    which JAX hands its own arrays. An index into one, or its value, is then a program of its own,
    and each argument a transfer: more than half of what interpreting takes.
    """
    of_jax, to_int = callbacks.io_callback_impl, shared_memory._to_int

    def call(*args, callback, **options):
        of = callback.callback_func
        if not getattr(of, "func", of).__module__.startswith("jax._src.pallas."):
            return of_jax(*args, callback=callback, **options)
        # A copy, as XLA takes the memory of an argument back when the call has returned.
        return jax.tree.map(np.asarray, callback(*map(np.array, args)))

    callbacks.io_callback_impl = call
    shared_memory._to_int = lambda x: x.item() if isinstance(x, np.ndarray) else to_int(x)


if not ON_GPU:
    take_numpy_arrays()

_MAPS, _MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
"""A process's mappings of memory, and how many Linux lets it have."""

DEFAULT = pytest.StashKey[list[str]]()
"""The names of the default suite's tests, of the files that were collected."""

_STARTED = pytest.StashKey[float]()
"""CPU seconds at the start of a test's phase."""

_LONG = ("test_lm_model", "test_notebooks", "test_nn_blocks")
"""Files whose tests take longest on a GPU."""


BUDGET = 5.0
"""CPU seconds that a test of the default suite may take; one that takes more is ``exhaustive``."""

DURATIONS = Path(__file__).parent.parent / ".test_durations"
"""CPU seconds of each test, as pytest-split stores them: ``pytest --store-durations -m ""``."""


def pytest_addoption(parser):
    parser.addoption(
        "--without-tma",
        action="store_true",
        help="run the kernels of GPUs that have no TMA and no clusters, on one that has",
    )


def pytest_configure(config):
    if config.option.without_tma:
        describe = target.describe
        without = lambda gpu: gpu and dataclasses.replace(gpu, tma=False)
        target.describe = lambda device: without(describe(device))
    config.addinivalue_line("markers", "compiled: asks a GPU what the interpreter cannot tell")
    config.addinivalue_line("markers", "needs(*packages): cannot run where one is missing")
    config.addinivalue_line("markers", "large: needs a good part of a GPU's memory")
    # A job in the background may ignore Ctrl-C; so would the commands that tests start and stop.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if ON_GPU and hasattr(config.option, "maxschedchunk"):  # pytest-xdist's
        config.option.maxschedchunk = 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Without clusters, kernels that take them say so: nothing is left to test."""
    try:
        return (yield)
    except NotImplementedError as error:
        if item.config.option.without_tma and "take clusters of blocks" in str(error):
            pytest.skip("rows that take clusters of blocks")
        raise


def _cpu_seconds():
    """CPU seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    item.stash[_STARTED] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """The duration of a phase is its CPU seconds, which a busy machine does not lengthen."""
    report = yield
    now = _cpu_seconds()
    report.duration = round(now - item.stash[_STARTED], 2)
    item.stash[_STARTED] = now
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselects what cannot run here: a skipped test is one that should have run."""
    for item in items:
        if item.get_closest_marker("compiled"):
            item.add_marker(pytest.mark.gpu)
        if group := _group(item.module):
            item.add_marker(group)
    impossible = [item for item in items if not _runs_here(item)]
    items[:] = [item for item in items if _runs_here(item)]
    config.hook.pytest_deselected(items=impossible)
    config.stash[DEFAULT] = [i.nodeid for i in items if not i.get_closest_marker("exhaustive")]
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    slow = over_budget(config.stash[DEFAULT], seconds)
    if slow and not hasattr(config, "workerinput"):  # a process of pytest-xdist could not say it
        raise pytest.UsageError("mark as exhaustive, or make shorter: " + ", ".join(slow))
    if ON_GPU:
        items[:] = _spread(items)


def over_budget(names, seconds):
    """Lists the default tests that take more than :data:`BUDGET`, with what they take."""
    slow = {name: seconds[name] for name in names if seconds.get(name, 0) > BUDGET}
    return [f"{name} ({taken:.1f} CPU s of {BUDGET:g})" for name, taken in slow.items()]


@functools.cache
def _group(module):
    """The mark of the tests of a part that is not the kernels, by what their file imports."""
    if module.__name__.endswith("test_notebooks"):
        return "notebooks"
    values = list(vars(module).values())
    modules = [v.__name__ for v in values if inspect.ismodule(v)]
    if any(name.startswith("bench.") and not name.startswith("bench.cases") for name in modules):
        return "bench"
    names = [v.__name__ if inspect.ismodule(v) else getattr(v, "__module__", "") for v in values]
    return "trainer" if any(f"{name}.".startswith("jaxkern.lm.") for name in names) else None


def _runs_here(item):
    if not ON_GPU and item.get_closest_marker("compiled"):
        return False
    needed = (name for mark in item.iter_markers("needs") for name in mark.args)
    if not all(map(importlib.util.find_spec, needed)):
        return False
    return not any(mark.args[0] for mark in item.iter_markers("skipif"))


def _spread(items):
    """Long tests first, each beside a short one; large ones far apart, as processes share them."""
    large = [i for i in items if i.get_closest_marker("large")]
    long = [i for i in items if i.path.stem in _LONG and i not in large]
    taken = {id(i) for i in (*large, *long)}
    short = [i for i in items if id(i) not in taken]
    apart = max(1, len(short) // (len(large) + 1))
    spread = []
    for n, item in enumerate(short):
        spread += [*([long.pop(0)] if long else []), item]
        spread += [large.pop(0)] if large and n % apart == apart // 2 else []
    return [*spread, *long, *large]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Frees the programs of earlier tests before the process has no room for another.

    The code of a CPU's program takes three mappings, and XLA crashes where Linux gives none.
    """
    if not _MAPS.exists() or not _MOST_MAPS.exists():
        return
    if _MAPS.read_text().count("\n") > int(_MOST_MAPS.read_text()) // 3:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _one_or_two_large_tests_at_a_time(request):
    if not (ON_GPU and request.node.get_closest_marker("large")):
        yield
        return
    slots = 2 if "H200" in jax.local_devices()[0].device_kind else 1  # of 80 GB and more each
    slot = zlib.crc32(request.node.nodeid.encode()) % slots
    with (Path(tempfile.gettempdir()) / f"jaxkern-{os.getuid()}-{slot}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        gc.collect()


def pytest_terminal_summary(terminalreporter):
    """Prints op × transformation, and the tests that took over twice their budget."""
    _print_matrix(terminalreporter)
    passed = terminalreporter.stats.get("passed", [])
    slow = [r for r in passed if r.duration > 2 * BUDGET and "exhaustive" not in r.keywords]
    if slow and not ON_GPU:
        terminalreporter.write_sep("-", f"over {2 * BUDGET:g} CPU seconds: mark them exhaustive")
        for report in slow:
            terminalreporter.write_line(f"{report.duration:7.1f}  {report.nodeid}")


def _print_matrix(terminalreporter):
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
