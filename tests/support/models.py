"""The models that tests run on."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

REPOSITORY = Path(__file__).resolve().parents[2]

TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}"
    "{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SENTENCES = (
    "The capital of France is Paris, and the river there is quiet.",
    "One two three four five six seven eight nine ten.",
    "été 北京 🙂 naïve café — “quoted” text, with marks!",
)


@cache
def smollm2_path() -> Path:
    """The default model, prepared once into the cache folder (about 40 s the first time)."""
    cache = os.environ.get("REPRISE_CACHE_DIR") or str(REPOSITORY / ".cache" / "models")
    command = [sys.executable, "-m", "reprise_worker.prepare", "--cache-dir", cache, "--quiet"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip().splitlines()[-1])


def write_byte_level_model(folder: Path, *, chat_template: str = TINY_CHAT_TEMPLATE) -> Path:
    """A small byte-level BPE tokenizer (every text has tokens), with its config beside it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return _write(folder, tokenizer, chat_template)


def write_byte_fallback_model(folder: Path) -> Path:
    """A tokenizer of the other family: word marks, and `<0xNN>` tokens for what it has no token for."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁a", "quiet", "▁quiet", "river", "s", "e", "t", "a", "é", "。", "▁▁", "ing"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _write(folder, tokenizer, TINY_CHAT_TEMPLATE)


def _write(folder: Path, tokenizer: Tokenizer, chat_template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
