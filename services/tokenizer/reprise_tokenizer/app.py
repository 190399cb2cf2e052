"""Wires the tokenizer together."""

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry

from reprise.v1.tokenizer_service_pb2_grpc import add_TokenizerServiceServicer_to_server
from reprise_runtime.grpc_server import GrpcServer
from reprise_runtime.health import Readiness
from reprise_runtime.logs import get_logger
from reprise_runtime.tracing import Tracing
from reprise_tokenizer.metrics import TokenizerMetrics
from reprise_tokenizer.model_files import load_model_files
from reprise_tokenizer.servicer import SERVICE_NAME, TokenizerRpc
from reprise_tokenizer.settings import TokenizerSettings
from reprise_tokenizer.tokenizing import Tokenizing
from reprise_tokenizer.work_pool import WorkPool

STOP_GRACE_S = 5.0


class TokenizerApp:
    """Ready once the model's files are read and the socket is bound; it waits for no other service."""

    def __init__(self, settings: TokenizerSettings) -> None:
        self.registry = CollectorRegistry()
        self.readiness = Readiness("model", "grpc")
        self._settings = settings
        self._log = get_logger()
        self._metrics = TokenizerMetrics(self.registry)
        self._tracing = Tracing(settings.trace_exporter, settings.service, self.registry)
        self._pool = WorkPool(
            threads=settings.work_threads, queue_calls=settings.work_queue_calls, metrics=self._metrics
        )
        self._grpc: GrpcServer | None = None

    async def start(self) -> None:
        settings = self._settings
        folder = Path(settings.model_path)
        files = await asyncio.to_thread(load_model_files, folder)
        tokenizing = Tokenizing(files, settings, self._metrics)
        self.readiness.met("model")
        if files.chat_template is None:
            self._log.warning("the model has no chat template: chats are refused", model_path=str(folder))
        servicer = TokenizerRpc(
            files,
            tokenizing,
            self._pool,
            self._metrics,
            model_name=settings.model_name or folder.name,
            max_stream_requests=settings.max_stream_requests,
        )
        self._grpc = GrpcServer(
            settings.listen_address,
            services=[SERVICE_NAME],
            add=lambda server: add_TokenizerServiceServicer_to_server(servicer, server),  # type: ignore[no-untyped-call]
            tracing=self._tracing,
        )
        await self._grpc.start()
        self.readiness.met("grpc")

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop(min(STOP_GRACE_S, self._settings.grace_period_s / 2))
        self._pool.close()
        await asyncio.to_thread(self._tracing.close)
