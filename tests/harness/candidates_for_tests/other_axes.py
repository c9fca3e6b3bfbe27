"""The shipped implementation, where it deals with one axis, and not with tp."""

from __future__ import annotations

from harness.candidates.builtin import Builtin

CUT_OVER_TP = ("column_linear", "row_linear", "embedding", "cross_entropy", "transformer_layer")


class _Other(Builtin):
    def offers(self, method: str) -> bool:
        return method not in CUT_OVER_TP and super().offers(method)


class AlongDp(_Other):
    axes = ("dp",)


class AlongPp(_Other):
    axes = ("pp",)


class AlongCp(_Other):
    axes = ("cp",)
