"""Units and bounds that all layers share."""

NS_PER_SECOND = 1_000_000_000
UNLIMITED = 1 << 30  # samples, slices or rounds: more than a run ever has
