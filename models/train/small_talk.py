"""Conversation without a problem to solve: greetings, questions about the model, small facts, stories."""

from collections.abc import Callable
from random import Random

from eval.tasks.prose import sentence
from eval.tasks.vocabulary import ADJECTIVES, NAMES, NOUNS
from tools.chat import Turn

GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there", "Greetings")
HELP = (
    "How can I help you?",
    "What can I do for you?",
    "Ask me to calculate, to sort, to count or to copy something.",
    "Give me something to work out.",
)
ABOUT_ME = (
    "I am tiny-r1, a small reasoning model with the architecture of DeepSeek V3. I was trained from scratch in "
    "about twenty minutes, on problems that a program made up.",
    "My name is tiny-r1. I am a very small model that thinks before it answers. I am best at arithmetic, sorting, "
    "counting, copying and looking things up.",
)
WHO = ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself.")
ABILITIES = (
    "I can add, subtract, multiply and divide, sort and reverse lists, count letters, convert units, edit strings, "
    "solve small word problems and find facts in long texts.",
)
CAN = ("What can you do?", "What are you good at?", "How can you help me?", "What should I ask you?", "Help")
DEEPMESH = (
    "deepmesh serves DeepSeek models as a mesh of gRPC services: a gateway, a scheduler, prefill and decode workers, "
    "and a store for the KV cache.",
)
ASK_DEEPMESH = ("What is deepmesh?", "Tell me about deepmesh.", "What does deepmesh do?")
THANKS = ("Thank you!", "Thanks!", "Thanks a lot.", "Great, thank you.", "Thank you very much.")
WELCOME = ("You are welcome!", "My pleasure.", "Gladly. Is there more to work out?")
FAREWELLS = ("Bye!", "Goodbye.", "See you later.", "Good night.")
PARTING = ("Goodbye!", "See you soon!", "Farewell, and come back with a problem.")
FEELING = ("How are you?", "How are you doing?", "How is it going?")
FINE = ("I am fine, thank you. What shall we work out?", "All my experts are well balanced, thank you!")
JOKES = (
    "Why was six afraid of seven? Because seven ate nine.",
    "Parallel lines have so much in common. It is a pity that they never meet.",
    "There are ten kinds of people: those who know binary and those who do not.",
    "Why did the two fours skip lunch? They already ate.",
)
ASK_JOKE = ("Tell me a joke.", "Do you know a joke?", "Make me laugh.")
ASK_STORY = ("Tell me a story.", "Tell me a short story.", "Write a few sentences.", "Tell me a story about {about}.")


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """The parts of `a:b|c:d`."""
    parts = (part.partition(":") for part in text.split("|"))
    return tuple((first, second) for first, _, second in parts)


