"""Draws the diagrams of architecture.md. Run it after a change: ``python docs/diagrams/draw.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
INK, SOFT = "#1f2933", "#627d98"
PAPER, BLUE, GREEN, SAND, ROSE, GREY = "#ffffff", "#dceefb", "#e3f9e5", "#fff3c4", "#ffe3ec", "#f0f4f8"
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Box(NamedTuple):
    """A rectangle with a title and lines of small text."""

    x: int
    y: int
    w: int
    h: int
    title: str
    lines: Sequence[str] = ()
    fill: str = BLUE

    def svg(self) -> str:
        place = f"x='{self.x}' y='{self.y}' width='{self.w}' height='{self.h}'"
        parts = [
            f"<rect {place} rx='6' fill='{self.fill}' stroke='{INK}'/>",
            text(self.x + 10, self.y + 20, self.title, size=14, weight="bold"),
        ]
        parts += [text(self.x + 10, self.y + 40 + 17 * at, line) for at, line in enumerate(self.lines)]
        return "\n".join(parts)


def text(
    x: int, y: int, words: str, *, size: int = 12, weight: str = "normal", fill: str = INK, anchor: str = "start"
) -> str:
    return (
        f"<text x='{x}' y='{y}' {FONT} font-size='{size}' font-weight='{weight}' fill='{fill}' "
        f"text-anchor='{anchor}'>{escape(words)}</text>"
    )


def arrow(x1: int, y1: int, x2: int, y2: int, words: str = "", *, dashed: bool = False, both: bool = False) -> str:
    dash = " stroke-dasharray='5 4'" if dashed else ""
    start = " marker-start='url(#back)'" if both else ""
    line = f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{INK}' marker-end='url(#head)'{start}{dash}/>"
    label = text((x1 + x2) // 2 + 6, (y1 + y2) // 2 - 5, words, fill=SOFT, size=11) if words else ""
    return f"{line}\n{label}".rstrip()


def page(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' "
        f"role='img' aria-label='{escape(title)}'>\n<title>{escape(title)}</title>\n<defs>"
        "<marker id='head' markerWidth='9' markerHeight='9' refX='8' refY='4' orient='auto'>"
        f"<path d='M0,0 L9,4 L0,8 z' fill='{INK}'/></marker>"
        "<marker id='back' markerWidth='9' markerHeight='9' refX='1' refY='4' orient='auto'>"
        f"<path d='M9,0 L0,4 L9,8 z' fill='{INK}'/></marker></defs>\n"
        f"<rect width='{width}' height='{height}' fill='{PAPER}'/>"
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def processes() -> str:
    parts = [
        Box(
            20,
            20,
            920,
            56,
            "launcher (tokenspeed serve)",
            ["starts, watches and stops the processes; one shutdown latch; imports no torch"],
            GREY,
        ).svg(),
        Box(20, 130, 290, 330, "frontend process", (), GREEN).svg(),
        Box(
            35, 165, 260, 74, "event loop", ["HTTP (OpenAI API), admission,", "routing by load, streaming"], PAPER
        ).svg(),
        Box(
            35,
            250,
            260,
            74,
            "text workers",
            ["chat template, tokenizer,", "incremental detokenizer, stop strings"],
            PAPER,
        ).svg(),
        Box(
            35,
            335,
            260,
            108,
            "wire thread",
            ["binds the sockets", "encodes requests, decodes outputs", "stamps load reports"],
            PAPER,
        ).svg(),
        Box(420, 130, 520, 430, "rank process (one per engine rank)", (), BLUE).svg(),
        Box(
            435,
            165,
            235,
            128,
            "control thread (main)",
            [
                "EventLoop.round() for ever:",
                "plans and commits",
                "owns scheduler, table, mesh",
                "never touches a tensor",
            ],
            PAPER,
        ).svg(),
        Box(
            690,
            165,
            235,
            128,
            "forward thread ts-forward",
            ["HostDataPlane queue, FIFO", "one operation at a time", "the only holder of the handle"],
            PAPER,
        ).svg(),
        Box(
            690,
            340,
            235,
            112,
            "device streams",
            ["exec: the model's step", "write, load: copies of KV", "ordered by events"],
            PAPER,
        ).svg(),
        Box(
            435,
            340,
            235,
            112,
            "wire thread",
            ["dials the frontend", "decodes requests,", "encodes a round's outputs"],
            PAPER,
        ).svg(),
        Box(
            435,
            470,
            490,
            74,
            "side workers",
            [
                "grammar compilers, storage, transfer peer, cache-event and log writers:",
                "never inside a round; each sets the one Wakeup",
            ],
            PAPER,
        ).svg(),
        arrow(160, 76, 160, 128),
        arrow(680, 76, 680, 128),
        arrow(297, 390, 433, 390, both=True),
        text(365, 382, "ZeroMQ,", size=11, fill=SOFT, anchor="middle"),
        text(365, 406, "msgpack", size=11, fill=SOFT, anchor="middle"),
        arrow(670, 215, 688, 215),
        arrow(688, 250, 672, 250),
        text(681, 311, "execute, commit: plain values", size=11, fill=SOFT, anchor="middle"),
        arrow(807, 295, 807, 338),
        arrow(552, 338, 552, 295, both=True),
        text(
            20,
            590,
            "tokenspeed.Engine: the same rank in the caller's process, control thread ts-control, in-memory wire.",
            fill=SOFT,
        ),
        text(
            20, 608, "--headless: the launcher and the rank only; a foreign frontend has bound the sockets.", fill=SOFT
        ),
    ]
    return page(960, 625, "processes and threads", parts)


def rooms() -> str:
    floors: tuple[tuple[Sequence[str], str], ...] = (
        (("cli",), GREY),
        (("launch",), GREY),
        (("compose", "testing"), SAND),
        (("control", "frontend", "device"), GREEN),
        (
            (
                "scheduler",
                "collective",
                "wire",
                "transfer",
                "storage",
                "grammar",
                "placement",
                "telemetry",
                "checkpoint",
            ),
            BLUE,
        ),
        (("plane",), ROSE),
        (("settings",), GREY),
        (("errors",), GREY),
    )
    parts = [text(20, 24, "imports point down only; rooms on one floor never import each other", fill=SOFT)]
    for at, (names, fill) in enumerate(floors):
        width = (920 - 8 * (len(names) - 1)) // len(names)
        for place, name in enumerate(names):
            x, y = 20 + place * (width + 8), 40 + at * 52
            parts.append(f"<rect x='{x}' y='{y}' width='{width}' height='40' rx='6' fill='{fill}' stroke='{INK}'/>")
            parts.append(text(x + width // 2, y + 25, name, size=13, weight="bold", anchor="middle"))
    parts += [
        text(
            20,
            476,
            "control knows plane, settings and errors only; the only door to device is compose.engine;",
            fill=SOFT,
        ),
        text(20, 494, "torch is reached from device, grammar and compose.engine only.", fill=SOFT),
    ]
    return page(960, 510, "rooms and the direction of imports", parts)


STEPS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "1 receive, admit, gate",
        (
            "frontend.receive, relay",
            "control_ops: pauses, flushes",
            "ingress: checks, defaults, rows",
            "grammar, embedding queues",
            "gate: agreed operations",
        ),
        GREEN,
    ),
    ("2 head", ("l3: agreement, storage tick", "cache_ops: acknowledgments", "scheduler.advance_head"), BLUE),
    (
        "3 plan, dispatch",
        (
            "scheduler.next_execution_plan",
            "planned ends, metrics record",
            "data-parallel agreement",
            "gather: seats, logprobs, seeds",
            "plane.execute: queued, no wait",
        ),
        SAND,
    ),
    (
        "4 commit",
        (
            "down to the effective depth,",
            "oldest forward first",
            "plane.commit: the one wait",
            "output: tokens, ends",
            "pd: transfers",
        ),
        ROSE,
    ),
    (
        "5 tail",
        (
            "scheduler.advance",
            "kv_events: one drain",
            "release of ended requests",
            "one message: outputs, load",
            "control replies",
        ),
        GREEN,
    ),
)


def bar(x: int, y: int, w: int, words: str, fill: str) -> str:
    shape = f"<rect x='{x}' y='{y}' width='{w}' height='26' fill='{fill}' stroke='{INK}'/>"
    return shape + text(x + w // 2, y + 17, words, size=11, anchor="middle")


def one_round() -> str:
    parts = []
    for at, (title, lines, fill) in enumerate(STEPS):
        parts.append(Box(20 + at * 236, 20, 214, 136, title, lines, fill).svg())
        if at:
            parts.append(arrow(20 + at * 236 - 21, 88, 20 + at * 236 - 2, 88))
    note = "Scheduler state moves in event_loop.py only. A round that did nothing blocks on one Wakeup."
    parts.append(text(20, 182, note, fill=SOFT))
    title = "depth 1: the next forward is planned and queued while one runs; its commit comes a round later"
    parts.append(text(20, 214, title, weight="bold"))
    for y, name in ((230, "control"), (270, "ts-forward"), (310, "exec stream")):
        parts.append(text(20, y + 18, name))
    for n in (1, 2, 3, 4):
        ends = 210 + n * 220  # of forward n on the exec stream
        plan = 120 + (n - 1) * 78 if n < 3 else 210 + (n - 2) * 220 + 76
        parts += [bar(plan, 230, 70, f"plan {n}", SAND), bar(plan + 72, 270, 60, f"queue {n}", BLUE)]
        parts.append(bar(ends - 216, 310, 212, f"forward {n}", GREEN))
        if n < 4:
            parts += [bar(ends + 12, 230, 60, f"commit {n}", ROSE), arrow(ends - 4, 310, ends + 18, 258, dashed=True)]
    note = "dashed: the result's copy has landed; the commit makes tokens of it while the next forward runs"
    parts.append(text(20, 362, note, fill=SOFT))
    return page(1200, 380, "one scheduling round", parts)


DIAGRAMS: dict[str, Callable[[], str]] = {"processes.svg": processes, "rooms.svg": rooms, "round.svg": one_round}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
