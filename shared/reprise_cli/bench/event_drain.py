"""Takes event batches and drops them: `python -m reprise_cli.bench.event_drain ENDPOINT`."""

import sys

import zmq


def main(endpoint: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        socket.recv_multipart()


if __name__ == "__main__":
    main(sys.argv[1])
