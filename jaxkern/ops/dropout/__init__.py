"""Dropout, alone and added to a residual."""

from jaxkern.ops.dropout.op import dropout as dropout
from jaxkern.ops.dropout.op import dropout_add as dropout_add
