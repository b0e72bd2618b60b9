"""Records of what was planned and measured."""
