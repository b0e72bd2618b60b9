"""Pictures with their headings and legends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from reports.front import Point
from reports.svg import Picture, Pictures, Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Titled(Shown, Protocol):
    @property
    def title(self) -> str: ...


AnyTitled = TypeVar("AnyTitled", bound=Titled)


@dataclass(frozen=True)
class Panel:
    """A picture with its heading, legend and, for a numbered front, the names of the numbers."""

    title: str
    picture: Picture
    notes: tuple[str, ...] = ()
    numbered: tuple[Point, ...] = ()
    unit: str = ""


class Panels:
    def __init__(self) -> None:
        self.pictures = Pictures()

    def drawn(self, data: AnyTitled, draw: Callable[[AnyTitled], Figure], title: str = "") -> Panel:
        """Returns a panel that matplotlib draws at the end."""
        return Panel(title or data.title, self.pictures.add(draw, data), _notes(data))

    def written(self, data: AnyTitled, write: Callable[[AnyTitled], str], title: str = "") -> Panel:
        """Returns a panel whose SVG is written at once."""
        return Panel(title or data.title, self.pictures.write(write, data), _notes(data))


def _notes(data: Titled) -> tuple[str, ...]:
    notes: tuple[str, ...] = getattr(data, "notes", ())
    return notes
