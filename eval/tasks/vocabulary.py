"""The words from which problems are made."""


def _split(text: str, separator: str = " ") -> tuple[str, ...]:
    """The parts of a text whose lines were broken at spaces."""
    return tuple(" ".join(text.split()).split(separator))


NOUNS = _split(
    """apple anchor apron arrow badge bag ball banana barrel basket bean bell bench berry bird blanket boat bone book
    boot bottle bowl box bread brick bridge brush bucket button cabin cake camera candle canoe card carpet carrot cart
    castle chain chair cherry clock cloud coat coin comb cookie copper cork cotton crate crown cup curtain desk diamond
    dish door drum duck eagle egg engine envelope falcon feather fence fern field flag flower flute forest fork fox
    garden gate ghost glass glove grape guitar hammer harbor harp hat hill honey horn horse island jacket jar jewel
    jug kettle key kite knife ladder lake lamp lantern leaf lemon letter lion lizard lock magnet map marble mask meadow
    melon mill mirror monkey moon mountain mouse needle nest net oak ocean olive onion orange oven owl paddle painting
    panda paper parrot peach pear pencil pepper piano pillow pine pirate planet plate plum pocket pond pony potato
    puzzle rabbit radio rain ribbon rice ring river robot rocket roof rope rose ruler saddle sail salt sand scarf
    school seed shell ship shirt shoe silver snow soap sock spoon spring star stone stove strawberry sugar sun swan
    table tailor teapot temple tent thunder ticket tiger tomato torch tower toy train tree trumpet tulip turtle
    umbrella valley vase village violin wagon wall watch water whale wheel whistle window wolf wood wool zebra"""
)
ADJECTIVES = _split(
    """amber ancient bitter black blue bold brave bright broken brown busy calm clean clever cold cool crisp curly dark
    deep dry dusty early empty famous fancy fast fierce flat free fresh friendly frozen gentle giant glad golden grand
    gray green happy hard heavy hidden high hollow honest huge humble icy jolly kind large late lazy light little lonely
    long loud lucky mighty narrow neat new noble odd old pale patient plain polite proud purple quick quiet rapid rare
    red rich round royal rusty shiny short silent simple slow small smooth soft solid sour steady strange strong sunny
    sweet swift tall tame tidy tiny tired warm weak white wide wild wise yellow young"""
)
NAMES = _split(
    """Ada Alan Alice Amir Anna Ben Bruno Carla Chen Clara Dan Diego Elena Emma Eva Felix Finn Grace Hana Hugo Ida Ivan
    Jack Jana Joe Julia Kai Kate Lena Leo Lily Luca Maria Max Mia Mila Nina Noah Nora Olga Omar Oscar Paul Petra Rosa
    Ruth Sam Sara Tom Vera Victor Yuki Zoe"""
)
PEOPLE = _split(
    """baker captain carpenter clerk cook dancer doctor driver farmer fisher gardener guard hunter king librarian
    merchant miller miner musician nurse painter pilot poet potter queen sailor shepherd singer smith soldier student
    teacher traveler weaver writer"""
)
PLACES = _split(
    """airport bakery barn beach bridge castle cellar city factory farm forest garden gate harbor hill hotel house
    island kitchen lake library market meadow mill mountain museum office palace park port river road school shore
    square station store street theater tower town valley village workshop"""
)
VERBS = _split(
    """borrowed bought broke brought carried cleaned counted drew dropped fixed forgot found gave hid kept left lifted
    lost made measured mended moved opened packed painted picked polished pulled pushed put repaired saw sent shared
    showed sold stole threw took used wanted washed watched weighed wrapped"""
)
TIMES = _split(
    """in the morning|at noon|in the evening|at night|before dawn|after lunch|on Monday|on Tuesday|on Wednesday|on
    Thursday|on Friday|on Saturday|on Sunday|last week|last year|in spring|in summer|in autumn|in winter|before the
    storm|after the storm|during the festival|while it rained|as the sun rose|without a word|with great
    care""",
    "|",
)
