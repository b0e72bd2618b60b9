"""bench report."""
def report() -> None:
    """Writes the report."""
