"""instructor against the server: structured answers through calls."""

from __future__ import annotations

from typing import Any

import pytest

instructor = pytest.importorskip("instructor", reason="instructor is only in the clients' environment")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class get_weather(pydantic.BaseModel):  # noqa: N801 - the name of the function that is called
    """The weather of a city."""

    city: str


@pytest.mark.parametrize("mode", ["TOOLS", "PARALLEL_TOOLS"])
def test_instructor_reads_a_model_out_of_a_call(server_url: str, mode: str) -> None:
    from collections.abc import Iterable

    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{server_url}/v1", api_key="x", max_retries=0), mode=instructor.Mode[mode]
    )
    wanted: Any = Iterable[get_weather] if mode == "PARALLEL_TOOLS" else get_weather
    found = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "weather"}], response_model=wanted, max_retries=0
    )
    assert [one.city for one in (found if mode == "PARALLEL_TOOLS" else [found])] == ["Paris"]
