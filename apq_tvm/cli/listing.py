"""What ``apq-tvm targets`` and ``apq-tvm formats`` list."""

from __future__ import annotations

from typing import Any


def list_targets() -> dict[str, Any]:
    """Every device profile, and the name that ``host`` resolves to on this machine.

    Returns
    -------
    dict
        ``host`` and ``targets``: ``name``, ``target``, ``features``, ``cores``, ``vector_bytes``,
        ``l1_bytes``, ``l2_bytes``, ``in_order``, ``macs_per_cycle``, ``variants`` (names of the
        devices that a library for this target chooses from) and ``sources`` of each.

    Raises
    ------
    BadTarget
        This machine fits no profile.
    """
    from apq_tvm.schedules.devices import PROFILES, find_profile

    return {
        "host": find_profile("host").name,
        "targets": [
            {
                "name": p.name,
                "target": dict(p.target),
                "features": sorted(p.features),
                "cores": p.cores,
                "vector_bytes": p.vector_bytes,
                "l1_bytes": p.l1_bytes,
                "l2_bytes": p.l2_bytes,
                "in_order": p.in_order,
                "macs_per_cycle": dict(p.macs_per_cycle),
                "variants": [variant.name for variant in p.variants],
                "sources": list(p.sources),
            }
            for p in PROFILES
        ],
    }


def list_formats() -> dict[str, Any]:
    """Every family of weight formats; integers with their bits per weight by group size.

    Returns
    -------
    dict
        ``families`` (``name``, ``grammar`` and ``examples`` of each), ``group_sizes`` and
        ``formats``, the integer ones: ``name``, ``bits``, ``zero_points`` and ``bits_per_weight``
        (by group size) of each.
    """
    from apq_tvm.formats import FAMILIES, FORMATS, GROUP_SIZES

    return {
        "families": [
            {"name": f.name, "grammar": f.grammar, "examples": list(f.examples)} for f in FAMILIES
        ],
        "group_sizes": list(GROUP_SIZES),
        "formats": [
            {
                "name": f.name,
                "bits": f.bits,
                "zero_points": f.zero_points,
                "bits_per_weight": {str(g): round(f.block_bits(g) / g, 4) for g in GROUP_SIZES},
            }
            for f in FORMATS
        ],
    }
