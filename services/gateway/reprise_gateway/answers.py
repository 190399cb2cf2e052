"""Answers in the shapes of the reference's OpenAI routes, members in its order.

The plain form writes null members; the stream form leaves most of them out.
"""

from dataclasses import dataclass
from typing import Any

from reprise_core.requests import PromptSources
from reprise_gateway.completions import Run
from reprise_gateway.sequence import Sequence, Update
from reprise_wire.clients.engine import EngineInfo

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished choice."""

    text: str
    num_tokens: int
    finish_reason: str
    stop_reason: str | int | None
    logprobs: Json | None = None
    prompt_logprobs: list[Json | None] | None = None


def models(infos: list[EngineInfo], created_s: int) -> Json:
    """The models, then their adapters; the first engine's, where several serve one."""
    models: dict[str, Json] = {}
    adapters: dict[str, Json] = {}
    for info in infos:
        models.setdefault(info.model_name, _model(info, created_s))
        for adapter in info.adapters:
            card = _card(adapter.name, adapter.path, info.model_name, None, adapter.digest, created_s)
            adapters.setdefault(adapter.name, card)
    return {"object": "list", "data": [*models.values(), *adapters.values()]}


def _model(info: EngineInfo, created_s: int) -> Json:
    return _card(
        info.model_name, info.model_path, None, info.max_model_len, info.model_fingerprint, created_s
    )


