"""The colours of a report; an item has the same colour in every picture.

Kinds of work and categories of memory use the palette of Okabe and Ito, "Color Universal Design" (2008,
https://jfly.uni-koeln.de/color/), which is safe for colour-vision deficiencies. Stages are ordered and use cividis,
whose lightness increases uniformly (Nuñez, Anderton and Renslow, PLoS ONE 13(7), 2018; the five anchors are those of
the R package viridisLite). It knows no picture.
"""

from __future__ import annotations

__all__ = ["BLUE", "ORANGE", "PAINT", "SKY", "VERMILION", "stage_colour", "text_on"]

SKY, BLUE, GREEN, ORANGE = "#56b4e9", "#0072b2", "#009e73", "#e69f00"
PURPLE, YELLOW, VERMILION = "#cc79a7", "#f0e442", "#d55e00"

PAINT = {
    # Tasks and their memory: forward and saved activations, backward and gradients, weights.
    "forward": SKY,
    "activations": SKY,
    "backward": BLUE,
    "gradients": BLUE,
    "weights": GREEN,
    "parameters": GREEN,
    "communication": ORANGE,
    "buffers": ORANGE,
    "update": PURPLE,
    "optimizer": PURPLE,
    "workspace": YELLOW,
    "framework": "#8b929c",
}
"""Colours by CSS class, on a light page and on a dark one."""

_CIVIDIS = ((0x00, 0x20, 0x4D), (0x41, 0x4D, 0x6B), (0x7C, 0x7B, 0x78), (0xBC, 0xAF, 0x6F), (0xFF, 0xEA, 0x46))


def stage_colour(index: int, count: int) -> str:
    """The colour of a stage out of ``count``.

    >>> stage_colour(0, 3), stage_colour(2, 3), stage_colour(0, 1)
    ('#00204d', '#ffea46', '#7c7b78')
    """
    place = (index / (count - 1) if count > 1 else 0.5) * (len(_CIVIDIS) - 1)
    lower = min(int(place), len(_CIVIDIS) - 2)
    mix = [
        round(one + (other - one) * (place - lower))
        for one, other in zip(_CIVIDIS[lower], _CIVIDIS[lower + 1], strict=True)
    ]
    return "#" + "".join(f"{part:02x}" for part in mix)


def text_on(colour: str) -> str:
    """Black or white, whichever has more contrast with ``colour`` by the formula of WCAG 2.2.

    >>> text_on("#ffea46"), text_on("#00204d")
    ('#000', '#fff')
    """
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#fff"
