"""The gRPC side: status."""

from reprise.v1 import publisher_service_pb2 as pb
from reprise.v1.publisher_service_pb2_grpc import PublisherServiceServicer
from reprise_publisher.adapters.event_sockets import EventSockets

SERVICE_NAME = "reprise.v1.PublisherService"


class PublisherServicer(PublisherServiceServicer):
    """Without sockets (events are off) every field is empty."""

    def __init__(self, topic: str, sockets: EventSockets | None) -> None:
        self._topic = topic
        self._sockets = sockets

    async def GetStatus(self, request: pb.GetStatusRequest, context: object) -> pb.GetStatusResponse:
        if self._sockets is None:
            return pb.GetStatusResponse()
        return pb.GetStatusResponse(
            topic=self._topic,
            events_endpoint=self._sockets.events_endpoint,
            replay_endpoint=self._sockets.replay_endpoint,
            next_sequence=self._sockets.stream.next_sequence,
            replay_first_sequence=self._sockets.first_replay_sequence,
            dropped_batches=self._sockets.stream.num_dropped,
            complete=self._sockets.stream.complete,
            record_blocks=self._sockets.num_recorded_blocks,
        )
