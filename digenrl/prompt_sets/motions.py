"""`motions`: short clips in which something moves, for video models."""

from __future__ import annotations

from digenrl.prompt_sets.contract import GeneratedPrompt, PromptSet
from digenrl.prompt_sets.grammar import Draw, Grammar, listed, sentence

RULES = {
    "walker": listed(
        """
        a golden retriever; a tabby cat; a red fox; a brown bear; a white horse; an elephant; a tiger; a baby
        goat; a husky; a raccoon; a gray wolf; a black panther; a rabbit
        """
    ),
    "walker_motion": listed(
        """
        runs toward the camera; shakes water off its fur; turns its head and looks up; stretches and yawns;
        jumps over a fallen log; trots along the path; rolls over on its back; sniffs the ground; slowly lies
        down; chases a butterfly; wades through shallow water; digs a hole in the ground
        """
    ),
    "wild_place": listed(
        """
        in a snowy forest; on a sandy beach; in a meadow full of flowers; on a dusty road; beside a stream; in
        tall golden grass; in a misty valley; on a rocky hillside; in a quiet garden
        """
    ),
    "flyer": listed(
        """
        an eagle; a white owl; a seagull; a flock of starlings; a hot-air balloon; a paper plane
        """
    ),
    "flyer_motion": listed(
        """
        glides over the water; rises above the trees; circles in the sky; descends slowly; flies past the
        camera; drifts across the clouds
        """
    ),
    "sky_place": listed(
        """
        at sunrise; above a mountain lake; over a wheat field; against a stormy sky; above a coastline; over
        snowy peaks; above a sleeping town
        """
    ),
    "person": listed(
        """
        a young woman; an old man; a little girl; a boy in a blue coat; a ballet dancer; a street artist; a
        skateboarder; a chef; a violinist; a farmer; an astronaut; a woman in a red dress; a robot
        """
    ),
    "person_motion": listed(
        """
        walks toward the camera; turns around and smiles; waves with one hand; spins in a circle; opens an
        umbrella; ties a shoelace; throws a ball into the air; lights a candle; pours a cup of tea; raises
        both arms; blows soap bubbles; runs up a flight of stairs; closes a book; bows slowly
        """
    ),
    "person_place": listed(
        """
        on a rainy street; in a sunlit kitchen; on an empty stage; in a busy market; on a wooden pier; in a
        park in autumn; on a rooftop at night; in a snowy square; in a train carriage
        """
    ),
    "vehicle": listed(
        """
        a red sports car; a steam train; a yellow bus; a sailing boat; a motorcycle; a cargo ship; a green
        tractor; a tram; a bicycle courier
        """
    ),
    "vehicle_motion": listed(
        """
        comes around a bend; passes from left to right; slows down and stops; moves away into the distance;
        comes closer and passes the camera; starts moving
        """
    ),
    "vehicle_place": listed(
        """
        in heavy rain; on a bright morning; at dusk; in light fog; under an orange evening sky; on a clear
        winter day; at night, with its lights on
        """
    ),
    "matter": listed(
        """
        ocean waves; thick smoke; colored ink in water; autumn leaves; candle flames; falling snow; sparks
        from a fire; raindrops on a window; sand on a dune; clouds above a mountain; lava; a waterfall; a
        field of wheat; a silk curtain; steam above a teacup
        """
    ),
    "matter_motion": listed(
        """
        in slow motion; moving in the wind; swirling slowly; in a time lapse; drifting from right to left;
        getting faster and faster; coming to rest
        """
    ),
    "matter_place": listed(
        """
        at sunset; in soft light; against a dark background; in close-up; under moonlight; at noon
        """
    ),
    "camera": listed(
        """
        the camera stays still; the camera pans slowly to the left; the camera pans slowly to the right; the
        camera moves slowly forward; the camera pulls back; the camera follows the movement; filmed from
        above; filmed from a low angle; filmed by hand; slow zoom in
        """
    ),
    "look": listed(
        """
        -; -; realistic; cinematic; on 16 mm film; in the style of a documentary; animated film;
        stop-motion animation; black and white; warm colors
        """
    ),
}
GRAMMAR = Grammar(RULES)
KINDS = (
    ("walker", "wild_place"),
    ("flyer", "sky_place"),
    ("person", "person_place"),
    ("vehicle", "vehicle_place"),
    ("matter", "matter_place"),
)


def draw_motion(draw: Draw) -> GeneratedPrompt:
    """Something that moves, seen by a camera. The subject is the pair of what moves and how."""
    mover, place = draw.one(KINDS)
    slots = (mover, f"{mover}_motion", place, "camera")
    subject, motion, where, camera = (GRAMMAR.expand(f"[{slot}]", draw) for slot in slots)
    text = GRAMMAR.expand(f"{subject} {motion} {where}, {camera}, [look]", draw).removesuffix(", ")
    wants = {"subject": subject, "motion": motion, "camera": camera}
    return GeneratedPrompt(sentence(text), wants, subject=f"{subject} {motion}")


MOTIONS = PromptSet(
    "motions",
    "short clips in which something moves",
    fits="pickscore and others with frame_stride, or your own video reward",
    draw=draw_motion,
    columns={"subject": "what moves", "motion": "how it moves", "camera": "how it is filmed"},
)
