"""Has forked_runners fork a process that runs a program: `python asking_runner.py ADDRESS ... PROGRAM`.

It passes its stdin, stdout and stderr on, and ends when that process does. It imports nothing of deepmesh, so it starts
in milliseconds.
"""

import os
import socket
import sys

if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as importer:
        importer.connect(sys.argv[1])
        socket.send_fds(importer, [sys.argv[-1].encode()], [0, 1, 2])
        # Its end is seen only once no process can write any more.
        os.close(0)
        os.close(1)
        # Nothing is received: the runner ended.
        importer.recv(1)
