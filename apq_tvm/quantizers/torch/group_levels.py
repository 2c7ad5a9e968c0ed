"""The nearest codes of formats whose groups each offer a few levels, found by searching them.

`apq_tvm.quantizers.feedback.descend.round_to` asks a family what every weight would be with every
code, which is right for any format and slow where codes follow weights step after step. Where a
code's level is the same for all weights of a group and follows one scale, the levels of the groups
are kept, in units of that scale, and searched by halving.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apq_tvm.formats.families import dequantize, family_of
from apq_tvm.formats.places import Place, array_of, filled
from apq_tvm.quantizers.feedback.descend import code_count, with_code
from apq_tvm.quantizers.feedback.places import places_of
from apq_tvm.quantizers.torch.ops import F, Tensor, torch
from apq_tvm.types import U8, QuantizedTensor


@dataclass(frozen=True)
class GroupLevels:
    """What the codes of every group stand for.

    Parameters
    ----------
    levels : Tensor [N, G, C]
        By code, of a scale of 1.
    place : Place
        Which scale each weight reads.
    size : int
        Weights of a group.
    k : int
        Of a row; its last group may be filled up.
    """

    levels: Tensor
    place: Place
    size: int
    k: int

    @classmethod
    def of(cls, tensor: QuantizedTensor, name: str) -> GroupLevels | None:
        """The levels of a tensor's groups; None if weights of a group have levels of their own, or
        depend on more than one array.

        Raises
        ------
        BadScheme
            If its weights do not each depend on one code.
        """
        places, top = places_of(tensor), np.asarray(family_of(tensor.scheme).top_codes(tensor))
        k, size = tensor.codes.shape[1], tensor.scheme.group_size
        size = k if size == -1 else min(size, k)
        count = code_count(tensor, name)
        if len(places) != 1 or places[0].columns.ndim != 1 or top.ndim or tensor.zeros is not None:
            return None
        (place,), groups = places, np.arange(k) // size
        array = array_of(tensor, place.name)
        if place.plane is not None or dequantize(filled(tensor, {place.name: 0 * array})).any():
            return None
        ones = filled(tensor, {place.name: np.ones_like(array)})
        found = []
        for code in range(count):
            values = dequantize(with_code(ones, code))
            of_groups = values[:, ::size]
            if not np.array_equal(values, of_groups[:, groups]):
                return None
            found.append(of_groups)
        return cls(torch.from_numpy(np.stack(found, axis=2)), place, size, k)

    def nearest(self, tensor: QuantizedTensor, target: Tensor) -> tuple[U8, Tensor]:
        """The nearest codes that a tensor of these groups offers, and what they decode to.

        Parameters
        ----------
        tensor : QuantizedTensor
            With the scales of now.
        target : float32 Tensor [N, K]

        Returns
        -------
        uint8 [N, K], Tensor [N, K]
        """
        scales = torch.from_numpy(array_of(tensor, self.place.name).astype(np.float32))
        columns = torch.from_numpy(self.place.columns[:: self.size])
        scales = scales[torch.from_numpy(self.place.rows)][:, columns]  # [N, G]
        offered, codes = (self.levels * scales[..., None]).flatten(0, 1).sort(dim=1)
        between = (offered[:, 1:] + offered[:, :-1]) / 2
        wanted = F.pad(target, (0, -self.k % self.size)).reshape(-1, self.size)
        at = torch.searchsorted(between, wanted)
        chosen, values = codes.to(torch.uint8).gather(1, at), offered.gather(1, at)
        rows = len(target)
        chosen, values = (x.reshape(rows, -1)[:, : self.k].contiguous() for x in (chosen, values))
        return chosen.numpy(), values
