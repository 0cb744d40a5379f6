"""`scenes`: people, animals, places and still lifes in many styles, for rewards of human preference."""

from __future__ import annotations

from digenrl.prompt_sets.contract import GeneratedPrompt, PromptSet
from digenrl.prompt_sets.grammar import Draw, Grammar, listed, sentence, with_article

RULES = {
    "person": listed(
        """
        an old fisherman; a young violinist; a ballet dancer; a street vendor; a blacksmith; a beekeeper; a
        mountain climber; an astronaut; a knight in worn armor; a lighthouse keeper; a florist; a girl with a
        red scarf; a boy with a paper kite; a scientist with round glasses; a medieval queen; a wizard with a
        long gray beard; a pilot from the 1930s; a potter with clay on her hands; twin sisters in yellow
        raincoats; a jazz singer; a samurai; a desert nomad; a clockmaker; a chess grandmaster; a Viking
        warrior; a tailor; a deep-sea diver; a gardener in a straw hat
        """
    ),
    "doing": listed(
        """
        reading a letter; laughing; looking into the distance; walking home; drinking tea; holding
        a lantern; feeding birds; waiting for a train; playing the accordion; mending a net; writing in a
        notebook; standing on a hill; warming their hands at a fire; carrying a basket of fruit; resting in
        the shade; looking at the stars; listening to an old radio; painting at an easel
        """
    ),
    "animal": listed(
        """
        a red fox; a snowy owl; a tabby cat; a golden retriever puppy; a black stallion; an elephant
        calf; a hummingbird; a brown bear; a family of ducks; a chameleon; a polar bear; a hedgehog; a
        white peacock; a pair of swans; a tortoise; a lynx; a raven; a meerkat; a herd of wild horses; a
        kingfisher; a panda cub; a tiger; a robin; a mountain goat; a small green dragon; a mechanical beetle;
        a unicorn; a phoenix
        """
    ),
    "beast_doing": listed(
        """
        resting on a mossy rock; crossing a stream; looking straight into the camera; hiding in tall grass; in
        mid-jump; wading through shallow water; waking up; on a snowy branch; among wildflowers; under a full
        moon; in a ray of sunlight; in the morning mist; wearing a tiny hat; by a campfire
        """
    ),
    "place": listed(
        """
        a stone bridge over a river; a lighthouse on a cliff; a narrow street in an old town; a tea
        plantation; a village of wooden houses by a fjord; a floating market; a city skyline; a ruined castle;
        a bamboo forest; a waterfall in a rainforest; terraced rice fields; a desert oasis; a glacier cave; an
        abandoned railway station; a lavender field; a harbor full of fishing boats; a mountain monastery; a
        greenhouse full of orchids; a night market; an underwater city; a castle in the clouds; a treehouse
        village; a spaceship landing pad; a library with endless shelves; a volcanic island; an alpine lake; a
        canyon with a winding road; a Japanese garden; a windmill among tulips
        """
    ),
    "weather": listed(
        """
        at sunrise; at dusk; in heavy rain; in falling snow; under a starry sky; in thick fog; during a
        thunderstorm; on a clear summer day; in autumn; in the blue hour; under northern lights; in early
        spring; in warm evening light; beneath a pale winter sun
        """
    ),
    "still": listed(
        """
        a bowl of ripe peaches; a stack of old books; a vase of wilting tulips; a loaf of fresh bread; a
        silver teapot; a brass telescope; a chocolate cake with cherries; a pair of worn boots; a glass of
        iced tea; a mechanical watch taken apart; a terrarium; a plate of sushi; a violin; a ship in a bottle;
        a bunch of dried herbs; a paper crane; a vintage typewriter; an hourglass; a bowl of ramen; a
        porcelain cat; a globe; a basket of mushrooms; a melting candle
        """
    ),
    "on": listed(
        """
        on a rustic wooden table; on a velvet cloth; on a window sill; on a marble slab; on a pile of maps;
        beside an open window; in a sunlit kitchen; on a workbench; against a dark background; on a blue
        tablecloth; next to a glass of water; under a reading lamp; on a mossy stone
        """
    ),
    "style": listed(
        """
        photo; 35 mm film photo;  black-and-white photo; portrait photo; cinematic still; oil
        painting; watercolor; gouache painting; charcoal drawing; ink drawing; pastel drawing; woodcut print;
        linocut; stained-glass window; art nouveau poster; ukiyo-e print; pixel-art picture; low-poly 3D render;
        claymation still; children's book illustration; comic panel; isometric drawing; concept drawing; paper-cut
        collage; vintage travel poster; art deco poster
        """
    ),
    "quality": listed(
        """
        soft shadows; rich colors; muted colors; fine detail; strong contrast; a shallow depth of field; a
        limited palette; dramatic light; gentle backlight; visible brush strokes; a low camera angle; a
        symmetrical composition; plenty of empty space; warm tones; cool tones; a bird's-eye view
        """
    ),
}
GRAMMAR = Grammar(RULES)
KINDS = (
    ("person", "[person]", "[doing], [weather]"),
    ("person", "[person]", "[doing] near [place]"),
    ("animal", "[animal]", "[beast_doing]"),
    ("animal", "[animal]", "[beast_doing], [weather]"),
    ("place", "[place]", "[weather]"),
    ("place", "[place]", "[weather], with [animal] in the foreground"),
    ("still life", "[still]", "[on]"),
)


def draw_scene(draw: Draw) -> GeneratedPrompt:
    """A scene in a style. The subject is what it shows, without its style."""
    kind, what, where = draw.one(KINDS)
    subject, setting, style = (GRAMMAR.expand(rule, draw) for rule in (what, where, "[style]"))
    scene = f"{subject} {setting}"
    styled = f"{with_article(style)} of {scene}"
    text = draw.one((styled, f"{styled}, with [quality]", f"{scene}, {style}, [quality]"))
    wants = {"kind": kind, "subject": subject, "setting": setting, "style": style}
    return GeneratedPrompt(sentence(GRAMMAR.expand(text, draw)), wants, subject=scene)


SCENES = PromptSet(
    "scenes",
    "people, animals, places and still lifes in many styles",
    fits="pickscore, hpsv2, image_reward, aesthetic, clip_score",
    draw=draw_scene,
    columns={
        "kind": "person, animal, place or still life",
        "subject": "who or what is shown",
        "setting": "where, when, or doing what",
        "style": "the style of the picture",
    },
)
