"""Mixed precision by levels, and loss scales of several kinds."""
