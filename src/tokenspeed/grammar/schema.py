"""Whether a JSON schema says only what its grammar will hold an answer to.

The compiler drops keywords it does not know, alone or beside others, and an answer that breaks a
dropped one would be a wrong answer. So every keyword of every subschema must be in a list here, in a
company in which it is known to be obeyed; anything else is refused by its name and place.

Source of the vocabulary: JSON Schema, draft 2020-12.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import ceil, floor

import attrs

from tokenspeed.grammar.regex import regex_fault
from tokenspeed.grammar.schema_parts import (
    ANNOTATIONS,
    BY_TYPE,
    DEFINITIONS,
    FORMATS,
    IMPLY,
    OLD_DRAFTS,
    OTHER_NAMES,
    SchemaFault,
    disjoint,
    exact,
    shown,
    type_names,
    value_fits,
)

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_VALUES = 10_000
MAX_COUNT = 10_000
"""Of minLength, maxItems and the like: the grammar grows with them."""

MAX_NUMBER = 1 << 53

DIGITS = 6
"""Behind the point, of a number that has bounds."""

BRANCHES = ("anyOf", "oneOf", "allOf")


@attrs.define(eq=False)
class Walk:
    """One schema under inspection.

    Attributes:
        seen: subschemas that were looked at, by identity: a reference leads to each once.
        values: of enums, so far.
        based: where a subschema has an $id, which changes what references below it mean, or "".
        refers: a reference was seen.
        sound: subschemas that do not lead back to themselves.
    """

    root: object
    seen: set[int] = attrs.field(factory=set[int])
    values: int = 0
    based: str = ""
    refers: bool = False
    sound: set[int] = attrs.field(factory=set[int])

    def whole(self) -> None:
        """Raises: SchemaFault."""
        self.node(self.root, "$", 0)
        if self.based and self.refers:
            raise SchemaFault(f"{self.based}: below the root of a schema with references, it is not supported")

    def node(self, node: object, path: str, depth: int) -> None:
        """Raises: SchemaFault."""
        if node is True:
            return
        if node is False:
            raise SchemaFault(f"{path}: false accepts no value")
        if not isinstance(node, dict):
            raise SchemaFault(f"{path}: got {shown(node)}, must be an object or a boolean")
        if id(node) in self.seen:
            return
        self.seen.add(id(node))
        if depth > MAX_DEPTH:
            raise SchemaFault(f"{path}: nested more than {MAX_DEPTH} deep")
        if len(self.seen) > MAX_NODES:
            raise SchemaFault(f"more than {MAX_NODES} subschemas")
        for name in ("$id", "id"):
            if node is not self.root and isinstance(node.get(name), str):
                self.based = f"{path}.{name}"
        asserted = frozenset(node) - ANNOTATIONS - DEFINITIONS
        asserted = frozenset(name for name in asserted if not name.startswith("x-"))
        for shape, look in (
            ("$ref", self._ref),
            ("const", self._values),
            ("enum", self._values),
            *((name, self._branches) for name in BRANCHES),
        ):
            if shape in asserted:
                look(node, shape, asserted - {shape}, path, depth)
                return
        self._typed(node, asserted, path, depth)

    def _ref(self, node: Mapping[str, object], _: str, beside: frozenset[str], path: str, depth: int) -> None:
        _only(beside, frozenset(), "$ref", path)
        self.refers = True
        self._leads_on(node, path, ())
        self.node(self.target(node, path), str(node["$ref"]), depth + 1)

    def _leads_on(self, node: object, path: str, above: tuple[int, ...]) -> None:
        """Raises: SchemaFault: references and branches lead back to the node, and no value is ever asked for."""
        if not isinstance(node, dict) or id(node) in self.sound:
            return
        if id(node) in above:
            raise SchemaFault(f"{path}.$ref: leads back to itself and to nothing else")
        if len(above) > MAX_DEPTH:
            raise SchemaFault(f"{path}.$ref: more than {MAX_DEPTH} references behind one another")
        inner = [self.resolve(node, path)] if "$ref" in node else []
        inner += [one for name in BRANCHES if isinstance(node.get(name), list) for one in node[name]]
        for one in inner:
            self._leads_on(one, path, (*above, id(node)))
        self.sound.add(id(node))

    @property
    def draft(self) -> str:
        """The standard that the schema says it follows, such as draft-07; "" where it does not say."""
        given = self.root.get("$schema") if isinstance(self.root, dict) else None
        return given.rstrip("#").rstrip("/").split("/")[-2] if isinstance(given, str) and given.count("/") > 3 else ""

    def resolve(self, node: Mapping[str, object], path: str) -> object:
        """What a reference within this schema points to."""
        where = node["$ref"]
        if not isinstance(where, str) or not (where == "#" or where.startswith("#/")):
            raise SchemaFault(f"{path}.$ref: got {shown(where)}, must be # or begin with #/, within this schema")
        if "%" in where:
            raise SchemaFault(f"{path}.$ref: got {shown(where)}; percent signs are not supported")
        found = self.root
        for step in where.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise SchemaFault(f"{path}.$ref: {shown(where)} points to nothing")
        return found

    def _values(self, node: Mapping[str, object], name: str, beside: frozenset[str], path: str, depth: int) -> None:
        del depth
        _only(beside, frozenset({"type"}), name, path)
        values = node["enum"] if name == "enum" else [node["const"]]
        if not isinstance(values, list) or not values:
            raise SchemaFault(f"{path}.{name}: got {shown(values)}, must be a list with at least one value")
        self.values += len(values)
        if self.values > MAX_VALUES:
            raise SchemaFault(f"{path}.{name}: more than {MAX_VALUES} values in all")
        kinds = type_names(node, path)
        for value in values:
            if not exact(value):
                raise SchemaFault(f"{path}.{name}: {shown(value)} has a number beyond 64 bits, which is not supported")
            if kinds is not None and not value_fits(value, kinds):
                raise SchemaFault(f"{path}.{name}: {shown(value)} is not of type {shown(node['type'])}")

    def _branches(self, node: Mapping[str, object], name: str, beside: frozenset[str], path: str, depth: int) -> None:
        _only(beside, frozenset({"type"}), name, path)
        branches = node[name]
        if not isinstance(branches, list) or not branches:
            raise SchemaFault(f"{path}.{name}: got {shown(branches)}, must be a list with at least one schema")
        if name == "allOf" and len(branches) > 1:
            raise SchemaFault(f"{path}.allOf: more than one schema is not supported; merge them into one")
        for at, branch in enumerate(branches):
            self.node(branch, f"{path}.{name}[{at}]", depth + 1)
        found = [self.target(branch, path) for branch in branches]
        if (outer := type_names(node, path)) is not None:
            for at, branch in enumerate(found):
                if not self._within(branch, outer):
                    raise SchemaFault(f"{path}.type: beside {name}, which does not repeat it in [{at}]; leave it out")
        if name == "oneOf":
            for at, one in enumerate(found):
                for later, other in enumerate(found[at + 1 :], at + 1):
                    if not disjoint(one, other, lambda node: self.target(node, path)):
                        raise SchemaFault(
                            f"{path}.oneOf: a value could fit both [{at}] and [{later}], which is not supported; "
                            "use anyOf, or give both a required property with a different const"
                        )

    def target(self, node: object, path: str) -> object:
        """`node`, or what its references lead to."""
        steps = 0
        while isinstance(node, dict) and "$ref" in node and steps < MAX_DEPTH:
            node, steps = self.resolve(node, path), steps + 1
        return node

    def _within(self, branch: object, outer: frozenset[str]) -> bool:
        if not isinstance(branch, dict):
            return False
        if "const" in branch or "enum" in branch:
            values = branch.get("enum", [branch.get("const")])
            return isinstance(values, list) and all(value_fits(value, outer) for value in values)
        kinds = type_names(branch, "")
        return kinds is not None and all(kind in outer or (kind == "integer" and "number" in outer) for kind in kinds)

    def _typed(self, node: Mapping[str, object], asserted: frozenset[str], path: str, depth: int) -> None:
        kinds = type_names(node, path)
        for name in sorted(asserted - {"type"}):
            of = [kind for kind, names in BY_TYPE.items() if name in names]
            if not of:
                raise SchemaFault(f"{path}.{name}: this keyword is not supported")
            if kinds is None and not asserted & IMPLY.get(of[0], frozenset()):
                raise SchemaFault(f"{path}.{name}: without a type, it is not supported; add type: {of[-1]}")
        implied = {kind for kind in ("object", "array") if asserted & BY_TYPE[kind]}
        if kinds is None and len(implied) > 1:
            raise SchemaFault(f"{path}: keywords of objects and of arrays need a type")
        here = frozenset(implied) if kinds is None else kinds
        if "object" in here:
            self._object(node, asserted, path, depth)
        if "array" in here:
            self._array(node, asserted, path, depth)
        if "string" in here:
            _string(node, asserted, path)
        if here & {"integer", "number"}:
            _number(node, asserted, path)

    def _object(self, node: Mapping[str, object], asserted: frozenset[str], path: str, depth: int) -> None:
        properties = _mapping(node, "properties", path)
        for name, inner in properties.items():
            self.node(inner, f"{path}.properties.{name}", depth + 1)
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaFault(f"{path}.required: got {shown(required)}, must be a list of names")
        for name in required:
            if name not in properties:
                raise SchemaFault(f"{path}.required: {shown(name)} is none of the properties")
        for name in OTHER_NAMES:
            if not isinstance(node.get(name, True), bool):
                self.node(node[name], f"{path}.{name}", depth + 1)
            if properties and node.get(name, True) not in (True, False, {}):
                # A name has other spellings with escapes, and the later of two values counts.
                raise SchemaFault(f"{path}.{name}: a schema beside properties is not supported; use true or false")
        for name in ("patternProperties", "propertyNames"):
            if name in asserted and properties:
                raise SchemaFault(f"{path}.{name}: beside properties, it is not supported")
        if "propertyNames" in asserted and any(node.get(name) is False for name in OTHER_NAMES):
            raise SchemaFault(f"{path}.propertyNames: where no property is allowed, it is not supported")
        if "patternProperties" in asserted and ("propertyNames" in asserted or node.get("additionalProperties")):
            raise SchemaFault(f"{path}.patternProperties: beside other rules for names, it is not supported")
        patterns = _mapping(node, "patternProperties", path)
        if len(patterns) > 1:
            raise SchemaFault(f"{path}.patternProperties: more than one pattern is not supported: a name could fit two")
        for pattern, inner in patterns.items():
            _pattern(pattern, f"{path}.patternProperties")
            self.node(inner, f"{path}.patternProperties.{pattern}", depth + 1)
        names = node.get("propertyNames")
        if names is not None:
            if not isinstance(names, dict) or not names.keys() <= {"pattern", "type"}:
                raise SchemaFault(f"{path}.propertyNames: only a pattern is supported")
            _pattern(names.get("pattern", ".*"), f"{path}.propertyNames.pattern")
        least, _ = _counts(node, "minProperties", "maxProperties", path)
        if least is not None and least > 1 and not properties:
            raise SchemaFault(f"{path}.minProperties: above 1 without properties is not supported: names may repeat")

    def _array(self, node: Mapping[str, object], asserted: frozenset[str], path: str, depth: int) -> None:
        del asserted
        if node.get("uniqueItems", False) is not False:
            raise SchemaFault(f"{path}.uniqueItems: this keyword is not supported")
        prefix = node.get("prefixItems", [])
        if prefix and self.draft in OLD_DRAFTS:
            raise SchemaFault(f"{path}.prefixItems: {self.draft} of $schema does not know it; leave $schema out")
        if not isinstance(prefix, list):
            raise SchemaFault(f"{path}.prefixItems: got {shown(prefix)}, must be a list of schemas")
        for at, inner in enumerate(prefix):
            self.node(inner, f"{path}.prefixItems[{at}]", depth + 1)
        for name in ("items", "unevaluatedItems"):
            if not isinstance(node.get(name, True), bool):
                self.node(node[name], f"{path}.{name}", depth + 1)
        least, _ = _counts(node, "minItems", "maxItems", path)
        if prefix and least is not None and least < len(prefix):
            raise SchemaFault(f"{path}.minItems: below the length of prefixItems, it is not supported")


def schema_fault(text: str) -> str:
    """Why the schema cannot be held to as a whole, or "". `text` is JSON."""
    try:
        root = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        return "nested too deep"
    except ValueError as no:
        return f"is not JSON: {no}"
    try:
        Walk(root).whole()
    except SchemaFault as no:
        return str(no)
    return ""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _only(beside: frozenset[str], allowed: frozenset[str], name: str, path: str) -> None:
    for other in sorted(beside - allowed):
        raise SchemaFault(f"{path}.{other}: beside {name}, it is not supported")


def _mapping(node: Mapping[str, object], name: str, path: str) -> Mapping[str, object]:
    found = node.get(name, {})
    if not isinstance(found, dict):
        raise SchemaFault(f"{path}.{name}: got {shown(found)}, must be an object")
    return found


def _counts(node: Mapping[str, object], low: str, high: str, path: str) -> tuple[int | None, int | None]:
    found: list[int | None] = []
    for name in (low, high):
        value = node.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT):
            raise SchemaFault(f"{path}.{name}: got {shown(value)}, must be an integer from 0 to {MAX_COUNT}")
        found.append(value)
    least, most = found
    if least is not None and most is not None and least > most:
        raise SchemaFault(f"{path}.{low}: {least} is more than {high}, {most}")
    return least, most


def _string(node: Mapping[str, object], asserted: frozenset[str], path: str) -> None:
    _counts(node, "minLength", "maxLength", path)
    given: list[str] = [name for name in ("pattern", "format") if name in asserted]
    given += ["minLength or maxLength"] if asserted & {"minLength", "maxLength"} else []
    if len(given) > 1:
        raise SchemaFault(f"{path}.{given[0]}: beside {' and '.join(given[1:])}, it is not supported")
    if "pattern" in asserted:
        _pattern(node["pattern"], f"{path}.pattern")
    if "format" in asserted and node["format"] not in FORMATS:
        raise SchemaFault(f"{path}.format: got {shown(node['format'])}, must be one of {', '.join(sorted(FORMATS))}")


def _pattern(pattern: object, path: str) -> None:
    if not isinstance(pattern, str):
        raise SchemaFault(f"{path}: got {shown(pattern)}, must be a text")
    if fault := regex_fault(pattern, quoted=True):
        raise SchemaFault(f"{path}: {fault}")


def _number(node: Mapping[str, object], asserted: frozenset[str], path: str) -> None:
    found: dict[str, Fraction] = {}
    for name in _bounds(asserted):
        value = node[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_NUMBER:
            raise SchemaFault(f"{path}.{name}: got {shown(value)}, must be a number of at most 2**53")
        if value != int(value) and "integer" in (type_names(node, path) or ()):
            raise SchemaFault(f"{path}.{name}: got {shown(value)}, must be a whole number for an integer")
        found[name] = Fraction(value) * 10**DIGITS
    least = [ceil(found["minimum"])] if "minimum" in found else []
    least += [floor(found["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in found else []
    most = [floor(found["maximum"])] if "maximum" in found else []
    most += [ceil(found["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in found else []
    if least and most and max(least) > min(most):
        names = " and ".join(found)
        raise SchemaFault(f"{path}: no number with at most {DIGITS} digits behind the point is within {names}")


def _bounds(asserted: frozenset[str]) -> Iterator[str]:
    return (name for name in sorted(asserted) if name in BY_TYPE["number"])
