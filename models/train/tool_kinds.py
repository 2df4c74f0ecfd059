"""Kinds of tools: what they are called, what they take, how people ask for them, and what they answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from eval.tasks.vocabulary import ADJECTIVES, NOUNS, PEOPLE, PLACES
from models.train.values import (
    Draw,
    color,
    company,
    decimal,
    foreign,
    made_up,
    number,
    person,
    place,
    small,
    thing,
    truth,
)


@dataclass(frozen=True)
class Kind:
    """A kind of tool. `parameters`: the type, and a drawer of values, of each parameter."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: Mapping[str, tuple[str, Draw]]
    # How users ask for a call, with {tool} and the parameters' names in braces.
    requests: tuple[str, ...]
    outputs: Draw


def weather(random: Random) -> str:
    sky = random.choice(("sunny", "cloudy", "raining", "snowing", "windy", "foggy"))
    form = random.randrange(4)
    if form == 0:
        return json.dumps({"temperature": random.randint(-20, 40)})
    if form == 1:
        return f"{random.randint(-20, 40)} degrees and {sky}."
    return f"It's {sky}." if form == 2 else f"It is {sky} today."


def result(random: Random) -> str:
    """What any tool may answer."""
    value = random.choice((number, thing, made_up, decimal))(random)
    form = random.randrange(5)
    if form == 0:
        return json.dumps({random.choice(("result", "value", "answer", "status", "total", "id")): value})
    if form == 1:
        return f"Error: {random.choice(('Missing required argument', 'Not found:', 'Invalid value for'))} '{value}'."
    return f"{value}" if form < 4 else f"Done: {value}."


