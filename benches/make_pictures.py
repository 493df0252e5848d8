"""Makes a folder of pictures that a model can learn, in ImageNet's layout.

    python benches/make_pictures.py FOLDER [--train 2000] [--val 400] [--classes 10] [--side 400]

Each class is a shape in a colour, at a random place and size, on noise. The files are JPEG, as long
as `--side` on the longer side. Needs NumPy and Pillow. The same arguments give the same files.
"""

import argparse
import colorsys
from pathlib import Path

import numpy
from PIL import Image

SHAPES = ("disc", "square", "ring", "cross", "stripes")


def mask(shape: str, y: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    """Where a shape of size 1 around the origin is."""
    distance = numpy.hypot(x, y)
    return {
        "disc": distance < 1,
        "square": numpy.maximum(abs(x), abs(y)) < 0.9,
        "ring": (distance < 1) & (distance > 0.6),
        "cross": (numpy.minimum(abs(x), abs(y)) < 0.3) & (numpy.maximum(abs(x), abs(y)) < 1),
        "stripes": (numpy.sin(8 * (x + y)) > 0) & (distance < 1.2),
    }[shape]


def picture(random: numpy.random.Generator, label: int, classes: int, side: int) -> Image.Image:
    """One picture of a class."""
    height, width = random.integers(side * 2 // 3, side + 1), side
    if random.random() < 0.5:
        height, width = width, height
    y, x = numpy.mgrid[0:height, 0:width]
    size = random.uniform(0.2, 0.4) * min(height, width)
    center = random.uniform(0.35, 0.65, 2) * (height, width)
    inside = mask(SHAPES[label % len(SHAPES)], (y - center[0]) / size, (x - center[1]) / size)
    # Neighbouring hues would be confused with each other; random grey backgrounds are not.
    hue = (label // len(SHAPES) * len(SHAPES) + 0.5 * (label % 2)) / classes
    color = 255 * numpy.array(colorsys.hsv_to_rgb(hue % 1, 0.8, 0.9))
    ground = random.uniform(40, 215) + 30 * numpy.sin(x / 37 + random.uniform(0, 6)) * numpy.cos(y / 29)
    values = numpy.where(inside[..., None], color, ground[..., None]) + random.normal(0, 14, (height, width, 1))
    return Image.fromarray(numpy.clip(values, 0, 255).astype(numpy.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("train", 2000), ("val", 400), ("classes", 10), ("side", 400), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    for part, (split, count) in enumerate((("train", arguments.train), ("val", arguments.val))):
        for number in range(count):
            label = number % arguments.classes
            folder = arguments.folder / split / f"class_{label:03}"
            folder.mkdir(parents=True, exist_ok=True)
            random = numpy.random.default_rng([arguments.seed, part, number])
            picture(random, label, arguments.classes, arguments.side).save(folder / f"{number:06}.jpg", quality=90)


if __name__ == "__main__":
    main()
