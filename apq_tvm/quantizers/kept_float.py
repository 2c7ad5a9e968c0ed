"""Which layers stay float unless `--tensor-type` names them, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apq_tvm.formats.integer import MAX_SCALE
from apq_tvm.types import WEIGHT_INPUT, ImportedModel, Node, Scheme

MIN_K = 16
"""Linear layers with fewer inputs stay float: the smallest group is 16."""

THIN = (16, 32)
"""Convolutions with at most so many outputs and inputs stay float (`_thin`): one vector of outputs,
one unit of K."""

MIN_TABLE_ROWS = 16
"""Embedding tables with fewer rows stay float: one row serves so many tokens that its error does
not average out (token types in BERT: all tokens use one of two rows), and its bytes are nothing. In
the demo model at W4A8g32, rounding those 768 weights too lowers the mean pooled cosine to the float
model from 0.9855 to 0.9788."""

MOST_CHOICES = 512
"""Outputs of a layer of which only the greatest are followed: experts that tokens are sent to, not
the words of a vocabulary."""

SIZES = (2.0**-20, MAX_SCALE)
"""Weights whose largest lies outside stay float: scales are float16, whose least number is 2^-24.
From 1e-7 down 8-bit codes of them have cosines below 0.99, at 1e-10 all scales are 0."""

MOST_LAYERS = 3
"""One behind the other before a logarithm: a Fourier transform in two steps and its bands."""

_PASSING = frozenset(
    # Results whose small values come from small operands: a spectrum's size, its bands, a mean,
    "Abs Add Clip Div Log Max Min Mul Neg Pow Sqrt Sub Sum Where apq.Linear apq.MatMul "
    "ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare "
    # and those that are operands, put elsewhere.
    "Concat Expand Flatten Gather Identity Reshape ScatterElements ScatterND Slice Split Squeeze "
    "Transpose Unsqueeze apq.Assume apq.Pad apq.Slice".split()
)

_ALONG = frozenset(
    "Add Cast Clip Div Flatten Identity LogSoftmax Mul Reshape Sigmoid Softmax Squeeze Sub "
    "Unsqueeze Where apq.Activation apq.Assume apq.Reshape apq.Softmax".split()
)
"""Between a layer and the choice of its greatest results."""


class KeptFloat:
    """Why layers of a model stay float unasked.

    Parameters
    ----------
    model : ImportedModel
    """

    def __init__(self, model: ImportedModel) -> None:
        self._model = model
        self._windows = {n.outputs[0] for n in model.nodes if n.op == "apq.Windows"}
        self._logarithms = _read_by_logarithms(model.nodes)
        self._routers = _routers(model)

    def reason(self, node: Node, scheme: Scheme) -> str:
        """Why a layer that `scheme` would quantize stays float, or ``""``."""
        return (
            self._small(node)
            or self._beyond_scales(node)
            or self._logarithm(node)
            or self._router(node)
            or self._thin(node, scheme)
        )

    def _small(self, node: Node) -> str:
        rows, columns = self._model.weights[node.inputs[WEIGHT_INPUT[node.op]]].shape
        if node.op == "apq.Linear" and columns < MIN_K:
            return f"K={columns} is below {MIN_K}, the smallest group"
        if node.op == "apq.Embedding" and rows < MIN_TABLE_ROWS:
            return (
                f"{rows} rows serve all tokens: their error would not average out, and they take "
                f"only {4 * rows * columns} bytes"
            )
        return ""

    def _beyond_scales(self, node: Node) -> str:
        weight = node.inputs[WEIGHT_INPUT[node.op]]
        if weight in self._model.quantized or weight in self._model.notes:  # codes of the file
            return ""
        array = self._model.weights[weight]
        largest = max(array.max(initial=0), -array.min(initial=0))  # abs would copy all of it
        least, most = SIZES
        if not 0 < largest < least and not most < largest < np.inf:
            return ""
        size = "small" if largest < least else "large"
        return f"its largest weight is {largest:.1e}, too {size} for scales, which are float16"

    def _logarithm(self, node: Node) -> str:
        """Spectra: a logarithm makes small values large, but codes are as coarse as the largest.

        The melspectrogram of openwakeword: cosine 0.89 in W8A8. A file's own codes are kept.
        """
        if node.name not in self._logarithms or self._coded(node):
            return ""
        return "a logarithm reads its results, whose small values 8 bits do not tell apart"

    def _router(self, node: Node) -> str:
        """Routers: a token that is sent to another expert gives something else altogether.

        Of experts with random weights in W8A8 tokens by another way had cosines of 0.28 to 0.94,
        all others 0.9999. A file's own codes are kept.
        """
        if node.name not in self._routers or self._coded(node):
            return ""
        return "what follows is chosen by its greatest results, which rounding could put in turns"

    def _thin(self, node: Node, scheme: Scheme) -> str:
        """Small convolutions.

        Rounding a pixel's inputs takes longer there than int8 products save (mtcnn's pnet: 0.44 ms
        instead of 0.56), and few errors do not average out. A file's own codes are kept.
        """
        if node.op != "apq.Linear" or not scheme.integer_acts or self._coded(node):
            return ""
        n, k = self._model.weights[node.inputs[1]].shape
        spec = self._model.value_specs.get(node.outputs[0])
        image = spec is not None and len(spec.shape) >= 4 and any(d != 1 for d in spec.shape[1:-1])
        if n > THIN[0] or k > THIN[1] or not (image or node.inputs[0] in self._windows):
            return ""
        return (
            f"{n} outputs of {k} inputs are at most {THIN[0]} of {THIN[1]}: rounding its pixels "
            "would take longer than int8 saves"
        )

    def _coded(self, node: Node) -> bool:
        return node.inputs[1] in self._model.quantized


def _read_by_logarithms(nodes: Sequence[Node]) -> set[str]:
    """Names of the layers whose small results a logarithm sees."""
    found: set[str] = set()
    layers: dict[str, int] = {}  # how many lie between a value and its logarithm
    for node in reversed(nodes):
        between = min((layers[out] for out in node.outputs if out in layers), default=None)
        if node.op == "Log":
            between = 0
        if between is None or node.op not in _PASSING:
            continue
        if node.op == "apq.Linear":
            if node.attrs["activation"] or between == MOST_LAYERS:
                continue
            found.add(node.name)
            between += 1
        for value in node.inputs:
            layers[value] = min(between, layers.get(value, between))
    return found


def _routers(model: ImportedModel) -> set[str]:
    """Names of the layers of whose results the places of the greatest are read."""
    makers = {out: node for node in model.nodes for out in node.outputs}
    read = {value for node in model.nodes for value in node.inputs}
    found: set[str] = set()
    for choice in model.nodes:
        if choice.op not in ("ArgMax", "TopK", "apq.TopK") or choice.outputs[-1] not in read:
            continue
        spec = model.value_specs.get(choice.inputs[0])
        if spec is None:
            continue
        axis = int(choice.attrs.get("axis", 0 if choice.op == "ArgMax" else -1))
        known, open_ = set[str](), [choice.inputs[0]]
        while open_:
            maker = makers.get(value := open_.pop())
            if maker is None or value in known:
                continue
            known.add(value)
            if maker.op in _ALONG:
                open_ += maker.inputs
            elif maker.op == "apq.Linear":
                outputs = model.weights[maker.inputs[1]].shape[0]
                if outputs == spec.shape[axis] and outputs <= MOST_CHOICES:
                    found.add(maker.name)
    return found
