"""``tokenspeed generate``: complete prompts in this process, no server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenspeed.cli.console import Console
from tokenspeed.cli.engine import OpenEngine, open_engine
from tokenspeed.cli.options import add_config, add_settings
from tokenspeed.cli.sampling import add_sampling, sampling_of
from tokenspeed.errors import RequestError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to complete; - or none: standard input")
    parser.add_argument("--file", metavar="FILE", help="a file with one prompt a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each prompt")
    add_config(parser)
    add_sampling(parser)
    add_settings(parser)


def run(options: argparse.Namespace, console: Console, *, engine: OpenEngine = open_engine) -> int:
    """Raises: RequestError: no prompt, or one that cannot be served."""
    prompts = read_prompts(options, console)
    sampling = sampling_of(options)
    with engine(options, console) as talker:
        completions = talker.generate(prompts, sampling)
    for prompt, done in zip(prompts, completions, strict=True):
        for choice in done.choices:
            if options.json:
                console.say(json.dumps(as_record(prompt, choice), ensure_ascii=False))
            else:
                console.say(f"{prompt}{choice.text}")
    return 0


def read_prompts(options: argparse.Namespace, console: Console) -> list[str]:
    """From arguments, a file, or standard input (the whole of it is one prompt)."""
    prompts = [prompt for prompt in options.prompts if prompt != "-"]
    if options.file is not None:
        try:
            lines = Path(options.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise RequestError(f"--file {options.file}: cannot be read: {exc}", field="file") from exc
        prompts += [line for line in lines if line.strip()]
    if "-" in options.prompts or (not prompts and options.file is None):
        prompts.append(console.stdin.read().rstrip("\n"))
    if not all(prompts) or not prompts:
        raise RequestError("no prompt: give texts, --file, or text on standard input", field="prompt")
    return prompts


def as_record(prompt: str, choice: object) -> dict[str, object]:
    names = ("text", "finish_reason", "stop_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "token_ids")
    return {"prompt": prompt, **{name: getattr(choice, name) for name in names}}
