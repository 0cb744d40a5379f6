"""`objects`: counts, colors and positions of everyday objects, with what is asked for in a form a reward can read.

`counts`, `colors` and `positions` are its three kinds, each as a set of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from digenrl.prompt_sets.contract import GeneratedPrompt, PromptSet
from digenrl.prompt_sets.grammar import Draw, Grammar, listed, sentence, with_article

NAMES = listed(
    """
    airplane; apple; backpack; ball; banana; bear; bed; bench; bicycle; bird; boat; book; bottle; bowl;
    bus; butterfly; cake; camera; candle; car; carrot; cat; chair; clock; couch; cow; cup; dog; donut;
    duck; elephant; flower; fork; giraffe; guitar; hat; horse; kite; knife; lamp; laptop; lemon; mug;
    orange; parking meter; pencil; pizza; plate; rabbit; sandwich; sheep; shoe; skateboard; snowboard;
    spoon; stop sign; suitcase; surfboard; table; teddy bear; toothbrush; traffic light; train; truck;
    tree; umbrella; vase; violin; watch; zebra
    """
)
OTHER_PLURALS = {
    "bench": "benches",
    "bus": "buses",
    "butterfly": "butterflies",
    "couch": "couches",
    "knife": "knives",
    "sandwich": "sandwiches",
    "sheep": "sheep",
    "toothbrush": "toothbrushes",
    "watch": "watches",
}  # not with -s
COLOR_NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")
NUMBER_WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}
RELATIONS = {"left of": "to the left of", "right of": "to the right of", "above": "above", "below": "below"}
OWN_COLOR = ("banana", "carrot", "lemon", "orange", "stop sign", "zebra")  # not asked for in another one

SETTING = Grammar(
    {
        "shot": listed(
            """
            a photo of; a picture of; a sharp photo of; a studio photo of; a simple drawing of; a painting of;
            a 3D render of; an illustration of; a realistic image of
            """
        ),
        "where": listed(
            """
            -; -; against a plain white background; against a light gray wall; outdoors; in soft
            daylight; on a grassy field; in an empty room; on a sandy beach; in a park; in the snow;
            in a bright studio; under a clear sky; seen from the front; at sunset
            """
        ),
    }
)


def draw_count(draw: Draw) -> GeneratedPrompt:
    """Two to six objects of a kind, or two kinds."""
    if draw.below(3):
        name, count = draw.one(NAMES), 2 + draw.below(5)
        return _prompt(draw, "count", _counted(name, count), [_object(name, count)])
    names = draw.different(NAMES, 2)
    counts = [1 + draw.below(4), 2 + draw.below(3)]
    phrase = " and ".join(_counted(name, count) for name, count in zip(names, counts, strict=True))
    return _prompt(draw, "count", phrase, [_object(*each) for each in zip(names, counts, strict=True)])


def draw_color(draw: Draw) -> GeneratedPrompt:
    """One or two objects, each of a given color."""
    names = draw.different([name for name in NAMES if name not in OWN_COLOR], 1 + draw.below(2))
    colors = draw.different(COLOR_NAMES, len(names))
    pairs = list(zip(names, colors, strict=True))
    phrase = " and ".join(with_article(f"{color} {name}") for name, color in pairs)
    return _prompt(draw, "color", phrase, [_object(name, 1, color) for name, color in pairs])


def draw_position(draw: Draw) -> GeneratedPrompt:
    """An object beside, above or below another."""
    first, second = draw.different(NAMES, 2)
    relation = draw.one(tuple(RELATIONS))
    phrase = f"{with_article(first)} {RELATIONS[relation]} {with_article(second)}"
    return _prompt(draw, "position", phrase, [_object(first), _object(second)], relation)


def draw_any(draw: Draw) -> GeneratedPrompt:
    return draw.one((draw_count, draw_color, draw_position))(draw)


def _prompt(
    draw: Draw, kind: str, phrase: str, objects: list[dict[str, Any]], relation: str | None = None
) -> GeneratedPrompt:
    shot, where = SETTING.expand("[shot]", draw), SETTING.expand("[where]", draw)
    text = sentence(f"{shot} {phrase}, {where}".removesuffix(", "))
    return GeneratedPrompt(text, {"kind": kind, "objects": objects, "relation": relation}, subject=phrase)


def _object(name: str, count: int = 1, color: str | None = None) -> dict[str, Any]:
    return {"name": name, "count": count, "color": color}


def _counted(name: str, count: int) -> str:
    return f"{NUMBER_WORDS[count]} {name if count == 1 else OTHER_PLURALS.get(name, f'{name}s')}"


def _set(name: str, description: str, draw: Callable[[Draw], GeneratedPrompt]) -> PromptSet:
    return PromptSet(
        name,
        description,
        fits="your own, with a detector",
        draw=draw,
        columns={
            "kind": "what is asked for: count, color or position",
            "objects": "a list of {name, count, color}; color is null if none is asked for",
            "relation": "where the first object is, seen from the second: left of, right of, above or below",
        },
    )


OBJECTS = _set("objects", "counts, colors and positions of objects", draw_any)
COUNTS = _set("counts", "numbers of objects", draw_count)
COLORS = _set("colors", "objects with given colors", draw_color)
POSITIONS = _set("positions", "objects beside, above or below each other", draw_position)
