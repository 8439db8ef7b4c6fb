"""English words for keys and word lists."""

from __future__ import annotations

from functools import cache
from itertools import product

_ADJECTIVES = """
    able amber ancient annual arctic autumn awake azure bare basic bitter blank blunt bold brave
    brief bright brisk broad broken bronze calm careful cheap civil classic clean clear clever
    close cloudy coarse cold common cool coral crisp curious curly daily damp dark dear deep
    delicate dense distant double dry dull dusty eager early easy elder empty equal exact faint
    fair famous fancy fast final fine firm first flat fluent formal free fresh frosty full gentle
    giant glad global golden grand grave gray great green handy happy hard harsh hasty heavy
    hidden hollow honest humble icy ideal idle inner ivory jolly keen kind large late lean level
    light little local lonely long loose loud loyal lucky lunar major mellow merry mild minor
    misty modern modest moist narrow native neat new noble noisy normal novel odd old open
    orange outer pale patient plain polite proud pure quick quiet rapid rare raw ready real rich
    rigid ripe rosy rough round royal rural rustic safe salty secret sharp short shy silent
    silver simple single sleepy slim slow small smart smooth social soft solar solid sour spare
    spicy stable steady steep stern still strict strong sturdy subtle sudden sunny sweet swift
    tall tame tart tender thick thin tidy tiny tired tough true upper urban useful vague vast
    velvet violet vivid warm weary white whole wide wild windy wise wooden young zesty
    """
_NOUNS = """
    acorn actor airport album anchor animal ankle apple apron arch arrow artist atlas aunt author
    autumn badge baker balcony ballad bamboo banana banjo barn barrel basin basket battery beach
    beacon beaver bench bicycle birch bishop blanket blossom boat border bottle boulder branch
    bread breeze brick bridge broom brother bucket buffalo builder button cabin cactus camel camera
    candle canoe canvas canyon captain carpet carrot castle cathedral ceiling cellar century chair
    chapel cherry chimney circle citizen clay clerk cliff clock cloud coast coconut coffee comet
    compass copper corner cottage cotton cousin crater creek cricket crown crystal curtain cushion
    dancer daughter deer delta desert desk diamond dinner doctor dolphin donkey dragon drawer
    driver drum eagle easel editor elbow elephant engine envelope estate evening fabric falcon
    farmer feather fence ferry fiddle field finger flame flower flute forest fossil fountain fox
    freight friend galaxy gallery garden garlic gate geyser ginger glacier glove goat granite grape
    guitar hammer harbor harvest hawk hazel helmet heron hill honey horizon horse hotel house
    iceberg insect island jacket jaguar jar jewel journal judge juice jungle kettle kitchen kite
    knight ladder lagoon lake lamp lantern lawyer leaf lemon letter library lily lion lizard lobby
    locket lumber magnet mango maple marble market meadow melon merchant meteor mirror mitten
    monkey moon morning mountain museum music napkin needle nephew nest notebook nurse oak oasis
    ocean office olive onion opera orchard otter oven owl oyster paddle page painter palace panther
    paper parade parcel parrot pasture path peach peanut pebble pencil penguin pepper piano picnic
    pigeon pillow pilot pine pioneer planet plaza plum poet pony poplar porch potato prairie prince
    pumpkin puzzle pyramid quarry queen rabbit radio raft railway rain ranch raven reef ribbon
    rider river robin rocket roof rooster rope rose ruby saddle sailor salad salmon sand satin
    scarf scholar school season shadow sheep shell shelter shepherd ship shirt shoulder sister
    skater sketch sky sled slipper snail snow sofa soldier song soup sparrow spider spoon spring
    squirrel stable stadium star station statue stone storm story stove stream street student
    summer sunset surgeon swan table tailor teacher temple tent theater thimble thread thunder
    tiger timber tower trail train tractor treasure tree trumpet tulip tunnel turkey turnip turtle
    uncle valley vase village vine violin visitor volcano wagon waiter walnut wardrobe water
    weaver whale wheat wheel willow window winter wizard wolf wood wool writer yard zebra
    """
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
WORDS = tuple(sorted({*ADJECTIVES, *NOUNS}))
"""Single words."""
NUM_KEYS = len(ADJECTIVES) * len(NOUNS)


def key_word(index: int) -> str:
    """Key `index` of NUM_KEYS: adjective-noun."""
    adjective, noun = divmod(index, len(NOUNS))
    return f"{ADJECTIVES[adjective]}-{NOUNS[noun]}"


@cache
def compounds() -> tuple[str, ...]:
    """Words written together from two, for lists that need more than WORDS."""
    return tuple(sorted({first + second for first, second in product(ADJECTIVES, NOUNS)}))
