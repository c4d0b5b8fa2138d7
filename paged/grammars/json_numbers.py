"""Intervals of JSON numbers in exact arithmetic, and regular expressions of the texts within them.

The grammar library computes with float64: beyond 2^53 its integers are others than the schema's. Texts are
bounded, as a model may write digits forever: see MAX_DIGITS and MAX_INTEGER_DIGITS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

Exact = int | Decimal  # a number as the schema writes it; a float would round
MAX_DIGITS = 17  # of a number before its exponent: a float64 needs no more
MAX_INTEGER_DIGITS = 19  # a 64-bit integer needs no more
MAX_EXPONENT = 290  # with MAX_DIGITS digits before it, a finite float64
MAX_MAGNITUDE = 400  # of exponents in a schema
# Of a bound without its exponent: a regular expression has a pair of parentheses for each, and 250 of them.
MAX_BOUND_DIGITS = 100
_LARGEST = 10 ** (MAX_EXPONENT + MAX_DIGITS)  # more than any number without bounds
_FRACTION = r"(\.[0-9]+)?"
_PLAIN = rf"(0|[1-9][0-9]*){_FRACTION}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The numbers from low to high. A bound may be missing, or excluded from the interval.

    multiple: all numbers in the interval are multiples of this; integers are multiples of 1.
    """

    low: Exact | None = None
    high: Exact | None = None
    is_low_open: bool = False
    is_high_open: bool = False
    is_integer: bool = False
    multiple: Fraction | None = None

    def intersect(self, other: Interval) -> Interval:
        """Return the intersection with another interval."""
        low = self.low
        is_low_open = self.is_low_open
        if low is None or (other.low is not None and other.low > low):
            low = other.low
            is_low_open = other.is_low_open
        elif other.low == low:
            is_low_open |= other.is_low_open
        high = self.high
        is_high_open = self.is_high_open
        if high is None or (other.high is not None and other.high < high):
            high = other.high
            is_high_open = other.is_high_open
        elif other.high == high:
            is_high_open |= other.is_high_open
        return Interval(
            low=low,
            high=high,
            is_low_open=is_low_open,
            is_high_open=is_high_open,
            is_integer=self.is_integer or other.is_integer,
            multiple=_common_multiple(self.multiple, other.multiple),
        )

    def why_empty(self) -> str | None:
        """Return why the interval contains no number; None if it contains one."""
        if self.low is None or self.high is None:
            return None
        low_name = "exclusiveMinimum" if self.is_low_open else "minimum"
        high_name = "exclusiveMaximum" if self.is_high_open else "maximum"
        if self.low > self.high:
            return f"{low_name} ({self.low}) is greater than {high_name} ({self.high})"
        if self.low == self.high and (self.is_low_open or self.is_high_open):
            return f"{low_name} ({self.low}) is equal to {high_name} ({self.high})"
        step = self.step
        if step is not None and self.first(step) > self.last(step):
            what = "integer" if step == 1 else f"multiple of {step}"
            return f"there is no {what} between {low_name} ({self.low}) and {high_name} ({self.high})"
        return None

    @property
    def step(self) -> Fraction | None:
        """All numbers in the interval are multiples of this number; None if there is no such number."""
        return _common_multiple(self.multiple, Fraction(1) if self.is_integer else None)

    def first(self, step: Fraction) -> Fraction:
        """Return the first multiple of `step` in the interval. The interval must have a lower bound."""
        low = Fraction(self.low or 0)
        found = math.ceil(low / step) * step
        return found + step if self.is_low_open and found == low else found

    def last(self, step: Fraction) -> Fraction:
        """Return the last multiple of `step` in the interval. The interval must have an upper bound."""
        high = Fraction(self.high or 0)
        found = math.floor(high / step) * step
        return found - step if self.is_high_open and found == high else found


def why_no_bound(value: Exact, *, is_low: bool) -> str | None:
    """Return why a number cannot be a bound in a regular expression; None if it can."""
    is_distant = value <= -_LARGEST if is_low else value >= _LARGEST
    if not is_distant and sum(map(len, _split(value))) > MAX_BOUND_DIGITS:
        return f"has more than {MAX_BOUND_DIGITS} digits when it is written without an exponent"
    return None


