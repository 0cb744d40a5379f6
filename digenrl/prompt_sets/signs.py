"""`ocr_signs`: signs, labels and screens that show a text, which is in double quotes in the prompt."""

from __future__ import annotations

import re

from digenrl.prompt_sets.contract import GeneratedPrompt, PromptSet
from digenrl.prompt_sets.grammar import Draw, Grammar, listed, sentence

QUOTED = re.compile(r'"([^"]+)"')

WORDS = {
    "first_name": listed(
        """
        Alice; Amir; Anna; Ben; Carla; Chen; Clara; Daniel; Diego; Elena; Emma; Farid; Felix; Grace; Hana;
        Hugo; Ida; Ines; Ivan; Jack; Jonas; Julia; Kai; Kira; Lara; Leo; Lena; Lucas; Maya; Mia; Milo; Nadia;
        Nina; Noah; Nora; Omar; Oscar; Paula; Pedro; Priya; Rosa; Ruth; Sam; Sara; Simon; Sofia; Tara; Theo;
        Tom; Uma; Vera; Viktor; Wanda; Yara; Yusuf; Zoe
        """
    ),
    "surname": listed(
        """
        Abbott; Baker; Bennett; Carver; Castillo; Dalton; Ferreira; Fischer; Foster; Grant; Hansen; Hayes;
        Hoffman; Ibarra; Jensen; Kaplan; Keller; Kovac; Lambert; Larsen; Marino; Mercer; Moreau; Nolan; Novak;
        Okafor; Olsen; Parker; Quinn; Ramsey; Rossi; Sato; Silva; Tanaka; Turner; Vargas; Weber; Whitman;
        Yilmaz; Zimmer
        """
    ),
    "tree": listed(
        """
        Alder; Ash; Aspen; Beech; Birch; Cedar; Cherry; Chestnut; Cypress; Elm; Hazel; Juniper; Laurel;
        Linden; Maple; Oak; Olive; Pine; Poplar; Rowan; Spruce; Walnut; Willow
        """
    ),
    "way": ("Street", "Lane", "Avenue", "Road", "Square", "Court", "Hill", "Bridge", "Park", "Terrace", "Station"),
    "town_start": listed(
        """
        Ash; Black; Bright; Clear; Cold; East; Fair; Green; High; Iron; Kings; Lake; Long; Maple; Mill; North;
        Oak; Red; River; Rose; Silver; Stone; Sun; West; White; Wind; Winter; Wood
        """
    ),
    "town_end": listed("bridge; brook; dale; field; ford; gate; haven; mouth; port; ton; view; well"),
    "town": ("[town_start][town_end]",),
    "adjective": listed(
        """
        amber; ancient; blue; brave; bright; broken; calm; copper; crimson; crooked; curious; dancing;
        distant; electric; emerald; endless; fearless; flying; forgotten; frozen; gentle; golden; happy;
        hidden; hungry; invisible; ivory; jolly; last; lazy; little; lonely; lost; lucky; midnight; misty;
        paper; patient; purple; quiet; rusty; salty; scarlet; secret; silent; silver; sleepy; spinning;
        stolen; tiny; velvet; wandering; wild; wise; wooden
        """
    ),
    "animal": listed(
        """
        badger; bear; beetle; bison; camel; cat; crane; crow; deer; dolphin; donkey; dragon; falcon; fox;
        frog; goat; goose; hare; hedgehog; heron; horse; kestrel; lion; lizard; lynx; moose; moth; octopus;
        otter; owl; panda; parrot; peacock; pelican; penguin; pony; rabbit; raven; robin; salmon; seal; snail;
        sparrow; stork; swan; tiger; toad; turtle; walrus; whale; wolf
        """
    ),
    "animals": listed(
        """
        badgers; bats; bears; bees; camels; cats; crows; dogs; dolphins; dragons; ducks; eagles; foxes; frogs;
        goats; hedgehogs; horses; lions; llamas; otters; owls; pandas; parrots; penguins; rabbits; ravens;
        robins; seals; snails; swans; tigers; toads; turtles; whales; wolves; zebras
        """
    ),
    "vegetable": listed(
        """
        asparagus; beetroot; carrot; celery; corn; leek; onion; pea; potato; pumpkin; spinach; tomato; turnip
        """
    ),
    "thing": listed(
        """
        anchor; arrow; balloon; bell; bicycle; book; button; candle; castle; clock; cloud; comet; compass;
        crown; door; feather; flame; garden; harbor; island; kettle; key; kite; ladder; lantern; letter;
        lighthouse; map; mirror; moon; mountain; ocean; orchard; pencil; piano; planet; puzzle; river; rocket;
        rope; sail; shadow; spoon; star; storm; suitcase; teapot; tower; train; umbrella; violin; wheel;
        window; winter
        """
    ),
    "fruit": listed(
        """
        apple; apricot; blackberry; blueberry; cherry; fig; grape; kiwi; lemon; lime; mango; orange; papaya;
        peach; pear; pineapple; plum; quince; raspberry; strawberry
        """
    ),
    "dish": listed(
        """
        bean stew; beef curry; carrot soup; cheese pie; chicken pie; fish tacos; fried rice; garlic bread;
        green salad; grilled corn; lemon pasta; lentil soup; mushroom risotto; noodle soup; onion soup;
        pumpkin soup; roast duck; spicy ramen; tomato soup; veggie burger
        """
    ),
    "drink": listed(
        """
        black coffee; cold brew; espresso; ginger tea; green tea; hot chocolate; iced latte; lemonade; mint
        tea; orange juice; sparkling water; apple cider
        """
    ),
    "shop": listed(
        """
        bakery; barber; bicycles; books; café; camera shop; cheese; coffee; diner; fabrics; flowers; gallery;
        garage; hardware; hotel; jewelers; laundry; music; noodles; optics; pharmacy; pizza; plants; pottery;
        records; shoes; stationery; tailor; tea house; toys
        """
    ),
    "weekday": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "month": listed(
        """
        January; February; March; April; May; June; July; August; September; October; November; December
        """
    ),
    "virtue": listed(
        """
        begin; believe; breathe; build; create; dream; explore; grow; keep going; learn; listen; read more;
        rest; shine; slow down; smile; stay curious; try again; wonder
        """
    ),
    "sport": listed("archery; chess; climbing; cycling; dance; fencing; hockey; judo; rowing; running"),
    "letters": tuple("ABCDEFGHJKLMNPRSTUVWXYZ"),
    "color": ("white", "black", "red", "blue", "green", "yellow", "orange", "silver", "gold", "turquoise", "pink"),
}

