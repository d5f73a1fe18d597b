"""The cross-entropy of logits, alone and with the linear layer that gives them."""

from jaxkern.ops.cross_entropy.linear_op import linear_cross_entropy as linear_cross_entropy
from jaxkern.ops.cross_entropy.op import cross_entropy as cross_entropy
