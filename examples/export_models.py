"""Makes ONNX files of torchvision's, timm's and transformers' models, with random weights.

``python examples/export_models.py FOLDER [--only TEXT]`` writes ``torchvision/``, ``timm/``,
``transformers/`` and ``optimum/NAME.onnx``, and inputs that make sense as ``.npz`` beside each, for
``examples/measure_models.py --exports FOLDER``. torch's two exporters both try their models.

It needs, beside the project's torch, in a folder that ``PYTHONPATH`` names: ``pip install --no-deps
--target FOLDER torchvision==0.28.0 timm==1.0.31 transformers==4.57.1 huggingface_hub==0.36.0
tokenizers==0.22.1 optimum==2.0.0 optimum-onnx==0.1.0 onnxscript onnx_ir regex requests urllib3 idna
certifi charset_normalizer pyyaml tqdm filelock packaging safetensors``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from exports.optimum_files import export_optimum
from exports.text import decoders, encoders
from exports.timm_nets import timm_nets
from exports.translators import translators
from exports.vision import vision

GROUPS = (
    ("torchvision", vision),
    ("timm", timm_nets),
    ("transformers", encoders),
    ("transformers", decoders),
    ("transformers", translators),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--exporter", default="")
    arguments = parser.parse_args()
    place, _, _ = arguments.only.partition(" ")
    if place not in (*dict(GROUPS), "optimum", ""):
        parser.error("--only begins with torchvision, timm, transformers or optimum")
    for package, group in GROUPS:
        if not package.startswith(place):
            continue
        folder = arguments.folder / package
        folder.mkdir(parents=True, exist_ok=True)
        for export in group():
            if arguments.only not in f"{package} {export.name}":
                continue
            for exporter in export.exporters:
                if arguments.exporter not in exporter:
                    continue
                try:
                    print(export.write(folder, exporter), flush=True)
                except Exception as error:
                    # What an exporter cannot do is its own affair; the others go on.
                    why = " ".join(str(error.__cause__ or error).split())
                    print(f"{export.name} {exporter}: {why[:300]}", file=sys.stderr, flush=True)
    if "optimum".startswith(place):
        export_optimum(arguments.folder, arguments.only)


if __name__ == "__main__":
    main()
