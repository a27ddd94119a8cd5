"""A server over a scripted engine, for clients that live in another environment: prints its URL, ends with its input.

The engine says what the last user message asks for, see `ANSWERS`; held to a JSON schema it says `JSON`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from frontend_rig import live_server
from piece_tokenizer import EOS, piece_tokenizer
from scripted_engine import ScriptedEngine, engine_info

from tokenspeed.frontend.text.output.families import OutputFamily
from tokenspeed.frontend.text.output.reasoning import REASONING
from tokenspeed.plane.messages import GenerateRequest
from tokenspeed.settings.model import ServerSettings

TOKENIZER = piece_tokenizer()
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWERS = {"weather": CALL, "think": "<think>Hm.</think>Yes.", "json": '{"city": "Paris", "degrees": 21}'}
HELLO = "hello world, 日本é the end"


def script(request: GenerateRequest) -> Sequence[int]:
    prompt = TOKENIZER.decode(request.input_ids.tolist())
    asked = prompt.rpartition("<|user|>")[2].partition("\n")[0]
    said = HELLO
    if request.sampling.json_schema is not None:
        said = ANSWERS["json"]
    elif request.sampling.structural_tag is not None:
        said = CALL
    return [*TOKENIZER.encode(ANSWERS.get(asked, said)), EOS]


def main() -> None:
    engine = ScriptedEngine(script=script, info=engine_info(max_model_len=4096, max_waiting=64))
    family = OutputFamily(calls="hermes", reasoning=REASONING["think"])
    settings = ServerSettings(port=0, max_body_mib=1.0, max_choices=4)
    with live_server(engine, family=family, settings=settings) as live:
        print(live.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
