"""The one table that describes every op to everything else: see :class:`~jaxkern.cases.case.Case`.

The tests, the bench, the ledger of errors and ``jaxkern doctor`` read it; no op does.
"""

from jaxkern.cases import activations, dropout, linear, losses, norm, optim, scans
from jaxkern.cases.case import Case
from jaxkern.cases.models import MODELS as MODELS

TABLE: tuple[Case, ...] = (
    *norm.CASES,
    *linear.CASES,
    *losses.CASES,
    *activations.CASES,
    *dropout.CASES,
    *scans.CASES,
    *optim.CASES,
)
