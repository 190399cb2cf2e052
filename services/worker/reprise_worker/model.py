"""A Hugging Face decoder with paged attention: load, check, run.

Not every architecture calls the attention interface, and some mix the requests of a flattened
batch in other layers. `PagedModel.check` finds out by running: one attention call per layer, and
the logits of transformers' own attention on each sequence alone.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from reprise_worker import attention
from reprise_worker.batch import Batch, ScheduledTokens, make_batch
from reprise_worker.kv_cache import KvCache
from reprise_worker.lora_folder import LoraWeights
from reprise_worker.lora_layers import LoraLayers, NotEveryToken, adapter_rows
from reprise_worker.model_folder import BadModel
from reprise_worker.request_state import IdList, RequestState

_WINDOWED_LAYER_TYPES = {"full_attention", "sliding_attention", None}
# Largest difference of logits that rounding explains, as a share of the largest logit.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(folder: Path, *, device: torch.device, dtype: str) -> "PagedModel":
    """The model of a checked folder; raises BadModel."""
    attention.register()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=_dtype(dtype, config, device),
            attn_implementation=attention.IMPLEMENTATION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadModel(f"model {folder} cannot be loaded by transformers: {reason}") from error
    return PagedModel(model, device)


def _dtype(wanted: str, config: Any, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        return _DTYPES[wanted]
    checkpoint = config.get_text_config().dtype
    return checkpoint if device.type == "cuda" and checkpoint in _TOLERANCE else torch.float32


class PagedModel:
    """Invariant after `check`: a forward pass over any batch gives each request its own logits."""

    def __init__(self, model: Any, device: torch.device) -> None:
        model.eval().to(device)
        self.hf = model
        self.config = model.config.get_text_config()
        self.architecture: str = type(model).__name__
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = self.config.vocab_size
        self._adapters = LoraLayers(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        probe = self._probe_layers()
        self.layers = tuple(probe.layers[layer] for layer in range(probe.num_calls))
        self.windows = tuple(probe.windows[layer] for layer in range(probe.num_calls))
        """Per layer the tokens that it sees, itself included; None = all."""

    @property
    def num_adapters(self) -> int:
        return self._adapters.num_adapters

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the model's positions allow, in tokens; 0 when it names none."""
        limits = [getattr(self.config, "max_position_embeddings", None)]
        rope = getattr(self.config, "rope_parameters", None) or {}
        # Some models have one set of parameters per kind of layer.
        for parameters in (rope, *(item for item in rope.values() if isinstance(item, dict))):
            if parameters.get("rope_type") == "longrope":
                # Beyond it, one long request would change the positions of all in its batch, and of
                # the keys that are in the cache already.
                limits.append(parameters.get("original_max_position_embeddings"))
        return int(min((limit for limit in limits if limit), default=0))

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KvCache, backend: attention.AttentionBackend) -> torch.Tensor:
        """Logits of the batch's `logit_rows`, (rows, vocab)."""
        kv.clear_blocks(batch.begun_blocks)
        step = attention.PagedStep(batch, kv, backend)
        with self._adapters.applied(adapter_rows(batch), batch.token_ids.shape[1]):
            return self._call(batch.token_ids, batch.positions, batch.logit_rows, step)

    def _call(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: object
    ) -> torch.Tensor:
        kept = {"logits_to_keep": rows} if self._keeps_logits else {}
        output = self.hf(
            input_ids=token_ids,
            attention_mask=None,
            position_ids=positions,
            use_cache=False,
            **kept,
            **{attention.STEP_ARGUMENT: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[rows]

    @torch.inference_mode()
    def _probe_layers(self) -> attention.ShapeProbe:
        """Each layer's K and V shape and window; raises BadModel where attention is not ours to do."""
        unknown = set(getattr(self.config, "layer_types", None) or ()) - _WINDOWED_LAYER_TYPES
        if unknown:
            raise self._unsupported(f"its layers use {', '.join(sorted(map(str, unknown)))}")
        num_layers = int(self.config.num_hidden_layers)
        probe = attention.ShapeProbe()
        positions = torch.arange(8, device=self.device)
        tokens = positions % self.vocab_size
        try:
            self._call(tokens[None], positions[None], positions[-1:], probe)
        except (TypeError, AssertionError, RuntimeError, ValueError, KeyError, AttributeError) as error:
            raise self._unsupported(f"a packed forward pass fails ({type(error).__name__})") from error
        if probe.num_calls != num_layers or set(probe.layers) != set(range(num_layers)):
            raise self._unsupported(
                f"{probe.num_calls} of its {num_layers} layers use the attention interface"
            )
        return probe

    def check(self, backend: attention.AttentionBackend, *, block_size: int) -> None:
        """Raises BadModel unless packed, paged passes give the logits of separate plain ones."""
        problem = self._difference((0, 0, 0), backend, block_size)
        if problem:
            raise self._unsupported(problem)

    def add_adapter(
        self, weights: LoraWeights, backend: attention.AttentionBackend, *, block_size: int
    ) -> int:
        """Its id, from 1. Raises BadModel unless packed passes give each request what it gets alone."""
        adapter_id = self._adapters.add(weights)
        try:
            problem = self._difference((adapter_id, 0, adapter_id), backend, block_size)
        except NotEveryToken as error:
            problem = f"a layer that it targets is not given every token ({error})"
        if problem:
            raise BadModel(f"adapter {weights.folder} is not supported: {problem}")
        return adapter_id

    def _difference(
        self, adapter_ids: Sequence[int], backend: attention.AttentionBackend, block_size: int
    ) -> str:
        """Between three sequences with these adapters, packed, and each alone; empty = none."""
        generator = np.random.Generator(np.random.Philox(key=7))
        sequences = [generator.integers(0, self.vocab_size, length) for length in (21, 13, 2)]
        expected = torch.stack([self._plain_logits(*one) for one in zip(sequences, adapter_ids, strict=True)])
        actual = self._paged_logits(sequences, adapter_ids, backend, block_size)
        if not torch.isfinite(actual).all():
            return "its logits are not finite"
        worst = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        if worst > _TOLERANCE[self.dtype]:
            return f"packed requests change each other's logits (by {worst:.1%})"
        return ""

    def _unsupported(self, why: str) -> BadModel:
        return BadModel(f"architecture {self.architecture} is not supported: {why}")

    @torch.inference_mode()
    def _plain_logits(self, sequence: np.ndarray[Any, Any], adapter_id: int) -> torch.Tensor:
        """Last-token logits by transformers' own attention, without a cache."""
        rows = [(adapter_id, slice(None))] if adapter_id else []
        self.hf.set_attn_implementation("eager")
        try:
            tokens = torch.from_numpy(sequence)[None].to(self.device)
            with self._adapters.applied(rows, len(sequence)):
                logits: torch.Tensor = self.hf(input_ids=tokens, use_cache=False).logits[0, -1]
            return logits.float()
        finally:
            self.hf.set_attn_implementation(attention.IMPLEMENTATION)

    def _paged_logits(
        self,
        sequences: Sequence[np.ndarray[Any, Any]],
        adapter_ids: Sequence[int],
        backend: attention.AttentionBackend,
        block_size: int,
    ) -> torch.Tensor:
        """The same logits in two packed passes: all but the last token, then the last ones."""
        per_sequence = -(-max(map(len, sequences)) // block_size)
        kv = KvCache(
            self.layers,
            num_blocks=1 + per_sequence * len(sequences),
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
        )
        states = [
            RequestState.scratch(
                tokens=IdList(sequence),
                blocks=IdList(range(1 + index * per_sequence, 1 + (index + 1) * per_sequence)),
                adapter_id=adapter_id,
            )
            for index, (sequence, adapter_id) in enumerate(zip(sequences, adapter_ids, strict=True))
        ]
        first = [ScheduledTokens(state, 0, len(state.tokens) - 1, False) for state in states]
        last = [ScheduledTokens(state, len(state.tokens) - 1, 1, True) for state in states]
        for items in (first, last):
            batch = make_batch(items, block_size=block_size, device=self.device)
            logits = self.forward(batch, kv, backend)
        return logits.float()
