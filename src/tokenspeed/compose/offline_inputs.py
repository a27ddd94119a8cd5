"""What callers of `tokenspeed.Engine` hand in, as the generation service takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from tokenspeed.errors import RequestError
from tokenspeed.frontend.generation import GenerationInput
from tokenspeed.frontend.limits import input_faults
from tokenspeed.frontend.options import SamplingOptions
from tokenspeed.frontend.text.chat import ChatTemplate
from tokenspeed.frontend.text.tokenizer import TextTokenizer
from tokenspeed.plane.messages import EngineInfo, Int32Array, frozen_tokens

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]
INT32 = (-(2**31), 2**31 - 1)


@attrs.frozen(kw_only=True, eq=False)
class InputReader:
    """Checks and tokenizes. Any thread. Methods raise RequestError, which names what is wrong and where.

    Attributes:
        chat: None: the model has no template.
        max_choices: of one prompt.
    """

    info: EngineInfo
    tokenizer: TextTokenizer
    chat: ChatTemplate | None
    max_choices: int

    def inputs(self, prompts: Prompt | Sequence[Prompt], sampling: SamplingOptions | None) -> list[GenerationInput]:
        options = SamplingOptions() if sampling is None else sampling
        if not isinstance(options, SamplingOptions):
            raise RequestError(f"sampling: SamplingOptions are needed, not {options!r}", field="sampling")
        listed = enumerate(_listed(prompts))
        inputs = [options.with_prompt(self._ids(prompt, field=f"prompts[{at}]")) for at, prompt in listed]
        for at, inp in enumerate(inputs):
            faults = input_faults(inp, self.info, max_choices=self.max_choices, field=f"prompts[{at}]")
            if faults:
                raise RequestError("; ".join(str(fault) for fault in faults), field=faults[0].field)
        return inputs

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        if not all(isinstance(message, Mapping) for message in messages):
            raise RequestError("messages: a list of objects with role and content is needed", field="messages")
        if self.chat is None:
            raise RequestError(f"{self.info.model} has no chat template; set model.chat_template", field="messages")
        # The template writes its own BOS, if the model has one.
        text = self.chat.render([dict(message) for message in messages], add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _ids(self, prompt: Prompt, *, field: str) -> Int32Array:
        if isinstance(prompt, str):
            return frozen_tokens(self.tokenizer.encode(prompt))
        if not isinstance(prompt, Iterable) or not all(isinstance(token, Integral) for token in prompt):
            raise RequestError(f"{field}: {prompt!r} is not allowed; expected a text or token ids", field=field)
        # No vocabulary reaches the bounds of int32: an id beyond them stays outside it, and is refused as one.
        return frozen_tokens(np.clip(prompt, *INT32))


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text, a list of ids, or a list of either."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts: {prompts!r} is not allowed; expected texts or token ids", field="prompts")
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [cast("list[int]", items)]
    return cast("list[Prompt]", items)
