"""What inductor multiplies by a weight is multiplied by the packed weight instead."""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from . import packed_weights

aten = torch.ops.aten


class PackLinearLayers(CustomGraphPass):
    """A pass over inductor's graphs that puts [`packed_weights.linear`] in the place of products with a graph's inputs.

    Weights remain inputs of the graph, so that nothing has to be compiled anew when they change.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        for target in (aten.mm.default, aten.addmm.default):
            for node in graph.find_nodes(op="call_function", target=target):
                arguments = _linear_arguments(node)
                if arguments is None:
                    continue
                with graph.inserting_before(node):
                    packed = graph.call_function(packed_weights.linear, arguments)
                packed.meta.update(node.meta)
                node.replace_all_uses_with(packed)
                graph.erase_node(node)

    def uuid(self) -> tuple[bytes, int]:
        return get_hash_for_files((__file__, packed_weights.__file__)), packed_weights.FEWEST_ELEMENTS


def _linear_arguments(node: torch.fx.Node) -> tuple | None:
    """The arguments of [`packed_weights.linear`] for a product; `None` where it isn't one with a weight that can be packed."""
    bias, tokens, matrix = node.args if len(node.args) == 3 else (None, *node.args)
    if node.kwargs or (bias is not None and bias.meta["val"].ndim != 1):
        return None
    is_linear = matrix.target is aten.permute.default and [*matrix.args[1]] == [1, 0]
    weight = matrix.args[0] if is_linear else matrix
    if weight.op != "placeholder" or not packed_weights.can_pack(weight.meta["val"]):
        return None
    return tokens, weight, bias, not is_linear
