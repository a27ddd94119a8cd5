"""An engine of one's own: admission order, sampler and cache-event sink replaced, the rest as it is."""

import attrs

from tokenspeed import Engine, SamplingOptions
from tokenspeed.device.sampling.base import SampledTokens
from tokenspeed.settings.model import ModelSettings, Settings


class ShortestPromptFirst:  # fits plane.ports.SchedulingPolicy
    wants_cached_tokens = False

    def key(self, *, order, priority, prompt_len, waited_rounds, cached_tokens):
        return (prompt_len - 8 * waited_rounds, order)  # waiting outweighs length: nobody starves


@attrs.frozen(eq=False)
class SecondBest:  # fits device.sampling.base.Sampler; the class itself fits device.parts.SamplerFactory
    slots: int
    vocab_size: int

    def seat(self, seat): ...
    def release(self, slot): ...
    def sample(self, logits, *, slots, positions, masks=None):  # no grammars: `masks` are passed over
        second = logits[:, : self.vocab_size].topk(2).indices[:, 1]
        return SampledTokens(tokens=second, nan=logits.isnan().any(-1))


class CountingSink:  # fits plane.ports.KvEventSink
    stored = 0

    def publish(self, events):
        self.stored += sum(len(getattr(event, "hashes", ())) for event in events)

    def close(self): ...


def main(settings=Settings(model=ModelSettings(source="random:tiny-llama"))):
    sink = CountingSink()
    with Engine(settings, policy=ShortestPromptFirst(), sampler=SecondBest, kv_sink=sink) as engine:
        done = engine.generate(["one long prompt " * 4, "hi"], SamplingOptions(max_tokens=24))
        return [completion.token_ids for completion in done], sink.stored


if __name__ == "__main__":
    print(main())
