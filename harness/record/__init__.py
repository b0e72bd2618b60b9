"""Records of what was planned and measured: plans, table schemas, and the store."""
