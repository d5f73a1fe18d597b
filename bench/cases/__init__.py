"""The one table that describes every op to everything else: see :class:`~bench.cases.case.Case`.

The tests, the bench and the ledger of errors read it; the package does not.
"""

from bench.cases import activations, dropout, linear, losses, norm, optim, scans
from bench.cases.case import Case
from bench.cases.models import MODELS as MODELS

TABLE: tuple[Case, ...] = (
    *norm.CASES,
    *linear.CASES,
    *losses.CASES,
    *activations.CASES,
    *dropout.CASES,
    *scans.CASES,
    *optim.CASES,
)
