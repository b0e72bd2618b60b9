"""Links as an axis: nodes that are network namespaces of this machine, real ranks in them, and
shaped links between them."""
