"""Random JSON schemas and regular expressions: mostly such as are served, with all that was once served wrongly."""

from __future__ import annotations

from random import Random

SIGNS = (
    *("a", "b", "Z", "0", "9", "-", "_", "é", '"', r"\\", r"\"", r"\/", "/", r"\n", r"\t", r"\.", ":", " ", r"\u0041"),
    *(r"\u0022", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[a-z]", "[^a]", '[^"]', '["a]', r'["\\]', "[!-~]"),
    *(r"[^\w]", r"[\s\S]", '[ -"]', r"[\]a]", "[$^]", r"[^\n]", r"[\u0000-\u0022]", r"\$", "日", "[^é]", r"\u65e5"),
)
REPEATS = ("?", "*", "+", "{2}", "{1,3}", "{0,2}", "*?", "+?", "{2,}", "{0}", "{1,60}", "{100}")
NUMBERS = (
    *(0, 1, -1, 2, 10, -10, 99, 100, 0.5, -0.5, 1.5, 0.1, 0.25, 3.14159, 1e-3, 1e-7, 123456789, 2**31, 2**53, -(2**53)),
    *(1e3, -0.0001, 0.000123, 12.0, 99.99, 1e10, 0.30000000000000004, 0.1234567, 0.1234568, 0.1000001),
)
WIDE = (2**53 + 1, -(2**63), 2**63 - 1, 2**63, 10**25)
TEXTS = ("", "a", "b", 'a"b', "\\", "é", "\n", "\u2028", "\U0001f600", "/", "\x7f", "\x010")
NAMES = ("a", "b", "ab", "a b", "é", '"q', "\\", "/", "", "$ref", "type", "properties", "additionalProperties", "\x7fa")
FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "uri", "hostname", "ipv6")
DEEPEST = 3


def random_pattern(rng: Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth >= DEEPEST or kind < 0.5:
        return rng.choice(SIGNS)
    if kind < 0.65:
        return random_pattern(rng, depth + 1) + random_pattern(rng, depth + 1)
    if kind < 0.75:
        return f"({random_pattern(rng, depth + 1)}|{random_pattern(rng, depth + 1)})"
    if kind < 0.8:
        begins, ends, repeats = rng.choice(["", "^"]), rng.choice(["", "$"]), rng.choice(["", "?", "*", "+", "{2}"])
        return f"(?:{begins}{random_pattern(rng, depth + 1)}{ends}){repeats}"
    if kind < 0.9:
        return rng.choice(SIGNS) + rng.choice(REPEATS)
    return "^" + random_pattern(rng, depth + 1) if kind < 0.95 else random_pattern(rng, depth + 1) + "$"


def random_value(rng: Random, depth: int = 0) -> object:
    kind = rng.randrange(12)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind < 7:
        return rng.choice(NUMBERS)
    if kind < 8:
        return rng.choice(WIDE)
    if kind < 10 or depth > 1:
        return rng.choice([True, False, None])
    if kind == 10:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(NAMES): random_value(rng, depth + 1) for _ in range(rng.randrange(3))}


def random_schema(rng: Random) -> object:
    made = _schema(rng, 0)
    if isinstance(made, dict) and rng.random() < 0.3:
        return {"$defs": {"x": _schema(rng, 2), "y": _schema(rng, 2)}, **made}
    return made


def _schema(rng: Random, depth: int) -> object:
    kind = rng.random()
    if depth > DEEPEST or kind < 0.12:
        return rng.choice([True, {}, {"type": rng.choice(["null", "boolean", "integer", "string", "number"])}])
    if kind < 0.27:
        return _number(rng)
    if kind < 0.42:
        return _string(rng)
    if kind < 0.6:
        return _array(rng, depth)
    if kind < 0.85:
        return _object(rng, depth)
    if kind < 0.9:
        values = [random_value(rng) for _ in range(rng.randrange(1, 4))]
        return rng.choice([{"enum": values}, {"const": values[0]}])
    if kind < 0.97:
        name = rng.choice(["anyOf", "anyOf", "oneOf", "allOf"])
        return {name: [_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
    return {"$ref": rng.choice(["#", "#/$defs/x", "#/$defs/y"])}


def _some(rng: Random, share: float, **keywords: object) -> dict[str, object]:
    return {name: value for name, value in keywords.items() if rng.random() < share}


def _number(rng: Random) -> object:
    kind = rng.choice(["integer", "number", ["integer", "string"], ["number", "null"], ["integer", "number"]])
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    bounds = _some(rng, 0.4, **{name: rng.choice(NUMBERS) for name in names})
    return {"type": kind, **bounds, **_some(rng, 0.05, multipleOf=2)}


def _string(rng: Random) -> object:
    kind = rng.choice(["string", "string", ["string", "null"]])
    lengths = _some(rng, 0.3, minLength=rng.randrange(5), maxLength=rng.randrange(5))
    return {
        "type": kind,
        **lengths,
        **_some(rng, 0.5, pattern=random_pattern(rng)),
        **_some(rng, 0.15, format=rng.choice(FORMATS)),
    }


def _array(rng: Random, depth: int) -> object:
    return {
        **_some(rng, 0.9, type="array"),
        **_some(rng, 0.6, items=rng.choice([_schema(rng, depth + 1), False])),
        **_some(rng, 0.3, prefixItems=[_schema(rng, depth + 1) for _ in range(rng.randrange(1, 3))]),
        **_some(rng, 0.3, minItems=rng.randrange(4), maxItems=rng.randrange(4)),
        **_some(rng, 0.1, unevaluatedItems=rng.choice([True, False, _schema(rng, depth + 1)])),
        **_some(rng, 0.05, uniqueItems=rng.choice([True, False])),
    }


def _object(rng: Random, depth: int) -> object:
    made: dict[str, object] = _some(rng, 0.9, type="object")
    if rng.random() < 0.6:
        names = rng.sample(NAMES, rng.randrange(1, 4))
        made["properties"] = {name: _schema(rng, depth + 1) for name in names}
        made |= _some(rng, 0.5, required=[name for name in names if rng.random() < 0.6])
    patterns = {random_pattern(rng): _schema(rng, depth + 1) for _ in range(rng.randrange(1, 3))}
    return {
        **made,
        **_some(rng, 0.4, additionalProperties=rng.choice([True, False, {}, _schema(rng, depth + 1)])),
        **_some(rng, 0.1, unevaluatedProperties=rng.choice([True, False, _schema(rng, depth + 1)])),
        **_some(rng, 0.1, patternProperties=patterns, propertyNames={"pattern": random_pattern(rng)}),
        **_some(rng, 0.2, minProperties=rng.randrange(4), maxProperties=rng.randrange(4)),
    }
