"""Programs that tests start inside sandboxes: the standard library is all there is.

``python3 inside.py websocket|http2 PORT`` after this file was written into the sandbox.
"""

from __future__ import annotations

import base64
import hashlib
import socket
import sys


def head(connection: socket.socket) -> dict[str, str]:
    text = b""
    while b"\r\n\r\n" not in text:
        text += connection.recv(4096)
    lines = text.decode().split("\r\n")[1:]
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}


def exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def websocket(connection: socket.socket) -> None:
    """Accept, then send the first short message back in capitals."""
    key = head(connection)["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
    connection.sendall("\r\n".join([*lines, f"Sec-WebSocket-Accept: {accept}", "", ""]).encode())
    _, length = exactly(connection, 2)
    mask, data = exactly(connection, 4), exactly(connection, length & 0x7F)
    text = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data)).upper()
    connection.sendall(bytes([0x81, len(text)]) + text)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def http2(connection: socket.socket) -> None:
    """Answer every request with status 200 and the text "over http/2"."""
    exactly(connection, 24)
    connection.sendall(frame(4, 0, 0))
    while True:
        header = exactly(connection, 9)
        exactly(connection, int.from_bytes(header[:3], "big"))
        kind, stream = header[3], int.from_bytes(header[5:], "big")
        if kind == 1:
            # 0x88 is ":status: 200" in HPACK's static table.
            connection.sendall(frame(1, 4, stream, b"\x88") + frame(0, 1, stream, b"over http/2"))
        elif kind == 4 and not header[4]:
            connection.sendall(frame(4, 1, 0))


def main() -> None:
    serve = {"websocket": websocket, "http2": http2}[sys.argv[1]]
    with socket.create_server(("127.0.0.1", int(sys.argv[2]))) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = server.accept()
            try:
                with connection:
                    serve(connection)
            except (EOFError, OSError):
                continue


if __name__ == "__main__":
    main()
