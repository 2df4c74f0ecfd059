"""Converting between units, with whole numbers."""

from random import Random

from eval.tasks.calculation import product, quotient
from eval.tasks.problem import Problem, bold

# Larger unit, smaller unit, how many of these make one, and the largest amount asked for.
CONVERSIONS = (
    ("kilometers", "meters", 1000, 99),
    ("meters", "centimeters", 100, 99),
    ("centimeters", "millimeters", 10, 99),
    ("kilograms", "grams", 1000, 99),
    ("liters", "milliliters", 1000, 99),
    ("tonnes", "kilograms", 1000, 99),
    ("hours", "minutes", 60, 30),
    ("minutes", "seconds", 60, 30),
    ("days", "hours", 24, 14),
    ("weeks", "days", 7, 52),
    ("years", "months", 12, 30),
    ("feet", "inches", 12, 30),
    ("yards", "feet", 3, 99),
    ("dozens", "pieces", 12, 30),
)
CONVERT = ("Convert {amount} to {unit}.", "How many {unit} are {amount}?", "Express {amount} in {unit}.")


def convert_units(random: Random) -> Problem:
    """Convert an amount to the smaller unit, or from the smaller unit into both."""
    large, small, factor, most = random.choice(CONVERSIONS)
    whole, rest = random.randint(1, most), random.randrange(factor) if random.random() < 0.6 else 0
    if random.random() < 0.6:
        return _to_small(random, large, small, factor, whole, rest)
    return _to_both(random, large, small, factor, whole, rest)


def _to_small(random: Random, large: str, small: str, factor: int, whole: int, rest: int) -> Problem:
    amount = f"{whole} {large} and {rest} {small}" if rest else f"{whole} {large}"
    result = f"{whole * factor + rest} {small}"
    lines = [f"{large} to {small}: times {factor}", product(whole, factor)]
    if rest:
        lines.append(f"{whole * factor}+{rest}={whole * factor + rest}")
    return Problem(
        task="convert_units",
        key=f"{amount} in {small}",
        prompt=random.choice(CONVERT).format(amount=amount, unit=small),
        reasoning="\n".join(lines),
        reply=f"{amount} = {bold(result)}",
        answer=result,
    )


def _to_both(random: Random, large: str, small: str, factor: int, whole: int, rest: int) -> Problem:
    amount = f"{whole * factor + rest} {small}"
    result = f"{whole} {large} and {rest} {small}"
    steps = quotient(whole * factor + rest, factor)
    return Problem(
        task="convert_units",
        key=f"{amount} in {large}",
        prompt=random.choice(CONVERT).format(amount=amount, unit=f"{large} and {small}"),
        reasoning=f"{small} to {large}: by {factor}\n{steps}\n{whole} and {rest}",
        reply=f"{amount} = {bold(result)}",
        answer=result,
    )
