"""Chat templates: rendered as their writers expect, refused politely, and kept within limits."""

from __future__ import annotations

from datetime import datetime

import pytest

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.errors import ModelError, RequestError
from tokenspeed.frontend.text.chat import chat_template, compile_template
from tokenspeed.frontend.text.messages import template_messages
from tokenspeed.frontend.text.tokenizer import load_tokenizer
from tokenspeed.settings.model import ModelSettings

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **kwargs: object) -> str:
    template = compile_template(source, special_tokens=(("bos_token", "<s>"), ("eos_token", "</s>")))
    return template.render(messages or HELLO, **kwargs)  # type: ignore[arg-type]


def test_a_usual_template_renders_with_and_without_the_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if message['role'] == 'user' %}\n"
        "U: {{ message.content | trim }}{{ eos_token }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    assert render(source) == "<s>U: hello</s>\nA:"
    assert render(source, add_generation_prompt=False) == "<s>U: hello</s>\n"


def test_the_functions_templates_rely_on_are_there() -> None:
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hello"}]'
    assert render("{{ {'b': '<é>', 'a': 1} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 1,\n "b": "<é>"\n}'
    assert render("{% for n in range(9) %}{% if n == 3 %}{% break %}{% endif %}{{ n }}{% endfor %}") == "012"
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}!") == "user!"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )
    assert (
        render("{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content ~ 1 }}{% endfor %}")
        == "1hello1"
    )
    assert render("{{ messages[0].content[1:3] + 'x' * 3 }}") == "elxxx"
    assert render("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(2 ** 10) }}") == "<1024>"


def test_the_date_is_that_of_the_clock_that_was_given() -> None:
    template = compile_template("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 2, 3))  # noqa: DTZ001
    assert template.render(HELLO) == "03 Feb 2024"


def test_tools_and_further_variables_reach_the_template_and_cannot_replace_its_own() -> None:
    source = "{{ tools[0].name if tools else 'none' }} {{ thinking }} {{ messages | length }} {{ bos_token }}"
    extra = {"thinking": False, "messages": [], "bos_token": "<b>"}
    assert render(source, tools=[{"name": "f"}], extra=extra) == "f False 1 <b>"
    assert render("{{ tools is none }}") == "True"


def test_content_parts_are_joined_and_other_keys_pass() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    found = template_messages(
        [
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "c"},
        ]
    )
    assert found[0] == {"role": "user", "content": "one\ntwo", "name": "me"}
    assert found[1]["content"] == ""
    assert found[1]["tool_calls"] == [{"id": "c", "function": {"name": "f", "arguments": {"x": [1]}}}]
    assert found[2] == {"role": "tool", "content": "", "tool_call_id": "c"}


def test_arguments_that_are_no_json_are_left_alone() -> None:
    call = {"function": {"name": "f", "arguments": "{x"}}
    assert template_messages([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None, "reasoning_content": "hm"}, ""),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": "yes", "refusal": None}, "yes"),
    ],
)
def test_an_answer_of_any_kind_can_be_sent_back(message: dict[str, object], content: str) -> None:
    (_, answer) = template_messages([*HELLO, {"role": "assistant", **message}])
    assert answer["content"] == content


@pytest.mark.parametrize(
    ("messages", "says", "field"),
    [
        ([], "one message at least", "messages"),
        ("hello", "one message at least", "messages"),
        (None, "one message at least", "messages"),
        ([1], "messages[0] is 1", "messages[0]"),
        ([{"content": "x"}], "messages[0].role is None", "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role is ''", "messages[0].role"),
        (
            [{"role": "assistant", "content": [{"type": "refusal"}]}],
            "messages[0].content[0].refusal is None",
            "messages[0].content[0].refusal",
        ),
        ([{"role": "user", "content": None, "refusal": "no"}], "messages[0].content is missing", "messages[0].content"),
        ([{"role": "user"}], "messages[0].content is missing", "messages[0].content"),
        ([*HELLO, {"role": "user", "content": 3}], "messages[1].content is 3", "messages[1].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0] is 'x'", "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1].type is 'image_url'; images are not supported yet",
            "messages[0].content[1].type",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "audio is not supported yet",
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "hologram"}]}],
            "type is 'hologram'; only 'text' is supported",
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text is None",
            "messages[0].content[0].text",
        ),
    ],
)
def test_malformed_messages_are_refused_by_field_and_value(messages: object, says: str, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        template_messages(messages)
    assert says in str(caught.value)
    assert (caught.value.status, caught.value.field) == (400, field)


def test_a_template_may_refuse_messages_in_its_own_words() -> None:
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.status, caught.value.field) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.deeper }}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_a_refusal_and_no_crash(source: str) -> None:
    with pytest.raises(RequestError, match="cannot render these messages"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__.os }}",
    ],
)
def test_the_sandbox_keeps_a_template_off_the_interpreter(source: str) -> None:
    with pytest.raises(ModelError, match="sandbox forbids"):
        render(source)


@pytest.mark.parametrize(
    "name", ["messages.__class__", "raise_exception.__globals__", "self._TemplateReference__context"]
)
def test_what_the_sandbox_hides_prints_as_nothing(name: str) -> None:
    assert render("[{{ " + name + " }}]") == "[]"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% set n = namespace(x='aa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ 'a' * 10**12 }}",
        "{{ [1] * 10**12 }}",
        "{{ 10**9 * 'ab' }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    ],
)
def test_a_template_that_grows_without_end_is_stopped(source: str) -> None:
    with pytest.raises(RequestError, match="over a limit"):
        render(source)


def test_limits_are_counted_anew_for_each_rendering() -> None:
    template = compile_template("{% for a in range(90000) %}{% endfor %}done")
    assert [template.render(HELLO) for _ in range(4)] == ["done"] * 4


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nosuchtag %}", "{{ x | nosuchfilter }}"])
def test_a_text_that_is_no_template_is_the_models_fault(source: str) -> None:
    with pytest.raises(ModelError, match="line 1 cannot be understood"):
        compile_template(source)


def test_a_preset_renders_and_encodes_with_one_bos() -> None:
    checkpoint = open_checkpoint(resolve_model(ModelSettings(source="random:tiny-llama"), NoProgress()))
    template, tokenizer = chat_template(checkpoint), load_tokenizer(checkpoint)
    assert template is not None
    prompt = template.render(HELLO)
    assert prompt == "<|bos|><|user|>hello<|end|><|assistant|>"
    assert tokenizer.encode(prompt).count(256) == 1
    assert tokenizer.encode(prompt) == tokenizer.encode(prompt, add_special_tokens=False)


@pytest.mark.model
def test_the_default_models_template_renders_as_its_makers_say() -> None:
    checkpoint = open_checkpoint(resolve_model(ModelSettings(), NoProgress()))
    template = chat_template(checkpoint)
    assert template is not None
    assert template.render(HELLO) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
