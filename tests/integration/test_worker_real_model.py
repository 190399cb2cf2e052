"""The default model: its tokenizer files are right, and plans give generate's tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from reprise_worker.attention import TorchAttention
from reprise_worker.model import PagedModel, load_model
from support.models import smollm2_path
from support.runner_driver import Driver
from support.tiny_models import plain_greedy

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_path()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PagedModel:
    return load_model(folder, device=torch.device("cpu"), dtype="auto")


def test_special_tokens_digits_and_template(folder: Path, tokenizer: Any) -> None:
    encoded = tokenizer.encode("<|im_start|>user\nHi 12345<|im_end|>")
    assert encoded.ids[0] == 1
    assert encoded.ids[-1] == 2
    assert encoded.tokens[-6:-1] == list("12345")  # SmolLM2 splits digits one by one
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<|im_start|>user\nHi 12345<|im_end|>"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in config["chat_template"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_dry_run_passes(model: PagedModel) -> None:
    model.check(TorchAttention(), block_size=16)


def test_greedy_tokens_equal_generate(model: PagedModel, tokenizer: Any) -> None:
    """Three requests together, one in chunks, one on another's blocks."""
    questions = ("What is the capital of France?", "Name three colours.", "What is the capital of Spain?")
    prompts = [tokenizer.encode(CHAT.format(question)).ids for question in questions]
    driver = Driver(model, num_blocks=64, block_size=16)
    driver.add(1, prompts[0])
    driver.add(2, prompts[1])
    driver.step({1: len(prompts[0]), 2: 10})
    shared = driver.blocks[1][:1]  # the system prompt
    assert prompts[2][:16] == prompts[0][:16]
    driver.add(3, prompts[2], shared_blocks=shared)
    driver.finish([1, 2, 3], NUM_TOKENS)
    for handle, prompt in enumerate(prompts, start=1):
        assert driver.output(handle) == plain_greedy(model, prompt, NUM_TOKENS), handle
    assert "Paris" in tokenizer.decode(driver.output(1))
