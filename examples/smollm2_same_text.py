"""What SmolLM2 writes when it is compiled: the text of float32, and drafts at fewer bits.

``python examples/smollm2_same_text.py greedy smollm2_w8 smollm2.onnx`` lets ONNX Runtime (float32)
and the module take the most probable token 40 times behind each of 20 prompts. Only prompts count
behind which float32 is never in doubt: its best score is 0.3 above the second, all the way.

``python examples/smollm2_same_text.py drafts smollm2_any`` compares plain decoding at all bits of
an any-precision module with drafts of a few bits that are checked at all, on four texts: what share
of guesses is right, and how long it takes.

The ONNX file is ``examples/smollm2.py --cache``; ``pip install gguf tokenizers`` come first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import chat
import numpy as np
import smollm2

MARGIN, PROMPTS, TOKENS = 0.3, 20, 40

SUBJECTS = (
    "the capital of France", "the alphabet", "the numbers from one to thirty", "water", "the sun",
    "the months of the year", "gravity", "photosynthesis", "a prime number", "the days of the week",
    "the seasons", "the planets of the solar system", "the colors of the rainbow", "a triangle",
    "the continents", "the heart", "electricity", "the moon", "the Roman Empire", "a volcano",
)  # fmt: skip
QUESTIONS = (
    "What is {}?", "Tell me about {}.", "Write {} in order.", "Explain {} to a child.",
    "Repeat three times: {}.", "List facts about {}.", "Why is {} important?", "Define {}.",
    "Write one sentence about {}.", "Say in five words: {}.", "Translate into French: {}.",
    "Write {} in capital letters.", "Copy: {}.",
)  # fmt: skip

TEXTS = {
    "list": "Write the numbers from one to fifty, separated by commas.",
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "story": "Tell me a short story about a fox and a crow.",
    "fact": "Explain how rain is made.",
}


def prompts(words: chat.Words) -> Iterator[tuple[str, list[int]]]:
    """Questions, and their tokens in the model's template."""
    for question, subject in product(QUESTIONS, SUBJECTS):
        text = question.format(subject)
        yield text, words.prompt([{"role": "user", "content": text}])


def by_float(session: Any, ids: list[int], ends: set[int]) -> tuple[list[int], float]:
    """Tokens that ONNX Runtime finds most probable, and the least margin between the first two."""
    feeds = {"input_ids": np.array([ids])}
    for port in session.get_inputs()[1:]:
        shape = [1 if d == "batch" else 0 if isinstance(d, str) else d for d in port.shape]
        feeds[port.name] = np.zeros(shape, np.float32)
    names = [port.name for port in session.get_outputs()]
    made: list[int] = []
    least = np.inf
    while len(made) < TOKENS and not (made and made[-1] in ends):
        results = dict(zip(names, session.run(None, feeds), strict=True))
        scores = results["logits"][0, -1]
        second, first = np.sort(np.partition(scores, -2)[-2:])
        least = min(least, float(first - second))
        if least < MARGIN:
            break
        made.append(int(np.argmax(scores)))
        feeds = {name: results[name.replace("past_key_values", "present")] for name in feeds
                 if name != "input_ids"}  # fmt: skip
        feeds["input_ids"] = np.array([made[-1:]])
    return made, least


def greedy(module: Any, onnx: Path, words: chat.Words) -> None:
    """Print prompt by prompt whether both wrote the same."""
    import onnxruntime

    session = onnxruntime.InferenceSession(onnx)
    same = seen = tried = 0
    for text, ids in prompts(words):
        tried += 1
        wanted, margin = by_float(session, ids, words.ends)
        if margin < MARGIN:
            continue
        seen += 1
        ours = list(module.generate(ids, len(wanted), stop=words.ends))
        same += ours == wanted
        at = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, wanted, strict=False))
        )
        verdict = "same" if ours == wanted else f"differs at token {at}"
        print(f"{verdict:22} {len(wanted):2} tokens, margin {margin:.2f}: {text}", flush=True)
        if seen == PROMPTS:
            break
    print(f"{same} of {seen} the same ({tried} prompts tried)")


def drafts(module: Any, words: chat.Words, few: int, count: int) -> None:
    """Print times with and without drafts, in turns."""
    for name, question in TEXTS.items():
        ids = words.prompt([{"role": "user", "content": question}])
        for ahead in (2, 3, 4):
            best, drafted = [np.inf, np.inf], module.Drafted()
            texts = []
            for _ in range(3):
                for which, draft in enumerate((None, (few, ahead))):
                    session = module.session(len(ids) + count)
                    made = module.generate(
                        ids, count, session=session, draft=draft, drafted=drafted, stop=words.ends
                    )
                    texts.append([next(made)])
                    began = time.perf_counter()
                    texts[-1] += list(made)
                    best[which] = min(best[which], time.perf_counter() - began)
            assert all(text == texts[0] for text in texts)
            tokens = len(texts[0]) - 1
            print(
                f"{name:6} {few} bits, {ahead} ahead: {drafted.acceptance:4.0%} right; "
                f"{tokens / best[0]:5.0f} tokens/s plain, {tokens / best[1]:5.0f} with drafts: "
                f"{best[0] / best[1]:.2f}",
                flush=True,
            )


def main() -> None:
    """Run one of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("greedy", "drafts"))
    parser.add_argument("module", type=Path)
    parser.add_argument("onnx", type=Path, nargs="?", help="of greedy")
    parser.add_argument("--gguf", type=Path, help="for its tokenizer; default: installed package")
    parser.add_argument("--bits", type=int, default=3, help="of drafts")
    parser.add_argument("--tokens", type=int, default=100, help="of drafts")
    parser.add_argument("--threads", type=int, help="default: all cores")
    options = parser.parse_args()
    words = chat.Words(options.gguf or smollm2.find())
    module = chat.load(options.module)
    if options.threads:
        module.set_num_threads(options.threads)
    if options.what == "greedy":
        greedy(module, options.onnx, words)
    else:
        drafts(module, words, options.bits, options.tokens)


if __name__ == "__main__":
    main()