def _common_multiple(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    if one is None or other is None:
        return one or other
    numerator = math.lcm(one.numerator, other.numerator)
    return Fraction(numerator, math.gcd(one.denominator, other.denominator))


def constant_text(value: Exact) -> str:
    """Return a number as JSON: as an integer if it is one and short, else as written in the schema."""
    whole = isinstance(value, int) or (value == value.to_integral_value() and value.adjusted() < MAX_DIGITS)
    return str(int(value)) if whole else str(value)


def terminal(interval: Interval) -> str:
    """Return a Lark expression for the numbers of an interval. `multiple` may only be 1 or None."""
    if interval.low is not None and interval.low == interval.high:
        return _constant(interval.low)
    interval = _without_distant_bounds(interval)
    if interval.step is not None:
        return _regex(_integers(interval))
    if interval.low is None and interval.high is None:
        return f'"-"? ({_mantissa(MAX_DIGITS)}) {_regex(f"([eE][+-]?{_exponent(0)})?")}'
    return " | ".join(_signed(interval))


def _without_distant_bounds(interval: Interval) -> Interval:
    """Drop the bounds that no number reaches."""
    if interval.low is not None and interval.low <= -_LARGEST:
        interval = replace(interval, low=None)
    if interval.high is not None and interval.high >= _LARGEST:
        interval = replace(interval, high=None)
    return interval


def _constant(value: Exact) -> str:
    return f'"{constant_text(value)}"'


def _regex(pattern: str) -> str:
    return f"/{pattern}/"


def _integers(interval: Interval) -> str:
    """Return a regular expression of the integers of an interval."""
    low = None if interval.low is None else int(interval.first(Fraction(1)))
    high = None if interval.high is None else int(interval.last(Fraction(1)))
    digits = max(MAX_INTEGER_DIGITS, *(len(str(abs(end))) for end in (low, high) if end is not None), 0)
    low = 1 - 10**digits if low is None else low
    high = 10**digits - 1 if high is None else high
    parts = []
    if low < 0:
        parts.append(f"-({integer_regex(max(1, -high), -low)})")
    if high >= 0:
        parts.append(integer_regex(max(0, low), high))
    return "|".join(parts)


def integer_regex(low: int, high: int | None) -> str:
    """Return a regular expression for the integers from low (at least 0) to high (None: unbounded)."""
    parts = list[str]()
    last = None if high is None else str(high)
    first = str(low)
    if last is not None and len(first) == len(last):
        return _same_length(first, last)
    parts.append(_same_length(first, "9" * len(first)))
    if last is None:
        parts.append(f"[1-9][0-9]{{{len(first)},}}")
    else:
        if len(last) > len(first) + 1:
            parts.append(f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}")
        parts.append(_same_length("1" + "0" * (len(last) - 1), last))
    return "|".join(parts)


def _same_length(low: str, high: str) -> str:
    """Return a regular expression of the digits from low to high, which have the same length."""
    if not low:
        return ""
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    rest = len(low) - 1
    first = int(low[0])
    last = int(high[0])
    parts = list[str]()
    if low[1:].strip("0"):
        parts.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return f"({'|'.join(parts)})"


def _signed(interval: Interval) -> Iterator[str]:
    """Yield terms for the negative numbers of an interval and for the others."""
    low = interval.low
    high = interval.high
    if low is None or low < 0:
        most = None if low is None else -low
        if high is None or high >= 0:
            yield f'"-" ({_positive(0, most, True, interval.is_low_open)})'
        else:
            yield f'"-" ({_positive(-high, most, interval.is_high_open, interval.is_low_open)})'
    if high is None or high > 0 or (high == 0 and not interval.is_high_open):
        is_inside = low is not None and low >= 0
        least = low if low is not None and is_inside else 0
        yield f"({_positive(least, high, is_inside and interval.is_low_open, interval.is_high_open)})"


def _positive(low: Exact, high: Exact | None, is_low_open: bool, is_high_open: bool) -> str:
    """Return an expression of the numbers from low, at least 0, to high, which may be missing."""
    if low == high:
        return _constant(low)
    ends = [low] if high is None else [low, high]
    # Between two numbers there is one with a digit more than theirs.
    digits = max(MAX_DIGITS, *(1 + sum(map(len, _split(end))) for end in ends))
    plain = f"{_regex(_at_least(low, is_low_open))} & {_mantissa(digits)}"
    if high is not None:
        return f"{_regex(_at_most(high, is_high_open))} & {plain}"
    one_digit = rf"[1-9](\.[0-9]{{1,{MAX_DIGITS - 1}}})?[eE]"
    if low == 0:
        return f"{plain} | {_regex(one_digit + '[+-]?' + _exponent(0))}"
    more = _exponent(len(_split(low)[0]))  # 10 to its power is more than low
    return f"{plain} | {_regex(one_digit + '[+]?' + more)}"


def _mantissa(digits: int) -> str:
    """Return an expression of numbers without an exponent that have at most this many digits."""
    return rf"{_regex(_PLAIN)} & /[0-9](\.?[0-9]){{0,{digits - 1}}}/"


def _exponent(least: int) -> str:
    return f"0?({integer_regex(least, max(MAX_EXPONENT, least))})"


def _split(value: Exact) -> tuple[str, str]:
    """Return the digits before and after the point, without zeros at the end."""
    whole, _, fraction = format(Decimal(value), "f").partition(".")
    return whole.lstrip("-0") or "0", fraction.rstrip("0")


def _at_least(value: Exact, is_open: bool) -> str:
    whole, fraction = _split(value)
    parts = [f"({integer_regex(int(whole) + 1, None)}){_FRACTION}"]
    if fraction or is_open:
        parts.append(rf"{whole}\.{_fraction_at_least(fraction, is_open)}")
    else:
        parts.append(whole + _FRACTION)
    return "|".join(parts)


def _fraction_at_least(digits: str, is_open: bool) -> str:
    if not digits:
        return "[0-9]*[1-9][0-9]*" if is_open else "[0-9]*"
    parts = [digits[0] + _fraction_at_least(digits[1:], is_open)]
    if digits[0] < "9":
        parts.append(f"[{int(digits[0]) + 1}-9][0-9]*")
    return f"({'|'.join(parts)})"


def _at_most(value: Exact, is_open: bool) -> str:
    whole, fraction = _split(value)
    parts = list[str]()
    if whole != "0":
        parts.append(f"({integer_regex(0, int(whole) - 1)}){_FRACTION}")
    if fraction:
        parts.append(rf"{whole}(\.{_fraction_at_most(fraction, is_open)})?")
    elif not is_open:
        parts.append(rf"{whole}(\.0+)?")
    return "|".join(parts)


def _fraction_at_most(digits: str, is_open: bool) -> str:
    """Return a regular expression of the digits of fractions of at most this one, which is not empty."""
    first, rest = digits[0], digits[1:]
    parts = list[str]()
    if rest:
        parts.append(f"{first}({_fraction_at_most(rest, is_open)})?")
    elif not is_open:
        parts.append(f"{first}0*")
    if first > "0":
        parts.append(f"[0-{int(first) - 1}][0-9]*")
    return f"({'|'.join(parts)})"