TEXTS = {
    "shop_name": listed(
        """
        [surname]'s [Shop]; [first_name]'s [Shop]; The [Adjective] [Animal]; [Adjective] [Thing] [Shop];
        [Animal] & [Animal]; [tree] [way] [Shop]; [town] [Shop]; [surname] & [surname]
        """
    ),
    "shop_notice": listed(
        """
        Open until [6-11] pm; Closed on [weekday]; Back at [1-12]:30; Summer Sale [10-70]%; Now hiring;
        Fresh [dish]; New: [drink]; [weekday] is [sport] night; Last day: [month] [1-28]
        """
    ),
    "road_sign": listed(
        """
        [town] [2-99] km; Exit [1-99]; [tree] [way]; Speed limit [2-9]0; Bridge closed; [ANIMAL] CROSSING;
        Detour to [town]; Welcome to [town]; Route [10-99] north; [town] next left; Slow: [animals] ahead
        """
    ),
    "plate": ("[letters][letters][letters] [100-999]", "[10-99] [letters][letters] [10-99]", "[ANIMAL] [1-99]"),
    "destination": ("[2-99] [town]", "[town] Express", "[1-80] [tree] [way]", "Platform [1-24]", "Not in service"),
    "price": ("$[1-19].[10-99]", "2 for $[3-15]", "[fruit] $[1-9]", "Only $[2-49]", "Buy [2-4] get 1 free"),
    "menu": listed(
        """
        Today: [dish]; [Dish] $[5-19]; Soup of the day: [vegetable]; [Drink] $[2-8]; Try our [dish];
        [weekday]: [dish]
        """
    ),
    "product": listed(
        """
        [surname]'s [Fruit] Jam; [town] Honey; [Adjective] [Animal] [Drink]; [Fruit] [20-99]%; Organic [Fruit];
        [tree] [Fruit] Soap; [Adjective] [Thing] No. [1-99]
        """
    ),
    "title": listed(
        """
        The [Adjective] [Thing]; The [Thing] of [town]; [Adjective] [Animals]; A [Thing] for [first_name];
        [first_name] and the [Thing]; The Last [Thing]; Letters from [town]; How to Draw [a Animal];
        [surname]'s [Thing]
        """
    ),
    "slogan": listed(
        """
        [Virtue] every [weekday]; [VIRTUE]; [Virtue], then [virtue]; Team [Animal]; [ADJECTIVE] [ANIMAL];
        I love [town]; Save the [animals]; [town] [Sport] Club; Class of [2001-2039]
        """
    ),
    "greeting": listed(
        """
        Happy Birthday [first_name]; Congrats [first_name]; [first_name] is [2-99]; [first_name] & [first_name];
        Welcome home [first_name]; Get well, [first_name]; Thank you [first_name]; Good luck [first_name]
        """
    ),
    "event": listed(
        """
        [town] Jazz Festival; [month] [1-28]: open day; [Adjective] [Animal] live; [Sport] Cup [2001-2039];
        Lost: [adjective] [animal]; [weekday] market; Vote [first_name] [surname]; The [Thing] Museum
        """
    ),
    "screen": listed(
        """
        [1-12]:[10-59]; Battery [1-99]%; Gate [letters][1-48]; Loading [1-99]%; Level [1-60];
        Flight [letters][letters] [100-999]; Score [1-20] to [1-20]; Password wrong; Hello [first_name];
        [10-39]°C in [town]; Now playing: [adjective] [thing]
        """
    ),
    "warning": listed(
        """
        Beware of the [animal]; Do not feed the [animals]; Caution: hot [drink]; Wet paint;
        Keep gate [1-40] closed; Danger: [adjective] [animal]; No parking on [weekday]; Push to open;
        Mind the [thing]
        """
    ),
    "headline": listed(
        """
        [Animal] found in [town]; [town] wins [Sport] Cup; Storm hits [town]; [surname] elected mayor;
        [town] bridge reopens; Rare [animal] returns
        """
    ),
}

