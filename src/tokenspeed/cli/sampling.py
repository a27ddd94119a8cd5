"""Sampling options of `generate` and `chat`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed.frontend.options import SamplingOptions

NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("--max-tokens", int, "tokens to generate at most"),
    ("--min-tokens", int, "no end before this many tokens"),
    ("--temperature", float, "0 is greedy; default: the model's own"),
    ("--top-p", float, "keep the likeliest tokens that sum to this probability"),
    ("--top-k", int, "keep the k likeliest tokens"),
    ("--min-p", float, "keep tokens at least this likely, relative to the likeliest"),
    ("--frequency-penalty", float, "lower a token's logit by this for each time it occurred"),
    ("--presence-penalty", float, "lower a token's logit by this if it occurred"),
    ("--repetition-penalty", float, "divide a token's logit by this if it occurred"),
    ("--seed", int, "makes random draws repeatable"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, text in NUMBERS:
        group.add_argument(name, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end right before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's end-of-sequence tokens")


def sampling_of(options: argparse.Namespace) -> SamplingOptions:
    """The given options; those not given keep their defaults."""
    from tokenspeed.frontend.options import SamplingOptions

    given = {name.lstrip("-").replace("-", "_") for name, _, _ in NUMBERS}
    values = {name: getattr(options, name) for name in given if getattr(options, name) is not None}
    return SamplingOptions(**values, stop=tuple(options.stop or ()), ignore_eos=options.ignore_eos)
