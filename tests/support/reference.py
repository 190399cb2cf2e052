"""What plain `transformers` generates greedily in float32, and whether an answer is that."""

from collections.abc import Sequence
from functools import cache

import torch
from transformers import AutoModelForCausalLM

from support.models import smollm2_path

TIE_TOLERANCE = 1e-3
"""Logits: where batch shape changes the last bits, a token may differ only at a tie this near."""


class Reference:
    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=torch.float32)
        self.model.eval()
        self.eos = self.model.generation_config.eos_token_id

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The output ids, the end token included."""
        minimum = {"min_new_tokens": max_tokens} if ignore_eos else {}
        ids = torch.tensor([list(prompt)])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **minimum,
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def log_probabilities(self, token_ids: Sequence[int]) -> torch.Tensor:
        """After each token, of every next one: (len(token_ids), vocab)."""
        logits: torch.Tensor = self.model(torch.tensor([list(token_ids)])).logits[0]
        return logits.log_softmax(dim=-1)

    @torch.inference_mode()
    def check_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Every token is the best after what stands before it, or ties with the best."""
        assert output, "no output"
        ids = torch.tensor([[*prompt, *output]])
        logits = self.model(ids[:, :-1]).logits[0, len(prompt) - 1 :]
        best = logits.max(dim=-1).values
        chosen = logits[torch.arange(len(output)), torch.tensor(list(output))]
        gaps = (best - chosen).tolist()
        worst = max(range(len(gaps)), key=gaps.__getitem__)
        assert gaps[worst] < TIE_TOLERANCE, f"token {worst} is {gaps[worst]:.4f} below the best"


@cache
def reference() -> Reference:
    return Reference()
