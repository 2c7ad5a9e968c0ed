"""``examples/little_llama.py``: what is trained is what is written, on text that is kept apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ort = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

import little_llama  # noqa: E402
import smollm2  # noqa: E402

CONFIG = replace(little_llama.CONFIG, layers=2, width=64, hidden=96, vocabulary=53, heads=4)
IDS = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (2, 20))


def test_the_onnx_file_computes_what_was_trained() -> None:
    model = little_llama.Llama(CONFIG)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.1 * torch.randn(value.shape)
        wanted = model(torch.from_numpy(IDS)).numpy()
    weights = {name: w.detach().numpy() for name, w in model.weights().items()}
    session = ort.InferenceSession(smollm2.build(CONFIG, weights).SerializeToString())
    (got,) = session.run(None, {"input_ids": IDS})
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())


def test_training_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(little_llama, "CONFIG", CONFIG)
    monkeypatch.setattr(little_llama, "SAVED", 2)
    ids = np.random.default_rng(1).integers(0, CONFIG.vocabulary, 600)
    whole = little_llama.train(ids, tmp_path / "whole.pt", 4).weights()
    optimize, seen = torch.optim.AdamW.step, []

    def interrupted(self: torch.optim.AdamW, *given: object) -> None:
        seen.append(0)
        if len(seen) == 4:
            raise KeyboardInterrupt
        optimize(self, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        little_llama.train(ids, tmp_path / "part.pt", 4)
    again = little_llama.train(ids, tmp_path / "part.pt", 4).weights()
    for name, weight in whole.items():
        torch.testing.assert_close(again[name], weight)


def test_every_tenth_page_is_kept_apart(tmp_path: Path) -> None:
    folder = tmp_path / "5.36" / "pod"
    folder.mkdir(parents=True)
    long = "words of which there are so many that nobody takes them for a heading."
    for page in range(20):
        text = f"=head1 Page\n\nPage {page:02} has {long}\n\n    code {long}\n\nshort\n"
        (folder / f"{page:02}.pod").write_text(text)
    train, apart = little_llama.prose(tmp_path)
    assert [p[:7] for p in apart.split("\n\n")] == ["Page 09", "Page 19"]
    assert len(train.split("\n\n")) == 18 and "code" not in train
    with pytest.raises(FileNotFoundError, match="apt-get install perl-doc"):
        little_llama.prose(tmp_path / "nowhere")


def test_windows_are_spread_over_the_text() -> None:
    found = little_llama.windows(np.arange(3000), 4)
    assert found.shape == (4, little_llama.TOKENS) and found[:, 0].tolist() == [0, 750, 1500, 2250]
