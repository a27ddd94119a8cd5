"""The event loop without a device and without torch: rounds driven by hand over a scripted data plane."""

from tokenspeed.compose.control import ControlContainer
from tokenspeed.plane.messages import GenerateRequest, SamplingParams, frozen_tokens
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.settings.model import Settings
from tokenspeed.testing import HandClock, HandWakeup, RecordingLink, ScriptedPlane, token_script

SPECS = DeviceSpecs(
    backend="none",
    model_name="scripted",
    dtype="float32",
    vocab_size=100,
    max_model_len=64,
    num_pages=17,
    page_tokens=16,
    max_num_seqs=4,
    max_batched_tokens=64,
    eos_token_ids=(0,),
)


def main() -> list[int]:
    """Tokens that a client gets from a device that answers 7, 8, 9 and then the end of the sequence."""
    link, plane = RecordingLink(), ScriptedPlane(answer=token_script([[7], [8], [9], [0], [0]]))
    box = ControlContainer(
        settings=Settings(), specs=SPECS, plane=plane, frontend=link, clock=HandClock(), wakeup=HandWakeup()
    )
    loop = box.loop()
    link.put(GenerateRequest(rid="a", input_ids=frozen_tokens([1, 2, 3]), sampling=SamplingParams(max_new_tokens=10)))
    while loop.round():
        pass
    return link.tokens("a")


if __name__ == "__main__":
    print(main())
