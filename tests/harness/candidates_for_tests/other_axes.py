"""The shipped implementation, where it deals with one axis, and not with tp."""

from __future__ import annotations

from harness.candidates.builtin import Builtin

CUT_OVER_TP = ("column_linear", "row_linear", "embedding", "cross_entropy", "transformer_layer")
OF_A_MODEL = ("clip_gradients", "mixed_precision", "gpt", "train_step")


class AlongDp(Builtin):
    axes = ("dp",)

    def offers(self, method: str) -> bool:
        return method not in CUT_OVER_TP and super().offers(method)


class AlongPp(AlongDp):
    axes = ("pp",)


class AlongCp(AlongDp):
    axes = ("cp",)

    def offers(self, method: str) -> bool:
        return method not in OF_A_MODEL and super().offers(method)
