"""Makes the pictures of this folder, and `expected.bin`: what torchvision makes of them.

Run with torchvision and Pillow installed: `python make.py`. The tests of
`executor/src/data/pictures/` compare with the results to the byte.
"""

from pathlib import Path

import numpy
from PIL import Image
from torchvision.transforms import functional

FOLDER = Path(__file__).parent
SIDE = 24


def picture(height: int, width: int) -> Image.Image:
    """Smooth colours with some noise: a photograph's worst parts."""
    random = numpy.random.default_rng(7)
    y, x = numpy.mgrid[0:height, 0:width]
    waves = [127 + 120 * numpy.sin(x / a + y / b) for a, b in ((5, 9), (11, 4), (3, 17))]
    noise = random.normal(0, 12, (height, width, 3))
    return Image.fromarray(numpy.clip(numpy.stack(waves, 2) + noise, 0, 255).astype(numpy.uint8))


def main() -> None:
    source = picture(43, 61)
    source.save(FOLDER / "colour.png")
    source.convert("L").save(FOLDER / "grey.png")
    source.quantize(16).save(FOLDER / "palette.png")
    source.convert("RGBA").save(FOLDER / "transparent.png")
    source.save(FOLDER / "baseline.jpg", quality=90)
    source.save(FOLDER / "progressive.jpg", quality=90, progressive=True)
    source.convert("L").save(FOLDER / "grey.jpg", quality=90)
    source.convert("CMYK").save(FOLDER / "cmyk.jpg", quality=90)

    centre = functional.center_crop(functional.resize(source, round(SIDE * 256 / 224)), SIDE)
    expected = [
        centre,
        functional.resized_crop(source, 5, 7, 29, 31, [SIDE, SIDE]),
        functional.resized_crop(source, 3, 20, 8, 10, [SIDE, SIDE]),
        functional.resized_crop(source, 0, 0, 43, SIDE, [SIDE, SIDE]),
        functional.adjust_brightness(centre, 1.3),
        functional.adjust_contrast(centre, 0.6),
        functional.adjust_saturation(centre, 1.7),
        functional.adjust_hue(centre, 0.1),
        functional.adjust_hue(centre, -0.3),
        Image.open(FOLDER / "palette.png").convert("RGB"),
        Image.open(FOLDER / "grey.png").convert("RGB"),
        Image.open(FOLDER / "baseline.jpg").convert("RGB"),
        Image.open(FOLDER / "progressive.jpg").convert("RGB"),
        Image.open(FOLDER / "grey.jpg").convert("RGB"),
        Image.open(FOLDER / "cmyk.jpg").convert("RGB"),
    ]
    data = b"".join(numpy.asarray(image).tobytes() for image in expected)
    (FOLDER / "expected.bin").write_bytes(data)


if __name__ == "__main__":
    main()
