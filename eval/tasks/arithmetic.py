"""Sums, differences, products and quotients, worked out place by place as on paper."""

from random import Random

from eval.tasks.problem import Problem, bold

PLACES = (
    "ones",
    "tens",
    "hundreds",
    "thousands",
    "ten-thousands",
    "hundred-thousands",
    "millions",
    "ten-millions",
)
ADD = (
    "What is {a} + {b}?",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
    "Calculate {a} plus {b}.",
    "Find the sum of {a} and {b}.",
)
SUBTRACT = ("What is {a} - {b}?", "Subtract {b} from {a}.", "{a} - {b} = ?", "Calculate {a} minus {b}.")
MULTIPLY = (
    "What is {a} * {b}?",
    "Multiply {a} by {b}.",
    "{a} * {b} = ?",
    "Calculate {a} times {b}.",
    "Find the product of {a} and {b}.",
)
DIVIDE = (
    "Divide {a} by {b}. Give the quotient and the remainder.",
    "What is {a} divided by {b}, with remainder?",
    "Find the quotient and remainder of {a} / {b}.",
)


def number(random: Random, most_digits: int) -> int:
    """A number whose count of digits is uniform in 1..most_digits."""
    digits = random.randint(1, most_digits)
    return random.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def add(random: Random) -> Problem:
    a, b = number(random, 6), number(random, 6)
    return addition(a, b, random.choice(ADD).format(a=a, b=b))


def addition(a: int, b: int, prompt: str) -> Problem:
    """a + b, of at most seven digits each, asked for as `prompt`."""
    return Problem(
        task="add",
        key=f"{a}+{b}",
        prompt=prompt,
        reasoning=f"I add place by place.\n{added(a, b)}",
        reply=f"{a} + {b} = {bold(a + b)}",
        answer=str(a + b),
    )


def subtract(random: Random) -> Problem:
    a, b = number(random, 6), number(random, 6)
    # Make most differences positive, as people's questions mostly are.
    if a < b and random.random() < 0.7:
        a, b = b, a
    return Problem(
        task="subtract",
        key=f"{a}-{b}",
        prompt=random.choice(SUBTRACT).format(a=a, b=b),
        reasoning=f"I subtract place by place.\n{subtracted(a, b)}",
        reply=f"{a} - {b} = {bold(a - b)}",
        answer=str(a - b),
    )


def multiply(random: Random) -> Problem:
    if random.random() < 0.5:
        a, b = number(random, 4), random.randint(2, 9)
    else:
        a, b = number(random, 3), random.randint(10, 99)
    return Problem(
        task="multiply",
        key=f"{a}*{b}",
        prompt=random.choice(MULTIPLY).format(a=a, b=b),
        reasoning=f"I multiply digit by digit.\n{multiplied(a, b)}",
        reply=f"{a} * {b} = {bold(a * b)}",
        answer=str(a * b),
    )


def divide(random: Random) -> Problem:
    a, b = number(random, 5), random.randint(2, 9)
    quotient, remainder = divmod(a, b)
    result = f"{quotient} remainder {remainder}"
    return Problem(
        task="divide",
        key=f"{a}/{b}",
        prompt=random.choice(DIVIDE).format(a=a, b=b),
        reasoning=f"I divide digit by digit.\n{divided(a, b)}",
        reply=f"{a} / {b} = {bold(result)}",
        answer=result,
    )


def digits_of(value: int, width: int = 1) -> list[int]:
    """The digits, lowest place first, filled with zeros to `width`."""
    return [int(digit) for digit in reversed(str(value).zfill(width))]


def _listing(value: int) -> str:
    places = ", ".join(f"{place} {digit}" for place, digit in zip(PLACES, digits_of(value), strict=False))
    return f"{value}: {places}"


def _read_back(digits: list[int]) -> str:
    """The digits from the highest place down, then the number itself without leading zeros."""
    places = [f"{place} {digit}" for place, digit in zip(PLACES, digits, strict=False)]
    value = int("".join(map(str, reversed(digits))))
    return f"{', '.join(reversed(places))}: {value}"


def added(a: int, b: int) -> str:
    """The lines of an addition."""
    width = max(len(str(a)), len(str(b)))
    lines = [_listing(a), _listing(b)]
    digits = []
    carry = 0
    for place, x, y in zip(PLACES, digits_of(a, width), digits_of(b, width), strict=False):
        total = x + y + carry
        lines.append(f"{place}: {x}+{y}+{carry}={total}, carry {total // 10}")
        carry = total // 10
        digits.append(total % 10)
    if carry:
        digits.append(carry)
    return "\n".join([*lines, _read_back(digits)])


def subtracted(a: int, b: int) -> str:
    """The lines of a subtraction. If b is larger, a is subtracted from b and the result is negated."""
    if a < b:
        return f"{a} is less than {b}: I take {b} - {a} and negate.\n{_difference(b, a)}\nnegated: -{b - a}"
    return f"{a} is not less than {b}.\n{_difference(a, b)}"


def _difference(a: int, b: int) -> str:
    width = len(str(a))
    lines = [_listing(a), _listing(b)]
    digits = []
    borrow = 0
    for place, x, y in zip(PLACES, digits_of(a), digits_of(b, width), strict=False):
        left = x - y - borrow
        borrow_next = int(left < 0)
        lines.append(f"{place}: {x}-{y}-{borrow}={left}, digit {left % 10}, borrow {borrow_next}")
        digits.append(left % 10)
        borrow = borrow_next
    return "\n".join([*lines, _read_back(digits)])


def multiplied(a: int, b: int) -> str:
    """The lines of a multiplication by a number of one or two digits."""
    if b < 10:
        return f"{_listing(a)}\n{_times_digit(a, b)}"
    tens, ones = divmod(b, 10)
    low, high = a * ones, a * tens * 10
    return "\n".join(
        [
            f"{b} is {tens} tens and {ones} ones.",
            _listing(a),
            f"{a}*{ones}",
            _times_digit(a, ones),
            f"{a}*{tens}",
            _times_digit(a, tens),
            f"with a zero: {high}",
            f"{low}+{high}",
            added(low, high),
        ]
    )


def _times_digit(a: int, factor: int) -> str:
    lines = []
    digits = []
    carry = 0
    for place, digit in zip(PLACES, digits_of(a), strict=False):
        total = digit * factor + carry
        lines.append(f"{place}: {digit}*{factor}+{carry}={total}, carry {total // 10}")
        digits.append(total % 10)
        carry = total // 10
    if carry:
        digits.append(carry)
    return "\n".join([*lines, _read_back(digits)])


def divided(a: int, b: int) -> str:
    """The lines of a long division by one digit."""
    lines = []
    quotient = ""
    remainder = 0
    for digit in str(a):
        current = remainder * 10 + int(digit)
        times = current // b
        remainder = current - times * b
        lines.append(
            f"bring down {digit}: {current}/{b}={times}, {times}*{b}={times * b}, {current}-{times * b}={remainder}"
        )
        quotient += str(times)
    return "\n".join([*lines, f"quotient {quotient}: {int(quotient)}, remainder {remainder}"])