KINDS = (
    Kind(
        ("get_weather", "weather", "get_current_weather", "find_forecast"),
        ("Get weather at a location.", "The weather in a city.", "Get the current weather."),
        {"location": ("string", place)},
        (
            "What is the weather in {location}?",
            "What's the weather like in {location}?",
            "How is the weather in {location} today?",
            "Tell me the weather in {location}.",
            "Is it raining in {location}?",
            "weather in {location}",
        ),
        weather,
    ),
    Kind(
        ("get_weather", "forecast"),
        ("The weather of the next days.", "Forecast for a city."),
        {"city": ("string", place), "days": ("integer", lambda random: random.randint(1, 9))},
        ("What will the weather be in {city} for {days} days?", "Give me a forecast for {city}, {days} days."),
        weather,
    ),
    Kind(
        ("get_time", "current_time", "local_time"),
        ("Get the local time of a city.", "The time in a place."),
        {"city": ("string", place)},
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city} now?"),
        lambda random: f"{random.randrange(24):02}:{random.randrange(60):02}",
    ),
    Kind(
        ("magic_function", "secret_function", "magic", "mystery"),
        ("Apply a magic function to an input.", "Calculate a secret function.", "A function of one number."),
        {"input": ("integer", small)},
        (
            "What is the value of {tool}({input})?",
            "What is {tool} of {input}?",
            "Apply {tool} to {input}.",
            "Calculate {tool}({input}) with the tool.",
            "Use the tool to find {tool}({input}).",
        ),
        result,
    ),
    Kind(
        ("add", "adder", "my_adder", "add_numbers", "sum_tool"),
        ("Add two numbers.", "Takes two integers, a and b, and returns their sum.", "The sum of a and b."),
        {"a": ("integer", small), "b": ("integer", small)},
        ("What is {a} + {b}", "What is {a} + {b}?", "Add {a} and {b} with the tool.", "Use {tool} for {a} and {b}."),
        lambda random: json.dumps({"result": number(random)}),
    ),
    Kind(
        ("create_customer", "new_customer", "add_customer"),
        ("Tool for creating a customer.", "Create a customer with a name in any language.", "Adds a customer."),
        {"customer_name": ("string", company), "description": ("string", lambda random: f"a {thing(random)} company")},
        (
            "Create a customer named '{customer_name}' (new) - {description}",
            "Create a customer named '{customer_name}', {description}.",
            "Add the customer '{customer_name}' ({description}).",
            'Please add "{customer_name}" as a customer: {description}',
        ),
        lambda random: f"Created customer {number(random)}.",
    ),
    Kind(
        ("translate", "translator"),
        ("Translate a text.", "Translates text to another language."),
        {
            "text": ("string", lambda random: foreign(random) if random.random() < 0.6 else thing(random)),
            "language": ("string", lambda random: random.choice(("English", "French", "German", "Chinese", "Spanish"))),
        },
        (
            "Translate '{text}' to {language}.",
            'How do you say "{text}" in {language}?',
            "Translate {text} into {language}.",
        ),
        lambda random: foreign(random) if random.random() < 0.4 else thing(random),
    ),
    Kind(
        ("send_message", "send_email", "notify"),
        ("Send a message to a person.", "Sends a text to someone."),
        {"to": ("string", person), "message": ("string", thing)},
        ("Send {to} the message '{message}'.", "Tell {to}: {message}", "Write to {to} that it is a {message}."),
        lambda random: "Sent.",
    ),
    Kind(
        ("search", "web_search", "find", "look_up"),
        ("Search the web.", "Find documents by a query."),
        {"query": ("string", thing)},
        ("Search for {query}.", "Find something about the {query}.", "Look for a {query} on the web."),
        result,
    ),
    Kind(
        ("get_price", "stock_price", "price_of"),
        ("The price of a product.", "Get a price in dollars."),
        {"item": ("string", lambda random: random.choice(NOUNS))},
        ("What does a {item} cost?", "How much is the {item}?", "Get the price of a {item}."),
        lambda random: json.dumps({"price": decimal(random)}),
    ),
    Kind(
        ("book_table", "reserve", "make_reservation"),
        ("Book a table.", "Reserve a table at a restaurant."),
        {"name": ("string", person), "people": ("integer", lambda random: random.randint(1, 12))},
        ("Book a table for {people} in the name of {name}.", "Reserve for {name}, {people} people."),
        lambda random: f"Booked, number {number(random)}.",
    ),
    Kind(
        ("greeting_generator", "greet", "make_greeting"),
        ("Generate a greeting in a particular style of speaking.", "Greet in a style."),
        {"answer_style": ("string", lambda random: random.choice((*PEOPLE, *ADJECTIVES)).capitalize())},
        ("Use the tool to write a {answer_style} greeting.", "Greet me in the style of a {answer_style}."),
        lambda random: f"Hello from the {random.choice(PLACES)}.",
    ),
)
# Parts of the names of other tools, and parameters that they may have.
VERBS = "get set find make create update delete list read write open close start stop check count move send load"
OBJECTS = "user order file item price page task note report table image route ticket account record value score"
PARAMETERS: Mapping[str, tuple[str, Draw]] = MappingProxyType(
    {
        "id": ("integer", number),
        "count": ("integer", small),
        "amount": ("number", decimal),
        "value": ("integer", small),
        "x": ("integer", small),
        "name": ("string", person),
        "title": ("string", thing),
        "place": ("string", place),
        "city": ("string", place),
        "label": ("string", made_up),
        "text": ("string", lambda random: random.choice((foreign, thing))(random)),
        "color": ("string", color),
        "urgent": ("boolean", truth),
    }
)
CALL_IT = ("Call {tool} with ", "Use {tool} with ", "Please run {tool}: ", "{tool}, ")
CALL_IT_BARE = ("Call {tool}.", "What is the value of {tool}()?", "Use {tool}.")


def draw_kind(random: Random) -> Kind:
    return random.choice(KINDS) if random.random() < 0.72 else _unheard(random)


def _unheard(random: Random) -> Kind:
    """A kind of tool that does not exist, with parameters that do not belong together."""
    verb, what = random.choice(VERBS.split()), random.choice(OBJECTS.split())
    name = f"{verb}_{what}" if random.random() < 0.8 else f"{verb}_{random.choice(NOUNS)}_{what}"
    keys = random.sample(list(PARAMETERS), random.choice((0, 1, 1, 2, 2, 3)))
    given = ", ".join(f"{key} {{{key}}}" for key in keys)
    requests = tuple(f"{start}{given}." for start in CALL_IT) if keys else CALL_IT_BARE
    description = f"{verb.capitalize()} {random.choice(('a', 'the'))} {what}."
    return Kind((name,), (description,), {key: PARAMETERS[key] for key in keys}, requests, result)
