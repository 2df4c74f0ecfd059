"""Forwards every frame between two network devices, delayed by some seconds: `python delayed_link.py A B SECONDS`.

Frames keep the kernel's headers about checksums and segmentation that are still to be done (PACKET_VNET_HDR), so that
only their times change.
"""

import heapq
import select
import socket
import sys
import time
from itertools import count

EVERY_PROTOCOL = 0x0003
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
LARGEST = 128 * 1024
# Most frames that are on their way at once; like a link, the relay drops further ones.
MOST = 20_000


def device(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
    opened.bind((name, EVERY_PROTOCOL))
    opened.setblocking(False)
    return opened


def relay(first: socket.socket, second: socket.socket, seconds: float) -> None:
    """Forward frames until the process is killed."""
    others = {first: second, second: first}
    numbers = count()
    due: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        for readable in select.select([first, second], [], [], wait)[0]:
            frame = readable.recv(LARGEST)
            if len(due) < MOST:
                heapq.heappush(due, (time.monotonic() + seconds, next(numbers), others[readable], frame))
        while due and due[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(due)
            try:
                target.send(frame)
            except OSError:
                # The device cannot take the frame: it is lost, as in a full queue.
                continue


if __name__ == "__main__":
    relay(device(sys.argv[1]), device(sys.argv[2]), float(sys.argv[3]))
