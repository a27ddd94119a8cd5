"""What is exported of grammars, by way of a rank's meter."""

from __future__ import annotations

from frontend_rig import sample

from tokenspeed.plane.ports import Meter
from tokenspeed.telemetry.meters import prometheus_meter
from tokenspeed.telemetry.registry import new_registry


def test_compilations_hits_and_refusals_are_counted_apart_and_waiting_is_a_gauge() -> None:
    registry = new_registry("m", process=False)
    meter: Meter = prometheus_meter(registry)
    for waiting in (1, 2, 1):
        meter.grammars_waiting(waiting)
    meter.grammar_decided(waited_s=2.0, compile_s=1.5, status=0)
    meter.grammar_decided(waited_s=0.0, compile_s=None, status=0)
    meter.grammar_decided(waited_s=0.5, compile_s=0.25, status=400)
    meter.grammar_decided(waited_s=0.0, compile_s=None, status=429)
    meter.grammar_decided(waited_s=0.0, compile_s=None, status=599)
    text = registry.scrape().decode()
    assert sample(text, "num_grammar_queue_reqs", engine="0") == 1
    assert sample(text, "num_grammar_total") == 5
    assert sample(text, "num_grammar_cache_hit_total") == 1
    assert [sample(text, "num_grammar_aborted_total", status=one) for one in ("400", "429", "500")] == [1, 1, 1]
    assert sample(text, "grammar_queue_time_seconds_count") == 5
    assert sample(text, "grammar_queue_time_seconds_sum") == 2.5
    assert sample(text, "grammar_compilation_time_seconds_count") == 2
    assert sample(text, "grammar_compilation_time_seconds_sum") == 1.75
