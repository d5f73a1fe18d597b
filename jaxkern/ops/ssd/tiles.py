"""How heads, channels and chunks of the SSD scan are spread over warpgroups and blocks."""

CHUNK = 128
"""Tokens of a chunk: `cum` is summed inside chunks, and states are saved at their starts."""
STEP = 64
"""Tokens that the forward takes at once."""
SLICE = 64
"""Channels of a warpgroup, the rows of a tensor core's instruction."""
