"""A rank: the process that holds one engine. `python -m engine.rank RANK SOCKET_FD PULSE_FD [SHARED...]`.

worker.ranks.process starts it; SHARED is what ranks of a worker have in common (engine.parallel.peers). It
ends when its service sends Stop, closes the socket or dies. It ignores terminal signals: the service handles them, and
may have requests to finish first.
"""

import signal
import socket
import sys

from engine.parallel.peers import GroupDescriptors
from engine.protocol.messages import Start, Stop
from engine.protocol.pulse import Pulse
from engine.rank.link import RankLink
from engine.rank.rank import Rank
from mesh.config import ObserveConfig
from mesh.event_fd import EventFd
from mesh.observe.logs import configure


def observed_at(place: int, config: ObserveConfig) -> ObserveConfig:
    """place: this rank's number on its host. All ranks would tell the same, so only the first does; all warn."""
    tells = place == 0 or config.log_level != "INFO"
    return config if tells else config.model_copy(update={"log_level": "WARNING"})


def main(arguments: list[str]) -> int:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    number, connection, pulse_descriptor = map(int, arguments[:3])
    group = GroupDescriptors.of_arguments(arguments[3:])
    # Its number on this host: each has equally many ranks. The worker may number them otherwise later, if it loses a
    # host.
    place = 0 if group is None else number % len(group.wakeups)
    wakeup = EventFd(None if group is None else group.wakeups[place])
    link = RankLink(socket.socket(fileno=connection), wakeup)
    rank = Rank(link, Pulse(pulse_descriptor), wakeup, group)
    started = False
    while not link.closed:
        # Other ranks may wake this one late, when it has been released: then there is no message.
        for message in link.receive(wait=True):
            if isinstance(message, Stop):
                return 0
            if not isinstance(message, Start):
                # It was sent before the service knew that this rank had lost another.
                continue
            if not started:
                observe = ObserveConfig.model_validate_json(message.observe)
                configure("rank" if group is None else f"rank {number}", observed_at(place, observe))
            started = True
            status = rank.run(message)
            if status is not None:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
