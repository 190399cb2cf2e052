"""One streamed completion, read by a thread of its own, or left unread."""

import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

from support.system import System


class AnswerStream:
    """`output_ids`, `text` and `usage` grow while it is read; `failure` is what went wrong."""

    def __init__(self, url: str, prompt: str, max_tokens: int, *, read: bool = True, **more: Any) -> None:
        body = {
            **{"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            **{"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **more},
        }
        self.output_ids: list[int] = []
        self.text = ""
        self.usage: dict[str, Any] = {}
        self.failure = ""
        self._socket = socket.socket()
        # Small, so that one who does not read is soon felt by the other side.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(url)
        self._socket.connect((address.hostname, address.port))
        payload = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + payload)
        self._thread = threading.Thread(target=self._read, daemon=True)
        if read:
            self.read_on()

    def read_on(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float = 120.0) -> "AnswerStream":
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), (
            f"not ended in {timeout_s} s; {len(self.output_ids)} tokens so far"
        )
        assert not self.failure, self.failure
        return self

    def has(self, num_tokens: int) -> bool:
        assert not self.failure, self.failure
        return len(self.output_ids) >= num_tokens

    def _read(self) -> None:
        done = False
        with self._socket, self._socket.makefile("rb") as lines:
            status = lines.readline()
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    self._take(json.loads(line[6:]))
        if b" 200 " not in status or not done:
            self.failure = self.failure or f"{status!r}, ended: {done}"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.failure = str(event["error"])
            return
        for choice in event["choices"]:
            self.output_ids += choice.get("token_ids") or []
            self.text += choice["text"]
        self.usage = event.get("usage") or self.usage


def check_answers(system: System, prompts: list[str], streams: list[AnswerStream], num_tokens: int) -> None:
    """Each is what transformers gives, counted once, and its text is that of its tokens."""
    from support.reference import reference

    for prompt, stream in zip(prompts, streams, strict=True):
        stream.join()
        prompt_ids = system.token_ids({"prompt": prompt})
        assert len(stream.output_ids) == num_tokens
        reference().check_greedy(prompt_ids, stream.output_ids)
        assert stream.usage["completion_tokens"] == num_tokens
        assert stream.usage["prompt_tokens"] == len(prompt_ids)
        status, answer = system.post("/detokenize", {"tokens": stream.output_ids})
        assert status == 200
        assert stream.text == answer["prompt"]
