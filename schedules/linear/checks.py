"""What linear kernels ask before they take a layer; each refusal is a reason `explain` prints."""

from __future__ import annotations

from apq_tvm.codegen.layouts import InterleavedLayout, default_layout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.types import DeviceProfile

_INT32_MAX = 2**31 - 1
_ACT_MAX = 127


def check_integer_acts(spec: LinearSpec) -> None:
    """Decline a layer whose activations stay float.

    Raises
    ------
    NotApplicable
    """
    assert spec.scheme is not None
    if not spec.scheme.integer_acts:
        raise NotApplicable(f"is for integer activations, not {spec.scheme}")


def check_float(spec: LinearSpec) -> None:
    """Decline quantized weights.

    Raises
    ------
    NotApplicable
    """
    if spec.scheme is not None:
        raise NotApplicable(f"is for float32 weights, not {spec.scheme}")


def check_features(profile: DeviceProfile, features: tuple[str, ...], lanes: int) -> None:
    """Decline a device without any of `features`, or whose vectors hold fewer int32 lanes.

    Raises
    ------
    NotApplicable
    """
    if features and not profile.features & set(features):
        raise NotApplicable(f"needs {' or '.join(features)}; {profile.name} has none of it")
    if profile.vector_bytes < 4 * lanes:
        have = 8 * profile.vector_bytes
        raise NotApplicable(f"needs {32 * lanes}-bit vectors; {profile.name} has {have}-bit ones")


def check_all_features(profile: DeviceProfile, features: tuple[str, ...], vector: int = 0) -> None:
    """Decline a device that lacks one of `features`, or whose registers have no `vector` bytes.

    Raises
    ------
    NotApplicable
    """
    missing = sorted(set(features) - profile.features)
    if missing:
        raise NotApplicable(f"needs {' and '.join(missing)}, which {profile.name} lacks")
    if profile.vector_bytes < vector:
        have = 8 * profile.vector_bytes
        raise NotApplicable(f"needs {8 * vector}-bit vectors; {profile.name} has {have}-bit ones")


def interleaved(spec: LinearSpec, lanes: int) -> InterleavedLayout:
    """The layout of a quantized layer whose kernel works on `lanes` rows at once."""
    assert spec.scheme is not None
    layout = default_layout(spec.scheme, spec.details, lanes)
    assert isinstance(layout, InterleavedLayout)
    return layout


def check_integer(
    spec: LinearSpec, profile: DeviceProfile, features: tuple[str, ...], lanes: int
) -> None:
    """Decline what an integer dot product cannot compute on the device.

    Raises
    ------
    NotApplicable
    """
    check_integer_acts(spec)
    check_features(profile, features, lanes)
    check_int32(spec, lanes)


def check_dequantized(
    spec: LinearSpec, profile: DeviceProfile, features: tuple[str, ...], lanes: int
) -> None:
    """Decline what a float dot product with decoded codes cannot compute on the device.

    Raises
    ------
    NotApplicable
    """
    assert spec.scheme is not None
    if spec.scheme.integer_acts:
        raise NotApplicable(f"is for float activations, not {spec.scheme}")
    check_features(profile, features, lanes)


def check_int32(spec: LinearSpec, lanes: int) -> None:
    """Decline a group so wide that int32 cannot hold every possible sum of it.

    Raises
    ------
    NotApplicable
    """
    layout = interleaved(spec, lanes)
    # |Σ code x|, and |zero Σ x| where the zero point is at most the largest code
    width, largest = layout.group_width(spec.k), (1 << layout.bits) - 1
    if 2 * width * largest * _ACT_MAX > _INT32_MAX:
        raise NotApplicable(
            f"K={spec.k}: {width} products of W{layout.bits} codes may exceed int32; use groups"
        )
