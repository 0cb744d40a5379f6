"""The elements of an SVG image: rectangles, lines, text, and the patterns for stale and idle.

Images are built as element trees, which escape all text.
"""

from __future__ import annotations

from typing import TypeAlias
from xml.etree import ElementTree

from digenrl.telemetry.styles import LEGEND_ORDER, WorkStyle

Element: TypeAlias = ElementTree.Element

INK = "#2f3640"
FAINT_INK = "#6b7480"
GRID = "#dfe3e8"
IDLE_FILL = "url(#digenrl-idle)"
ELSEWHERE_FILL = "#fdf0dc"
_FONT = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
# Mean width of a character relative to the font size; an overestimate, as the reader's font is unknown.
_CHARACTER_WIDTH = 0.6


def new_image(width: float, title: str) -> Element:
    """An image with a title for screen readers, the patterns, and a white background."""
    image = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": f"{width:g}",
            "font-family": _FONT,
            "role": "img",
            "style": "max-width: 100%; height: auto",
        },
    )
    ElementTree.SubElement(image, "title").text = printable(title)
    ElementTree.SubElement(image, "rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
    _add_patterns(image)
    return image


def _add_patterns(image: Element) -> None:
    """Dots for idle time, and stripes in the color of each kind of stale work."""
    defs = ElementTree.SubElement(image, "defs")
    size = {"patternUnits": "userSpaceOnUse", "width": "6", "height": "6"}
    dots = ElementTree.SubElement(defs, "pattern", {"id": "digenrl-idle", **size})
    ElementTree.SubElement(dots, "rect", {"width": "6", "height": "6", "fill": "#f5f6f8"})
    ElementTree.SubElement(dots, "circle", {"cx": "3", "cy": "3", "r": "0.9", "fill": "#aeb7c2"})
    for style in LEGEND_ORDER:
        if style.stale:
            ids = {"id": _pattern_id(style), **size, "patternTransform": "rotate(45)"}
            stripes = ElementTree.SubElement(defs, "pattern", ids)
            ElementTree.SubElement(stripes, "rect", {"width": "6", "height": "6", "fill": style.fill})
            ElementTree.SubElement(stripes, "rect", {"width": "2", "height": "6", "fill": "#ffffff"})


def layer(image: Element) -> Element:
    """An empty group in front of everything drawn so far."""
    return ElementTree.SubElement(image, "g")


def fill_of(style: WorkStyle) -> str:
    """The color of a kind of work, or its stripes if it is stale."""
    return f"url(#{_pattern_id(style)})" if style.stale else style.fill


def rect(parent: Element, x: float, y: float, width: float, height: float, fill: str, kind: str) -> Element:
    """A rectangle; `kind` becomes its class."""
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}"}
    return ElementTree.SubElement(parent, "rect", {"class": kind, **place, "fill": fill})


def line(
    parent: Element, x1: float, y1: float, x2: float, y2: float, color: str, width: float, dash: str = ""
) -> Element:
    ends = {"x1": f"{x1:.2f}", "y1": f"{y1:.2f}", "x2": f"{x2:.2f}", "y2": f"{y2:.2f}"}
    drawn = ElementTree.SubElement(parent, "line", {**ends, "stroke": color, "stroke-width": f"{width:g}"})
    if dash:
        drawn.set("stroke-dasharray", dash)
    return drawn


def text(
    parent: Element,
    x: float,
    baseline: float,
    content: str,
    *,
    size: float,
    fill: str = INK,
    anchor: str = "start",
    weight: str = "",
    halo: str = "",
) -> Element:
    """A line of text; `halo` is a color around the letters that keeps them readable on stripes.

    It ignores the pointer, so that the tooltip of the block below it is shown.
    """
    place = {"x": f"{x:.2f}", "y": f"{baseline:.2f}", "font-size": f"{size:g}", "fill": fill}
    element = ElementTree.SubElement(parent, "text", {**place, "text-anchor": anchor, "pointer-events": "none"})
    if weight:
        element.set("font-weight", weight)
    if halo:
        element.attrib |= {
            "stroke": halo,
            "stroke-width": "3",
            "stroke-linejoin": "round",
            "paint-order": "stroke",
        }
    element.text = printable(content)
    return element


def text_width(content: str, size: float) -> float:
    """The approximate width of a line of text in pixels."""
    return _CHARACTER_WIDTH * size * len(content)


def printable(content: str) -> str:
    """The text with control characters replaced, which XML does not allow."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in content)


def _pattern_id(style: WorkStyle) -> str:
    return f"digenrl-stale-{style.letter}"
