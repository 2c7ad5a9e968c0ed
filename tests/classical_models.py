"""Operators of ``ai.onnx.ml`` as converters of scikit-learn, XGBoost and LightGBM write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)
COLUMNS = 4
NODES: list[Any] = []
OUTPUTS: dict[str, int] = {}
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
CONSTANTS = {
    "some": np.array([[2, 0]]),
    "one": np.array(3),
    "names": np.linspace(-3, 3, 7, dtype=np.float32),
}


def _add(
    op: str, outputs: str, kinds: tuple[int, ...] = (FLOAT,), given: str = "x", **attrs: Any
) -> None:
    names = outputs.split()
    node = helper.make_node(op, given.split(), names, name=names[0], domain="ai.onnx.ml", **attrs)
    NODES.append(node)
    OUTPUTS.update(zip(names, kinds, strict=True))


def _rows() -> None:
    _add("Scaler", "scaled", offset=[0.5, 1.0, -2.0, 0.25], scale=[2.0, 0.5, 1.0, 3.0])
    _add("Scaler", "scaled_alike", offset=[0.5], scale=[2.0])
    _add("Scaler", "scaled_whole", given="whole", offset=[1.0], scale=[0.25])
    for norm in ("MAX", "L1", "L2"):
        _add("Normalizer", f"norm_{norm}", norm=norm)
    gaps = {"imputed_value_floats": [1.0, 2.0, 3.0, 4.0], "replaced_value_float": float("nan")}
    _add("Imputer", "filled", given="gaps", **gaps)
    _add("Imputer", "filled_alike", imputed_value_floats=[7.0], replaced_value_float=0.0)
    _add("Binarizer", "above", threshold=0.25)
    _add("ArrayFeatureExtractor", "columns", given="x some")
    _add("ArrayFeatureExtractor", "column", given="x one")
    _add("ArrayFeatureExtractor", "classes", given="names whole")
    _add("FeatureVectorizer", "beside", given="x scaled", inputdimensions=[4, 4])
    _add("OneHotEncoder", "hot", given="whole", cats_int64s=[0, 2, 5], zeros=1)
    _add(
        "LabelEncoder",
        "renamed",
        given="whole",
        keys_int64s=[0, 1, 2],
        values_floats=[0.5, 1.5, 2.5],
        default_float=-1.0,
    )
    _add(
        "LabelEncoder",
        "numbered",
        (INT64,),
        given="whole",
        keys_int64s=[3, 1],
        values_int64s=[10, 20],
    )


def _linear() -> None:
    coefficients = RNG.standard_normal(12).tolist()
    _add(
        "LinearRegressor", "line", targets=3, coefficients=coefficients, intercepts=[1.0, 2.0, 3.0]
    )
    _add("LinearRegressor", "one_line", coefficients=coefficients[:4], intercepts=[0.5])
    for post in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"):
        _add(
            "LinearClassifier",
            f"label_{post} scores_{post}",
            (INT64, FLOAT),
            coefficients=coefficients,
            intercepts=[0.1, 0.2, 0.3],
            classlabels_ints=[4, 9, 2],
            post_transform=post,
        )
        _add(
            "LinearClassifier",
            f"two_label_{post} two_scores_{post}",
            (INT64, FLOAT),
            coefficients=coefficients[:4],
            intercepts=[0.1],
            classlabels_ints=[7, 3],
            post_transform=post,
        )


def _vectors() -> None:
    """Support vector machines: every kernel, two classes and three."""
    alike = {"support_vectors": RNG.standard_normal(5 * COLUMNS).tolist()}
    for kind in ("LINEAR", "POLY", "RBF", "SIGMOID"):
        kernel = {"kernel_type": kind, "kernel_params": [0.5, 0.25, 3.0], **alike}
        coefficients = RNG.uniform(-1, 1, 10).tolist()
        weighted = {"coefficients": coefficients[:5], "rho": [0.25]}
        _add("SVMRegressor", f"curve_{kind}", n_supports=5, **kernel, **weighted)
        _add(
            "SVMClassifier",
            f"side_{kind} distances_{kind}",
            (INT64, FLOAT),
            classlabels_ints=[4, 9, 2],
            vectors_per_class=[2, 1, 2],
            coefficients=coefficients,
            rho=[0.125, -0.25, 0.0625],
            **kernel,
        )
    _add("SVMRegressor", "inside", one_class=1, n_supports=5, **kernel, **weighted)
    _add(
        "SVMRegressor",
        "flat",
        kernel_type="LINEAR",
        kernel_params=[1.0, 0.0, 1.0],
        coefficients=coefficients[:COLUMNS],
        rho=[0.5],
    )
    two = {"classlabels_ints": [7, 3], "vectors_per_class": [2, 3]}
    kinds = (INT64, FLOAT)
    _add("SVMClassifier", "two_side two_distances", kinds, **two, **kernel, **weighted)


def _nodes(trees: int, depth: int, modes: tuple[str, ...]) -> dict[str, list[Any]]:
    """Whole trees whose nodes are numbered level by level; the last level are leaves."""
    inner, count = 2**depth - 1, 2 ** (depth + 1) - 1
    drawn = [modes[i % len(modes)] for i in range(trees * inner)]
    made: dict[str, list[Any]] = {key: [] for key in ("treeids", "nodeids", "featureids")}
    made |= {key: [] for key in ("values", "modes", "truenodeids", "falsenodeids", "hitrates")}
    made["missing_value_tracks_true"] = []
    for tree in range(trees):
        for number in range(count):
            leaf = number >= inner
            made["treeids"].append(tree)
            made["nodeids"].append(number)
            made["featureids"].append(0 if leaf else int(RNG.integers(COLUMNS)))
            made["values"].append(0.0 if leaf else float(RNG.integers(-2, 3)) / 2)
            made["modes"].append("LEAF" if leaf else drawn.pop())
            made["truenodeids"].append(0 if leaf else 2 * number + 1)
            made["falsenodeids"].append(0 if leaf else 2 * number + 2)
            made["hitrates"].append(1.0)
            made["missing_value_tracks_true"].append(int(RNG.integers(2)) if len(modes) > 1 else 0)
    return {f"nodes_{key}": value for key, value in made.items()}


def _leaves(kind: str, trees: int, depth: int, targets: list[int], low: float) -> dict[str, Any]:
    leaves = [(t, n) for t in range(trees) for n in range(2**depth - 1, 2 ** (depth + 1) - 1)]
    keys = [(t, n, target) for t, n in leaves for target in targets]
    return {
        f"{kind}_treeids": [t for t, _, _ in keys],
        f"{kind}_nodeids": [n for _, n, _ in keys],
        f"{kind}_ids": [target for _, _, target in keys],
        f"{kind}_weights": RNG.uniform(low, 1, len(keys)).tolist(),
    }


def _trees() -> None:
    plain, mixed = ("BRANCH_LEQ",), ("BRANCH_LT", "BRANCH_EQ", "BRANCH_GTE", "BRANCH_NEQ")
    for how in ("SUM", "AVERAGE", "MIN", "MAX"):
        _add(
            "TreeEnsembleRegressor",
            f"forest_{how}",
            aggregate_function=how,
            n_targets=1,
            **_nodes(3, 2, plain),
            **_leaves("target", 3, 2, [0], -1),
        )
    _add(
        "TreeEnsembleRegressor",
        "targets",
        given="gaps",
        n_targets=2,
        base_values=[0.5, -0.5],
        **_nodes(2, 3, mixed),
        **_leaves("target", 2, 3, [0, 1], -1),
    )
    for post in ("NONE", "LOGISTIC", "SOFTMAX"):
        _add(
            "TreeEnsembleClassifier",
            f"kind_{post} chances_{post}",
            (INT64, FLOAT),
            classlabels_int64s=[5, 1, 8],
            post_transform=post,
            **_nodes(3, 2, plain),
            **_leaves("class", 3, 2, [0, 1, 2], 0),
        )
        for name, low, base in (("votes", 0, []), ("margin", -1, []), ("based", -1, [0.3])):
            _add(
                "TreeEnsembleClassifier",
                f"{name}_kind_{post} {name}_{post}",
                (INT64, FLOAT),
                classlabels_int64s=[0, 1],
                post_transform=post,
                **({"base_values": base} if base else {}),
                **_nodes(2, 2, plain),
                **_leaves("class", 2, 2, [0], low / 2),
            )
    _add(
        "TreeEnsembleClassifier",
        "both_kind both",
        (INT64, FLOAT),
        classlabels_int64s=[0, 1],
        **_nodes(2, 2, plain),
        **_leaves("class", 2, 2, [0, 1], 0),
    )


def joined(outputs: tuple[str, ...] = (), opset: int = 17) -> onnx.ModelProto:
    """One model of `outputs`, or all: ``x``, ``gaps`` [n, 4] floats, ``whole`` [n, 2] integers."""
    if not NODES:
        _rows()
        _linear()
        _vectors()
        _trees()
    value = helper.make_tensor_value_info
    inputs = [
        value("x", FLOAT, ["n", COLUMNS]),
        value("gaps", FLOAT, ["n", COLUMNS]),
        value("whole", INT64, ["n", 2]),
    ]
    graph = helper.make_graph(
        [node for node in NODES if not outputs or set(outputs) & set(node.output)],
        "classical",
        inputs,
        [value(name, OUTPUTS[name], None) for name in outputs or OUTPUTS],
        [numpy_helper.from_array(array, name) for name, array in CONSTANTS.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def feeds(rows: int) -> dict[str, Any]:
    """Numbers that meet the thresholds exactly, gaps and zeros among them."""
    x = (RNG.integers(-4, 5, (rows, COLUMNS)) / 4).astype(np.float32)
    x[0] = 0
    gaps = np.where(RNG.random(x.shape) < 0.3, np.float32(np.nan), x)
    return {"x": x, "gaps": gaps, "whole": RNG.integers(0, 7, (rows, 2))}
