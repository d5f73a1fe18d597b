"""The gated delta rule, of Gated DeltaNet and KDA, and one step of it to decode."""

from jaxkern.ops.delta_rule.op import gated_delta_rule as gated_delta_rule
from jaxkern.ops.delta_rule.op import gated_delta_rule_step as gated_delta_rule_step
