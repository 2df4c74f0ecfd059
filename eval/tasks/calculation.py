"""Small calculations as chains of equal expressions, in steps that can be done in the head."""


def total(a: int, b: int) -> str:
    """a + b by the tens of b, then its ones: "48+37=78+7=85"."""
    tens = b - b % 10
    if b < 10 or b % 10 == 0 or a == 0:
        return f"{a}+{b}={a + b}"
    return f"{a}+{b}={a + tens}+{b % 10}={a + b}"


def difference(a: int, b: int) -> str:
    """a - b by the tens of b, then its ones: "83-37=53-7=46"; b is at most a."""
    assert b <= a
    tens = b - b % 10
    if b < 10 or b % 10 == 0:
        return f"{a}-{b}={a - b}"
    return f"{a}-{b}={a - tens}-{b % 10}={a - b}"


def product(a: int, b: int) -> str:
    """a * b by the tens of a, then its ones, beyond the table of twelves: "19*12=120+108=228"."""
    tens = a - a % 10
    if max(a, b) <= 12 or a % 10 == 0 or a < 10 or _is_power_of_ten(b):
        return f"{a}*{b}={a * b}"
    return f"{a}*{b}={tens * b}+{a % 10 * b}={a * b}"


def quotient(a: int, b: int) -> str:
    """a / b with remainder. Tens of b are taken away first: "10*12=120, 237-120=117", then "9*12=108, 117-108=9"."""
    lines = []
    times = a // b
    parts = (times,) if _is_power_of_ten(b) else (times - times % 10, times % 10)
    left = a
    for part in parts:
        if part:
            lines.append(f"{part}*{b}={part * b}, {left}-{part * b}={left - part * b}")
            left -= part * b
    return "\n".join(lines)


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"
