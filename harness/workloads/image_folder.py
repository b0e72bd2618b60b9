from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.host.user_code import one_line
from harness.spec.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BYTES = 4 * 2**30
"""Largest size of all scaled images together."""


def image_files(name: str, folder: Path, num_labels: int) -> list[list[Path]]:
    """Returns each class's files, from the subfolder of its name.

    Raises UsageError if one is empty, or for no or too many of them.
    """
    if not folder.is_dir():
        raise UsageError(f"data {name!r}: there is no folder {str(folder)!r}")
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    if not classes or len(classes) > num_labels:
        raise UsageError(
            f"data {name!r} has {len(classes)} folders, but the model has {num_labels} classes;"
            " give one folder of images for each class"
        )
    files = [sorted(path for path in of.iterdir() if not path.is_dir()) for of in classes]
    for path, of_class in zip(classes, files, strict=True):
        if not of_class:
            raise UsageError(f"data {name!r}: folder {path.name!r} has no images; add at least one")
    return files


def read_images(
    name: str, classes: Sequence[Sequence[Path]], size: int
) -> list[NDArray[np.generic]]:
    """Returns each class's images as bytes (images, 3, size, size).

    Raises UsageError for the first file that is no image.
    """
    from PIL import Image

    if (needed := sum(map(len, classes)) * 3 * size**2) > MOST_BYTES:
        raise UsageError(
            f"data {name!r}: {sum(map(len, classes))} images of {size} x {size} pixels take"
            f" {needed / 2**30:.0f} GiB; give at most {MOST_BYTES // (3 * size**2)}"
        )
    arrays: list[NDArray[np.generic]] = []
    for files in classes:
        pixels = np.empty((len(files), 3, size, size), np.uint8)
        for number, file in enumerate(files):
            try:
                with Image.open(file) as image:
                    scaled = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            except Exception as error:  # whatever Pillow's plugins raise for damaged files
                raise UsageError(
                    f"data {name!r}: {file.parent.name}/{file.name} is not a readable image:"
                    f" {one_line(error)}"
                ) from None
            pixels[number] = np.asarray(scaled).transpose(2, 0, 1)
        arrays.append(pixels)
    return arrays
