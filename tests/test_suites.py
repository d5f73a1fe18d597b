"""The suites: their budgets, and the table of faults that they are worth their time by."""

import json

from tests import conftest, faults

MINUTES = 8
"""What the default suite may take on two cores; one of them is to start and to collect."""


def test_the_default_suite_fits_its_minutes(request):
    seconds = json.loads(conftest.DURATIONS.read_text())
    default = request.config.stash[conftest.DEFAULT]
    assert sum(seconds.get(name, 0) for name in default) < 2 * 60 * (MINUTES - 1)
    assert conftest.over_budget(default, seconds) == []


def test_a_default_test_over_its_budget_is_named():
    seconds = {"slow": conftest.BUDGET + 0.1, "quick": conftest.BUDGET, "exhaustive": 100.0}
    told = conftest.over_budget(["slow", "quick", "new"], seconds)
    assert told == ["slow (5.1 CPU s of 5)"]


def test_faults_can_be_planted():
    """The lines that they change are in the package, once; a change of one of them changes both."""
    table = faults.table()
    assert len(table) >= 30
    for fault in table:
        text = (faults.ROOT / fault.file).read_text()
        assert fault.planted(text) != text
        assert fault.tests
        assert all((faults.ROOT / name).exists() for name in fault.tests)
