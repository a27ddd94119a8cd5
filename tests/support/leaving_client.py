"""A client that is a process of its own, so that it can be stopped and killed: python leaving_client.py JSON

``{"host", "port", "path", "body", "count", "events"}``: send `body` on `count` connections, read `events`
server-sent events of each, say ``ready``, read on to the ends, and print the answers' bodies as a JSON list.
"""

from __future__ import annotations

import json
import socket
import sys


def sent(host: str, port: int, path: str, body: bytes) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    sock.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
    return sock


def main() -> None:
    told = json.loads(sys.argv[1])
    body = json.dumps(told["body"]).encode()
    socks = [sent(told["host"], told["port"], told["path"], body) for _ in range(told["count"])]
    heard = []
    for sock in socks:
        data = b""
        while data.count(b"data: ") < told["events"]:
            piece = sock.recv(65536)
            assert piece, f"closed after {data!r}"
            data += piece
        heard.append(data)
    print("ready", flush=True)
    for at, sock in enumerate(socks):
        while piece := sock.recv(65536):
            heard[at] += piece
    print(json.dumps([data.decode() for data in heard]), flush=True)


if __name__ == "__main__":
    main()