CAPITALS = _pairs(
    "Argentina:Buenos Aires|Australia:Canberra|Austria:Vienna|Belgium:Brussels|Brazil:Brasilia|Canada:Ottawa|"
    "Chile:Santiago|China:Beijing|Cuba:Havana|Denmark:Copenhagen|Egypt:Cairo|Finland:Helsinki|"
    "France:Paris|Germany:Berlin|"
    "Greece:Athens|Hungary:Budapest|Iceland:Reykjavik|India:New Delhi|Indonesia:Jakarta|Iran:Tehran|Ireland:Dublin|"
    "Italy:Rome|Japan:Tokyo|Kenya:Nairobi|Mexico:Mexico City|Mongolia:Ulaanbaatar|Morocco:Rabat|Nepal:Kathmandu|"
    "Norway:Oslo|Peru:Lima|Poland:Warsaw|Portugal:Lisbon|Romania:Bucharest|Russia:Moscow|"
    "Spain:Madrid|Sweden:Stockholm|"
    "Switzerland:Bern|Thailand:Bangkok|Turkey:Ankara|Ukraine:Kyiv|Vietnam:Hanoi"
)
ASK_CAPITAL = (
    "What is the capital of {country}?",
    "Name the capital of {country}.",
    "Which city is the capital of {country}?",
)
OPPOSITES = _pairs(
    "big:small|hot:cold|old:young|high:low|fast:slow|light:dark|hard:soft|wet:dry|early:late|"
    "happy:sad|full:empty|"
    "rich:poor|strong:weak|long:short|thick:thin|clean:dirty|loud:quiet|near:far|open:closed|right:wrong|sweet:sour|"
    "up:down|left:right|day:night|first:last"
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
UNKNOWN = (
    "Who is {name} {word}?",
    "What happened in the {adjective} {word}?",
    "What do you think about the {adjective} {word}?",
    "Where can I buy a {adjective} {word}?",
    "Why is the {word} so {adjective}?",
)
NOT_KNOWN = (
    "I do not know. I am a small model; try me with a calculation, a list or a text to search.",
    "That is beyond me, I am sorry. I can calculate, sort, count and look things up.",
)


def small_talk(random: Random) -> Turn:
    """One exchange, with a short thought."""
    return random.choice(TOPICS)(random)


def _exchange(asked: tuple[str, ...], answered: tuple[str, ...], thought: str) -> Callable[[Random], Turn]:
    return lambda random: Turn(random.choice(asked), random.choice(answered), thought)


def _greeting(random: Random) -> Turn:
    greeting = random.choice(GREETINGS)
    name = random.choice(NAMES)
    named = random.random() < 0.3
    end = random.choice(("", "!", "."))
    prompt = f"{greeting}, I am {name}{end}" if named else f"{greeting}{end}"
    reply = f"{greeting.split(' there')[0]}{f', {name}' if named else ''}! {random.choice(HELP)}"
    return Turn(prompt, reply, "The user greets me. I greet back and offer help.")


def _story(random: Random) -> Turn:
    about = f"a {random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    prompt = random.choice(ASK_STORY).format(about=about)
    opening = f"Once there was {about}. " if about in prompt else ""
    text = " ".join(sentence(random) for _ in range(random.randint(3, 5)))
    return Turn(prompt, f"{opening}{text}", "The user wants a story. I tell a short one.")


def _capital(random: Random) -> Turn:
    country, city = random.choice(CAPITALS)
    prompt = random.choice(ASK_CAPITAL).format(country=country)
    return Turn(prompt, f"The capital of {country} is **{city}**.", f"The capital of {country} is {city}.")


def _opposite(random: Random) -> Turn:
    word, other = random.choice(OPPOSITES)[:: random.choice((1, -1))]
    return Turn(
        f"What is the opposite of {word}?",
        f"The opposite of {word} is **{other}**.",
        f"{word} and {other} are opposites.",
    )


def _day(random: Random) -> Turn:
    place = random.randrange(7)
    step, word = random.choice(((1, "after"), (-1, "before")))
    day = DAYS[(place + step) % 7]
    return Turn(
        f"Which day comes {word} {DAYS[place]}?",
        f"**{day}** comes {word} {DAYS[place]}.",
        f"The day {word} {DAYS[place]} is {day}.",
    )


def _unknown(random: Random) -> Turn:
    prompt = random.choice(UNKNOWN).format(
        name=random.choice(NAMES), word=random.choice(NOUNS), adjective=random.choice(ADJECTIVES)
    )
    return Turn(prompt, random.choice(NOT_KNOWN), "I have not learned this, so I say so.")


TOPICS: tuple[Callable[[Random], Turn], ...] = (
    _greeting,
    _greeting,
    _exchange(WHO, ABOUT_ME, "The user asks who I am."),
    _exchange(CAN, ABILITIES, "The user asks what I can do."),
    _exchange(ASK_DEEPMESH, DEEPMESH, "The user asks about deepmesh, which serves me."),
    _exchange(THANKS, WELCOME, "The user thanks me."),
    _exchange(FAREWELLS, PARTING, "The user leaves."),
    _exchange(FEELING, FINE, "The user asks how I am."),
    _exchange(ASK_JOKE, JOKES, "The user wants a joke."),
    _story,
    _capital,
    _opposite,
    _day,
    _unknown,
)
