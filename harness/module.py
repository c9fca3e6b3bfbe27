"""How a candidate presents a module that it built: what is called, and how its parameters are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reference.layout import Layout, placements

if TYPE_CHECKING:
    import torch


def require_callables(what: str, arguments: Mapping[str, object]) -> None:
    """Raises TypeError for an argument that is there and cannot be called."""
    for name, value in arguments.items():
        if value is not None and not callable(value):
            raise TypeError(f"{what}(..., {name}={value!r}): expected a function; pass it without calling it")


class PartOf:
    """A parameter that the module holds as part of a larger tensor, such as the queries of one fused weight for
    queries, keys and values.

    take: picks the parameter out of a tensor of the rank's own shape: cuts, views, permutes, indexes, and nothing else.
        It is asked for the parameter's values and for its gradient, ``PartOf(qkv, lambda w: w[:n])``.
    """

    def __init__(self, tensor: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tensor = tensor
        self.take = take


class Sharded:
    """A built module, and how its parameters are cut.

    ``layouts`` name each parameter with the layout of its values: ``Sharded(layer, weight=Split(0, "tp"))``. Names
    are those of the subject (``weight``, ``bias``).

    forward: called instead of ``module`` with the inputs, where the module wants or returns something else than the
        subject's tensors.
    parameters: the tensor behind a name, where it is not the module's attribute of that name; or the `PartOf` a tensor
        that holds several.
    grads: the layout of a gradient, of a parameter or an input, where it is not that of the tensor itself:
        ``{"bias": Partial("tp")}`` for a gradient that the trainer sums over tp later.
    inputs, outputs: layouts of the tensors that go in and come out, where they are not what the subject expects. Of a
        partial tensor every rank has the whole gradient.
    read_grad: reads the gradient of a tensor (default: ``main_grad`` where the case asks for it, else ``grad``).
    finish: called once after the last backward, for what a trainer does then before it uses the gradients.
    masks: the places of the dropout masks that each forward draws by torch's random functions, in their order; without
        it, what a module with dropout computes is not compared with anything.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        *,
        forward: Callable[..., Any] | None = None,
        parameters: Mapping[str, torch.Tensor | PartOf] | None = None,
        grads: Mapping[str, Layout] | None = None,
        inputs: Mapping[str, Layout] | None = None,
        outputs: Mapping[str, Layout] | None = None,
        read_grad: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        finish: Callable[[], None] | None = None,
        masks: Sequence[str] = (),
        **layouts: Layout,
    ) -> None:
        for layout in (
            *layouts.values(),
            *(grads or {}).values(),
            *(inputs or {}).values(),
            *(outputs or {}).values(),
        ):
            placements(layout)  # refuses what is not a layout
        require_callables("Sharded", {"module": module, "forward": forward, "read_grad": read_grad, "finish": finish})
        self.module = module
        self.forward = forward or module
        self.layouts = dict(layouts)
        self.grads = {**self.layouts, **(grads or {})}
        self.inputs = dict(inputs or {})
        self.outputs = dict(outputs or {})
        self.read_grad = read_grad
        self.finish = finish
        self.masks = tuple(masks)
        self.parameters = dict(parameters or {})

    def parameter(self, name: str) -> torch.Tensor | PartOf:
        """What is behind a name. Raises AttributeError naming what the module has."""
        found = self.parameters.get(name, getattr(self.module, name, None))
        if found is None:
            known = [n for n, _ in getattr(self.module, "named_parameters", list)()]
            raise AttributeError(
                f"the built module has no parameter {name!r} (it has: {', '.join(known) or 'none'}); "
                f"pass it with Sharded(..., parameters={{{name!r}: tensor}})"
            )
        tensor: torch.Tensor | PartOf = found
        return tensor
