"""A multi-turn workload for benchmarks of block hashing and of the KV cache manager.

Sizes in tokens, a fixed seed: 120 conversations of at most 6 turns; each starts from one of 8 system
prompts of 1,024 to 2,048 tokens; a turn's prompt is the whole earlier prompt, the 64 answer tokens
before it and new user tokens; conversations take turns round robin; token ids uniform in
[0, 128256). It gives 625 requests, 4,571,353 prompt tokens, prompts of 1,736 to 16,333 tokens
(median 6,337), of which 69.0 % were sent before.
"""

import random
from dataclasses import dataclass

SEED = 20240
NUM_ANSWER_TOKENS = 64
VOCABULARY = 128_256


@dataclass
class Conversation:
    history: list[int]


def make_multi_turn(
    *, seed: int = SEED, conversations: int = 120, turns: int = 6, max_prompt_tokens: int = 16_384
) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) in the order of arrival."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    systems = [tokens(draw.randint(1024, 2048)) for _ in range(8)]
    chats = [Conversation(list(draw.choice(systems))) for _ in range(conversations)]
    requests = []
    for turn in range(turns):
        for chat in chats:
            known = len(chat.history)
            # About 30 per cent of the prompt is new.
            num_new = draw.randint(int(known * 0.33), int(known * 0.53))
            if turn == 0:
                num_new = draw.randint(512, 2048)
            if known + num_new > max_prompt_tokens:
                continue
            prompt = chat.history + tokens(num_new)
            answer = tokens(NUM_ANSWER_TOKENS)
            requests.append((prompt, answer))
            chat.history = prompt + answer
    return requests