def _card(
    name: str, root: str, parent: str | None, max_model_len: int | None, content: str, created_s: int
) -> Json:
    permission = {
        "id": f"modelperm-{content}",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "reprise",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


def plain(run: Run, answers: list[Answer]) -> Json:
    usage = _usage(run, [answer.num_tokens for answer in answers], plain_form=True)
    head = {
        "id": run.request_id,
        "object": "chat.completion" if run.call.chat else "text_completion",
        "created": run.created_s,
        "model": run.served.name,
    }
    choices = [_plain_choice(run, i, answer) for i, answer in enumerate(answers)]
    tail: Json = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    if run.call.chat:
        prompt_ids = list(run.sequences[0].work.prompt_ids) if run.call.return_token_ids else None
        prompt: Json = {"prompt_logprobs": answers[0].prompt_logprobs, "prompt_token_ids": prompt_ids}
        tail = {**prompt, "prompt_text": None, **tail}
    return {
        **head,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": fingerprint(run.info),
        "usage": usage,
        **tail,
    }


def _plain_choice(run: Run, i: int, answer: Answer) -> Json:
    sequence = run.sequences[i]
    ids = run.call.return_token_ids
    ends: Json = {
        "logprobs": answer.logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "token_ids": sequence.output_ids[: answer.num_tokens] if ids else None,
    }
    if run.call.chat:
        return {"index": i, "message": _message(answer.text), **ends, "routed_experts": None}
    return {
        "index": i,
        "text": run.echoes[i] + answer.text,
        **ends,
        "prompt_logprobs": answer.prompt_logprobs,
        "prompt_token_ids": list(sequence.work.prompt_ids) if ids else None,
        "routed_experts": None,
    }


def _message(text: str) -> Json:
    return {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }


class ChunkMaker:
    """The chunks of one streamed answer."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num_shown = [0] * len(run.sequences)
        self._begun = [False] * len(run.sequences)
        self._open = len(run.sequences)

    def opening(self) -> list[Json]:
        """A chat begins with the role of each answer."""
        run = self._run
        if not run.call.chat:
            return []
        prompt_ids = list(run.sequences[0].work.prompt_ids) if run.call.return_token_ids else None
        chunks = []
        for i in range(len(run.sequences)):
            choice = {
                "index": i,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            chunk = self._chunk([choice])
            chunk.update(prompt_token_ids=prompt_ids, prompt_text=None)
            chunks.append(self._with_usage(chunk))
        return chunks

    def shows(self, update: Update) -> bool:
        """False when there is nothing to show yet: the text is held back."""
        return bool(update.text) or update.finish_reason is not None

    def chunk(self, i: int, update: Update, logprobs: Json | None) -> Json:
        """`logprobs`: of the tokens since this answer's last chunk."""
        begun, self._begun[i] = self._begun[i], True
        ids = self._run.sequences[i].output_ids[self._num_shown[i] : update.num_tokens]
        self._num_shown[i] = update.num_tokens
        token_ids = ids if self._run.call.return_token_ids else None
        make = self._chat_choice if self._run.call.chat else self._text_choice
        choice = make(i, update, token_ids, first=not begun)
        choice["logprobs"] = logprobs
        chunk = self._with_usage(self._chunk([choice]))
        if update.finish_reason is not None:
            self._open -= 1
            if not self._open and not self._run.call.include_usage:
                chunk["system_fingerprint"] = fingerprint(self._run.info)
        return chunk

    def closing(self) -> list[Json]:
        if not self._run.call.include_usage:
            return []
        usage = _usage(self._run, self._num_shown, plain_form=False)
        tail = {"usage": usage, "system_fingerprint": fingerprint(self._run.info)}
        return [{**self._chunk([]), **tail}]

    def _chat_choice(self, i: int, update: Update, token_ids: list[int] | None, *, first: bool) -> Json:
        choice: Json = {
            "index": i,
            "delta": {"content": update.text},
            "logprobs": None,
            "finish_reason": update.finish_reason,
        }
        if update.finish_reason is not None:
            choice["stop_reason"] = update.stop_reason
        choice["token_ids"] = token_ids
        return choice

    def _text_choice(self, i: int, update: Update, token_ids: list[int] | None, *, first: bool) -> Json:
        call = self._run.call
        shows_prompt = first and (call.return_token_ids or call.echo)
        return {
            "index": i,
            "text": self._run.echoes[i] + update.text if first else update.text,
            "logprobs": None,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
            "prompt_token_ids": list(self._run.sequences[i].work.prompt_ids) if shows_prompt else None,
            "token_ids": token_ids,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        run = self._run
        return {
            "id": run.request_id,
            "object": "chat.completion.chunk" if run.call.chat else "text_completion",
            "created": run.created_s,
            "model": run.served.name,
            "choices": choices,
        }

    def _with_usage(self, chunk: Json) -> Json:
        if self._run.call.continuous_usage:
            chunk["usage"] = _counts(self._run, self._num_shown)
        return chunk


def fingerprint(info: EngineInfo) -> str:
    return f"reprise-{info.version}-{info.model_fingerprint[:8]}"


def _counts(run: Run, num_tokens: list[int]) -> Json:
    """Each prompt counts once, whatever n is."""
    prompt = sum(len(sequence.work.prompt_ids) for sequence in run.sequences[:: run.call.n])
    completion = sum(num_tokens)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def _usage(run: Run, num_tokens: list[int], *, plain_form: bool) -> Json:
    usage = _counts(run, num_tokens)
    # As the reference: of several parts the last one's numbers, not the sum.
    last = run.sequences[-1]
    created = _created_tokens(last, run.info) if run.call.chat else None
    usage["prompt_tokens_details"] = _prompt_details(last.sources, created, plain_form=plain_form)
    if plain_form:
        usage["completion_tokens_details"] = None
    return usage


def _prompt_details(sources: PromptSources | None, created: int | None, *, plain_form: bool) -> Json:
    found = sources or PromptSources(prompt_tokens=0)
    details: Json = {"cached_tokens": found.cached}
    if plain_form or created is not None:
        details["created_cache_tokens"] = created
    if plain_form:
        details["multimodal_tokens"] = None
    details["local_cached_tokens"] = found.device
    details["external_cached_tokens"] = found.cached - found.device
    details["cached_by_source"] = {
        "device": found.device,
        "host": found.host,
        "disk": found.disk,
        "external": found.external,
    }
    return details


def _created_tokens(sequence: Sequence, info: EngineInfo) -> int:
    """Prompt tokens in full blocks that were not cached before."""
    if not info.enable_prefix_caching or sequence.sources is None:
        return 0
    full = len(sequence.work.prompt_ids) // info.block_size * info.block_size
    return max(0, full - sequence.sources.cached)