SCENES = {
    "shot": listed(
        """
        a photo of; a close-up photo of; a wide shot of; a cinematic shot of; a detailed photo of; an oil
        painting of; a watercolor of; a black-and-white photo of; an ink drawing of; a 3D render of; a
        comic-style drawing of; a film photo of; a vintage postcard of
        """
    ),
    "saying": ("that says", "that reads", "with the words", "with the text"),
    "lettering": listed(
        """
        in bold letters; in neat handwriting; in red paint;  in gold letters; in
        capital letters; in large, clear type; in black ink; in rounded letters
        """
    ),
    "weather": listed(
        """
        on a sunny morning; on a rainy evening; at dusk; at night; in light snow; in thick fog; under a clear
        blue sky; in the golden light of sunset; on a windy day; after a storm
        """
    ),
    "indoor_light": listed(
        """
        in warm lamplight; in soft window light; under bright ceiling lamps; in a dim room; with a blurred
        background; lit from the side; in the morning sun
        """
    ),
    "street": listed(
        """
        a narrow cobbled street; a busy avenue; a quiet village square; a harbor promenade; a rainy city
        street; a tree-lined road; an old market square; a street corner
        """
    ),
    "nature": listed(
        """
        a gravel path; a pine forest; a mountain pass; a wheat field; a desert highway; a sandy beach; a
        frozen lake; a flower meadow; a river bank
        """
    ),
    "room": listed(
        """
        a cozy kitchen; a small café; an old library; a tidy office; a school classroom; a workshop; a train
        station hall; a museum hall; a living room; a crowded bar
        """
    ),
    "table": listed(
        """
        a wooden table; a marble counter; a checkered tablecloth; a shop shelf; a window sill; a stone wall; a
        picnic blanket
        """
    ),
    "person": listed(
        """
        a smiling woman; an old man; a young boy; a little girl; a street musician; a chef; a construction
        worker; a student; a runner; a robot; an astronaut; a farmer; a knight
        """
    ),
    "beast": listed(
        """
        a cat; a golden retriever; a panda; an owl; a penguin; a raccoon; a fox; a frog; a hedgehog; an
        elephant
        """
    ),
    "scene": (
        'a storefront on [street], with [a color] sign [saying] "[shop_name]" [lettering], [weather]',
        'a painted wooden sign [saying] "[shop_name]" above a door on [street], [weather]',
        'a glowing neon sign [saying] "[shop_name]" on a brick wall, [weather]',
        'a shop window on [street] with a paper notice [saying] "[shop_notice]", [weather]',
        'a folding board on the pavement of [street] [saying] "[menu]" in white chalk, [weather]',
        'a road sign [saying] "[road_sign]" beside [nature], [weather]',
        '[a color] road sign [saying] "[road_sign]" at the end of [street], [weather]',
        'a weathered wooden signpost [saying] "[road_sign]" in front of [nature], [weather]',
        'a warning sign [saying] "[warning]" on a metal fence, [weather]',
        'a door in [room] with [a color] sign [saying] "[warning]", [indoor_light]',
        '[a color] car with the license plate "[plate]" parked on [street], [weather]',
        '[a color] bus on [street] whose display shows "[destination]", [weather]',
        'a departure board in a station hall that shows "[destination]" [lettering], [indoor_light]',
        '[a color] delivery van with "[shop_name]" on its side, on [street], [weather]',
        'a wooden boat named "[adjective_animal]", with the name painted on its bow, near [nature], [weather]',
        'a chalkboard in [room] [saying] "[menu]" in [color] chalk, [indoor_light]',
        'a price tag [saying] "[price]" on a basket of fruit at a market, [weather]',
        'a glass jar with a label [saying] "[product]" on [table], [indoor_light]',
        'a cardboard box with "[product]" printed on it [lettering], on [table], [indoor_light]',
        'a bottle with [a color] label [saying] "[product]" on [table], [indoor_light]',
        'a book titled "[title]" lying on [table], [indoor_light]',
        'a film poster with the title "[title]" [lettering] on a wall in [room], [indoor_light]',
        'an open notebook on [table] with "[slogan]" written in it [lettering], [indoor_light]',
        'a mug with the words "[slogan]" on [table], [indoor_light]',
        '[person] wearing [a color] T-shirt [saying] "[slogan]", [weather]',
        '[person] holding up a cardboard sign [saying] "[slogan]" on [street], [weather]',
        '[beast] holding a small sign [saying] "[slogan]" in [room], [indoor_light]',
        '[beast] standing in [nature] next to a sign [saying] "[warning]", [weather]',
        'a birthday cake with "[greeting]" written in icing, on [table], [indoor_light]',
        'a greeting card with "[greeting]" on it [lettering], on [table], [indoor_light]',
        'a banner [saying] "[greeting]" hanging across [room], [indoor_light]',
        'a poster on a wall on [street] announcing "[event]" [lettering], [weather]',
        'a billboard above [street] [saying] "[event]", [weather]',
        'a message board in [room] with a note [saying] "[event]", [indoor_light]',
        'a smartphone on [table] whose screen shows "[screen]", [indoor_light]',
        'a large screen in [room] that shows "[screen]" [lettering], [indoor_light]',
        'an old computer monitor in [room] with "[screen]" on it, [indoor_light]',
        'a newspaper on [table] with the headline "[headline]", [indoor_light]',
        'a wall on [street] with the graffiti "[slogan]" in [color] spray paint, [weather]',
        'the words "[virtue_words]" written in the sand of a beach, [weather]',
        'the words "[virtue_words]" carved into an old tree, [weather]',
        'a hot-air balloon with "[town]" written on it, floating over [nature], [weather]',
        'a museum label [saying] "[title]" under a painting, [indoor_light]',
        'a patch on the jacket of [person] [saying] "[slogan]", [indoor_light]',
    ),
    "adjective_animal": ("[Adjective] [Animal]", "[first_name] [1-12]", "[Adjective] [Thing]"),
    "virtue_words": ("[Virtue]", "[virtue] with [first_name]", "[first_name] was here", "[Virtue] in [town]"),
}

GRAMMAR = Grammar({**WORDS, **TEXTS, **SCENES})


def draw_sign(draw: Draw) -> GeneratedPrompt:
    """A sign, label or screen with a text. The subject is the text without letter case and white space."""
    prompt = sentence(GRAMMAR.expand("[shot] [scene]", draw))
    (text,) = QUOTED.findall(prompt)
    return GeneratedPrompt(prompt, {"text": text}, subject="".join(text.casefold().split()))


OCR_SIGNS = PromptSet(
    "ocr_signs",
    "signs, labels and screens that show a text",
    fits="ocr",
    draw=draw_sign,
    columns={"text": "the text to show, which is also in double quotes in the prompt"},
)
