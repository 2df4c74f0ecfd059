"""Word problems of two or three small steps, from templates."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from eval.tasks.calculation import difference, product, total
from eval.tasks.problem import Problem, bold
from eval.tasks.vocabulary import NAMES

THINGS = (
    "apples",
    "books",
    "coins",
    "cookies",
    "eggs",
    "lemons",
    "marbles",
    "oranges",
    "pears",
    "pencils",
    "shells",
    "stamps",
)
GOODS = ("bread", "tea", "honey", "rope", "soap", "cloth", "candle", "lamp", "kite", "map")


@dataclass(frozen=True)
class Story:
    question: str
    # Each step is a sentence or a calculation.
    steps: tuple[str, ...]
    result: int
    # The things that are counted; the word follows the result in the reply.
    unit: str


def word_problem(random: Random) -> Problem:
    story = random.choice(STORIES)(random)
    return Problem(
        task="word_problem",
        key=story.question,
        prompt=story.question,
        reasoning="\n".join(story.steps),
        reply=f"The answer is {bold(story.result)} {story.unit}.",
        answer=str(story.result),
    )


def _give_and_get(random: Random) -> Story:
    name, friend = random.sample(NAMES, 2)
    thing = random.choice(THINGS)
    start, got = random.randint(5, 60), random.randint(2, 40)
    gave = random.randint(1, start + got)
    return Story(
        f"{name} has {start} {thing}. {friend} gives {name} {got} more. Then {name} loses {gave} {thing}. "
        f"How many {thing} does {name} have now?",
        (
            f"After the gift: {total(start, got)}",
            f"After the loss: {difference(start + got, gave)}",
        ),
        start + got - gave,
        thing,
    )


def _boxes(random: Random) -> Story:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    boxes, each, extra = random.randint(2, 12), random.randint(2, 12), random.randint(1, 30)
    return Story(
        f"{name} fills {boxes} boxes with {each} {thing} each and has {extra} {thing} left over. "
        f"How many {thing} are there in all?",
        (
            f"In the boxes: {product(boxes, each)}",
            f"With the rest: {total(boxes * each, extra)}",
        ),
        boxes * each + extra,
        thing,
    )


def _share(random: Random) -> Story:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    friends, each, kept = random.randint(2, 9), random.randint(2, 12), random.randint(1, 15)
    total = friends * each + kept
    return Story(
        f"{name} has {total} {thing}, keeps {kept} and shares the rest equally among {friends} friends. "
        f"How many {thing} does each friend get?",
        (
            f"To share: {difference(total, kept)}",
            f"For each: {total - kept}/{friends}={each}",
        ),
        each,
        thing,
    )


def _shopping(random: Random) -> Story:
    name = random.choice(NAMES)
    first, second = random.sample(GOODS, 2)
    count, price, other = random.randint(2, 9), random.randint(2, 12), random.randint(1, 40)
    return Story(
        f"{name} buys {count} pieces of {first} at {price} dollars each and one piece of {second} for {other} dollars. "
        f"How many dollars does {name} pay?",
        (
            f"For {first}: {product(count, price)}",
            f"In all: {total(count * price, other)}",
        ),
        count * price + other,
        "dollars",
    )


def _change(random: Random) -> Story:
    name, good = random.choice(NAMES), random.choice(GOODS)
    count, price = random.randint(2, 9), random.randint(2, 11)
    paid = count * price + random.randint(1, 30)
    return Story(
        f"{name} buys {count} pieces of {good} at {price} dollars each and pays with {paid} dollars. "
        f"How many dollars does {name} get back?",
        (
            f"The price: {product(count, price)}",
            f"The change: {difference(paid, count * price)}",
        ),
        paid - count * price,
        "dollars",
    )


def _travel(random: Random) -> Story:
    name = random.choice(NAMES)
    speed, hours, rest = random.randint(3, 12) * 5, random.randint(2, 6), random.randint(5, 90)
    return Story(
        f"{name} drives {hours} hours at {speed} kilometers per hour and then {rest} kilometers more. "
        f"How many kilometers does {name} drive in all?",
        (
            f"In {hours} hours: {product(hours, speed)}",
            f"In all: {total(hours * speed, rest)}",
        ),
        hours * speed + rest,
        "kilometers",
    )


def _saving(random: Random) -> Story:
    name = random.choice(NAMES)
    weekly, weeks, spent = random.randint(3, 12), random.randint(3, 12), random.randint(1, 9)
    saved = weekly * weeks
    return Story(
        f"{name} saves {weekly} dollars a week for {weeks} weeks and then spends {spent} dollars. "
        f"How many dollars are left?",
        (
            f"Saved: {product(weekly, weeks)}",
            f"Left: {difference(saved, spent)}",
        ),
        saved - spent,
        "dollars",
    )


def _ages(random: Random) -> Story:
    name, other = random.sample(NAMES, 2)
    age, older, years = random.randint(4, 40), random.randint(2, 30), random.randint(2, 20)
    return Story(
        f"{name} is {age} years old. {other} is {older} years older than {name}. "
        f"How old will {other} be in {years} years?",
        (
            f"{other} now: {total(age, older)}",
            f"In {years} years: {total(age + older, years)}",
        ),
        age + older + years,
        "years",
    )


def _more_than(random: Random) -> Story:
    name, other = random.sample(NAMES, 2)
    thing = random.choice(THINGS)
    count, times = random.randint(2, 15), random.randint(2, 6)
    return Story(
        f"{name} has {count} {thing}. {other} has {times} times as many. How many {thing} do they have together?",
        (
            f"{other}: {product(count, times)}",
            f"Together: {total(count, count * times)}",
        ),
        count + count * times,
        thing,
    )


def _rows(random: Random) -> Story:
    place = random.choice(("hall", "theater", "school", "garden", "tent"))
    rows, seats = random.randint(3, 12), random.randint(3, 12)
    taken = random.randint(1, rows * seats - 1)
    return Story(
        f"A {place} has {rows} rows of {seats} seats. {taken} seats are taken. How many seats are free?",
        (
            f"Seats: {product(rows, seats)}",
            f"Free: {difference(rows * seats, taken)}",
        ),
        rows * seats - taken,
        "seats",
    )


def _reading(random: Random) -> Story:
    name = random.choice(NAMES)
    daily, days, left = random.randint(4, 20), random.randint(3, 9), random.randint(5, 60)
    return Story(
        f"{name} reads {daily} pages a day for {days} days and has {left} pages left. How many pages has the book?",
        (
            f"Read: {product(daily, days)}",
            f"In all: {total(daily * days, left)}",
        ),
        daily * days + left,
        "pages",
    )


def _teams(random: Random) -> Story:
    teams, members, coaches = random.randint(3, 12), random.randint(3, 11), random.randint(2, 9)
    free = random.randint(1, 20)
    players, people = teams * members, teams * members + coaches
    return Story(
        f"{teams} teams of {members} players travel with {coaches} coaches. {free} seats stay free. "
        f"How many seats are there?",
        (
            f"Players: {product(teams, members)}",
            f"People: {total(players, coaches)}",
            f"Seats: {total(people, free)}",
        ),
        people + free,
        "seats",
    )


STORIES: tuple[Callable[[Random], Story], ...] = (
    _give_and_get,
    _boxes,
    _share,
    _shopping,
    _change,
    _travel,
    _saving,
    _ages,
    _more_than,
    _rows,
    _reading,
    _teams,
)
